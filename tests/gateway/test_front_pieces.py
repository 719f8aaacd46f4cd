"""Inputs longer than the model takes, in pieces; end tokens that survive every cut."""

from __future__ import annotations

import base64

import numpy as np
import pytest
import transformers

from rose.errors import NonFinite
from rose.gateway.pieces import Pieces
from rose.gateway.tokenizer import TextTokenizer
from rose.proto import rose_pb2 as pb
from rose.proto.convert import tensor_to_proto, tokens_from_proto
from tests.gateway.cards import m3_card, pplx_card
from tests.gateway.conftest import DIMENSION, MAX_TOKENS, card_for, live_front
from tests.gateway.expected import vector_of
from tests.support.tiny_families import tiny_qwen3_embedding

LONG = " ".join(f"salt {i}" for i in range(150))


def vectors(response):
    assert response.status_code == 200, response.text
    return np.array([item["embedding"] for item in response.json()["data"]])


def sent(live):
    return [ids.tolist() for ids in tokens_from_proto(live.engines[0].seen[-1].tokens)]


def ids(length, start=10):
    return np.arange(start, start + length, dtype=np.int32)


@pytest.mark.parametrize("normalized", [True, False])
def test_the_mean_of_orthogonal_unit_vectors(normalized):
    """Report C47 (vllm P#57498): its length is 0.707; one where the model normalises, by tokens where it does not."""
    pieces = Pieces([ids(30)], 20, 0, ids(0))
    assert [len(piece) for piece in pieces.sequences] == [15, 15]
    (row,) = pieces.merge(np.eye(2, dtype=np.float32), normalized=normalized)
    assert np.linalg.norm(row) == pytest.approx(1.0 if normalized else 0.5**0.5, abs=1e-6)
    uneven = Pieces([ids(5)], 4, 0, ids(0))
    assert [len(piece) for piece in uneven.sequences] == [3, 2]
    (row,) = uneven.merge(np.eye(2, dtype=np.float32), normalized=normalized)
    expected = np.array([0.6, 0.4])
    assert row == pytest.approx(expected / np.linalg.norm(expected) if normalized else expected, abs=1e-6)


@pytest.mark.parametrize("length", [1, 3, 8, 9, 14, 15, 20, 50])
def test_pieces_hold_every_token_once_between_the_special_ones_of_the_whole(length):
    suffix = np.array([2], dtype=np.int32)
    whole = np.concatenate(([0], ids(length), suffix)).astype(np.int32)
    pieces = Pieces([whole, whole[:3]], 8, 1, suffix).sequences
    assert all(len(piece) <= 8 for piece in pieces)
    assert all((piece[0], piece[-1]) == (0, 2) for piece in pieces[:-1])
    assert np.concatenate([piece[1:-1] for piece in pieces[:-1]]).tolist() == whole[1:-1].tolist()
    assert max(map(len, pieces[:-1])) - min(map(len, pieces[:-1])) <= 1
    assert pieces[-1].tolist() == whole[:3].tolist()


def test_long_texts_among_short_ones(text_folder):
    """Report C47: order, numbers and usage over HTTP; what fits is what it would be anyway."""
    with live_front(text_folder, card_for(text_folder)) as live:
        assert live.embed(["salt", LONG]).status_code == 400
        response = live.embed(["salt", LONG, "flour"], split_long_inputs=True)
        found = vectors(response)
        sequences = sent(live)
        assert response.json()["usage"]["prompt_tokens"] == sum(map(len, sequences))
        (whole,) = TextTokenizer(text_folder).encode([LONG])
        long = sequences[1:-1]
        assert [one for piece in long for one in piece[1:-1]] == whole[1:-1].tolist()
        assert all(len(piece) <= MAX_TOKENS for piece in long)
        mean = np.average([vector_of(piece, DIMENSION) for piece in long], axis=0, weights=[len(p) for p in long])
        assert np.abs(found[1] - mean / np.linalg.norm(mean)).max() < 1e-6
        assert np.array_equal(found[[0, 2]], vectors(live.embed(["salt", "flour"])))
        cut = vectors(live.embed([LONG, "salt"], split_long_inputs=True, dimensions=16))
        assert np.abs(cut[0] - mean[:16] / np.linalg.norm(mean[:16])).max() < 1e-6
        assert live.engines[0].seen[-1].dimensions == 0
        bits = live.embed(LONG, split_long_inputs=True, output_dtype="ubinary", encoding_format="base64")
        raw = np.frombuffer(base64.b64decode(bits.json()["data"][0]["embedding"]), np.uint8)
        assert np.array_equal(raw, np.packbits(mean > 0))
        piecewise = vectors(live.embed([[5] * 300], split_long_inputs=True))
        assert [len(piece) for piece in sent(live)] == [100, 100, 100]
        assert np.linalg.norm(piecewise) == pytest.approx(1, abs=1e-6)


def test_an_error_names_the_input_and_not_its_piece(text_folder):
    with live_front(text_folder, card_for(text_folder)) as live:

        def fault(request):
            raise NonFinite("a piece", param="input", index=2)

        live.engines[0].fault = fault
        error = live.embed(["salt", LONG, "flour"], split_long_inputs=True).json()["error"]
        assert (error["code"], error["index"]) == ("non_finite", 1)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"outputs": ["dense", "sparse"]}, "'sparse'"),
        ({"outputs": ["colbert"]}, "'colbert'"),
        ({"truncate": True}, "not both"),
        ({"truncate_prompt_tokens": 8}, "not both"),
    ],
)
def test_what_has_no_mean_is_refused(text_folder, fields, words):
    with live_front(text_folder, m3_card(text_folder)) as live:
        error = live.embed(LONG, split_long_inputs=True, **fields).json()["error"]
        assert (error["code"], error["param"]) == ("invalid_input", "split_long_inputs")
        assert words in error["message"]


def test_codes_are_not_averaged(text_folder):
    with live_front(text_folder, pplx_card(text_folder)) as live:
        error = live.embed(LONG, split_long_inputs=True, output_dtype="int8").json()["error"]
        assert "'int8'" in error["message"]


def test_a_zero_mean_stays_zero(text_folder):
    with live_front(text_folder, card_for(text_folder)) as live:

        def opposite(card, request):
            rows = np.ones((len(request.tokens.lengths), DIMENSION), dtype=np.float32)
            rows[::2] *= -1
            return pb.EmbedResponse(outputs=[pb.Output(name="dense", values=tensor_to_proto(rows))])

        live.engines[0].answer = opposite
        assert not vectors(live.embed([[5] * 200], split_long_inputs=True)).any()


@pytest.mark.parametrize("text", ["test", "", "salt " * 300])
def test_the_end_token_that_is_pooled_closes_every_text(tmp_path, text):
    """Report C85 (sentence-transformers#2591; Qwen3-Embedding#54): the ids are the library's, cut ones included."""
    folder = tiny_qwen3_embedding(tmp_path / "m")
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    prompt = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
    with live_front(folder, card_for(folder, prompts={"query": prompt}, vocab_size=1000)) as live:
        if not text:
            assert live.embed(text).status_code == 400
            assert live.embed(text, prompt=prompt).status_code == 400
            return
        end = reference("a")["input_ids"][-1]
        for fields, whole in (
            ({}, text),
            ({"prompt_name": "query"}, prompt + text),
            ({"prompt": prompt}, prompt + text),
        ):
            assert live.embed(text, truncate=True, **fields).status_code == 200
            (found,) = sent(live)
            assert found == reference(whole, truncation=True, max_length=MAX_TOKENS)["input_ids"]
            assert found[-1] == end
        live.embed(text, split_long_inputs=True)
        assert all(piece[-1] == end for piece in sent(live))

"""POST /v1/contextualizedembeddings: documents as one sequence, a vector a chunk, in Perplexity's shape."""

from __future__ import annotations

import base64
import random

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer

from rose.gateway.schemas_context import ContextualResponse
from rose.proto.annotations import spans_from_proto
from rose.proto.convert import tokens_from_proto
from tests.gateway.cards import pplx_card
from tests.gateway.conftest import DIMENSION, MAX_TOKENS, live_front
from tests.gateway.expected import vector_of
from tests.support.tiny_families import tiny_pplx_context

DOCUMENTS = [["The river meets the sea.", " south of the old lighthouse", "salt"], ["猫在窗台上睡着了。"], ["a", "b"]]
ROUTE = "/v1/contextualizedembeddings"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_pplx_context(tmp_path_factory.mktemp("context") / "m")


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def live(folder):
    with live_front(folder, pplx_card(folder)) as live:
        yield live


def post(live, value, **fields):
    return live.client.post(ROUTE, json={"input": value} | fields)


def chunks_of(response):
    """The embeddings of each document."""
    assert response.status_code == 200, response.text
    data = response.json()["data"]
    assert [one["index"] for one in data] == list(range(len(data)))
    assert {one["object"] for one in data} == {"list"}
    for document in data:
        assert [chunk["index"] for chunk in document["data"]] == list(range(len(document["data"])))
        assert {tuple(chunk) for chunk in document["data"]} == {("object", "index", "embedding")}
    return [[chunk["embedding"] for chunk in document["data"]] for document in data]


def ids_of(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False).ids


def signed(vector):
    return np.rint(np.tanh(vector) * 127).astype(np.int8)


def sent(live):
    """(sequences, spans) as the engine saw them last."""
    request = live.engines[0].seen[-1]
    sequences = [ids.tolist() for ids in tokens_from_proto(request.tokens)]
    return sequences, [bounds.tolist() for bounds in spans_from_proto(request.spans, len(sequences))]


def test_the_whole_answer(live, tokenizer):
    response = post(live, DOCUMENTS, model="embedder")
    separator = tokenizer.token_to_id("<|endoftext|>")
    sequences, spans = sent(live)
    # The reference joins the texts by the separator's own spelling and tokenises the whole.
    assert sequences == [ids_of(tokenizer, "<|endoftext|>".join(chunks)) for chunks in DOCUMENTS]
    for ids, bounds, chunks in zip(sequences, spans, DOCUMENTS, strict=True):
        assert [ids[start:end] for start, end in bounds] == [ids_of(tokenizer, chunk) for chunk in chunks]
        assert [ids[end] for _, end in bounds[:-1]] == [separator] * (len(chunks) - 1)
        assert (bounds[0][0], bounds[-1][1]) == (0, len(ids))
    for found, chunks in zip(chunks_of(response), DOCUMENTS, strict=True):
        rows = np.stack([np.frombuffer(base64.b64decode(one), np.int8) for one in found])
        assert np.array_equal(rows, [signed(vector_of(ids_of(tokenizer, chunk), DIMENSION)) for chunk in chunks])
    answer = response.json()
    tokens = sum(map(len, sequences))
    assert (set(answer), answer["object"]) == ({"object", "data", "model", "usage"}, "list")
    assert (answer["model"], answer["usage"]) == ("tiny/embedder", {"prompt_tokens": tokens, "total_tokens": tokens})
    msgspec.json.decode(response.content, type=ContextualResponse)


def test_encodings_and_dimensions(live, tokenizer):
    dense = vector_of(ids_of(tokenizer, "salt"), DIMENSION)

    def only(**fields):
        ((found,),) = chunks_of(post(live, [["salt"]], **fields))
        return found

    def raw(text, dtype):
        return np.frombuffer(base64.b64decode(text), dtype)

    assert np.array_equal(raw(only(encoding_format="base64_int8", dimensions=16), np.int8), signed(dense)[:16])
    bits = raw(only(encoding_format="base64_binary"), np.uint8)
    assert np.array_equal(np.unpackbits(bits, bitorder="little"), dense >= 0)
    assert len(raw(only(encoding_format="base64_binary", dimensions=16), np.uint8)) == 2
    assert np.array_equal(np.float32(only(encoding_format="float")), dense)
    assert np.array_equal(raw(only(encoding_format="base64"), "<f4"), dense)
    assert np.array_equal(np.float32(only(encoding_format="float", dimensions=8)), dense[:8])


def test_a_chunk_that_holds_the_separator_is_still_one_chunk(live, tokenizer):
    """Report C33: a text cannot make chunks of its own."""
    evil = "salt<|endoftext|>more <|endoftext|>"
    separator = tokenizer.token_to_id("<|endoftext|>")
    assert [len(one) for one in chunks_of(post(live, [[evil, "b"], [evil]]))] == [2, 1]
    sequences, spans = sent(live)
    assert [ids.count(separator) for ids in sequences] == [1, 0]
    start, end = spans[0][0]
    assert tokenizer.decode(sequences[0][start:end], skip_special_tokens=False) == evil


@pytest.mark.parametrize(
    ("value", "index", "words"),
    [
        ("a", None, "a list of documents"),
        (None, None, "null"),
        ([], None, "empty"),
        (["a"], 0, "[[text]]"),
        ([["a"], "b"], 1, "a list of chunks"),
        ([["a"], []], 1, "no chunk"),
        ([["a"], ["b", ""]], 1, "chunk 1 is empty"),
        ([["a", 3]], 0, "chunk 1 is the number 3"),
        ([["a"], ["b", ["c"]]], 1, "chunk 1 is a list"),
        ([["a"], ["salt " * 100, "salt " * 60]], 1, f"limit of the model is {MAX_TOKENS}"),
    ],
)
def test_bad_documents(live, value, index, words):
    response = post(live, value)
    error = response.json()["error"]
    assert response.status_code == 400, response.text
    assert (error["param"], error["index"]) == ("input", index)
    assert words in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": DIMENSION + 1}, "dimensions"),
        ({"dimensions": 12, "encoding_format": "base64_binary"}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"priority": "high"}, "priority"),
        ({"model": "other"}, "model"),
    ],
)
def test_bad_fields(live, fields, param):
    response = post(live, [["a"]], **fields)
    assert response.status_code == (404 if param == "model" else 400)
    assert response.json()["error"]["param"] == param


def test_separators_count_towards_the_limit(live, tokenizer):
    words = MAX_TOKENS // 2
    one = len(ids_of(tokenizer, "a"))
    assert one == 1
    assert post(live, [["a"] * words]).status_code == 200
    assert len(sent(live)[0][0]) == MAX_TOKENS - 1
    assert post(live, [["a"] * (words + 1)]).status_code == 400


def test_documents_chunks_and_tokens_have_bounds(folder):
    """Report C73: fan-out of one request is bounded here as well."""
    limits = {"max_documents": 3, "max_chunks": 5, "max_context_tokens": 20}
    with live_front(folder, pplx_card(folder), **limits) as live:
        for value, words in (
            ([["a"]] * 4, "4 documents"),
            ([["a"] * 3] * 2, "6 chunks"),
            ([["salt flour ferry harbour quiet river lighthouse"] * 2], "tokens in one request, the limit is 20"),
        ):
            response = post(live, value)
            assert response.status_code == 413, response.text
            assert words in response.json()["error"]["message"]
        assert live.engines[0].seen == []
        assert post(live, [["a"], ["b"], ["c", "d", "e"]]).status_code == 200


def test_many_documents_are_split_over_replicas_and_put_together_in_order(folder, tokenizer):
    card = pplx_card(folder, max_batch_tokens=150)
    draw = random.Random(0)
    documents = [[f"{i} {j} salt" for j in range(draw.randrange(1, 7))] for i in range(60)]
    with live_front(folder, card, card) as live:
        for engine in live.engines:
            engine.backwards = 2
        found = chunks_of(post(live, documents, encoding_format="float"))
        for vectors, chunks in zip(found, documents, strict=True):
            expected = np.stack([vector_of(ids_of(tokenizer, chunk), DIMENSION) for chunk in chunks])
            assert np.array_equal(np.float32(vectors), expected)
        assert all(len(engine.seen) > 2 for engine in live.engines)


def test_a_model_that_is_not_contextual_refuses(text_folder):
    with live_front(text_folder, pplx_card(text_folder)) as live:
        response = post(live, [["a"]])
        assert (response.status_code, response.json()["error"]["param"]) == (400, "model")
        assert "no contextual model" in response.json()["error"]["message"]


def test_a_replica_that_ignores_the_spans_is_caught(folder):
    with live_front(folder, pplx_card(folder)) as live:
        answer = live.engines[0].answer

        def without(card, request):
            request.ClearField("spans")
            return answer(card, request)

        live.engines[0].answer = without
        assert post(live, [["a", "b"]]).status_code == 500
        assert post(live, [["a"]]).status_code == 500

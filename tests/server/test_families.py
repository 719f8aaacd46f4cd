"""Every kind of output of every family over the link, against the same model run by hand on one sequence."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch

from rose.attention_backends.base import load_backend
from rose.batch import Batch
from rose.client import Client
from rose.errors import InvalidInput
from tests.server.by_hand import cosine, random_sequences
from tests.server.served import Served
from tests.support.tiny_families import (
    tiny_bge_m3,
    tiny_cross_encoder_bert,
    tiny_cross_encoder_xlmr,
    tiny_pplx_context,
    tiny_qwen3_reranker,
)

CPU = torch.device("cpu")
RERANKERS = {
    "bert": tiny_cross_encoder_bert,
    "xlm_roberta": tiny_cross_encoder_xlmr,
    "qwen3": tiny_qwen3_reranker,
}


def run_by_hand(model, ids, output: str, *, types=None, spans=None) -> np.ndarray:
    """All rows of one output for one sequence, past engine and wire."""
    batch = Batch.pack([list(ids)])
    if types is not None:
        batch.type_ids = torch.tensor(types, dtype=torch.int32)
    if spans is not None:
        batch.spans = torch.tensor(spans, dtype=torch.int32)
    batch.attention = load_backend("torch_sdpa", model.attention_spec(CPU, torch.float32)).plan(batch)
    with torch.inference_mode():
        return model(batch, (output,))[output].numpy()


@pytest.fixture(scope="module")
def m3(tmp_path_factory):
    served = Served(tiny_bge_m3(tmp_path_factory.mktemp("m3") / "model"))
    yield served
    served.close()


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    served = Served(tiny_pplx_context(tmp_path_factory.mktemp("context") / "model"))
    yield served
    served.close()


@pytest.fixture(scope="module", params=RERANKERS)
def reranker(request, tmp_path_factory):
    served = Served(RERANKERS[request.param](tmp_path_factory.mktemp(request.param) / "model"))
    yield served
    served.close()


SUBSETS = [names for n in (1, 2, 3) for names in combinations(("dense", "sparse", "colbert"), n)]


@pytest.mark.parametrize("outputs", SUBSETS, ids="+".join)
def test_any_of_the_three_outputs_of_bge_m3_in_one_forward(m3, outputs):
    sequences = random_sequences(m3.model.vocab_size, [7, 1, 30, 2], seed=len(outputs))
    with Client(m3.address) as client:
        before = client.stats().batches_total
        result = client.embed(sequences, outputs=outputs)
        assert client.stats().batches_total == before + 1
    assert tuple(result.outputs) == outputs
    for index, ids in enumerate(sequences):
        for name in outputs:
            expected = run_by_hand(m3.model, ids, name)
            rows = result.item(name, index)
            if name == "dense":
                np.testing.assert_allclose(rows, expected[0], atol=2e-6)
            else:
                skipped = 1 if name == "colbert" else 0
                assert rows.shape == (len(ids) - skipped, expected.shape[1])
                np.testing.assert_allclose(rows, expected[skipped:], atol=2e-5)
    if "colbert" in outputs:
        np.testing.assert_allclose(np.linalg.norm(result.outputs["colbert"], axis=1), 1, atol=1e-5)
    if "sparse" in outputs:
        assert (result.outputs["sparse"] >= 0).all()


def test_many_texts_of_different_lengths_keep_their_token_rows(m3):
    """Report C109 (FlagEmbedding#532): a weight a token and nothing of the vocabulary's size, over several batches."""
    lengths = np.random.default_rng(5).integers(1, 100, 60)
    sequences = random_sequences(m3.model.vocab_size, lengths, seed=6)
    with Client(m3.address) as client:
        result = client.embed(sequences, outputs=["sparse", "colbert", "dense"])
        alone = [client.embed([ids], outputs=["sparse", "colbert", "dense"]) for ids in sequences[:10]]
    assert result.timing.batches > 3
    assert result.outputs["sparse"].shape == (lengths.sum(), 1)
    assert result.outputs["colbert"].shape[0] == (lengths - 1).sum()
    for index, single in enumerate(alone):
        for name in ("sparse", "colbert"):
            np.testing.assert_allclose(result.item(name, index), single.item(name, 0), atol=2e-5)


@pytest.mark.parametrize("length", [127, 128, 129, 1000])
def test_no_position_past_the_table_is_ever_read(m3, reranker, length):
    """Reports C44 (vllm#22761) and C48 (vllm#28191): the longest sequence is served whole, one more token is named."""
    for served in (m3, reranker):
        output = served.model.default_output
        ids = random_sequences(served.model.vocab_size, [length], seed=length)[0]
        with Client(served.address) as client:
            if length <= 128:
                rows = client.embed([ids]).vectors[0]
                np.testing.assert_allclose(rows, run_by_hand(served.model, ids, output)[0], rtol=1e-4, atol=1e-5)
            else:
                with pytest.raises(InvalidInput, match=f"item 1 has {length} tokens, over the model's limit of 128"):
                    client.embed([[5, 6], ids])
            short = client.embed([[5, 6]]).vectors[0]
        np.testing.assert_allclose(short, run_by_hand(served.model, [5, 6], output)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("missing", ["sparse", "colbert"])
def test_an_output_whose_head_is_missing_is_refused_with_the_reason(tmp_path, missing):
    """Report C110 (FlagEmbedding#550): lexical weights out of a head that was never loaded."""
    there = {"sparse": "colbert", "colbert": "sparse"}[missing]
    served = Served(tiny_bge_m3(tmp_path / "model", heads=[there]))
    try:
        with Client(served.address) as client:
            cards = {output.name: output for output in client.info().outputs}
            assert f"{missing}_linear.pt" in cards[missing].unavailable
            assert not cards[there].unavailable
            for outputs in ([missing], ["dense", missing]):
                with pytest.raises(InvalidInput, match=f"'{missing}' cannot be had .*{missing}_linear.pt") as raised:
                    client.embed([[5, 6, 7]], outputs=outputs)
                assert (raised.value.http_status, raised.value.param) == (400, "outputs")
            assert set(client.embed([[5, 6, 7]], outputs=["dense", there]).outputs) == {"dense", there}
    finally:
        served.close()


def test_the_card_tells_kinds_and_tokens_without_a_row(m3, reranker):
    with Client(m3.address) as client:
        cards = {output.name: output for output in client.info().outputs}
    assert {name: card.kind for name, card in cards.items()} == {
        "dense": "vector",
        "sparse": "weights",
        "colbert": "vector",
    }
    assert (cards["sparse"].skip_tokens, cards["colbert"].skip_tokens) == (0, 1)
    with Client(reranker.address) as client:
        card = client.info()
        assert [(output.name, output.kind) for output in card.outputs] == [("score", "score")]
        with pytest.raises(InvalidInput, match="no output 'dense', it has: score"):
            client.embed([[5, 6]], outputs=["dense"])
        with pytest.raises(InvalidInput, match="'score' scores whole sequences"):
            client.embed([[5, 6]], spans=[[(0, 1)]])


def test_scores_are_raw_logits_and_constant_in_any_company(reranker):
    """Report C14 (fastembed-rs#107): a pair's score is its own, whoever else is in the batch."""
    ids = random_sequences(reranker.model.vocab_size, [23], seed=1)[0]
    expected = run_by_hand(reranker.model, ids, "score")[0]
    with Client(reranker.address) as client:
        for others in (0, 2, 7, 15):
            company = random_sequences(reranker.model.vocab_size, [5 + 3 * i for i in range(others)], seed=others)
            for place in {0, others // 2, others}:
                scores = client.embed([*company[:place], ids, *company[place:]]).vectors
                np.testing.assert_allclose(scores[place], expected, rtol=1e-5, atol=1e-5)


def test_token_types_reach_the_families_that_have_them(reranker):
    ids = random_sequences(reranker.model.vocab_size, [6, 12], seed=2)
    types = [[0, 0, 0, 1, 1, 1], [0] * 5 + [1] * 7]
    size = reranker.folder.architecture.type_vocab_size
    with Client(reranker.address) as client:
        plain = client.embed(ids).vectors
        zeros = client.embed(ids, token_types=[[0] * 6, [0] * 12]).vectors
        np.testing.assert_allclose(plain, zeros, atol=1e-5)
        if size < 2:
            with pytest.raises(InvalidInput, match=r"outside this model's token types 0\.\.0") as raised:
                client.embed(ids, token_types=types)
            assert (raised.value.param, raised.value.index) == ("token_types", 0)
            return
        scores = client.embed(ids, token_types=types).vectors
        for index in range(2):
            expected = run_by_hand(reranker.model, ids[index], "score", types=types[index])[0]
            np.testing.assert_allclose(scores[index], expected, rtol=1e-5, atol=1e-5)
        assert np.abs(scores - plain).min() > 1e-3, "types change the score"
        with pytest.raises(InvalidInput, match=r"token type 2 at position 0 .* 0\.\.1"):
            client.embed(ids, token_types=[[0] * 6, [2] * 12])


def test_chunks_of_a_document_get_a_vector_each(context):
    sequences = random_sequences(context.model.vocab_size, [40, 12, 3, 90], seed=3)
    spans = [[(0, 10), (11, 39)], [(0, 12)], [], [(0, 30), (31, 60), (61, 90), (90, 90)]]
    with Client(context.address) as client:
        result = client.embed(sequences, outputs=["dense", "int8"], spans=spans)
    for index, (ids, pairs) in enumerate(zip(sequences, spans, strict=True)):
        assert len(result.item("dense", index)) == len(result.item("int8", index)) == len(pairs)
        if pairs:
            expected = run_by_hand(context.model, ids, "dense", spans=pairs)
            np.testing.assert_allclose(result.item("dense", index), expected, rtol=1e-4, atol=1e-5)
        for row, (start, end) in enumerate(pairs):
            if (start, end) == (0, len(ids)):
                assert cosine(result.item("dense", index)[row], run_by_hand(context.model, ids, "dense")[0]) > 0.99999
    assert not result.item("dense", 3)[3].any(), "an empty chunk has no direction"


def test_integer_codes_of_a_text_are_the_same_in_any_company(context):
    """Report C14 (fastembed-rs#107): activations scaled over the whole batch made a text's vector its neighbours'."""
    ids = random_sequences(context.model.vocab_size, [31], seed=8)[0]
    with Client(context.address) as client:
        alone = client.embed([ids], outputs=["int8"]).vectors[0].astype(int)
        for others in (1, 3, 8, 15):
            company = random_sequences(context.model.vocab_size, [4 * i + 1 for i in range(others)], seed=others)
            found = client.embed([ids, *company, ids], outputs=["int8"]).vectors.astype(int)
            for row in (found[0], found[-1]):
                difference = np.abs(row - alone)
                assert difference.max() <= 1, "a step of the grid at most, where a sum ends on its edge"
                assert (difference == 0).mean() >= 0.98
    assert np.abs(alone).max() > 20


def test_a_model_that_pools_no_parts_says_so(m3):
    with Client(m3.address) as client, pytest.raises(InvalidInput, match=r"takes no spans: .* by cls") as raised:
        client.embed([[5, 6, 7]], outputs=["dense"], spans=[[(0, 1)]])
    assert raised.value.param == "spans"

"""Scores, lexical weights, token vectors and spans over a real socket, to a fake engine."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from rose.client import AsyncClient, Client
from rose.errors import InvalidInput, NonFinite, PayloadTooLarge
from tests.server.fake_engine import (
    NAN,
    POISON,
    SPOILS,
    FakeEngine,
    int8_row,
    late_rows,
    plain_row,
    score_row,
    unit_row,
    weight_rows,
)
from tests.server.running_server import serving


def sequences_of(lengths, seed=0):
    random = np.random.default_rng(seed)
    return [random.integers(0, 600, size=n).astype(np.int32) for n in lengths]


def test_outputs_of_every_shape_in_one_answer():
    sequences = sequences_of([3, 1, 70, 20, 7])
    types = [ids % 2 for ids in sequences]
    with serving(FakeEngine(shuffle=1)) as server, Client(server.address) as client:
        result = client.embed(sequences, outputs=["late", "score", "plain", "weights"], token_types=types)
        assert result.timing.batches > 1
        assert list(result.outputs) == ["late", "score", "plain", "weights"]
        assert set(result.splits) == {"late", "weights"}
        for i, ids in enumerate(sequences):
            np.testing.assert_array_equal(result.item("late", i), late_rows(ids)[1:])
            np.testing.assert_array_equal(result.item("weights", i), weight_rows(ids))
            np.testing.assert_array_equal(result.item("score", i), score_row(ids, types[i]))
            np.testing.assert_array_equal(result.item("plain", i), plain_row(ids))


def test_spans_come_back_with_their_items_whatever_the_batches():
    sequences = sequences_of([10, 60, 4, 1, 33])
    spans = [[(0, 5), (5, 10)], [(0, 60), (1, 2), (30, 30)], [], [(0, 1)], [(3, 30)]]
    with serving(FakeEngine(shuffle=2)) as server, Client(server.address) as client:
        result = client.embed(sequences, outputs=["plain", "int8", "weights"], spans=spans)
        assert result.timing.batches > 1
        for i, (ids, pairs) in enumerate(zip(sequences, spans, strict=True)):
            plain = [plain_row(ids[a:b]) if b > a else np.zeros(8) for a, b in pairs]
            np.testing.assert_array_equal(result.item("plain", i), np.reshape(plain, (-1, 8)))
            int8 = [int8_row(ids[a:b]) if b > a else np.zeros(4) for a, b in pairs]
            np.testing.assert_array_equal(result.item("int8", i), np.reshape(int8, (-1, 4)))
            np.testing.assert_array_equal(result.item("weights", i), weight_rows(ids))


def test_an_empty_span_is_a_zero_row_and_no_fault_even_where_rows_have_unit_length():
    ids = np.array([5, 6, 7], dtype=np.int32)
    with serving() as server, Client(server.address) as client:
        for dimensions in (0, 4):
            rows = client.embed([ids], outputs=["unit"], spans=[[(0, 2), (3, 3)]], dimensions=dimensions).vectors
            whole = unit_row(ids[:2])[: dimensions or 8]
            np.testing.assert_allclose(rows[0], whole / np.linalg.norm(whole), rtol=1e-6)
            assert not rows[1].any()
        assert client.stats().retried_items_total == 0


def test_a_span_that_is_not_finite_fails_its_item_and_its_company_is_answered():
    """Report C26 (vllm#19661): what was run again alone keeps its spans and token types."""
    sequences = [np.array([1, 2, 3]), np.array([4, NAN, 6]), np.array([7, 8])]
    spans = [[(0, 2), (2, 3)], [(0, 1), (1, 3)], [(1, 2)]]
    with serving() as server, Client(server.address) as client:
        with pytest.raises(NonFinite, match="item 1") as raised:
            client.embed(sequences, outputs=["plain"], spans=spans)
        assert raised.value.index == 1
        spans[1] = [(0, 1), (2, 3)]
        result = client.embed(sequences, outputs=["plain"], spans=spans)
        np.testing.assert_array_equal(result.item("plain", 1), [plain_row([4]), plain_row([6])])


def test_token_types_stay_beside_their_items_when_run_again_alone():
    sequences = [np.array([1, 2]), np.array([SPOILS]), np.array([3, 4, 5])]
    types = [[1, 0], [1], [1, 1, 0]]
    with serving() as server, Client(server.address) as client:
        scores = client.embed(sequences, outputs=["score"], token_types=types).vectors
        assert client.stats().retried_items_total == 3
    np.testing.assert_array_equal(scores, [score_row(*pair) for pair in zip(sequences, types, strict=True)])


def test_the_row_of_a_token_that_has_none_is_no_fault():
    with serving() as server, Client(server.address) as client:
        result = client.embed([[5], [6, 7]], outputs=["late"])
        assert result.outputs["late"].shape == (1, 2)
        assert result.splits["late"] == (0, 0, 1)
        assert client.stats().retried_items_total == 0


@pytest.mark.parametrize("output", ["weights", "score", "late"])
def test_values_of_every_kind_are_looked_at(output):
    """Report C26 (dify#11827): NaN never travels, whatever it was meant to be."""
    with serving() as server, Client(server.address) as client:
        with pytest.raises(NonFinite) as raised:
            client.embed([[1, 2], [3, NAN, 4]], outputs=[output])
        assert raised.value.index == 1


def test_an_answer_that_cannot_fit_is_refused_before_anything_runs():
    """Report C153 (ai-gateway#1209): an answer of rows a token is many times its request."""
    with serving(max_payload=70_000) as server, Client(server.address) as client:
        with pytest.raises(PayloadTooLarge, match=r"over the limit of 4464 \(--max-payload\): send fewer items"):
            client.embed([[1] * 200] * 2, outputs=["tokens"])
        assert not server.engine.batches
        assert client.embed([[1] * 200], outputs=["tokens"]).vectors.shape == (200, 3)


def test_what_the_model_cannot_give_is_refused_with_the_reason():
    """Report C110 (FlagEmbedding#550): a head that is missing makes its output a 400, and the others still served."""
    with serving() as server, Client(server.address) as client:
        for outputs, words in ((["plain", "sparse"], "sparse_linear.pt is missing"), (["dense"], "no output 'dense'")):
            with pytest.raises(InvalidInput, match=words) as raised:
                client.embed([[1]], outputs=outputs)
            assert (raised.value.http_status, raised.value.param) == (400, "outputs")
        np.testing.assert_array_equal(client.embed([[1]], outputs=["plain"]).vectors, [plain_row([1])])


@pytest.mark.parametrize("length", [1, 255, 256, 257, 1 << 12])
def test_lengths_around_the_models_limit(length):
    """Reports C44 (vllm#22761) and C48 (vllm#22280): up to the limit served, one more is named, nothing else breaks."""
    with serving() as server, Client(server.address) as client:
        if length <= 256:
            np.testing.assert_array_equal(client.embed([[7] * length]).vectors, [plain_row([7] * length)])
        else:
            with pytest.raises(
                InvalidInput, match=f"item 1 has {length} tokens, over the model's limit of 256"
            ) as error:
                client.embed([[1], [7] * length], outputs=["score"])
            assert (error.value.param, error.value.index) == ("input", 1)
        np.testing.assert_array_equal(client.embed([[7]]).vectors, [plain_row([7])])


def test_failing_company_leaves_spans_alone():
    """Report C140 (infinity#242): the batch raised; who was not at fault is answered from a run of its own."""
    with serving(FakeEngine(batch_tokens=100)) as server, Client(server.address) as client:
        with pytest.raises(Exception, match="poison"):
            client.embed([[1, 2], [POISON]], spans=[[(0, 1)], [(0, 1)]])
        result = client.embed([[1, 2]], spans=[[(0, 1)]])
        np.testing.assert_array_equal(result.item("plain", 0), [plain_row([1])])


async def _embed(address: str):
    async with await AsyncClient.connect(address) as client:
        return await client.embed([[1, 2, 3]], outputs=["plain", "late"], spans=[[(0, 3)]], token_types=[[0, 1, 1]])


def test_the_asyncio_client_takes_the_same():
    with serving() as server:
        result = asyncio.run(_embed(server.address))
        (request,) = server.engine.added
    np.testing.assert_array_equal(result.item("plain", 0), [plain_row([1, 2, 3])])
    np.testing.assert_array_equal(result.item("late", 0), late_rows([1, 2, 3])[1:])
    assert [types.tolist() for types in request.token_types] == [[0, 1, 1]]

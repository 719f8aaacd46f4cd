"""Rows of a request come back in its own order, cut and normalised as asked, whatever batches they were in."""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.engine.request import Priority
from rose.errors import NonFinite
from rose.models.base import OutputSpec
from rose.proto import rose_pb2 as pb
from rose.proto.convert import tensor_from_proto
from rose.server.answers import Answer, faulty_rows, renormalize
from rose.server.validate import Work
from tests.server.fake_engine import DIMENSION, OUTPUTS, int8_row, late_rows, plain_row, token_rows, unit_row

ROWS = {"plain": plain_row, "unit": unit_row, "int8": int8_row}


def answer_for(names, sequences, dimensions=0, spans=None) -> Answer:
    """An answer of these outputs, for sequences of which only the lengths count."""
    specs = {name: OUTPUTS[name] for name in names}
    return Answer(Work(sequences, specs, dimensions, Priority.ONLINE, sum(map(len, sequences)), 0, spans=spans))


def filled(answer: Answer) -> list[pb.Output]:
    answer.fill()
    return list(answer.message.outputs)


def batch_of(sequences):
    batch = {name: np.stack([row(ids) for ids in sequences]) for name, row in ROWS.items()}
    batch["tokens"] = np.concatenate([token_rows(ids) for ids in sequences])
    splits = (0, *np.cumsum([len(ids) for ids in sequences]).tolist())
    return batch, splits


@given(st.integers(1, 20), st.data())
def test_any_order_and_any_cuts_into_batches(count, data):
    sequences = [np.arange(i, i + 1 + (7 * i) % 5) for i in range(count)]
    order = data.draw(st.permutations(range(count)))
    cuts = sorted(data.draw(st.sets(st.integers(1, count), max_size=6)) | {0, count})
    answer = answer_for(("tokens", "plain", "int8"), sequences)
    for start, end in pairwise(cuts):
        batch, splits = batch_of([sequences[i] for i in order[start:end]])
        for row, item in enumerate(order[start:end]):
            assert not answer.complete
            answer.put(item, batch, row, row + 1, splits)
    assert answer.complete
    outputs = {output.name: output for output in filled(answer)}
    assert list(outputs) == ["tokens", "plain", "int8"]
    np.testing.assert_array_equal(tensor_from_proto(outputs["plain"].values), [plain_row(ids) for ids in sequences])
    np.testing.assert_array_equal(tensor_from_proto(outputs["int8"].values), [int8_row(ids) for ids in sequences])
    splits = list(outputs["tokens"].splits)
    tokens = tensor_from_proto(outputs["tokens"].values)
    for i, ids in enumerate(sequences):
        np.testing.assert_array_equal(tokens[splits[i] : splits[i + 1]], token_rows(ids))


def test_whole_runs_of_rows_at_once():
    sequences = [np.arange(1, n + 2) for n in range(6)]
    batch, splits = batch_of(sequences)
    answer = answer_for(("plain", "tokens"), sequences[2:])
    answer.put(0, batch, 2, 6, splits)
    plain, tokens = filled(answer)
    np.testing.assert_array_equal(tensor_from_proto(plain.values), [plain_row(ids) for ids in sequences[2:]])
    assert list(tokens.splits) == [0, 3, 7, 12, 18]


def test_part_of_an_answer_shares_no_memory_with_its_batch():
    """A request spread over many batches does not keep them all; one that is whole leaves at once, without a copy."""
    sequences = [np.array([1, 2]), np.array([3])]
    answer = answer_for(("plain", "tokens"), sequences)
    for item, ids in enumerate(sequences):
        batch, splits = batch_of([ids])
        answer.put(item, batch, 0, 1, splits)
        for values in batch.values():
            values[:] = 77
    plain, tokens = filled(answer)
    assert 77 not in tensor_from_proto(plain.values)
    assert 77 not in tensor_from_proto(tokens.values)


@given(st.integers(1, 8), st.data())
def test_leading_tokens_without_a_row_are_left_out_of_every_item(count, data):
    """Report C109 (FlagEmbedding#532): rows are those of the tokens that were asked for, and no more."""
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=count, max_size=count))
    sequences = [np.arange(n) for n in lengths]
    cuts = sorted(data.draw(st.sets(st.integers(1, count), max_size=3)) | {0, count})
    answer = answer_for(("late", "tokens"), sequences)
    for start, end in pairwise(cuts):
        batch = {"late": np.concatenate([late_rows(ids) for ids in sequences]), **batch_of(sequences)[0]}
        answer.put(start, batch, start, end, batch_of(sequences)[1])
    late, tokens = filled(answer)
    assert list(late.splits) == [0, *np.cumsum([n - 1 for n in lengths])]
    assert list(tokens.splits) == [0, *np.cumsum(lengths)]
    expected = np.concatenate([late_rows(ids)[1:] for ids in sequences])
    np.testing.assert_array_equal(tensor_from_proto(late.values), expected)


def int32(*pairs) -> np.ndarray:
    return np.array(pairs, dtype=np.int32).reshape(-1, 2)


def test_rows_of_spans_come_with_their_splits_and_cut_ones_are_normalised_again():
    spans = [int32((0, 1), (1, 3)), int32(), int32((2, 2))]
    sequences = [np.arange(3), np.arange(2), np.arange(4)]
    rows = np.array([[3, 4, 1], [5, 12, 1], [0, 0, 0]], dtype=np.float32)
    specs = {"e": OutputSpec(dtype="float32", dimension=3, normalized=True)}
    answer = Answer(Work(sequences, specs, 2, Priority.ONLINE, 9, 0, spans=spans))
    answer.put(0, {"e": rows}, 0, 1, (0, 3), (0, 2))
    answer.put(1, {"e": rows}, 1, 3, (0, 1, 3, 7), (0, 2, 2, 3))
    assert answer.complete
    (output,) = filled(answer)
    assert list(output.splits) == [0, 2, 2, 3]
    expected = [[0.6, 0.8], [5 / 13, 12 / 13], [0, 0]]
    np.testing.assert_allclose(tensor_from_proto(output.values), expected, rtol=1e-6)


def test_a_cut_span_without_direction_names_its_item():
    spans = [int32((0, 1)), int32(), int32((0, 1), (1, 2))]
    specs = {"e": OutputSpec(dtype="float32", dimension=2, normalized=True)}
    answer = Answer(Work([np.arange(3)] * 3, specs, 1, Priority.ONLINE, 9, 0, spans=spans))
    answer.put(0, {"e": np.array([[1, 0], [1, 0], [0, 1]], dtype=np.float32)}, 0, 3, (0, 3, 6, 9), (0, 1, 1, 3))
    with pytest.raises(NonFinite, match="first 1 dimensions") as raised:
        filled(answer)
    assert raised.value.index == 2


def test_large_answers_of_many_batches_cost_no_more_than_their_size():
    """Copies that each grew the whole would be quadratic: 16 times the items would cost 256 times the time."""

    def seconds(items: int) -> float:
        sequences = [np.arange(8)] * items
        batch = {"tokens": np.ones((8, 3), dtype=np.float32)}
        start = time.process_time()
        answer = answer_for(("tokens",), sequences)
        for item in range(items):
            answer.put(item, batch, 0, 1, (0, 8))
        filled(answer)
        return time.process_time() - start

    seconds(100)
    small = min(seconds(1000) for _ in range(5))
    assert min(seconds(16000) for _ in range(5)) < 80 * small


@pytest.mark.parametrize("dimensions", range(1, DIMENSION + 1))
def test_cut_vectors_are_normalised_again_where_the_model_normalises(dimensions):
    sequences = [np.array([1, 2, 3]), np.array([9, 4])]
    batch, splits = batch_of(sequences)
    answer = answer_for(("plain", "unit"), sequences, dimensions)
    answer.put(0, batch, 0, 2, splits)
    plain, unit = (tensor_from_proto(output.values) for output in filled(answer))
    np.testing.assert_array_equal(plain, batch["plain"][:, :dimensions])
    cut = batch["unit"][:, :dimensions].astype(np.float64)
    np.testing.assert_allclose(unit, cut / np.linalg.norm(cut, axis=1, keepdims=True), rtol=1e-6)
    assert unit.dtype == np.float32


def test_a_cut_without_direction_is_an_error_of_that_item():
    with pytest.raises(NonFinite, match="first 2 dimensions of output 'unit'") as caught:
        renormalize(np.array([[1, 0], [0, 0]], dtype=np.float32), "unit")
    assert caught.value.index == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("normalized", [True, False])
def test_rows_that_must_not_travel(bad, normalized):
    """Report C26 (vllm#19661, dify#11792): non-finite rows are found, wherever in the row they are."""
    spec = OutputSpec(dtype="float32", dimension=4, normalized=normalized)
    values = np.ones((5, 4), dtype=np.float32)
    assert faulty_rows(values, spec).tolist() == []
    values[1, 3] = bad
    values[4, 0] = bad
    assert faulty_rows(values, spec).tolist() == [1, 4]


def test_zero_rows_are_faults_only_where_rows_have_unit_length():
    """Report C164 (ollama#17878): all-zero vectors with a friendly status."""
    values = np.array([[1, 0], [0, 0]], dtype=np.float32)
    assert faulty_rows(values, OutputSpec(dtype="float32", dimension=2, normalized=True)).tolist() == [1]
    assert faulty_rows(values, OutputSpec(dtype="float32", dimension=2)).tolist() == []


def test_large_finite_rows_are_no_faults_and_integers_never_are():
    large = np.full((2, 4), 3e38, dtype=np.float32)
    assert faulty_rows(large, OutputSpec(dtype="float32", dimension=4)).tolist() == []
    assert faulty_rows(np.zeros((2, 4), dtype=np.int8), OutputSpec(dtype="int8", dimension=4)).tolist() == []
    assert faulty_rows(np.zeros((0, 4), dtype=np.float32), OutputSpec(dtype="float32", dimension=4)).tolist() == []

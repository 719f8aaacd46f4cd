"""Rows of a request come back in its own order, cut and normalised as asked, whatever batches they were in."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.errors import NonFinite
from rose.models.base import OutputSpec
from rose.proto.convert import tensor_from_proto
from rose.server.answers import Answer, faulty_rows, renormalize
from tests.server.fake_engine import DIMENSION, OUTPUTS, int8_row, plain_row, token_rows, unit_row

ROWS = {"plain": plain_row, "unit": unit_row, "int8": int8_row}


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
    answer = Answer({name: OUTPUTS[name] for name in ("tokens", "plain", "int8")}, count, 0)
    for start, end in pairwise(cuts):
        batch, splits = batch_of([sequences[i] for i in order[start:end]])
        for row, item in enumerate(order[start:end]):
            assert not answer.complete
            answer.put(item, batch, row, row + 1, splits)
    assert answer.complete
    outputs = {output.name: output for output in answer.outputs()}
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
    answer = Answer({"plain": OUTPUTS["plain"], "tokens": OUTPUTS["tokens"]}, 4, 0)
    answer.put(0, batch, 2, 6, splits)
    plain, tokens = answer.outputs()
    np.testing.assert_array_equal(tensor_from_proto(plain.values), [plain_row(ids) for ids in sequences[2:]])
    assert list(tokens.splits) == [0, 3, 7, 12, 18]


def test_the_answer_does_not_share_memory_with_the_batch():
    batch, splits = batch_of([np.array([1, 2])])
    answer = Answer({"plain": OUTPUTS["plain"], "tokens": OUTPUTS["tokens"]}, 1, 0)
    answer.put(0, batch, 0, 1, splits)
    for values in batch.values():
        values[:] = 77
    plain, tokens = answer.outputs()
    assert 77 not in tensor_from_proto(plain.values)
    assert 77 not in tensor_from_proto(tokens.values)


@pytest.mark.parametrize("dimensions", range(1, DIMENSION + 1))
def test_cut_vectors_are_normalised_again_where_the_model_normalises(dimensions):
    batch, splits = batch_of([np.array([1, 2, 3]), np.array([9, 4])])
    answer = Answer({"plain": OUTPUTS["plain"], "unit": OUTPUTS["unit"]}, 2, dimensions)
    answer.put(0, batch, 0, 2, splits)
    plain, unit = (tensor_from_proto(output.values) for output in answer.outputs())
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

"""Late chunking: parts of a sequence pooled by themselves, whatever the company; and what may lie beside ids."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.config import EngineConfig
from rose.engine import Engine, Item, Request, StepResult
from rose.engine.buckets import Buckets
from rose.engine.execution import CpuExecutor
from rose.engine.graphs import LazyGraphs
from rose.engine.open_request import Run, Work
from rose.engine.staging import ALIGN, Staging
from rose.errors import InternalError, InvalidInput
from tests.engine.fake_model import DIMENSION, FakeModel, ManualExecutor, NoAttention, expected_pooled, expected_tokens
from tests.engine.test_graphs import CPU, FakeCapturer

CONFIG = EngineConfig(online_tokens=64, bulk_tokens=256, max_sequences=8, max_tokens=128)


def spans_of(*pairs: tuple[int, int]) -> np.ndarray:
    return np.array(pairs, dtype=np.int32).reshape(-1, 2)


def expected_span(ids: np.ndarray, start: int, end: int) -> np.ndarray:
    """The fake model's row for part of a sequence: positions are those in the whole."""
    part = ids[start:end]
    return np.array([int(part.sum()), sum(range(start, end)), 0, end - start], dtype=np.float32)


def make(**kwargs) -> tuple[Engine, ManualExecutor, FakeModel]:
    executor, model = ManualExecutor(), FakeModel()
    return Engine(model, CONFIG, executor, NoAttention(), **kwargs), executor, model


def drain(engine: Engine, executor: ManualExecutor) -> list[StepResult]:
    results = []
    while found := engine.step():
        results += found
        while executor.waiting:
            executor.run_one()
    assert engine.idle
    return results


def span_rows(results: list[StepResult], name: str = "pooled") -> dict[Item, np.ndarray]:
    found = {}
    for result in results:
        values, splits = result.outputs[name].result(), result.span_splits
        assert len(splits) == len(result.items) + 1
        assert splits[-1] == len(values)
        for row, item in enumerate(result.items):
            found[item] = values[splits[row] : splits[row + 1]]
    return found


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_each_span_gets_its_own_row_whatever_the_batches(data):
    lengths = data.draw(st.lists(st.integers(1, 100), min_size=1, max_size=12))
    rng = np.random.default_rng(len(lengths))
    sequences = [rng.integers(0, 600, n).astype(np.int32) for n in lengths]
    spans = []
    for length in lengths:
        bound = st.integers(0, length)
        pairs = data.draw(st.lists(st.tuples(bound, bound).map(sorted), max_size=4))
        spans.append(spans_of(*pairs))
    engine, executor, _ = make()
    engine.add(Request(1, sequences, spans=spans, outputs=("pooled", "tokens")))
    results = drain(engine, executor)
    got = span_rows(results)
    assert set(got) == {Item(1, index) for index in range(len(lengths))}
    for index, (ids, bounds) in enumerate(zip(sequences, spans, strict=True)):
        expected = [expected_span(ids, start, end) for start, end in bounds.tolist()]
        np.testing.assert_array_equal(got[Item(1, index)], np.array(expected).reshape(-1, DIMENSION))
    for result in results:
        tokens = result.outputs["tokens"].result()
        for row, item in enumerate(result.items):
            rows = tokens[result.splits[row] : result.splits[row + 1]]
            np.testing.assert_array_equal(rows, expected_tokens(sequences[item.index]))


def test_requests_with_and_without_spans_share_no_batch():
    engine, executor, model = make()
    ids = np.arange(1, 9, dtype=np.int32)
    for number in range(6):
        engine.add(Request(number, [ids], spans=[spans_of((0, 2), (2, 8))] if number % 2 else None))
    results = drain(engine, executor)
    assert sorted(sorted(item.request_id for item in result.items) for result in results) == [[0, 2, 4], [1, 3, 5]]
    assert model.span_batches == [[[0, 2], [2, 8], [8, 10], [10, 16], [16, 18], [18, 24]]]
    for result in results:
        rows = result.outputs["pooled"].result()
        assert len(rows) == (6 if result.span_splits else 3)
        if not result.span_splits:
            np.testing.assert_array_equal(rows, [expected_pooled(ids)] * 3)


def test_a_batch_without_a_single_span_gives_no_rows_and_no_kernel_sees_an_empty_output():
    engine, executor, model = make()
    engine.add(Request(1, [np.ones(4, np.int32), np.ones(2, np.int32)], spans=[spans_of(), spans_of()]))
    (result,) = drain(engine, executor)
    assert result.outputs["pooled"].result().shape == (0, DIMENSION)
    assert result.span_splits == (0, 0, 0)
    assert model.span_batches == [[[0, 1]]]


def test_an_aborted_request_with_spans_leaves_its_lane_in_order():
    engine, executor, _ = make()
    for number in range(3):
        engine.add(Request(number, [np.ones(4, np.int32)], spans=[spans_of((0, number + 1))]))
    assert engine.abort(1)
    results = drain(engine, executor)
    assert {item.request_id for result in results for item in result.items} == {0, 2}


def test_batches_with_spans_keep_their_shape_and_are_never_captured():
    graphs = LazyGraphs(CPU, capturer=FakeCapturer(), max_bytes=1 << 20)
    engine, executor, model = make(graphs=graphs, inflection_tokens=1024)
    for number in range(4):
        engine.add(Request(number, [np.ones(5, np.int32)], spans=[spans_of((1, 5))]))
        drain(engine, executor)
    assert model.shapes == [(5, 1)] * 4
    assert (graphs.metrics.captures, graphs.metrics.plain) == (0, 4)


def test_a_model_that_ignores_the_spans_is_an_internal_error(monkeypatch):
    monkeypatch.setattr(
        FakeModel, "__call__", lambda self, batch, outputs: {"pooled": batch.ids.new_zeros(1, 4).float()}
    )
    engine, executor, _ = make()
    engine.add(Request(1, [np.ones(4, np.int32)], spans=[spans_of((0, 2), (2, 4))]))
    (result,) = drain(engine, executor)
    with pytest.raises(InternalError, match=r"\(1, 4\); declared is float32 \(2, 4\)"):
        result.outputs["pooled"].result()


@pytest.mark.parametrize(
    ("spans", "message", "index"),
    [
        ([spans_of((0, 2))], "spans for 1 of 2 sequences", None),
        ([spans_of((0, 2)), spans_of((0, 1), (1, 4))], r"span 1 of item 1 is 1\.\.4: .* end <= 3", 1),
        ([spans_of((-1, 2)), spans_of()], r"span 0 of item 0 is -1\.\.2", 0),
        ([spans_of((2, 1)), spans_of()], r"span 0 of item 0 is 2\.\.1", 0),
        ([spans_of(), spans_of((0, 2)).astype(np.int64)], r"\[n, 2\] int32, not int64", 1),
        ([spans_of(), np.zeros(2, np.int32)], r"int32 of shape \(2,\)", 1),
    ],
)
def test_spans_that_reach_outside_are_refused_by_name_and_nothing_is_queued(spans, message, index):
    engine, _, _ = make()
    with pytest.raises(InvalidInput, match=message) as raised:
        engine.add(Request(1, [np.ones(4, np.int32), np.ones(3, np.int32)], spans=spans))
    assert (raised.value.param, raised.value.index) == ("spans", index)
    assert engine.queued_requests == 0


@pytest.mark.parametrize(("types", "limit"), [([0, 2], "0..1"), ([-1, 0], "0..1")])
def test_token_types_outside_the_models_own_never_reach_a_device(types, limit):
    engine, executor, _ = make(type_vocab_size=2)
    sequences = [np.ones(2, np.int32)] * 2
    good = np.array([1, 0], np.int32)
    with pytest.raises(InvalidInput, match=f"token types {limit}") as raised:
        engine.add(Request(1, sequences, token_types=[good, np.array(types, np.int32)]))
    assert (raised.value.param, raised.value.index) == ("token_types", 1)
    engine.add(Request(2, sequences, token_types=[good, good]))
    assert len(drain(engine, executor)) == 1


def test_negative_token_types_are_refused_even_where_the_model_does_not_say_how_many_there_are():
    engine, _, _ = make()
    with pytest.raises(InvalidInput, match="token type -1 at position 0 is negative"):
        engine.add(Request(1, [np.ones(2, np.int32)], token_types=[np.array([-1, 0], np.int32)]))


@pytest.mark.parametrize("types", [False, True])
def test_spans_lie_aligned_behind_everything_else(types):
    buckets = Buckets(inflection_tokens=4096, max_tokens=512, max_sequences=64)
    runs = [Run(i, 0, [5], np.arange(5, dtype=np.int32), None, [spans_of((0, 5), (3, 3))]) for i in range(3)]
    if types:
        runs[1].token_types = np.ones(5, np.int32)
    work = Work(runs, ("e",))
    key = buckets.key(work.lengths, ("e",), token_types=work.token_types, spans=True)
    assert not key.padded
    staged = Staging(pin=False).write(0, work, key)
    batch = staged.batch(staged.packed)
    assert batch.spans.tolist() == [[0, 5], [3, 3], [5, 10], [8, 8], [10, 15], [13, 13]]
    assert (batch.spans.data_ptr() - staged.packed.data_ptr()) % (4 * ALIGN) == 0
    assert batch.cu_seqlens.tolist() == [0, 5, 10, 15]
    assert staged.rows == staged.pooled_rows == 6


def test_spans_through_the_worker_thread():
    engine = Engine(FakeModel(), CONFIG, CpuExecutor(num_threads=1), NoAttention())
    ids = np.arange(10, 40, dtype=np.int32)
    engine.add(Request(1, [ids], spans=[spans_of((0, 10), (10, 30), (4, 4))]))
    (result,) = engine.step()
    rows = result.outputs["pooled"].result()
    np.testing.assert_array_equal(rows, [expected_span(ids, *pair) for pair in ((0, 10), (10, 30), (4, 4))])
    engine.close()

"""The engine over a model whose answers can be worked out by hand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

import numpy as np
import pytest

from rose.config import EngineConfig
from rose.engine import Engine, Item, Priority, Request, StepResult
from rose.engine.execution import CpuExecutor
from rose.errors import DeadlineExceeded, InternalError, InvalidInput, StartupError, Unsupported
from tests.engine.fake_model import (
    DIMENSION,
    VOCAB,
    FakeModel,
    ManualExecutor,
    NoAttention,
    expected_pooled,
    expected_tokens,
)

CONFIG = EngineConfig(online_tokens=64, bulk_tokens=256, max_sequences=8, max_tokens=128)


@pytest.fixture
def engine():
    engine = Engine(FakeModel(), CONFIG, CpuExecutor(num_threads=1), NoAttention())
    yield engine
    engine.close()


def manual(config: EngineConfig = CONFIG, **kwargs) -> tuple[Engine, ManualExecutor]:
    executor = ManualExecutor()
    return Engine(FakeModel(), config, executor, NoAttention(), **kwargs), executor


def sequences(*lengths: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 600, n).astype(np.int32) for n in lengths]


def drain(engine: Engine) -> list[StepResult]:
    results = []
    for _ in range(100_000):
        results += (found := engine.step())
        if not found:
            if engine.idle:
                return results
            time.sleep(0.0001)
    raise AssertionError("the engine does not come to rest")


def rows(results: Iterable[StepResult], name: str = "pooled") -> dict[Item, np.ndarray]:
    found: dict[Item, np.ndarray] = {}
    for result in results:
        if name in result.outputs:
            values = result.outputs[name].result()
            assert len(values) == len(result.items)
            for item, row in zip(result.items, values, strict=True):
                assert item not in found, "answered twice"
                found[item] = row
    return found


def test_answers_belong_to_their_questions_whatever_the_batches(engine):
    """Report C12 (ollama#6187): right vectors in the wrong order, for texts of very different lengths in one call."""
    ids = sequences(*np.random.default_rng(1).integers(1, 128, 200))
    engine.add(Request(1, ids))
    engine.add(Request(2, ids[::-1]))
    got = rows(drain(engine))
    assert len(got) == 400
    for index, array in enumerate(ids):
        np.testing.assert_array_equal(got[Item(1, index)], expected_pooled(array))
        np.testing.assert_array_equal(got[Item(2, 199 - index)], expected_pooled(array))


def test_an_answer_is_the_same_alone_and_in_company(engine):
    ids = sequences(5, 17, 1, 128)
    engine.add(Request(1, ids))
    together = rows(drain(engine))
    engine.add(Request(2, ids, alone=True))
    results = drain(engine)
    assert [len(result.items) for result in results] == [1] * 4
    apart = rows(results)
    for index in range(4):
        np.testing.assert_array_equal(together[Item(1, index)], apart[Item(2, index)])


def test_per_token_outputs_come_with_their_splits(engine):
    ids = sequences(3, 1, 7)
    engine.add(Request(1, ids, outputs=("tokens", "pooled", "tokens")))
    (result,) = drain(engine)
    assert result.splits == (0, 3, 4, 11)
    assert result.tokens == 11
    assert set(result.outputs) == {"tokens", "pooled"}
    values = result.outputs["tokens"].result()
    for (begin, end), array in zip(zip(result.splits, result.splits[1:], strict=False), ids, strict=True):
        np.testing.assert_array_equal(values[begin:end], expected_tokens(array))


def test_outputs_keep_their_dtype(engine):
    engine.add(Request(1, sequences(3, 4), outputs=("flags",)))
    (result,) = drain(engine)
    flags = result.outputs["flags"].result()
    assert flags.dtype == np.int8
    np.testing.assert_array_equal(flags, [[3], [4]])


def test_no_outputs_means_the_default_and_order_and_repetition_do_not_matter():
    engine, executor = manual()
    engine.add(Request(1, sequences(3)))
    engine.add(Request(2, sequences(3), outputs=("pooled",)))
    engine.add(Request(3, sequences(3), outputs=("tokens", "pooled")))
    engine.add(Request(4, sequences(3), outputs=("pooled", "tokens", "pooled")))
    (first,) = engine.step()
    executor.run_one()
    (second,) = engine.step()
    assert [item.request_id for item in first.items + second.items] == [1, 2, 3, 4]
    assert [set(result.outputs) for result in (first, second)] == [{"pooled"}, {"pooled", "tokens"}]


def test_token_types_reach_the_model_and_are_zero_for_those_without(engine):
    ids = sequences(4, 6)
    types = [np.ones(4, np.int32), np.arange(6, dtype=np.int32) % 2]
    engine.add(Request(1, ids, token_types=types))
    engine.add(Request(2, ids))
    results = drain(engine)
    got = rows(results)
    for index in range(2):
        np.testing.assert_array_equal(got[Item(1, index)], expected_pooled(ids[index], types[index]))
        np.testing.assert_array_equal(got[Item(2, index)], expected_pooled(ids[index]))


@pytest.mark.parametrize(
    ("outputs", "error", "message"),
    [
        (("nonsense",), InvalidInput, "unknown output 'nonsense'; this model has pooled, flags, tokens, sparse"),
        (("pooled", "sparse"), Unsupported, "'sparse' is not available: sparse_linear.pt is missing"),
    ],
)
def test_outputs_that_cannot_be_had_are_refused_by_name(engine, outputs, error, message):
    with pytest.raises(error, match=message) as raised:
        engine.add(Request(1, sequences(3), outputs=outputs))
    assert raised.value.param == "outputs"
    assert engine.idle


def test_a_long_text_is_refused_or_served_and_the_short_one_is_served_too(engine):
    """Report C42 (tei#723, tei#694): longer than a batch's tokens, one text blocked all others for ever."""
    with pytest.raises(InvalidInput, match="129 tokens; this model takes at most 128"):
        engine.add(Request(1, sequences(129)))
    engine.add(Request(2, sequences(128)))  # twice the online budget
    engine.add(Request(3, sequences(5)))
    assert set(rows(drain(engine))) == {Item(2, 0), Item(3, 0)}


def test_an_id_outside_the_vocabulary_never_reaches_a_device(engine):
    """Report C60 (vllm#11375): an id beyond the table ends a CUDA process."""
    with pytest.raises(InvalidInput, match=f"outside the vocabulary 0..{VOCAB - 1}") as raised:
        engine.add(Request(1, [np.array([1], np.int32), np.array([VOCAB], np.int32)]))
    assert raised.value.index == 1
    assert engine.idle


def test_a_forward_that_raises_ends_its_own_batch_only(engine):
    """Report C140 (infinity#242): one failing batch killed the worker, and nothing was ever answered again."""
    engine.add(Request(1, [np.array([1, 666], np.int32)], alone=True))
    engine.add(Request(2, sequences(5)))
    engine.add(Request(3, [np.array([666], np.int32)], alone=True))
    results = {result.items[0].request_id: result for result in drain(engine)}
    for number in (1, 3):
        with pytest.raises(ArithmeticError, match="666 cannot be embedded"):
            results[number].outputs["pooled"].result()
    np.testing.assert_array_equal(results[2].outputs["pooled"].result()[0], expected_pooled(sequences(5)[0]))
    assert engine.failed_batches == 2
    engine.add(Request(4, sequences(6)))
    assert set(rows(drain(engine))) == {Item(4, 0)}


def test_a_plan_that_fails_ends_its_own_batch_only(engine, monkeypatch):
    def refuse(batch, slot=0):
        raise RuntimeError("no plan")

    with monkeypatch.context() as patched:
        patched.setattr(NoAttention, "plan", lambda self, batch, slot=0: refuse(batch, slot))
        engine.add(Request(1, sequences(5)))
        (result,) = drain(engine)
        with pytest.raises(RuntimeError, match="no plan"):
            result.outputs["pooled"].result()
    engine.add(Request(2, sequences(5)))
    assert set(rows(drain(engine))) == {Item(2, 0)}


def test_a_launch_that_fails_before_it_starts_is_an_answer_too(monkeypatch):
    engine, executor = manual()

    def refuse(fn, *, expected_seconds=None):
        raise RuntimeError("this executor is closed")

    with monkeypatch.context() as patched:
        patched.setattr(executor, "launch", refuse)
        engine.add(Request(1, sequences(5)))
        (result,) = engine.step()
    with pytest.raises(RuntimeError, match="closed"):
        result.outputs["pooled"].result()
    assert engine.idle
    assert engine.failed_batches == 1
    engine.add(Request(2, sequences(5)))
    (result,) = engine.step()
    executor.run_one()
    assert result.outputs["pooled"].result().shape == (1, DIMENSION)


def test_a_model_that_breaks_its_word_is_an_internal_error(monkeypatch):
    engine, executor = manual()
    monkeypatch.setattr(FakeModel, "__call__", lambda self, batch, outputs: {"pooled": batch.ids[:, None].double()})
    engine.add(Request(1, sequences(5)))
    (result,) = engine.step()
    executor.run_one()
    with pytest.raises(InternalError, match=r"'pooled' came as torch.float64 \(5, 1\); declared is float32 \(1, 4\)"):
        result.outputs["pooled"].result()


def test_step_never_waits_and_no_more_than_two_batches_are_in_flight():
    engine, executor = manual()
    for number in range(5):
        engine.add(Request(number, sequences(64)))
    launched = [engine.step() for _ in range(4)]
    assert [len(results) for results in launched] == [1, 1, 0, 0]
    assert engine.in_flight == 2
    assert engine.queued_requests == 3
    assert engine.wake_at() is None, "only a finished batch helps now"
    executor.run_one()
    assert engine.in_flight == 1
    assert engine.wake_at() == float("-inf"), "a full batch waits and there is room: step again now"
    assert len(engine.step()) == 1


def test_the_second_batch_waits_for_company_until_the_first_is_about_to_end():
    engine, executor = manual()
    engine.add(Request(0, sequences(60)))
    engine.step()
    executor.run_one(seconds=0.05)
    engine.add(Request(1, sequences(60)))
    (_,) = engine.step()
    assert executor.expected == [None, pytest.approx(0.05)]
    end = engine.expected_end
    assert end == pytest.approx(time.monotonic() + 0.05, abs=0.04)
    engine.add(Request(2, sequences(20)))
    assert engine.step() == [], "20 tokens would waste the next launch"
    wake = engine.wake_at()
    assert end - 0.006 < wake < end
    engine.add(Request(3, sequences(30)))
    while time.monotonic() < wake:
        assert engine.step() == []
        time.sleep(0.001)
    (result,) = engine.step()
    assert [item.request_id for item in result.items] == [2, 3]
    assert engine.in_flight == 2


def test_a_query_goes_before_bulk_work_that_is_not_launched_yet():
    """Two large batches in flight would make it wait for both; the second is held back until the device needs it."""
    engine, executor = manual()
    engine.add(Request(0, sequences(*[64] * 40), priority=Priority.BULK))
    engine.step()
    executor.run_one(seconds=5.0)
    engine.step()
    assert engine.step() == []
    assert engine.wake_at() == pytest.approx(engine.expected_end - 0.5)
    engine.add(Request(1, sequences(10)))
    (result,) = engine.step()
    assert result.items[0] == Item(1, 0)
    assert result.tokens <= CONFIG.online_tokens


def test_expired_requests_come_back_as_errors_and_are_not_run():
    """Report C148 (infinity#546): work was done for callers who had timed out."""
    clock = [100.0]
    engine, executor = manual(clock=lambda: clock[0])
    for number in range(1000):
        engine.add(Request(number, sequences(64), deadline=100.1))
    engine.add(Request(5000, sequences(3), deadline=200.0))
    launched = [engine.step(), engine.step()]
    assert [result.items for results in launched for result in results] == [(Item(0, 0),), (Item(1, 0),)]
    assert engine.wake_at() == 100.1
    clock[0] = 100.1
    (result,) = engine.step()
    assert sorted(result.dropped) == list(range(2, 1000))
    assert all(isinstance(error, DeadlineExceeded) for error in result.dropped.values())
    assert (result.items, result.outputs, result.tokens) == ((), {}, 0)
    assert engine.metrics.expired_requests == 998
    executor.run_one()
    executor.run_one()
    (result,) = engine.step()
    assert result.items == (Item(5000, 0),)
    assert engine.metrics.batches == 3


def test_aborted_requests_are_not_run():
    engine, executor = manual()
    engine.add(Request(1, sequences(64, 64, 64)))
    engine.add(Request(2, sequences(3)))
    assert engine.abort(1)
    assert not engine.abort(1)
    (result,) = engine.step()
    assert result.items == (Item(2, 0),)
    executor.run_one()
    assert engine.idle
    assert engine.metrics.aborted_requests == 1


def test_gauges_and_counters_tell_the_truth():
    """Report C150 (tei#880): the gauge rises with a hundred waiting and falls back to zero."""
    engine, executor = manual()
    for number in range(100):
        engine.add(Request(number, sequences(2, 3)))
    assert (engine.queued_requests, engine.queued_tokens, engine.in_flight) == (100, 500, 0)
    assert not engine.idle
    while not engine.idle:
        engine.step()
        while executor.waiting:
            executor.run_one()
    assert (engine.queued_requests, engine.queued_tokens, engine.in_flight) == (0, 0, 0)
    metrics = engine.metrics
    assert (metrics.sequences, metrics.tokens, metrics.padding_tokens) == (200, 500, 0)
    assert metrics.batches == engine.graphs.metrics.plain == 25  # eight sequences each


def test_a_stuck_forward_shows_in_the_age_of_its_batch():
    clock = [0.0]
    engine, executor = manual(clock=lambda: clock[0])
    assert engine.in_flight_seconds == 0.0
    engine.add(Request(1, sequences(3)))
    engine.step()
    clock[0] = 42.0
    assert engine.in_flight_seconds == 42.0
    executor.run_one()
    assert engine.in_flight_seconds == 0.0


def test_library_users_await_results(engine):
    async def embed(number: int, ids: list[np.ndarray]) -> np.ndarray:
        engine.add(Request(number, ids))
        while not (results := engine.step()):
            await asyncio.sleep(0.001)
        (result,) = results
        return await result.outputs["pooled"]

    async def main() -> None:
        for number in range(3):
            ids = sequences(5, 9, seed=number)
            values = await asyncio.wait_for(embed(number, ids), 10)
            np.testing.assert_array_equal(values, np.stack([expected_pooled(array) for array in ids]))

    asyncio.run(main())


def test_warming_up_runs_each_key_and_leaves_no_trace_in_the_queue(engine):
    keys = [engine.key_for([5]), engine.key_for([100, 3], ("tokens", "flags")), engine.key_for([7], token_types=True)]
    engine.warmup(keys)
    assert engine.idle
    assert engine.metrics.batches == 0
    assert engine.graphs.metrics.plain == 3
    engine.add(Request(1, sequences(3)))
    with pytest.raises(RuntimeError, match="requests wait or run"):
        engine.warmup(keys)


def test_a_warm_up_that_fails_says_so(engine, monkeypatch):
    def fail(self, batch, outputs):
        raise ArithmeticError("cold")

    monkeypatch.setattr(FakeModel, "__call__", fail)
    with pytest.raises(ArithmeticError, match="cold"):
        engine.warmup([engine.key_for([5])])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"online_tokens": 0}, "online_tokens must be at least 1, not 0"),
        ({"max_sequences": -1}, "max_sequences must be at least 1"),
        ({"max_in_flight": 3}, "max_in_flight is at most 2, not 3"),
        ({"online_tokens": 100, "bulk_tokens": 50}, r"bulk_tokens \(50\) is smaller than online_tokens \(100\)"),
    ],
)
def test_numbers_that_cannot_work_are_refused_at_start(changed, message):
    with pytest.raises(StartupError, match=message):
        manual(EngineConfig(**changed))


def test_closing_lets_what_is_in_flight_finish():
    engine = Engine(FakeModel(), CONFIG, CpuExecutor(), NoAttention())
    engine.add(Request(1, sequences(5)))
    (result,) = engine.step()
    engine.close()
    assert result.outputs["pooled"].ready()
    np.testing.assert_array_equal(result.outputs["pooled"].result()[0], expected_pooled(sequences(5)[0]))


def test_every_launch_fences_the_slot_it_wrote(monkeypatch):
    fences: list[tuple[int, object]] = []
    monkeypatch.setattr("rose.engine.staging.Staging.fence", lambda self, slot, ticket: fences.append((slot, ticket)))
    engine, executor = manual()
    launched = []
    for number in range(4):
        engine.add(Request(number, sequences(3)))
        engine.step()
        launched.append(executor.last)
        executor.run_one()
    assert fences == list(zip([0, 1, 0, 1], launched, strict=True))

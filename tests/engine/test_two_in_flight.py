"""Ten thousand steps with two batches in flight and other splits every time: results equal those of one at a time."""

from __future__ import annotations

import random
import time
from collections import deque

import numpy as np
import pytest
import torch

from rose.config import EngineConfig
from rose.engine import Engine, Request, StepResult
from rose.engine.execution import CpuExecutor
from rose.engine.graphs import LazyGraphs
from tests.engine.every_bucket import BUCKETS, MOST, ONE_BATCH, lengths_in
from tests.engine.fake_model import FakeModel, NoAttention, expected_pooled

STEPS = 10_000
OUTPUTS = ("flags", "pooled")


class ReplayInPlace:
    """A captured forward: replays read the key's buffers and write outputs that stay where they are."""

    bytes = 1000

    def __init__(self, fn) -> None:
        self._fn = fn
        self.outputs = {name: torch.full_like(value, -1) for name, value in fn().items()}

    def replay(self) -> None:
        for name, value in self._fn().items():
            self.outputs[name].copy_(value)

    def release(self) -> None:
        for value in self.outputs.values():
            value.fill_(-1)


class CaptureInPlace:
    def capture(self, key, fn) -> ReplayInPlace:
        return ReplayInPlace(fn)


class SometimesSlow(FakeModel):
    """Now and then takes long enough for the next batch to be staged, and the one after to be asked for, meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self._random = random.Random(0)

    def __call__(self, batch, outputs):
        found = super().__call__(batch, outputs)
        if self._random.random() < 0.02:
            time.sleep(0.001)
        assert all(torch.equal(found[name], value) for name, value in super().__call__(batch, outputs).items()), (
            "the inputs changed under a running forward"
        )
        return found


def requests(count: int) -> list[Request]:
    """Each fills a batch, so that no two batches have the same splits but the second is always launched."""
    rng = np.random.default_rng(7)
    made = []
    for number in range(count):
        cuts = np.sort(rng.choice(np.arange(1, 64), rng.integers(0, 12), replace=False))
        ids = rng.integers(0, 600, 64).astype(np.int32)
        made.append(Request(number, np.split(ids, cuts), outputs=OUTPUTS))
    return made


def collect(result: StepResult, found: dict[int, list[np.ndarray]]) -> None:
    values = [result.outputs[name].result() for name in OUTPUTS]
    (number,) = {item.request_id for item in result.items}
    assert number not in found
    found[number] = values


@pytest.mark.parametrize("graphs", [False, True], ids=["plain", "graphs"])
def test_two_in_flight_give_what_one_at_a_time_gives(graphs):
    """Report C126 (mstar#236): the host overwrote a staging buffer before its copy ran, so that a replay used the
    boundaries of another step."""
    executor = CpuExecutor(num_threads=1)
    place = LazyGraphs(executor.device, capturer=CaptureInPlace() if graphs else None, max_bytes=1 << 20)
    config = EngineConfig(online_tokens=64, bulk_tokens=64, max_sequences=16, max_tokens=64)
    engine = Engine(SometimesSlow(), config, executor, NoAttention(), graphs=place, inflection_tokens=1024)
    asked = requests(STEPS)
    waiting = deque(asked)
    in_flight: deque[StepResult] = deque()
    found: dict[int, list[np.ndarray]] = {}
    twice = 0
    while len(found) < STEPS:
        while waiting and engine.queued_requests < 4:
            engine.add(waiting.popleft())
        in_flight.extend(engine.step())
        twice += engine.in_flight == 2
        while in_flight and (in_flight[0].outputs["pooled"].ready() or engine.in_flight == 2 or not waiting):
            collect(in_flight.popleft(), found)
    assert twice > STEPS / 20, "two batches were hardly ever in flight, so this showed nothing"
    if graphs:
        assert place.metrics.hits > STEPS / 2
    engine.close()
    for request in asked:
        flags, pooled = found[request.id]
        np.testing.assert_array_equal(pooled, np.stack([expected_pooled(ids) for ids in request.sequences]))
        np.testing.assert_array_equal(flags[:, 0], [len(ids) for ids in request.sequences])


def test_results_outlive_the_buffers_they_came_from():
    """What a caller holds is never written again, though the graph's own outputs are at every replay."""
    executor = CpuExecutor(num_threads=1)
    place = LazyGraphs(executor.device, capturer=CaptureInPlace(), max_bytes=1 << 20)
    config = EngineConfig(online_tokens=64, bulk_tokens=64, max_sequences=16, max_tokens=64)
    engine = Engine(FakeModel(), config, executor, NoAttention(), graphs=place, inflection_tokens=1024)
    held = []
    for number in range(20):
        ids = np.full(64, number, np.int32)
        engine.add(Request(number, [ids]))
        (result,) = engine.step()
        held.append((ids, result.outputs["pooled"].result()))
    assert place.metrics.hits == 18
    engine.close()
    for ids, pooled in held:
        np.testing.assert_array_equal(pooled[0], expected_pooled(ids))


def test_every_bucket_replays_what_it_ran_plain():
    """One bucket after the other, back, and again: each replay reads its own key's buffers only."""
    executor = CpuExecutor(num_threads=1)
    place = LazyGraphs(executor.device, capturer=CaptureInPlace(), max_bytes=1 << 30)
    config = EngineConfig(max_sequences=64, max_tokens=512, **ONE_BATCH)
    engine = Engine(FakeModel(), config, executor, NoAttention(), graphs=place, inflection_tokens=MOST)
    rng = np.random.default_rng(5)
    asked = []
    for tokens in BUCKETS:
        lengths = lengths_in(tokens)
        assert engine.key_for(lengths, OUTPUTS).tokens == tokens
        asked.append([rng.integers(0, 600, n).astype(np.int32) for n in lengths])
    turns = [*range(len(asked)), *reversed(range(len(asked))), *range(len(asked))]
    for number, turn in enumerate(turns):
        engine.add(Request(number, asked[turn], outputs=OUTPUTS))
        (result,) = engine.step()
        got = result.outputs["pooled"].result()
        np.testing.assert_array_equal(got, np.stack([expected_pooled(ids) for ids in asked[turn]]))
    engine.close()
    assert place.metrics.plain == place.metrics.captures == place.metrics.hits == len(BUCKETS)


def test_warming_up_captures_and_the_first_request_replays():
    backend = NoAttention()
    executor = CpuExecutor(num_threads=1)
    place = LazyGraphs(executor.device, capturer=CaptureInPlace(), max_bytes=1 << 20)
    config = EngineConfig(online_tokens=64, bulk_tokens=256, max_sequences=16, max_tokens=128)
    engine = Engine(FakeModel(), config, executor, backend, graphs=place, inflection_tokens=1024)
    small, large = engine.key_for([50]), engine.key_for([100, 100], OUTPUTS)
    engine.warmup([small, large])
    assert (place.metrics.plain, place.metrics.captures, place.metrics.hits) == (2, 2, 2)
    assert [key for key, _ in backend.planned] == [large] * 3 + [small] * 3, "largest first, under its key"
    engine.add(Request(1, [np.arange(50, dtype=np.int32)]))
    (result,) = engine.step()
    np.testing.assert_array_equal(result.outputs["pooled"].result(), [expected_pooled(np.arange(50))])
    assert place.metrics.hits == 3
    assert engine.metrics.padding_tokens == 14
    engine.close()

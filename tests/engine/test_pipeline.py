"""When the next batch follows, and what is expected of it."""

from __future__ import annotations

import math

import pytest

from rose.engine.buckets import GraphKey
from rose.engine.estimate import Durations
from rose.engine.execution import DoneTicket
from rose.engine.pipeline import LEAD_SECONDS, Pipeline


def key(tokens: int, *, padded: bool = False) -> GraphKey:
    return GraphKey(tokens, 1, 512, ("e",), padded=padded)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def make(depth: int = 2) -> tuple[Pipeline, Clock]:
    clock = Clock()
    return Pipeline(depth, clock), clock


def test_an_idle_device_gets_work_at_once_and_a_busy_pipeline_none():
    pipeline, _ = make()
    assert pipeline.launch_at(full=False, single_waits=True) == -math.inf
    tickets = [DoneTicket(), DoneTicket()]
    for ticket in tickets:
        pipeline.push(ticket, key(64))
    assert pipeline.launch_at(full=True, single_waits=True) == math.inf
    assert len(pipeline) == 2
    tickets[0].settle(None, 0.001)
    assert len(pipeline) == 1
    tickets[1].settle(None, 0.001)
    assert pipeline.launch_at(full=False, single_waits=False) == -math.inf


@pytest.mark.parametrize(
    ("end", "full", "single", "expected"),
    [
        (None, False, True, math.inf),  # nothing is known: the batch grows until the first is done
        (None, True, True, -math.inf),
        (None, True, False, -math.inf),
        (200.0, True, True, -math.inf),  # a full batch of queries cannot get better
        (200.0, True, False, 200.0 - LEAD_SECONDS),  # bulk waits until the device needs it
        (200.0, False, True, 200.0 - LEAD_SECONDS),
        (200.0, False, False, 200.0 - LEAD_SECONDS),
    ],
)
def test_the_second_batch_follows_when_waiting_cannot_improve_it_or_the_first_is_about_to_end(
    end, full, single, expected
):
    pipeline, _ = make()
    pipeline.push(DoneTicket(expected_end=end), key(64))
    assert pipeline.launch_at(full=full, single_waits=single) == expected


def test_the_lead_grows_with_the_length_of_the_batch():
    pipeline, _ = make()
    done: DoneTicket[None] = DoneTicket()
    done.settle(None, 0.020)
    pipeline.push(done, key(16384))
    pipeline.push(DoneTicket(expected_end=200.0), key(16384))
    assert pipeline.launch_at(full=True, single_waits=False) == pytest.approx(200.0 - 0.002)


def test_one_batch_at_a_time_if_so_configured():
    pipeline, _ = make(depth=1)
    pipeline.push(DoneTicket(expected_end=0.0), key(64))
    assert pipeline.launch_at(full=True, single_waits=True) == math.inf


def test_age_and_expected_end_are_the_oldest_batchs():
    pipeline, clock = make()
    assert (pipeline.expected_end, pipeline.oldest_seconds) == (None, 0.0)
    first: DoneTicket[None] = DoneTicket(expected_end=101.0)
    pipeline.push(first, key(64))
    clock.now += 2
    pipeline.push(DoneTicket(expected_end=103.0), key(64))
    assert (pipeline.expected_end, pipeline.oldest_seconds) == (101.0, 2.0)
    first.settle(None, 1.0)
    clock.now += 1
    assert (pipeline.expected_end, pipeline.oldest_seconds) == (103.0, 1.0)


def test_failures_are_counted_and_teach_nothing():
    pipeline, _ = make()
    ticket: DoneTicket[None] = DoneTicket()
    pipeline.push(ticket, key(64))
    ticket.fail(ValueError("no"))
    pipeline.retire()
    assert pipeline.failed == 1
    assert pipeline.expect(key(64)) is None


def test_estimates_come_from_the_key_else_from_batches_of_its_size():
    durations = Durations()
    assert durations.expect(key(1000)) is None
    durations.observe(key(1000), 0.010)
    assert durations.expect(key(600)) == pytest.approx(0.006), "per token, within a power of two"
    assert durations.expect(key(2000)) is None
    durations.observe(key(576, padded=True), 0.004)
    assert durations.expect(key(576, padded=True)) == 0.004


def test_estimates_follow_a_slower_device_slowly_and_forget_a_compile_at_once():
    durations = Durations()
    padded = key(64, padded=True)
    durations.observe(padded, 2.0)  # the first run compiled
    durations.observe(padded, 0.001)
    assert durations.expect(padded) == 0.001
    durations.observe(padded, 0.002)
    assert durations.expect(padded) == pytest.approx(0.0012)
    for _ in range(30):
        durations.observe(padded, 0.002)
    assert durations.expect(padded) == pytest.approx(0.002, rel=0.01)

"""Who is in the next batch: order, budgets, rounds, classes, deadlines."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from rose.config import EngineConfig
from rose.engine.open_request import Work
from rose.engine.request import Item, Priority, Request
from rose.engine.scheduler import BULK_PATIENCE, LOOK_PAST, Scheduler
from rose.errors import DeadlineExceeded, InvalidInput

CONFIG = EngineConfig(online_tokens=100, bulk_tokens=400, max_sequences=16, max_tokens=1000)


def make(config: EngineConfig = CONFIG) -> Scheduler:
    return Scheduler(config, vocab_size=1000)


def request(number: int, lengths: list[int], *, first_id: int = 0, **kwargs) -> Request:
    """Sequence i holds nothing but the id `first_id + i`."""
    return Request(number, [np.full(n, (first_id + i) % 1000, dtype=np.int32) for i, n in enumerate(lengths)], **kwargs)


def add(scheduler: Scheduler, number: int, lengths: list[int], outputs: tuple[str, ...] = ("e",), **kwargs) -> None:
    scheduler.add(request(number, lengths, **kwargs), outputs)


def drain(scheduler: Scheduler) -> list[Work]:
    batches = []
    while (work := scheduler.next_batch()) is not None:
        batches.append(work)
        assert len(batches) < 100_000, "the queue spins"
    return batches


def numbers(work: Work) -> list[int]:
    return [run.request_id for run in work.runs]


def test_an_empty_queue_gives_nothing():
    scheduler = make()
    assert scheduler.next_batch() is None
    assert not scheduler.full
    assert scheduler.next_deadline() is None
    assert (scheduler.queued_tokens, scheduler.queued_requests, scheduler.queued_sequences) == (0, 0, 0)


@pytest.mark.parametrize(
    ("lengths", "single_tokens", "single"),
    [([60, 60], 120, True), ([60, 61], 120, False), ([900], 120, True), ([60, 60], 1000, True), ([60, 61], 1000, True)],
)
def test_few_short_sequences_count_as_a_single_query(lengths, single_tokens, single):
    scheduler = make(replace(CONFIG, online_tokens=300, single_tokens=single_tokens))
    add(scheduler, 1, lengths)
    assert scheduler.single_waits == single
    small = make(replace(CONFIG, online_tokens=100, single_tokens=single_tokens))
    add(small, 1, lengths)
    assert small.single_waits == (len(lengths) == 1), "they would not fit into its batch"


@pytest.mark.parametrize("priority", list(Priority))
@pytest.mark.parametrize("tokens", [3, 500])
def test_a_query_that_is_all_that_waits_is_the_next_batch(priority, tokens):
    scheduler = make()
    for number in range(3):
        add(scheduler, 10 + number, [5])
        scheduler.abort(10 + number)
        add(scheduler, number, [tokens], priority=priority, alone=number == 1)
        work = scheduler.next_batch()
        assert work is not None
        assert (numbers(work), work.splits, work.items) == ([number], (0, tokens), (Item(number, 0),))
        assert (scheduler.queued_tokens, scheduler.queued_requests, scheduler.queued_sequences) == (0, 0, 0)
        assert not scheduler.single_waits
        assert scheduler.next_batch() is None


def test_equals_are_served_in_the_order_of_their_arrival():
    scheduler = make()
    for number in range(20):
        add(scheduler, number, [30])
    batches = drain(scheduler)
    assert [numbers(work) for work in batches[:2]] == [[0, 1, 2], [3, 4, 5]]
    assert [number for work in batches for number in numbers(work)] == list(range(20))


def test_items_and_ids_lie_in_batch_order():
    scheduler = make()
    add(scheduler, 7, [3, 2], first_id=10)
    add(scheduler, 8, [1], first_id=20)
    work = scheduler.next_batch()
    assert work is not None
    assert work.items == (Item(7, 0), Item(7, 1), Item(8, 0))
    assert work.lengths == [3, 2, 1]
    assert work.tokens == 6
    np.testing.assert_array_equal(np.concatenate([run.ids for run in work.runs]), [10, 10, 10, 11, 11, 20])


def test_single_queries_mean_the_online_budget_and_jobs_alone_the_bulk_budget():
    scheduler = make()
    add(scheduler, 1, [40] * 30)
    assert scheduler.budget == 400
    work = scheduler.next_batch()
    assert work is not None
    assert work.tokens == 400
    add(scheduler, 2, [40])
    assert scheduler.budget == 100
    work = scheduler.next_batch()
    assert work is not None
    assert work.tokens <= 100
    assert scheduler.budget == 400


def test_a_short_query_joins_the_next_batch_although_jobs_wait():
    """A job of ten thousand sequences does not sit in front of it, nor do three."""
    scheduler = make()
    for number in range(3):
        add(scheduler, number, [20] * 10_000)
        scheduler.next_batch()
    add(scheduler, 9, [20])
    work = scheduler.next_batch()
    assert work is not None
    assert 9 in numbers(work)
    assert len(set(numbers(work))) == 4, "the jobs get a part of the same batch"


def test_equal_jobs_end_one_after_another():
    scheduler = make()
    for number in range(4):
        add(scheduler, number, [25] * 40)  # 1000 tokens: three batches of 16 x 25
    ends = {}
    for at, work in enumerate(drain(scheduler)):
        for number in numbers(work):
            ends[number] = at
    assert sorted(ends.values()) == list(ends.values())
    assert len(set(ends.values())) > 1


def test_a_job_cut_short_by_the_end_of_a_batch_goes_first_in_the_next():
    """Otherwise two jobs could fall into step so that one of them only ever gets the rest of a batch."""
    scheduler = make(EngineConfig(online_tokens=10, bulk_tokens=100, max_sequences=64, max_tokens=100))
    add(scheduler, 1, [30] * 30)
    add(scheduler, 2, [10] * 90)
    got = {1: 0, 2: 0}
    for _ in range(8):
        work = scheduler.next_batch()
        assert work is not None
        for run in work.runs:
            got[run.request_id] += len(run.ids)
    assert 0.5 < got[1] / got[2] < 2


def test_bulk_yields_to_online_and_fills_what_it_leaves():
    scheduler = make()
    add(scheduler, 1, [10] * 40, priority=Priority.BULK)
    add(scheduler, 2, [40])
    add(scheduler, 3, [40])
    work = scheduler.next_batch()
    assert work is not None
    assert numbers(work)[:2] == [2, 3]
    assert work.tokens == 100


def test_bulk_never_starves_under_a_stream_of_online_queries():
    scheduler = make()
    add(scheduler, 1, [100, 100], priority=Priority.BULK)
    served_at = []
    for step in range(3 * BULK_PATIENCE):
        add(scheduler, 100 + step, [100])
        work = scheduler.next_batch()
        assert work is not None
        if 1 in numbers(work):
            served_at.append(step)
    assert served_at == [BULK_PATIENCE, 2 * BULK_PATIENCE + 1]


def test_the_oldest_bulk_request_does_not_starve_behind_later_ones_that_fit_the_gaps():
    """Small ones that fill every gap must not hide that a longer one, or one with other outputs, never fits."""
    scheduler = make()
    add(scheduler, 1, [90], priority=Priority.BULK)
    add(scheduler, 2, [90], ("other",), priority=Priority.BULK)
    waiting = {1, 2}
    for step in range(4 * BULK_PATIENCE):
        add(scheduler, 1000 + step, [60])
        add(scheduler, 2000 + step, [10], priority=Priority.BULK)
        work = scheduler.next_batch()
        assert work is not None
        waiting -= set(numbers(work))
    assert not waiting


def test_only_requests_with_the_same_outputs_share_a_batch():
    scheduler = make()
    for number in range(6):
        add(scheduler, number, [10], ("a",) if number % 2 else ("b",))
    batches = drain(scheduler)
    assert [(work.outputs, numbers(work)) for work in batches] == [(("b",), [0, 2, 4]), (("a",), [1, 3, 5])]


def test_lanes_take_turns_by_how_long_their_first_request_has_waited():
    scheduler = make()
    add(scheduler, 1, [100], ("a",))
    add(scheduler, 2, [100], ("b",))
    add(scheduler, 3, [100], ("a",))
    assert [numbers(work) for work in drain(scheduler)] == [[1], [2], [3]]


def test_items_that_ask_for_it_get_a_batch_of_their_own():
    scheduler = make()
    add(scheduler, 1, [5])
    add(scheduler, 2, [5, 5], alone=True)
    add(scheduler, 3, [5])
    batches = [work.items for work in drain(scheduler)]
    assert batches == [(Item(1, 0), Item(3, 0)), (Item(2, 0),), (Item(2, 1),)]


def test_a_sequence_longer_than_the_budget_runs_alone_and_blocks_nobody():
    """Report C42 (tei#723, tei#694): one request that fits into no batch must not keep the queue spinning for ever."""
    scheduler = make()
    add(scheduler, 1, [10])
    add(scheduler, 2, [900])
    add(scheduler, 3, [10])
    batches = drain(scheduler)
    assert [numbers(work) for work in batches] == [[1, 3], [2]]
    with pytest.raises(InvalidInput, match="1001 tokens; this model takes at most 1000") as raised:
        add(scheduler, 4, [10, 1001])
    assert (raised.value.param, raised.value.index) == ("input", 1)
    add(scheduler, 5, [10])
    assert [numbers(work) for work in drain(scheduler)] == [[5]]


def test_long_sequences_do_not_starve_behind_short_ones():
    scheduler = make()
    add(scheduler, 1, [500])
    for step in range(50):
        add(scheduler, 10 + step, [60])
        work = scheduler.next_batch()
        assert work is not None
        if 1 in numbers(work):
            assert numbers(work) == [1]
            assert step <= 1
            return
    pytest.fail("the long sequence was never served")


def test_a_gap_is_filled_by_a_later_request_but_only_a_few_are_looked_at():
    scheduler = make()
    add(scheduler, 1, [60])
    for number in range(2, 2 + LOOK_PAST - 1):
        add(scheduler, number, [50])
    add(scheduler, 50, [40])
    work = scheduler.next_batch()
    assert work is not None
    assert numbers(work) == [1, 50]
    scheduler = make()
    add(scheduler, 1, [60])
    for number in range(2, 2 + LOOK_PAST):
        add(scheduler, number, [50])
    add(scheduler, 50, [40])
    work = scheduler.next_batch()
    assert work is not None
    assert numbers(work) == [1]
    work = scheduler.next_batch()
    assert work is not None
    assert numbers(work) == [2, 3], "those looked past keep their places"


def test_no_more_sequences_than_configured():
    scheduler = make()
    add(scheduler, 1, [1] * 50)
    assert [work.sequences for work in drain(scheduler)] == [16, 16, 16, 2]


def test_full_means_that_waiting_could_not_make_the_batch_larger():
    scheduler = make()
    add(scheduler, 1, [60])
    assert not scheduler.full
    add(scheduler, 2, [40])
    assert scheduler.full
    scheduler = make()
    add(scheduler, 1, [1] * 16)
    assert scheduler.full


def test_expired_requests_are_dropped_before_batching_wherever_they_wait():
    """Report C148 (infinity#546): no work for callers who have given up."""
    scheduler = make()
    add(scheduler, 0, [60] * 3)
    for number in range(1, 1001):
        add(scheduler, number, [60], deadline=10.0 if number % 2 else 20.0)
    dropped = scheduler.expire(10.0)
    assert sorted(dropped) == list(range(1, 1001, 2))
    assert all(isinstance(error, DeadlineExceeded) for error in dropped.values())
    assert "1 of 1 sequences not yet run" in dropped[1].message
    assert scheduler.queued_requests == 501
    assert scheduler.next_deadline() == 20.0
    served = [number for work in drain(scheduler) for number in numbers(work)]
    assert set(served) == {0, *range(2, 1001, 2)}
    assert scheduler.expire(30.0) == {}
    assert scheduler.next_deadline() is None


def test_a_request_that_expires_half_way_loses_only_what_waits():
    scheduler = make()
    add(scheduler, 1, [300, 300, 300], deadline=5.0)
    assert scheduler.next_batch() is not None
    error = scheduler.expire(5.0)[1]
    assert "2 of 3 sequences not yet run" in error.message
    assert scheduler.next_batch() is None
    assert (scheduler.queued_tokens, scheduler.queued_sequences, scheduler.queued_requests) == (0, 0, 0)


def test_an_aborted_request_is_gone_and_its_id_free():
    scheduler = make()
    add(scheduler, 1, [10], first_id=1, deadline=5.0)
    add(scheduler, 2, [10])
    assert scheduler.abort(1)
    assert not scheduler.abort(1)
    assert not scheduler.abort(99)
    add(scheduler, 1, [20], first_id=2)
    assert scheduler.expire(6.0) == {}, "the deadline was the aborted one's"
    work = scheduler.next_batch()
    assert work is not None
    assert (numbers(work), work.lengths) == ([2, 1], [10, 20])


def test_aborting_everything_leaves_nothing_behind():
    scheduler = make()
    for number in range(10_000):
        add(scheduler, number, [1], deadline=1e9)
        scheduler.abort(number)
    assert scheduler.next_batch() is None
    assert scheduler.queued_requests == scheduler.queued_tokens == 0
    lanes = [lane for lanes in scheduler._lanes.values() for lane in lanes.values()]
    assert sum(len(lane.ring) for lane in lanes) == 0
    assert len(scheduler._deadlines) <= 64


def test_gauges_rise_and_fall_with_the_queue():
    """Report C150 (tei#880): the queue gauge must be the queue."""
    scheduler = make()
    for number in range(100):
        add(scheduler, number, [7, 3])
        assert (scheduler.queued_requests, scheduler.queued_tokens) == (number + 1, 10 * (number + 1))
    while (work := scheduler.next_batch()) is not None:
        assert work.tokens > 0
    assert (scheduler.queued_requests, scheduler.queued_tokens, scheduler.queued_sequences) == (0, 0, 0)
    assert not scheduler.single_waits


@pytest.mark.parametrize(
    ("sequences", "message", "index"),
    [
        ([], "holds no sequence", None),
        ([np.array([1], np.int32), np.array([], np.int32)], "no tokens", 1),
        ([np.array([1], np.int64)], "flat int32 array, not int64", 0),
        ([np.array([[1]], np.int32)], "flat int32 array", 0),
        ([np.array([1], np.int32), np.array([0, 1000], np.int32)], r"id 1000 at position 1 is outside .* 0\.\.999", 1),
        ([np.array([-1], np.int32)], "id -1 at position 0 is outside", 0),
    ],
)
def test_what_no_device_may_see_is_refused_by_name_and_nothing_is_queued(sequences, message, index):
    scheduler = make()
    with pytest.raises(InvalidInput, match=message) as raised:
        scheduler.add(Request(1, sequences), ("e",))
    assert (raised.value.param, raised.value.index) == ("input", index)
    assert scheduler.queued_requests == 0
    assert scheduler.next_batch() is None


def test_ids_that_were_checked_are_not_looked_at_again():
    scheduler = make()
    ids = [np.array([1, 1000], dtype=np.int32)]
    with pytest.raises(InvalidInput, match="vocabulary"):
        scheduler.add(Request(1, ids), ("e",))
    scheduler.add(Request(1, ids, checked=True), ("e",))
    assert scheduler.queued_tokens == 2


def test_an_open_id_is_refused_and_so_are_token_types_of_other_lengths():
    scheduler = make()
    add(scheduler, 1, [10])
    with pytest.raises(InvalidInput, match="request id 1 is open already"):
        add(scheduler, 1, [10])
    with pytest.raises(InvalidInput, match="token types must have the lengths") as raised:
        add(scheduler, 2, [2, 3], token_types=[np.zeros(2, np.int32), np.zeros(2, np.int32)])
    assert raised.value.param == "token_types"
    assert scheduler.queued_requests == 1


def test_ten_times_the_items_cost_about_ten_times_the_time():
    """A part costs a binary search and a slice, not a walk: no step is quadratic in the size of a request."""

    def seconds(items: int) -> float:
        scheduler = make()
        lengths = [2] * items
        start = time.perf_counter()
        add(scheduler, 1, lengths)
        for number in range(2, 102):
            add(scheduler, number, [2] * (items // 100))
        drain(scheduler)
        return time.perf_counter() - start

    seconds(1000)
    small = min(seconds(10_000) for _ in range(3))
    large = min(seconds(100_000) for _ in range(3))
    assert large < 30 * small

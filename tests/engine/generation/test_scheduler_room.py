"""Plans by hand where room is short or a sequence ends early: setting back, classes, deadlines, failures, limits."""

from __future__ import annotations

import time

import pytest

from rose.engine.generation.bulk import BulkPatience
from rose.engine.generation.request import Finish
from rose.errors import DeadlineExceeded, InvalidInput, StartupError
from tests.engine.generation.scheduling import END, add, finish, make, plan_of, shape, told


def test_the_youngest_is_set_back_and_goes_on_from_the_tokens_it_has():
    """Three pages: two sequences of one page each, and one page to grow into."""
    scheduler = make(num_pages=4, max_tokens=12, prefix_cache=False)
    add(scheduler, 1, 3, new=9)
    add(scheduler, 2, 3, new=6)
    scheduler.commit(plan_of(scheduler), [11, 21])
    second = plan_of(scheduler)
    third = plan_of(scheduler)
    assert [entry[:2] for entry in shape(third)] == [(1, 4)], "there is one page for two that need one"
    assert scheduler.queued_requests == 1
    assert scheduler.queued_tokens == 4
    assert told(scheduler, second, [12, 22]) == [(1, 12, Finish.NONE), (2, 22, Finish.NONE)]
    assert scheduler.queued_tokens == 5, "a token that was on its way belongs to what it starts from"
    plans = [third]
    while scheduler.in_flight:
        plan = scheduler.next_batch()
        assert plan is None or [entry[0] for entry in shape(plan)] == [1]
        plans += [] if plan is None else [plan]
        oldest = plans.pop(0)
        scheduler.commit(oldest, [13] * oldest.draws)
        if not any(sequence == 1 for sequence in scheduler._open):
            break
    plan = plan_of(scheduler)
    assert shape(plan) == [(2, 0, 5, True, False)]
    assert plan.started == [], "it has started before"
    assert plan.chunks[0].sequence.ids[:5].tolist() == [21, 21, 21, 21, 22]
    assert scheduler.metrics.preemptions == 1
    assert scheduler.metrics.recomputed_tokens == 5
    assert told(scheduler, plan, [23]) == [(2, 23, Finish.NONE)]


def test_what_was_set_back_waits_for_its_tokens_on_their_way():
    scheduler = make(num_pages=4, max_tokens=12, prefix_cache=False)
    add(scheduler, 1, 3, new=9)
    add(scheduler, 2, 3, new=6)
    plan_of(scheduler)
    second = plan_of(scheduler)
    third = plan_of(scheduler)
    assert len(second.chunks) == 2
    assert len(third.chunks) == 1
    scheduler.abort(1)
    assert scheduler.next_batch() is None, "there is room, and two tokens nobody knows"
    assert scheduler.open_requests == 1


def test_an_end_token_may_come_while_its_sequence_waits():
    scheduler = make(num_pages=4, max_tokens=12)
    add(scheduler, 1, 3, new=9)
    add(scheduler, 2, 3, new=6)
    scheduler.commit(plan_of(scheduler), [11, 21])
    second = plan_of(scheduler)
    plan_of(scheduler)
    assert scheduler.queued_requests == 1
    assert told(scheduler, second, [12, END]) == [(1, 12, Finish.NONE), (2, END, Finish.STOP)]
    assert (scheduler.queued_requests, scheduler.queued_tokens) == (0, 0)


def test_pages_of_sequences_that_have_drawn_everything_go_before_anybody_is_set_back():
    scheduler = make(num_pages=4, max_tokens=12)
    add(scheduler, 1, 3, new=9)
    add(scheduler, 2, 3, new=2)
    plan_of(scheduler)
    second = plan_of(scheduler)
    assert len(second.chunks) == 2
    add(scheduler, 3, 4, new=2)
    third = plan_of(scheduler)
    assert [entry[:2] for entry in shape(third)] == [(1, 4)]
    for _ in range(4):
        plan_of(scheduler)
    assert scheduler.metrics.preemptions == 0


def test_a_waiting_prompt_leaves_room_for_those_who_run():
    """Nine pages free and eight wanted, beside three sequences that will soon want one each: it would be thrash."""
    scheduler = make(num_pages=13, max_tokens=48, batch_tokens=64)
    for number in (1, 2, 3):
        add(scheduler, number, 2, new=12)
    scheduler.commit(plan_of(scheduler), [5] * 3)
    add(scheduler, 4, 29, new=2)
    assert [entry[0] for entry in shape(plan_of(scheduler))] == [1, 2, 3]
    assert scheduler.queued_requests == 1
    scheduler.abort(3)
    assert [entry[0] for entry in shape(plan_of(scheduler))] == [1, 2, 4]


def test_nobody_overtakes_who_waits_for_pages():
    scheduler = make(num_pages=13, max_tokens=48, batch_tokens=64)
    add(scheduler, 1, 30, new=2)
    plan_of(scheduler)
    add(scheduler, 2, 30, new=2)
    add(scheduler, 3, 2, new=2)
    add(scheduler, 4, 2, new=2, bulk=True)
    assert [entry[0] for entry in shape(plan_of(scheduler))] == [1], "not even bulk that would fit"
    scheduler.abort(1)
    assert [entry[0] for entry in shape(plan_of(scheduler))] == [2, 3, 4]


# Classes


def test_online_prompts_go_before_bulk_ones_that_started_earlier():
    scheduler = make()
    add(scheduler, 1, 40, bulk=True)
    add(scheduler, 2, 40, bulk=True)
    assert [entry[:3] for entry in shape(plan_of(scheduler))] == [(1, 0, 16)]
    add(scheduler, 3, 20)
    assert [entry[:3] for entry in shape(plan_of(scheduler))] == [(3, 0, 16)]
    assert [entry[:3] for entry in shape(plan_of(scheduler))] == [(3, 16, 4), (1, 16, 12)]


def test_bulk_gives_up_the_youngest_only_and_only_if_that_helps():
    scheduler = make(num_pages=31, max_tokens=100, batch_tokens=100)
    for number in (1, 2, 3):
        add(scheduler, number, 24, bulk=True)
    plan_of(scheduler)
    add(scheduler, 4, 90, new=2)
    plan = plan_of(scheduler)
    assert [entry[0] for entry in shape(plan)] == [4], "all three, for it takes them"
    scheduler.abort(4)
    for number in (1, 2, 3):
        scheduler.abort(number)
    scheduler = make(num_pages=31, max_tokens=100, batch_tokens=100)
    for number in (1, 2, 3):
        add(scheduler, number, 24, bulk=True)
    plan_of(scheduler)
    add(scheduler, 4, 44, new=2)
    assert [entry[0] for entry in shape(plan_of(scheduler))] == [1, 2, 4]
    add(scheduler, 5, 90, new=2)
    assert [entry[0] for entry in shape(plan_of(scheduler))] == [1, 2, 4], "nothing they have is enough"


def test_a_bulk_prompt_left_out_for_long_gets_its_chunks_before_younger_ones():
    scheduler = make()
    scheduler._bulk = BulkPatience(batches=3)
    add(scheduler, 1, 40, bulk=True)
    assert [entry[:3] for entry in shape(plan_of(scheduler))] == [(1, 0, 16)]
    add(scheduler, 2, 150)
    add(scheduler, 3, 10)
    given = [[entry[:3] for entry in shape(plan_of(scheduler))] for _ in range(5)]
    assert given[:3] == [[(2, 0, 16)], [(2, 16, 16)], [(2, 32, 16)]]
    assert given[3:] == [[(1, 16, 16)], [(1, 32, 8), (2, 48, 8)]]
    assert scheduler.promotions == 1


# Ends from outside


def test_an_aborted_request_gives_its_pages_back_at_once_and_its_tokens_are_thrown_away():
    scheduler = make()
    add(scheduler, 1, 12)
    first = plan_of(scheduler)
    second = plan_of(scheduler)
    assert scheduler.abort(1)
    assert not scheduler.abort(1)
    assert not scheduler.abort(99)
    assert scheduler.pages.available == scheduler.pages.total
    add(scheduler, 1, 2)
    third = plan_of(scheduler)
    assert told(scheduler, first, [5]) == [None]
    assert told(scheduler, second, [6]) == [None]
    assert told(scheduler, third, [7]) == [(1, 7, Finish.NONE)], "the same id, another request"
    assert scheduler.metrics.wasted_tokens == 2


def test_deadlines_end_what_waits_and_what_runs():
    scheduler = make(max_running=1)
    add(scheduler, 1, 2, deadline=10.0)
    add(scheduler, 2, 2, deadline=5.0)
    add(scheduler, 3, 2)
    scheduler.commit(plan_of(scheduler), [5])
    plan = plan_of(scheduler)
    assert scheduler.next_deadline() == 5.0
    assert scheduler.expire(4.9) == {}
    assert list(scheduler.expire(5.0)) == [2]
    assert scheduler.next_deadline() == 10.0
    expired = scheduler.expire(10.25)
    assert isinstance(expired[1], DeadlineExceeded)
    assert expired[1].message == "the deadline passed 250 ms ago with 1 of at most 10 new tokens"
    assert told(scheduler, plan, [5]) == [None]
    assert scheduler.next_deadline() is None
    assert [entry[0] for entry in shape(plan_of(scheduler))] == [3]


def test_ended_requests_do_not_pile_up_in_the_queue():
    scheduler = make(max_running=1)
    add(scheduler, 1, 2, new=100, deadline=1e9)
    plan_of(scheduler)
    for number in range(2, 3000):
        add(scheduler, number, 2, deadline=1e9)
        scheduler.abort(number)
    assert sum(map(len, scheduler._waiting._heaps)) < 300
    assert len(scheduler._deadlines._heap) < 300
    assert scheduler.queued_tokens == 0


def test_a_sequence_that_fails_is_not_found_by_the_next():
    scheduler = make()
    prompt = list(range(1, 20))
    add(scheduler, 1, prompt)
    add(scheduler, 2, 1)
    scheduler.commit(plan_of(scheduler), [])
    plan = plan_of(scheduler)
    spoilt, other = (chunk.sequence for chunk in plan.chunks)
    assert (spoilt.request.id, other.request.id) == (1, 2)
    assert scheduler.pages.cached == 4
    assert scheduler.fail(spoilt)
    assert not scheduler.fail(spoilt)
    assert told(scheduler, plan, [-1, 5]) == [None, (2, 5, Finish.NONE)]
    assert scheduler.pages.cached == 0
    add(scheduler, 3, prompt)
    assert shape(plan_of(scheduler))[1][:3] == (3, 0, 15)


def test_plans_are_committed_once_in_order_and_whole():
    scheduler = make()
    add(scheduler, 1, 2)
    first, second = plan_of(scheduler), plan_of(scheduler)
    for end in (lambda: scheduler.commit(second, [5]), lambda: scheduler.fail_batch(second)):
        with pytest.raises(RuntimeError, match="in the order they were made"):
            end()
    with pytest.raises(RuntimeError, match="2 tokens for a plan that draws 1"):
        scheduler.commit(first, [5, 6])
    scheduler.commit(first, [5])
    for end in (lambda: scheduler.commit(first, [5]), lambda: scheduler.fail_batch(first)):
        with pytest.raises(RuntimeError, match="in the order they were made"):
            end()


# Limits and cost


def test_an_open_id_is_refused_and_nothing_is_queued():
    scheduler = make()
    add(scheduler, 1, 2)
    with pytest.raises(InvalidInput, match="request id 1 is open already"):
        add(scheduler, 1, 2)
    assert (scheduler.open_requests, scheduler.queued_tokens) == (1, 2)


def test_a_sequence_that_fills_the_whole_cache_is_served_and_a_longer_one_is_refused():
    scheduler = make(num_pages=4, max_tokens=100)
    add(scheduler, 1, 3, new=10)
    finish(scheduler)
    with pytest.raises(InvalidInput, match=r"need 4 pages of 4 tokens; the whole cache has 3"):
        add(scheduler, 2, 3, new=11)


@pytest.mark.parametrize("prompt", [199, 196, 193])
def test_the_longest_prompt_in_chunks_ends(prompt):
    """As vllm#48039 tells it, a prompt of exactly the model's limit never ended once it was read in chunks."""
    scheduler = make()
    add(scheduler, 1, prompt, new=200 - prompt)
    finish(scheduler)
    with pytest.raises(InvalidInput, match="this model takes at most 200"):
        add(scheduler, 2, 200, new=1)


def test_numbers_that_cannot_work_are_refused_at_start():
    with pytest.raises(StartupError, match=r"batch_tokens \(8\) must be more than max_running \(8\)"):
        make(batch_tokens=8)


def test_planning_64_decoding_sequences_takes_less_than_100_microseconds():
    """Best of many: other work of the machine is no cost of ours. About 9 us on a busy two-core machine."""
    scheduler = make(num_pages=4000, page_size=16, max_tokens=2000, max_running=64, batch_tokens=2048)
    for number in range(64):
        add(scheduler, number, 20 + number, new=900)
    plan = plan_of(scheduler)
    while plan.decodes < 64:
        following = plan_of(scheduler)
        scheduler.commit(plan, [5] * plan.draws)
        plan = following
    planning, committing, tokens = [], [], [5] * 64
    for _ in range(320):
        begin = time.perf_counter()
        following = plan_of(scheduler)
        planning.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        scheduler.commit(plan, tokens)
        committing.append(time.perf_counter() - begin)
        plan = following
    # The best of every 16 batches, in which each sequence takes a page once.
    assert sum(min(planning[i::16]) for i in range(16)) / 16 < 100e-6
    assert sum(min(committing[i::16]) for i in range(16)) / 16 < 200e-6

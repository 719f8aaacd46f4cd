"""Plans by hand: chunks, decoding ahead of the tokens, ends, reuse."""

from __future__ import annotations

import pytest

from rose.engine.generation.request import Finish
from tests.engine.generation.scheduling import END, add, finish, make, plan_of, shape, told


def test_nothing_open_gives_nothing():
    scheduler = make()
    assert scheduler.next_batch() is None
    assert not scheduler.has_work
    assert (scheduler.queued_tokens, scheduler.queued_requests, scheduler.running) == (0, 0, 0)
    assert scheduler.next_deadline() is None
    assert scheduler.expire(1e9) == {}


def test_a_prompt_is_read_in_chunks_and_its_next_token_is_decoded_before_the_first_is_known():
    scheduler = make()
    add(scheduler, 1, 35)
    assert scheduler.queued_tokens == 35
    first = plan_of(scheduler)
    assert (shape(first), first.decodes, first.draws, first.tokens) == ([(1, 0, 16, False, False)], 0, 0, 16)
    assert first.started == [1]
    second = plan_of(scheduler)
    assert shape(second) == [(1, 16, 16, False, False)]
    assert second.started == []
    assert scheduler.queued_tokens == 3
    assert scheduler.commit(first, []) == []
    third = plan_of(scheduler)
    assert shape(third) == [(1, 32, 3, True, False)]
    assert scheduler.queued_tokens == 0
    assert scheduler.commit(second, []) == []
    fourth = plan_of(scheduler)
    assert (shape(fourth), fourth.decodes, fourth.draws) == ([(1, 35, 1, True, True)], 1, 1)
    assert told(scheduler, third, [7]) == [(1, 7, Finish.NONE)]
    assert told(scheduler, fourth, [8]) == [(1, 8, Finish.NONE)]
    assert scheduler.in_flight == 0


def test_decoding_comes_first_and_prompts_share_the_rest_in_the_order_of_their_arrival():
    scheduler = make()
    add(scheduler, 1, 2)
    add(scheduler, 2, 3)
    scheduler.commit(plan_of(scheduler), [5, 5])
    for number in (3, 4, 5):
        add(scheduler, number, 8)
    plan = plan_of(scheduler)
    assert shape(plan) == [
        (1, 2, 1, True, True),
        (2, 3, 1, True, True),
        (3, 0, 8, True, False),
        (4, 0, 6, False, False),
    ]
    assert (plan.decodes, plan.draws, plan.tokens, plan.started) == (2, 3, 16, [3, 4])
    assert scheduler.queued_requests == 1
    assert [entry[:3] for entry in shape(plan_of(scheduler))] == [(1, 3, 1), (2, 4, 1), (3, 8, 1), (4, 6, 2), (5, 0, 8)]


def test_a_decoding_sequence_keeps_its_chunk_object():
    """A step for many sequences makes no objects; the plan says so, and must be staged before the next."""
    scheduler = make()
    add(scheduler, 1, 2)
    plan_of(scheduler)
    first, second = plan_of(scheduler), plan_of(scheduler)
    assert first.chunks[0] is second.chunks[0]
    assert second.chunks[0].start == 3


def test_nothing_is_planned_past_max_new_tokens():
    scheduler = make()
    add(scheduler, 1, 2, new=2)
    first, second = plan_of(scheduler), plan_of(scheduler)
    assert scheduler.has_work
    assert scheduler.next_batch() is None
    assert not scheduler.has_work, "until a batch in flight has ended"
    assert scheduler.open_requests == 1
    assert told(scheduler, first, [5]) == [(1, 5, Finish.NONE)]
    assert scheduler.next_batch() is None
    assert told(scheduler, second, [6]) == [(1, 6, Finish.LENGTH)]
    assert (scheduler.open_requests, scheduler.metrics.wasted_tokens) == (0, 0)
    assert scheduler.pages.available == scheduler.pages.total


def test_one_new_token_is_the_prompts_own_batch():
    scheduler = make()
    add(scheduler, 1, 8, new=1)
    plan = plan_of(scheduler)
    assert told(scheduler, plan, [5]) == [(1, 5, Finish.LENGTH)]
    assert scheduler.next_batch() is None


def test_an_end_token_is_seen_one_batch_late_and_the_token_after_it_is_thrown_away():
    scheduler = make()
    add(scheduler, 1, 2)
    add(scheduler, 2, 2)
    first, second = plan_of(scheduler), plan_of(scheduler)
    assert told(scheduler, first, [END, 5]) == [(1, END, Finish.STOP), (2, 5, Finish.NONE)]
    third = plan_of(scheduler)
    assert shape(third) == [(2, 3, 1, True, True)]
    assert told(scheduler, second, [9, 6]) == [None, (2, 6, Finish.NONE)]
    assert scheduler.metrics.wasted_tokens == 1


@pytest.mark.parametrize(
    ("sampling", "token", "finish"),
    [
        ({}, END, Finish.STOP),
        ({"ignore_eos": True}, END, Finish.NONE),
        ({"stop_ids": (7, 8)}, 8, Finish.STOP),
        ({"stop_ids": (7, 8), "ignore_eos": True}, 7, Finish.STOP),
        ({"stop_ids": (7,)}, END, Finish.STOP),
        ({"stop_ids": (END,), "ignore_eos": True}, END, Finish.STOP),
        ({"min_new_tokens": 1}, END, Finish.NONE),
        ({}, 8, Finish.NONE),
    ],
)
def test_what_ends_a_sequence(sampling, token, finish):
    scheduler = make()
    add(scheduler, 1, 2, **sampling)
    assert told(scheduler, plan_of(scheduler), [token]) == [(1, token, finish)]


def test_an_end_token_as_the_last_allowed_one_is_a_stop():
    scheduler = make()
    add(scheduler, 1, 2, new=1)
    assert told(scheduler, plan_of(scheduler), [END]) == [(1, END, Finish.STOP)]


# Reuse


def test_a_prompt_that_is_wholly_cached_still_computes_its_last_page():
    scheduler = make()
    prompt = list(range(1, 13))
    add(scheduler, 1, prompt, new=1)
    finish(scheduler)
    add(scheduler, 2, prompt, new=1)
    plan = plan_of(scheduler)
    assert shape(plan) == [(2, 8, 4, True, False)]
    assert scheduler.commit(plan, [5])[0].cached_tokens == 8
    assert (scheduler.pages.metrics.hits, scheduler.pages.metrics.tokens_reused) == (1, 8)


def test_a_longer_prompt_goes_on_from_what_is_cached_and_tells_so_with_its_first_token_only():
    scheduler = make()
    add(scheduler, 1, list(range(1, 13)), new=1)
    finish(scheduler)
    add(scheduler, 2, [*range(1, 13), 50], new=3)
    assert scheduler.queued_tokens == 13
    plan = plan_of(scheduler)
    assert shape(plan) == [(2, 12, 1, True, False)]
    assert scheduler.queued_tokens == 0
    assert [new.cached_tokens for new in scheduler.commit(plan, [5])] == [12]
    assert [new.cached_tokens for new in scheduler.commit(plan_of(scheduler), [5])] == [0]


def test_a_page_is_offered_once_its_batch_has_ended_and_shared_while_it_is_held():
    scheduler = make(batch_tokens=64)
    prompt = list(range(1, 13))
    add(scheduler, 1, prompt)
    first = plan_of(scheduler)
    add(scheduler, 2, prompt)
    second = plan_of(scheduler)
    assert shape(second)[1] == (2, 0, 12, True, False), "what is still being computed could yet fail"
    scheduler.commit(first, [5])
    add(scheduler, 3, prompt)
    before = scheduler.pages.available
    third = plan_of(scheduler)
    assert shape(third)[2] == (3, 8, 4, True, False)
    assert before - scheduler.pages.available == 2, "one for its last page, and one that request 2 grows by"
    assert third.chunks[2].sequence.pages[:2] == first.chunks[0].sequence.pages[:2]


def test_the_next_turn_of_a_talk_finds_the_answer_too():
    scheduler = make()
    add(scheduler, 1, [1, 2, 3, 4, 5], new=8)
    for token in range(21, 29):
        scheduler.commit(plan_of(scheduler), [token])
    assert scheduler.open_requests == 0
    add(scheduler, 2, [1, 2, 3, 4, 5, *range(21, 29), 30, 31])
    # 13 tokens, of which the last was drawn and never computed.
    assert shape(plan_of(scheduler)) == [(2, 12, 3, True, False)]


def test_without_a_prefix_cache_nothing_is_found():
    scheduler = make(prefix_cache=False)
    for number in (1, 2):
        add(scheduler, number, list(range(1, 13)), new=1)
        plan = plan_of(scheduler)
        assert [entry[1:3] for entry in shape(plan)] == [(0, 12)]
        scheduler.commit(plan, [5])
    assert scheduler.pages.metrics.hits == 0


# Pages run out

"""Rows of recurrent state to be found again, and when a scheduler keeps one; plain Python throughout."""

from __future__ import annotations

import pytest

from rose.engine.generation.saved_states import SavedStates
from tests.engine.generation.scheduling import add, finish, make, plan_of, shape

A, B, C, D = (bytes([n]) * 16 for n in range(4))


def filled(*digests: bytes) -> SavedStates:
    states = SavedStates(10, len(digests))
    for digest in digests:
        row = states.take()
        assert row is not None
        assert states.keep(row, digest)
    return states


def test_the_least_recently_used_goes_first():
    states = filled(A, B, C)
    states.unwant(states.want(A))
    assert states.take() == 11
    assert B not in states
    assert (A in states, C in states, len(states)) == (True, True, 2)


def test_none_is_left_while_all_are_written_to_or_wanted():
    states = filled(A, B)
    wanted = states.want(A)
    assert states.take() == 11
    assert states.take() is None
    states.unwant(wanted)
    assert states.take() == 10
    assert not SavedStates(10, 0)
    assert SavedStates(10, 0).take() is None


def test_one_row_for_one_content():
    states = filled(A, B, C)
    states.forget([C])
    row = states.take()
    assert row == 12
    assert not states.keep(row, A)
    assert states.take() == 12, "the other holds it already"
    assert states.take() == 11, "and has been used just now"


def test_what_is_forgotten_while_it_is_wanted_is_free_afterwards():
    states = filled(A)
    first, second = states.want(A), states.want(A)
    states.forget([A, D])
    assert (A in states, states.take()) == (False, None)
    states.unwant(first)
    assert states.take() is None
    states.unwant(second)
    assert states.take() == 10


def hybrid(**changes):
    return make(**{"saved_states": 6, "state_tokens": 8, **changes})


def saves(plan) -> list[tuple[int, int, int]]:
    return [(save.sequence.request.id, save.tokens, save.row) for save in plan.saves]


def test_a_prompt_is_cut_behind_its_last_page_and_found_from_there():
    scheduler = hybrid(batch_tokens=64)
    add(scheduler, 1, 30, new=1)
    first = plan_of(scheduler)
    assert shape(first) == [(1, 0, 28, False, False)]
    assert (saves(first), first.resumes) == ([(1, 28, 9)], [])
    assert len(scheduler.states) == 0
    scheduler.commit(first, [])
    assert len(scheduler.states) == 1
    rest = plan_of(scheduler)
    assert shape(rest) == [(1, 28, 2, True, False)]
    assert rest.saves == []
    scheduler.commit(rest, [5])
    add(scheduler, 2, 30, new=1)
    add(scheduler, 100, 30, new=1)  # made of the same ids as request 1
    plan = plan_of(scheduler)
    assert shape(plan) == [(2, 0, 28, False, False), (100, 28, 2, True, False)]
    (resumed,) = plan.resumes
    lanes = {chunk.sequence.request.id: chunk.sequence.lane for chunk in plan.chunks}
    assert resumed == (9, lanes[100])


def test_a_cut_prompt_has_one_chunk_a_batch_and_others_get_the_rest():
    scheduler = hybrid(batch_tokens=64)
    add(scheduler, 1, 30, new=2)
    add(scheduler, 2, 20, new=2)
    add(scheduler, 3, 6, new=2, bulk=True)
    plan = plan_of(scheduler)
    assert shape(plan) == [(1, 0, 28, False, False), (2, 0, 16, False, False), (3, 0, 6, True, False)]
    scheduler.commit(plan, [5])
    assert [part[1:3] for part in shape(plan_of(scheduler))] == [(6, 1), (28, 2), (16, 4)]


def test_chunks_end_with_pages_where_a_state_is_worth_it():
    scheduler = hybrid(batch_tokens=15, max_running=2)
    add(scheduler, 1, 60, new=1)
    seen = []
    while scheduler.open_requests:
        plan = plan_of(scheduler)
        seen.append((plan.chunks[0].start, plan.chunks[0].length, [save.tokens for save in plan.saves]))
        scheduler.commit(plan, [5] * plan.draws)
    assert seen == [(0, 12, [12]), (12, 12, [24]), (24, 12, [36]), (36, 12, [48]), (48, 8, [56]), (56, 4, [])]
    scheduler = hybrid(batch_tokens=15, max_running=2, state_tokens=1000)
    add(scheduler, 1, 60, new=1)
    assert shape(plan_of(scheduler)) == [(1, 0, 15, False, False)]


def test_a_text_that_grows_keeps_its_latest_state_only():
    scheduler = hybrid()
    add(scheduler, 1, 3, new=40, ignore_eos=True)
    rows, kept = [], []
    while scheduler.open_requests:
        plan = plan_of(scheduler)
        rows += [save.tokens for save in plan.saves]
        scheduler.commit(plan, [5] * plan.draws)
        kept.append(len(scheduler.states))
    assert rows == [8, 16, 24, 32, 40]
    assert max(kept) == 1
    add(scheduler, 2, [11, 11, 11, *[5] * 39], new=1)
    assert plan_of(scheduler).chunks[0].start == 40


@pytest.mark.parametrize("end", ["abort", "fail", "break"])
def test_a_state_that_nobody_can_trust_is_never_found(end):
    scheduler = hybrid(batch_tokens=64)
    add(scheduler, 1, 30, new=1)
    plan = plan_of(scheduler)
    assert plan.saves
    if end == "abort":
        scheduler.abort(1)
    elif end == "fail":
        scheduler.fail(plan.chunks[0].sequence)
    if end == "break":
        assert scheduler.fail_batch(plan) == []
    else:
        scheduler.commit(plan, [])
    assert len(scheduler.states) == 0
    finish(scheduler)
    assert len(scheduler.states._free) + len(scheduler.states) == 6


def test_a_sequence_that_is_set_back_goes_on_from_its_state():
    scheduler = hybrid(num_pages=13, batch_tokens=32, max_running=2)
    add(scheduler, 1, 17, new=14, ignore_eos=True)
    add(scheduler, 2, 17, new=10, ignore_eos=True)
    starts = {}
    while scheduler.open_requests:
        plan = plan_of(scheduler)
        for chunk in plan.chunks:
            if not chunk.from_device and chunk.sequence.preemptions:
                starts.setdefault(chunk.sequence.request.id, chunk.start)
        scheduler.commit(plan, [5] * plan.draws)
    assert scheduler.metrics.preemptions == 1
    assert starts[2] >= 16, "not from its beginning"

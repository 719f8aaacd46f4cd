"""After a failed batch: who is computed when, with whom, and what becomes of what was on its way."""

from __future__ import annotations

import pytest

from rose.engine.generation.request import Finish
from rose.engine.generation.sequence import State
from rose.engine.generation.trials import MOST_UNEXPLAINED
from tests.engine.generation.scheduling import add, finish, make, plan_of, shape, told

NONE = Finish.NONE


def three_decoding(**limits):
    """Requests 1, 2, 3 of two tokens each, with one token drawn and told."""
    scheduler = make(**limits)
    for number in (1, 2, 3):
        add(scheduler, number, 2)
    assert told(scheduler, plan_of(scheduler), [7, 8, 9]) == [(1, 7, NONE), (2, 8, NONE), (3, 9, NONE)]
    return scheduler


def test_each_is_computed_alone_and_decodes_alone_once_before_they_meet_again():
    scheduler = three_decoding()
    failed = plan_of(scheduler)
    assert scheduler.fail_batch(failed) == []
    assert (scheduler.metrics.retries, scheduler.metrics.preemptions) == (3, 0)
    assert (scheduler.queued_requests, scheduler.queued_tokens) == (3, 9)
    assert scheduler.pages.available == scheduler.pages.total
    for number in (1, 2, 3):
        # The prompt and the token that was told; then the step.
        prompt, step = plan_of(scheduler), plan_of(scheduler)
        assert shape(prompt) == [(number, 0, 3, True, False)]
        assert shape(step) == [(number, 3, 1, True, True)]
        assert told(scheduler, prompt, [10 + number]) == [(number, 10 + number, NONE)]
        assert told(scheduler, step, [20 + number]) == [(number, 20 + number, NONE)]
    assert shape(plan_of(scheduler)) == [(number, 4, 1, True, True) for number in (1, 2, 3)]


def test_what_was_launched_before_the_failure_was_known_means_nothing():
    """Its tokens are thrown away, be they not finite; nobody starts again before it has ended."""
    scheduler = three_decoding()
    failed = plan_of(scheduler)
    add(scheduler, 4, 2)
    behind = plan_of(scheduler)
    assert [chunk[0] for chunk in shape(behind)] == [1, 2, 3, 4]
    scheduler.fail_batch(failed)
    assert scheduler.next_batch() is None
    assert not scheduler.has_work
    assert not scheduler.fail(behind.chunks[0].sequence)
    assert told(scheduler, behind, [-1, 6, 6, 5]) == [None, None, None, (4, 5, NONE)]
    assert scheduler.metrics.wasted_tokens == 3
    assert scheduler.pages.cached == 0
    assert shape(plan_of(scheduler)) == [(1, 0, 3, True, False)]


def test_a_batch_behind_that_fails_too_is_the_fault_of_none_of_them_again():
    scheduler = three_decoding()
    failed = plan_of(scheduler)
    add(scheduler, 4, 2)
    behind = plan_of(scheduler)
    scheduler.fail_batch(failed)
    assert scheduler.fail_batch(behind) == []
    assert scheduler.metrics.retries == 4
    assert [chunk.sequence.unexplained for chunk in behind.chunks] == [1, 1, 1, 1]
    finish(scheduler)


def test_the_one_that_fails_alone_clears_the_others():
    scheduler = three_decoding()
    failed = plan_of(scheduler)
    sequences = [chunk.sequence for chunk in failed.chunks]
    scheduler.fail_batch(failed)
    first = plan_of(scheduler)
    step = plan_of(scheduler)
    assert scheduler.fail_batch(first) == [1]
    assert scheduler.fail_batch(step) == []
    assert [s.unexplained for s in sequences[1:]] == [0, 0]
    # A second one that is guilty too explains no more than there was.
    assert scheduler.fail_batch(plan_of(scheduler)) == [2]
    assert sequences[2].unexplained == 0
    finish(scheduler)
    assert scheduler.pages.available == scheduler.pages.total


def test_a_chunked_prompt_is_tried_whole_and_nothing_starts_meanwhile():
    scheduler = make()
    add(scheduler, 1, 40)
    scheduler.fail_batch(plan_of(scheduler))
    add(scheduler, 2, 2)
    add(scheduler, 3, 2, bulk=True)
    plans = [plan_of(scheduler) for _ in range(4)]
    assert [shape(plan) for plan in plans] == [
        [(1, 0, 16, False, False)],
        [(1, 16, 16, False, False)],
        [(1, 32, 8, True, False)],
        [(1, 40, 1, True, True)],
    ]
    assert scheduler.next_batch() is None
    for plan in plans:
        scheduler.commit(plan, [5] * plan.draws)
    together = plan_of(scheduler)
    assert [chunk[0] for chunk in shape(together)] == [1, 2, 3]
    assert together.started == [2, 3]


def test_one_whose_last_token_was_on_its_way_draws_it_again():
    scheduler = make()
    add(scheduler, 1, 2, new=2)
    scheduler.commit(plan_of(scheduler), [7])
    last = plan_of(scheduler)
    assert last.chunks[0].sequence.state is State.DRAINED
    scheduler.fail_batch(last)
    again = plan_of(scheduler)
    assert shape(again) == [(1, 0, 3, True, False)]
    assert told(scheduler, again, [8]) == [(1, 8, Finish.LENGTH)]
    assert (scheduler.open_requests, scheduler.next_batch()) == (0, None)


def test_others_go_on_where_no_trial_has_room():
    """The pages are with one that came in a later batch; it ends, and makes room."""
    scheduler = make(num_pages=9, batch_tokens=32, prefix_cache=False)
    add(scheduler, 1, 5, new=12)
    failed = plan_of(scheduler)
    add(scheduler, 2, 20, new=8)
    behind = [plan_of(scheduler) for _ in range(2)]
    assert [chunk[0] for chunk in shape(behind[0])] == [1, 2]
    assert scheduler.pages.available == 0
    scheduler.fail_batch(failed)
    for plan in behind:
        scheduler.commit(plan, [5] * plan.draws)
    add(scheduler, 3, 1, new=1)
    seen = []
    while scheduler.open_requests:
        plan = plan_of(scheduler)
        seen.append([chunk[0] for chunk in shape(plan)])
        if seen[-1] == [2]:
            assert scheduler.next_batch() is None, "a trial may follow once this is over"
        scheduler.commit(plan, [5] * plan.draws)
    # Alone to its end, for it draws six more; then the trial, and only then the newcomer.
    assert seen[:9] == [[2]] * 6 + [[1]] * 2 + [[1, 3]]


def test_failures_without_a_culprit_are_forgiven_a_few_times():
    scheduler = three_decoding()
    for _ in range(MOST_UNEXPLAINED):
        together = plan_of(scheduler)
        assert len(together.chunks) == 3
        assert scheduler.fail_batch(together) == []
        for _ in range(6):
            plan = plan_of(scheduler)
            scheduler.commit(plan, [5])
    assert sorted(scheduler.fail_batch(plan_of(scheduler))) == [1, 2, 3]
    assert scheduler.open_requests == 0


def test_bulk_yields_to_a_trial_too():
    scheduler = make(num_pages=8, prefix_cache=False)
    add(scheduler, 1, 9, new=8)
    failed = plan_of(scheduler)
    scheduler.fail_batch(failed)
    trial, step = plan_of(scheduler), plan_of(scheduler)
    scheduler.commit(trial, [5])
    scheduler.commit(step, [5])
    add(scheduler, 2, 10, new=8, bulk=True)
    together = plan_of(scheduler)
    assert [chunk[0] for chunk in shape(together)] == [1, 2]
    scheduler.fail_batch(together)
    # The elder first, with all the pages it wants.
    assert shape(plan_of(scheduler))[0][:3] == (1, 0, 11)
    finish_all = 0
    while scheduler.in_flight:
        scheduler.commit(scheduler._in_flight[0], [5] * scheduler._in_flight[0].draws)
        finish_all += 1
    finish(scheduler)
    assert finish_all == 1
    assert scheduler.pages.available == scheduler.pages.total


def one_decoding(**limits):
    """Request 1, which has many tokens to go, and its sequence."""
    scheduler = make(**limits)
    add(scheduler, 1, 2, new=150)
    scheduler.commit(plan_of(scheduler), [7])
    return scheduler, scheduler._open[1]


def goes_on(scheduler, batches=2):
    for _ in range(batches):
        plan = plan_of(scheduler)
        scheduler.commit(plan, [5] * plan.draws)


ROUNDS = range(100, 100 + 2 * MOST_UNEXPLAINED)


@pytest.mark.parametrize("known", [True, False], ids=["after its batch failed", "before"])
@pytest.mark.parametrize("how", ["abort", "deadline"])
def test_one_that_leaves_before_its_trial_is_not_laid_to_the_others(how, known):
    """Client after client sends what breaks, and is gone before that is found out."""
    scheduler, innocent = one_decoding()
    for number in ROUNDS:
        add(scheduler, number, 2, deadline=float(number))
        together = plan_of(scheduler)
        assert len(together.chunks) == 2
        if known:
            assert scheduler.fail_batch(together) == []
            assert innocent.unexplained == 1
        if how == "abort":
            assert scheduler.abort(number)
        else:
            assert list(scheduler.expire(number + 0.5)) == [number]
        if not known:
            assert scheduler.fail_batch(together) == []
        assert innocent.unexplained == 0
        goes_on(scheduler)
    assert not innocent.finished
    finish(scheduler)
    assert scheduler.pages.available == scheduler.pages.total


@pytest.mark.parametrize("planned", [1, 2])
def test_nor_one_that_leaves_in_the_midst_of_its_trial(planned):
    scheduler, innocent = one_decoding()
    for number in ROUNDS:
        add(scheduler, number, 2)
        scheduler.fail_batch(plan_of(scheduler))
        goes_on(scheduler)
        plans = [plan_of(scheduler) for _ in range(planned)]
        assert {chunk.sequence.request.id for plan in plans for chunk in plan.chunks} == {number}
        scheduler.abort(number)
        for plan in plans:
            assert scheduler.fail_batch(plan) == []
        assert innocent.unexplained == 0
    assert not innocent.finished


@pytest.mark.parametrize("ending", [{"new": 2}, {"new": 9, "stop_ids": (8,)}], ids=["length", "stop"])
def test_nor_one_that_ends_before_its_step(ending):
    """Its prompt can be computed alone; the step that failed is never run again."""
    scheduler, innocent = one_decoding()
    for number in ROUNDS:
        add(scheduler, number, 2, **ending)
        goes_on(scheduler, 1)
        scheduler.fail_batch(plan_of(scheduler))
        assert innocent.unexplained == 1
        goes_on(scheduler)
        plan = plan_of(scheduler)
        finishes = told(scheduler, plan, [8])[0][2]
        assert finishes is (Finish.LENGTH if ending["new"] == 2 else Finish.STOP)
        assert innocent.unexplained == 0
    assert not innocent.finished


def test_nor_one_that_has_stopped_and_is_in_one_batch_more():
    scheduler, innocent = one_decoding()
    for number in ROUNDS:
        add(scheduler, number, 2, stop_ids=(8,))
        first, behind = plan_of(scheduler), plan_of(scheduler)
        assert len(behind.chunks) == 2
        assert told(scheduler, first, [5, 8])[1][2] is Finish.STOP
        assert scheduler.fail_batch(behind) == []
        assert innocent.unexplained == 0
        goes_on(scheduler)
    assert not innocent.finished


def test_one_that_was_cleared_and_leaves_then_explains_nothing():
    scheduler = three_decoding()
    failed = plan_of(scheduler)
    scheduler.fail_batch(failed)
    goes_on(scheduler)
    assert scheduler.abort(1)
    assert [chunk.sequence.unexplained for chunk in failed.chunks] == [1, 1, 1]
    assert scheduler.abort(2)
    assert [chunk.sequence.unexplained for chunk in failed.chunks] == [0, 0, 0]
    assert scheduler.abort(3)
    assert [chunk.sequence.unexplained for chunk in failed.chunks] == [0, 0, 0]


@pytest.mark.parametrize("guilty", ["fails alone", "leaves", "has left"])
def test_the_batch_behind_may_be_the_fault_of_whoever_was_in_the_first(guilty):
    """A newcomer meets the one at fault only in a batch that was launched before the failure was known."""
    scheduler = three_decoding()
    failed = plan_of(scheduler)
    add(scheduler, 4, 2)
    behind = plan_of(scheduler)
    sequences = [chunk.sequence for chunk in behind.chunks]
    scheduler.fail_batch(failed)
    if guilty == "has left":
        scheduler.abort(1)
    scheduler.fail_batch(behind)
    if guilty == "leaves":
        scheduler.abort(1)
    elif guilty == "fails alone":
        assert [s.unexplained for s in sequences] == [1, 1, 1, 1]
        assert scheduler.fail_batch(plan_of(scheduler)) == [1]
    assert [s.unexplained for s in sequences[1:]] == [0, 0, 0]
    finish(scheduler)
    assert scheduler.pages.available == scheduler.pages.total


def test_one_that_has_been_tried_too_often_takes_the_failure_with_it():
    scheduler, worn = one_decoding()
    worn.unexplained = MOST_UNEXPLAINED
    add(scheduler, 2, 2)
    together = plan_of(scheduler)
    newcomer = together.chunks[1].sequence
    assert scheduler.fail_batch(together) == [1]
    assert newcomer.unexplained == 0
    finish(scheduler)

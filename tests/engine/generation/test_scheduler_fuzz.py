"""Random loads, aborts, deadlines and failing batches on a pretend device with hardly any pages.

Whatever happens, every request gets exactly the tokens it would get alone, in order and once; nobody is overtaken by
somebody younger; the oldest is never set back; and in the end every page and lane is back.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rose.engine.generation.bulk import BulkPatience
from rose.engine.generation.limits import GenerationLimits
from rose.engine.generation.request import Finish, GenerateRequest, Sampling
from rose.engine.generation.scheduler import GenerationScheduler
from rose.engine.generation.sequence import Sequence, State
from rose.engine.generation.trials import MOST_UNEXPLAINED
from rose.engine.request import Priority
from rose.errors import DeadlineExceeded, InvalidInput
from tests.engine.generation.pretend_device import END, VOCAB, PretendDevice, expected_tokens

DEPTH = 2


@dataclass
class Known:
    """What the test knows of one open request."""

    request: GenerateRequest
    expected: list[int]
    got: list[int] = field(default_factory=list)


class Serving(RuleBasedStateMachine):
    @initialize(
        page_size=st.integers(1, 4),
        pages=st.integers(4, 24),
        lanes=st.integers(1, 5),
        spare_tokens=st.integers(1, 12),
        kind=st.sampled_from(["reuse", "reuse", "no reuse", "recurrent", "saved states", "saved states"]),
        states=st.integers(1, 6),
        state_tokens=st.integers(1, 8),
    )
    def start(self, page_size, pages, lanes, spare_tokens, kind, states, state_tokens):
        self.limits = GenerationLimits(
            vocab_size=VOCAB,
            max_tokens=60,
            page_size=page_size,
            num_pages=pages,
            max_running=lanes,
            batch_tokens=lanes + spare_tokens,
            prefix_cache=kind in ("reuse", "saved states"),
            saved_states=states if kind == "saved states" else 0,
            state_tokens=state_tokens,
        )
        self.scheduler = GenerationScheduler(self.limits, [END])
        # Promotions are rare by default.
        self.scheduler._bulk = BulkPatience(batches=9, preemptions=2)
        self.device = PretendDevice(self.limits, recurrent=kind in ("recurrent", "saved states"))
        self.known: dict[int, Known] = {}
        self.count = 0
        self.now = 0.0

    @rule(
        beginning=st.sampled_from([(), (3, 4), (3, 4, 5, 6, 7, 8, 9, 10), (3, 4, 5, 6, 1, 1)]),
        rest=st.lists(st.integers(1, 3), max_size=14),
        new=st.one_of(st.integers(1, 3), st.integers(1, 25)),
        stop_ids=st.sampled_from([(), (7, 11), tuple(range(1, 20))]),
        ignore_eos=st.booleans(),
        least=st.integers(0, 3),
        bulk=st.sampled_from([False, False, True]),
        patience=st.one_of(st.none(), st.floats(1, 30)),
    )
    def add(self, beginning, rest, new, stop_ids, ignore_eos, least, bulk, patience):
        self.count += 1
        prompt = np.array([*beginning, *rest], dtype=np.int32)
        request = GenerateRequest(
            self.count,
            prompt,
            Sampling(max_new_tokens=new, stop_ids=stop_ids, ignore_eos=ignore_eos, min_new_tokens=min(least, new)),
            deadline=None if patience is None else self.now + patience,
            priority=Priority.BULK if bulk else Priority.ONLINE,
        )
        if not len(prompt) or len(prompt) + new > self.limits.longest:
            with pytest.raises(InvalidInput):
                self.scheduler.add(request)
            return
        self.scheduler.add(request)
        self.known[self.count] = Known(request, expected_tokens(request))

    @precondition(lambda self: self.scheduler.in_flight < DEPTH)
    @rule()
    def launch(self):
        scheduler = self.scheduler
        before = self.sequences()
        oldest = min((s for s in before if s.rank == 0), key=lambda s: s.serial, default=None)
        set_back = 0 if oldest is None else oldest.preemptions
        ranks = {s.serial: s.rank for s in before}
        had_work = scheduler.has_work
        plan = scheduler.next_batch()
        if oldest is not None:
            assert oldest.preemptions == set_back, "the oldest was set back"
        self.nobody_is_overtaken(ranks)
        if plan is None:
            assert scheduler.in_flight or not self.known, "nothing runs, and what waits does not start"
            assert not scheduler.has_work
            return
        assert had_work, "there was a batch to plan and nobody would have asked for it"
        assert 1 <= plan.tokens == sum(chunk.length for chunk in plan.chunks) <= self.limits.batch_tokens
        assert len(plan.chunks) <= self.limits.max_running
        assert plan.draws == sum(chunk.samples for chunk in plan.chunks)
        planned = {chunk.sequence for chunk in plan.chunks}
        on_trial = [s for s in planned if s in scheduler._trials]
        assert not on_trial or len(plan.chunks) == 1, "a trial in company"
        if not on_trial and oldest is not None and oldest.state in (State.PREFILL, State.DECODE):
            assert oldest in planned, "the oldest runs and gets nothing"
        first = [s.request.id for s in (c.sequence for c in plan.chunks) if s in before and s.preemptions == 0]
        assert set(plan.started) <= set(first)
        self.device.launch(plan)

    @precondition(lambda self: self.scheduler.in_flight)
    @rule()
    def finish(self):
        self.commit(*self.device.run())

    def commit(self, plan, tokens):
        news = self.scheduler.commit(plan, tokens)
        assert len(news) == len(tokens)
        for new in news:
            if new is None:
                continue
            known = self.known[new.request_id]
            assert (new.cached_tokens == 0) or not known.got, "told of once"
            assert new.cached_tokens % self.limits.page_size == 0
            assert new.cached_tokens < len(known.request.ids)
            known.got.append(new.token)
            assert known.got == known.expected[: len(known.got)], "another token than alone"
            assert (new.finish is not Finish.NONE) == (known.got == known.expected)
            if new.finish is not Finish.NONE:
                self.ended_rightly(known, new)
                del self.known[new.request_id]

    def ended_rightly(self, known, new):
        sampling = known.request.sampling
        ends = new.token in sampling.stop_ids or (new.token == END and not sampling.ignore_eos)
        stopped = ends and len(known.got) > sampling.min_new_tokens
        assert new.finish is (Finish.STOP if stopped else Finish.LENGTH)
        assert stopped or len(known.got) == sampling.max_new_tokens

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def abort(self, data):
        number = data.draw(st.sampled_from(sorted(self.known)))
        assert self.scheduler.abort(number)
        assert not self.scheduler.abort(number)
        del self.known[number]

    @rule(seconds=st.floats(0.1, 4))
    def time_passes(self, seconds):
        self.now += seconds
        due = {n for n, k in self.known.items() if k.request.deadline is not None and k.request.deadline <= self.now}
        expired = self.scheduler.expire(self.now)
        assert set(expired) == due
        assert all(isinstance(error, DeadlineExceeded) for error in expired.values())
        for number in due:
            del self.known[number]

    @precondition(lambda self: self.scheduler.in_flight and self.count % 5 == 0)
    @rule()
    def a_batch_fails(self):
        self.break_down()

    @precondition(lambda self: self.scheduler.in_flight > 1)
    @rule()
    def two_batches_fail_in_a_row(self):
        self.break_down()
        self.break_down()

    def break_down(self):
        """Only what fails alone, on its trial, or without anybody's fault again and again, is told of it."""
        plan = self.device.break_down()
        sequences = [chunk.sequence for chunk in plan.chunks]
        live = [s for s in sequences if not s.finished and not s.void]
        tried = {s.request.id for s in live if s in self.scheduler._trials}
        assert not tried or len(sequences) == 1, "a trial in company"
        worn = {s.request.id for s in live if s.unexplained >= MOST_UNEXPLAINED}
        # Who of it has ended, or ends by this, may have been at fault.
        counts = not worn and not any(s.finished for s in sequences)
        unexplained = {s: s.unexplained + counts for s in live}
        retries = self.scheduler.metrics.retries
        assert set(self.scheduler.fail_batch(plan)) == tried | worn
        assert self.scheduler.metrics.retries - retries == len(live) - len(tried | worn)
        for number in tried | worn:
            del self.known[number]
        for sequence in live:
            assert sequence.finished or (sequence in self.scheduler._trials and sequence.drawn == sequence.known)
            assert sequence.finished or sequence.unexplained == unexplained[sequence]

    @precondition(lambda self: self.scheduler.in_flight and self.count % 5 == 1)
    @rule()
    def a_row_is_not_finite(self):
        plan, tokens = self.device.run()
        drawing = [chunk.sequence for chunk in plan.chunks if chunk.samples]
        if drawing:
            spoilt = drawing[0]
            was_open = not spoilt.finished and not spoilt.void
            assert self.scheduler.fail(spoilt) is was_open
            if was_open:
                del self.known[spoilt.request.id]
        self.commit(plan, tokens)

    def sequences(self) -> list[Sequence]:
        return list(self.scheduler._open.values())

    def nobody_is_overtaken(self, ranks):
        """Who waits in front has started when who waits behind has; a promotion during this plan changes the order."""
        by_rank = [s for s in self.sequences() if s.rank == ranks[s.serial]]
        on_trial = self.scheduler._trials
        by_rank = [s for s in by_rank if s not in on_trial]
        waiting = [s for s in by_rank if s.state is State.WAITING and s.preemptions == 0]
        for sequence in waiting:
            overtaken = [
                other
                for other in by_rank
                if other.state is State.PREFILL
                and other.computed == 0
                and other.rank == sequence.rank
                and other.serial > sequence.serial
            ]
            assert not overtaken

    @invariant()
    def pages_and_lanes_have_the_holders_that_name_them(self):
        if not hasattr(self, "scheduler"):
            return
        sequences, pool = self.sequences(), self.scheduler.pages
        holders = [0] * self.limits.num_pages
        for sequence in sequences:
            assert len(set(sequence.pages)) == len(sequence.pages)
            assert sequence.capacity == len(sequence.pages) * self.limits.page_size
            for page in sequence.pages:
                holders[page] += 1
        assert holders == pool._holders
        assert holders[0] == 0
        assert sum(holder > 0 for holder in holders) + pool.available == pool.total
        # Whoever waits is in one line, once.
        heaps = enumerate(self.scheduler._waiting._heaps)
        line = [s for rank, heap in heaps for _, s in heap if s.state is State.WAITING and s.rank == rank]
        line = [s for s in line if not s.finished] + [s for s in sequences if s in self.scheduler._trials]
        assert len({s.serial for s in line}) == len(line)
        lanes = [s.lane for s in sequences if s.lane]
        assert len(set(lanes)) == len(lanes)
        # Every row of saved states is found, free, wanted though nobody finds it any more, or being written to.
        states = self.scheduler.states
        written = [save.row for plan in self.scheduler._in_flight for save in plan.saves]
        resumed = [s.resumes for s in sequences if s.resumes]
        assert sorted(states._wanted) == sorted(set(resumed))
        rows = [*states._free, *written, *({*states._rows.values()} | {*states._wanted})]
        first = self.limits.max_running + 1
        assert sorted(rows) == list(range(first, first + self.limits.saved_states))
        for sequence in sequences:
            assert sequence.known <= sequence.drawn <= sequence.max_length
            assert 0 <= sequence.unexplained <= MOST_UNEXPLAINED
            assert (sequence.state is State.WAITING) <= (not sequence.pages and not sequence.lane)

    @invariant()
    def gauges_are_the_queue(self):
        if not hasattr(self, "scheduler"):
            return
        scheduler, sequences = self.scheduler, self.sequences()
        assert {s.request.id for s in sequences} == set(self.known)
        assert scheduler.open_requests == len(self.known)
        assert scheduler.queued_requests == sum(s.state is State.WAITING for s in sequences)
        assert scheduler.running == sum(s.state in (State.PREFILL, State.DECODE) for s in sequences)
        assert scheduler.queued_tokens == sum(s.known - s.computed for s in sequences if s.state <= State.PREFILL)
        assert scheduler.in_flight == len(self.device.launched)
        deadlines = [k.request.deadline for k in self.known.values() if k.request.deadline is not None]
        assert scheduler.next_deadline() == min(deadlines, default=None)

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        steps = 0
        while self.known or self.scheduler.in_flight:
            steps += 1
            assert steps < 20_000, "it does not end"
            while self.scheduler.in_flight < DEPTH and self.scheduler.has_work:
                self.launch()
            if self.scheduler.in_flight:
                self.finish()
            self.pages_and_lanes_have_the_holders_that_name_them()
            self.gauges_are_the_queue()
        assert self.scheduler.next_batch() is None
        assert self.scheduler.pages.available == self.scheduler.pages.total
        assert self.scheduler._running.free_lanes == self.limits.max_running
        assert not self.scheduler.states._wanted


TestServing = Serving.TestCase
TestServing.settings = settings(
    max_examples=150, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)

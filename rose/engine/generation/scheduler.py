"""Which tokens of which sequences make up the next batch, and what the drawn tokens mean.

Every decoding sequence gets one token a batch; prompts share what is left of the budget, in order of arrival and in
chunks. Batches are planned ahead of the tokens they follow from: a plan only needs to know that a token was drawn, not
which one. So `max_new_tokens` ends a sequence exactly, and an end token is seen after one more token was planned, which
is thrown away. When pages run out, the youngest running sequence loses its own and starts again from the tokens it has
so far; the oldest one never does, so everything ends. Plain Python; knows neither devices nor models.

Class BULK yields: its sequences start after all others, and lose lane and pages to them. It never starves: what was
passed over or lost its pages too often counts as ONLINE from then on, with the age it has.

When a batch fails, its sequences are set back and go on from the tokens they have, each alone at first: see trials.py.
Until that is settled nothing new starts, and others go on only where no trial can.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass

import numpy as np

from rose.engine.generation.bulk import BulkPatience
from rose.engine.generation.limits import GenerationLimits, check_limits
from rose.engine.generation.pages import PagePool
from rose.engine.generation.request import Finish, GenerateRequest, NewToken
from rose.engine.generation.running import Running, age
from rose.engine.generation.saved_states import SavedStates
from rose.engine.generation.sequence import BatchPlan, Chunk, Sequence, State
from rose.engine.generation.trials import MOST_UNEXPLAINED, Trials
from rose.engine.generation.validation import check_generate
from rose.engine.generation.waiting import Deadlines, WaitingLine
from rose.engine.request import Priority
from rose.errors import DeadlineExceeded, RoseError


@dataclass(slots=True)
class SchedulerMetrics:
    """Counters since start.

    Attributes:
        preemptions: times a sequence lost its pages.
        recomputed_tokens: tokens that such a sequence computes again to go on; those it finds in the cache left out.
        wasted_tokens: drawn after their sequence had ended, or after a batch of it had failed, and thrown away.
        retries: times a sequence was set back, to be tried alone, because its batch had failed.
    """

    preemptions: int = 0
    recomputed_tokens: int = 0
    wasted_tokens: int = 0
    retries: int = 0


class GenerationScheduler:
    """The open requests of one generating engine.

    `next_batch` plans a batch, which is staged and launched at once. Every plan ends by `commit` or `fail_batch`.
    """

    def __init__(self, limits: GenerationLimits, end_ids: Iterable[int] = ()) -> None:
        """
        Args:
            end_ids: tokens that end a sequence by the model's own word.

        Raises:
            StartupError: a number of `limits` that cannot work.
        """
        check_limits(limits)
        self.limits = limits
        self.metrics = SchedulerMetrics()
        self._end_ids = frozenset(end_ids)
        self._open: dict[int, Sequence] = {}
        self._waiting = WaitingLine()
        self._waiting_tokens = 0
        self._running = Running(limits)
        self._bulk = BulkPatience()
        self._trials = Trials()
        self._deadlines = Deadlines()
        self._in_flight: deque[BatchPlan] = deque()
        self._serial = 0
        self._stuck = False
        self._blocked: tuple[int, int, int] | None = None

    @property
    def pages(self) -> PagePool:
        return self._running.pages

    @property
    def states(self) -> SavedStates:
        return self._running.states

    @property
    def open_requests(self) -> int:
        return len(self._open)

    @property
    def running(self) -> int:
        """Sequences that have a lane, pages, and tokens left to plan."""
        return len(self._running)

    @property
    def queued_requests(self) -> int:
        """Requests without pages: not started yet, or set back."""
        return len(self._open) - self._running.holders

    @property
    def queued_tokens(self) -> int:
        """Tokens that are known and in no planned batch: prompts, and all tokens of sequences that were set back."""
        return self._waiting_tokens + self._running.due_tokens

    @property
    def promotions(self) -> int:
        """Sequences of class BULK that came to count as ONLINE, since start."""
        return self._bulk.promotions

    @property
    def in_flight(self) -> int:
        """Plans that have not ended."""
        return len(self._in_flight)

    @property
    def has_work(self) -> bool:
        """Whether `next_batch` may give something; False also while everything waits for a plan in flight."""
        return bool(self._open) and not self._stuck

    def add(self, request: GenerateRequest) -> None:
        """Queue a request.

        Raises:
            InvalidInput: see `check_generate`. Nothing is queued then.
        """
        check_generate(request, self.limits, self._open)
        prompt = len(request.ids)
        ids = np.empty(prompt + request.sampling.max_new_tokens, dtype=np.int32)
        ids[:prompt] = request.ids
        self._serial += 1
        sequence = Sequence(
            request=request,
            ids=ids,
            known=prompt,
            prompt_length=prompt,
            serial=self._serial,
            drawn=prompt,
            max_length=len(ids),
            rank=int(request.priority is Priority.BULK),
        )
        self._open[request.id] = sequence
        if sequence.rank:
            self._bulk.add(sequence)
        self._deadlines.push(sequence)
        self._wait(sequence)

    def abort(self, request_id: int) -> bool:
        """End a request, wherever it stands; tokens on their way are thrown away. Returns whether it was open."""
        sequence = self._open.get(request_id)
        if sequence is None:
            return False
        self._end(sequence)
        return True

    def expire(self, now: float) -> dict[int, RoseError]:
        """End every request whose deadline has passed, running ones too; request id -> error."""
        expired: dict[int, RoseError] = {}
        for sequence in self._deadlines.due(now):
            request, new = sequence.request, sequence.known - sequence.prompt_length
            late = (now - (request.deadline or now)) * 1000
            expired[request.id] = DeadlineExceeded(
                f"the deadline passed {late:.0f} ms ago with {new} of at most {request.sampling.max_new_tokens} new"
                " tokens"
            )
            self._end(sequence)
        return expired

    def next_deadline(self) -> float | None:
        """The earliest deadline of what is open."""
        return self._deadlines.earliest()

    def next_batch(self) -> BatchPlan | None:
        """Plan a batch; None if nothing can be computed before a plan in flight ends. Call `expire` before."""
        running, waiting = self._running, self._waiting
        running.recycle_lanes()
        for sequence in running.grow():
            self._set_back(sequence)
        tried = self._next_trial() if self._trials else None
        if tried is not None or (self._trials and self._in_flight):
            return self._planned(tried)
        started: list[int] = []
        if waiting.first(0) is not None and not self._trials:
            self._admit(0, started)
        chunks = running.decode()
        decodes = len(chunks)
        budget = running.prefill(chunks, self.limits.batch_tokens - decodes)
        if budget and waiting.first(0) is None and waiting.first(1) is not None and not self._trials:
            self._admit(1, started, budget)
            running.prefill(chunks, budget)
        if len(self._bulk):
            self._watch_bulk()
        return self._planned(BatchPlan(chunks, decodes, started) if chunks else None)

    def commit(self, plan: BatchPlan, tokens: ListLike[int]) -> list[NewToken | None]:
        """Take the tokens a batch has drawn.

        Args:
            plan: the oldest in flight.
            tokens: one for each chunk that samples, in the order of the plan.

        Returns:
            What is to be told, in the same order; None for a token of a sequence that has ended meanwhile.

        Raises:
            RuntimeError: another plan than the oldest, or another number of tokens.
        """
        if len(tokens) != plan.draws:
            raise RuntimeError(f"{len(tokens)} tokens for a plan that draws {plan.draws}")
        self._ended(plan)
        if plan.saves:
            self._running.settle(plan.saves)
        trials = self._trials if self._trials else None
        news: list[NewToken | None] = []
        drawn = iter(tokens)
        reuse, page_size = self.pages.reuse, self.limits.page_size
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.in_flight -= 1
            if sequence.void:
                sequence.void -= 1
                if chunk.samples:
                    next(drawn)
                    news.append(None)
                    self.metrics.wasted_tokens += 1
                continue
            if trials is not None and chunk.from_device and sequence in trials:
                self._clear(sequence)
            # Of a decoding sequence `start` says nothing any more; all it knew before this token is computed now.
            computed = sequence.known if chunk.samples else chunk.start + chunk.length
            if reuse and computed - sequence.kept * page_size >= page_size and not sequence.finished:
                self._running.keep(sequence, computed)
            if chunk.samples:
                news.append(self._take(sequence, next(drawn)))
        return news

    def fail(self, sequence: Sequence) -> bool:
        """End a sequence whose numbers cannot be trusted; nobody finds its pages again.

        For one whose drawn token is of no use: call it before the `commit` of that plan, with any token in its place.

        Returns:
            Whether it had not ended before, and its token was not void anyway.
        """
        if sequence.finished or sequence.void:
            return False
        self._running.forget(sequence)
        self._end(sequence)
        return True

    def fail_batch(self, plan: BatchPlan) -> list[int]:
        """A plan could not be launched, or its forward failed: its sequences are set back and tried alone.

        Args:
            plan: the oldest in flight.

        Returns:
            The requests that ended so: the one whose trial this was, and those that have been tried too often.

        Raises:
            RuntimeError: another plan than the oldest.
        """
        self._ended(plan)
        self._running.unsettle(plan.saves)
        failed: list[int] = []
        company: list[Sequence] = []
        beside: list[Sequence] = []
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.in_flight -= 1
            if sequence.void:
                sequence.void -= 1
                if not sequence.finished:
                    beside.append(sequence)
            elif not sequence.finished:
                if sequence in self._trials or sequence.unexplained >= MOST_UNEXPLAINED:
                    self.fail(sequence)
                    failed.append(sequence.request.id)
                else:
                    company.append(sequence)
        for sequence in company:
            self._retry(sequence)
        # Whoever has ended, by now or meanwhile, is tried no more and may have been at fault.
        explained = any(chunk.sequence.finished for chunk in plan.chunks)
        self._trials.begin(company, beside, explained=explained)
        return failed

    def _planned(self, plan: BatchPlan | None) -> BatchPlan | None:
        if plan is None:
            self._stuck = True
        else:
            if self._running.states:
                self._running.planned(plan)
            self._in_flight.append(plan)
        return plan

    def _ended(self, plan: BatchPlan) -> None:
        if not self._in_flight or self._in_flight[0] is not plan:
            raise RuntimeError("plans end in the order they were made, each once")
        self._in_flight.popleft()
        self._stuck = False

    def _next_trial(self) -> BatchPlan | None:
        """A batch of one sequence on trial, if one has something to compute and the room for it."""
        sequence = self._trials.next()
        if sequence is None:
            return None
        if sequence.state is State.WAITING:
            found = self._room_for(sequence)
            if found is None:
                return None
            self._start(sequence, found)
            self._trials.started(sequence)
        if sequence.state is State.DECODE:
            return BatchPlan(self._running.decode(sequence), 1)
        chunks: list[Chunk] = []
        self._running.prefill(chunks, self.limits.batch_tokens, sequence)
        return BatchPlan(chunks, 0)

    def _retry(self, sequence: Sequence) -> None:
        """Compute it anew from the tokens that have arrived; what is still on its way follows from nothing."""
        self.metrics.retries += 1
        if sequence.state is State.WAITING:
            self._waiting.remove(sequence)
        else:
            self._running.set_back(sequence)
            self._waiting_tokens += sequence.known
        sequence.drawn = sequence.known
        sequence.void = sequence.in_flight

    def _clear(self, sequence: Sequence) -> None:
        """It has passed its trial; if it lost its pages meanwhile, it waits as anybody."""
        self._trials.clear(sequence)
        if sequence.state is State.WAITING and not sequence.finished:
            self._waiting.push(sequence)

    def _admit(self, rank: int, started: list[int], budget: int | None = None) -> None:
        """Start waiting sequences of a rank in their order, as long as there are tokens, lanes and pages for them."""
        running = self._running
        budget = running.prompt_budget() if budget is None else budget
        while budget > 0 and (head := self._waiting.first(rank)) is not None:
            # One that was set back starts again once all its tokens are on the host.
            if head.in_flight or self._blocked == (head.serial, self.pages.releases, running.free_lanes):
                return
            # Taken out first: what is set back for it may be older, and then waits before it.
            self._waiting.pop(rank)
            found = self._room_for(head)
            if found is None:
                self._waiting.push(head)
                self._blocked = (head.serial, self.pages.releases, running.free_lanes)
                return
            self._start(head, found)
            budget -= head.known - head.computed
            if head.preemptions == 0:
                started.append(head.request.id)

    def _room_for(self, head: Sequence) -> list[int] | None:
        """As `pages_to_start`, after BULK sequences have yielded where that helps."""
        found = self._running.pages_to_start(head)
        return self._yielded_by_bulk(head) if found is None and head.rank == 0 else found

    def _start(self, head: Sequence, found: list[int]) -> None:
        self._waiting_tokens -= head.known
        self._running.start(head, found)
        if head.preemptions:
            self.metrics.recomputed_tokens += head.known - head.computed

    def _yielded_by_bulk(self, head: Sequence) -> list[int] | None:
        """As `pages_to_start`, with what running BULK sequences give up for it: all that it takes, or nothing."""
        bulk = sorted((sequence for sequence in self._running if sequence.rank > 0), key=age)
        if not self._running.could_start(head, bulk):
            return None
        found = None
        while bulk and found is None:
            youngest = bulk.pop()
            self._running.set_back(youngest)
            self._set_back(youngest)
            found = self._running.pages_to_start(head)
        return found

    def _set_back(self, sequence: Sequence) -> None:
        """A running sequence has lost lane and pages; it waits at its old place."""
        self.metrics.preemptions += 1
        if sequence.rank and self._bulk.is_worn(sequence):
            self._bulk.promote(sequence)
        self._wait(sequence)

    def _watch_bulk(self) -> None:
        overdue = self._bulk.overdue()
        if overdue is None:
            return
        self._bulk.promote(overdue)
        if overdue.state is not State.WAITING:
            self._running.aged()
        elif overdue not in self._trials:
            self._waiting.forget_one()
            self._waiting.push(overdue)

    def _wait(self, sequence: Sequence) -> None:
        if sequence not in self._trials:
            self._waiting.push(sequence)
        self._waiting_tokens += sequence.known
        self._stuck = False

    def _take(self, sequence: Sequence, token: int) -> NewToken | None:
        """A token has arrived."""
        if sequence.finished:
            self.metrics.wasted_tokens += 1
            return None
        sequence.ids[sequence.known] = token
        known = sequence.known = sequence.known + 1
        if sequence.state is State.WAITING:
            self._waiting_tokens += 1
        request = sequence.request
        new = NewToken(request.id, token)
        number = known - sequence.prompt_length
        if number == 1:
            new.cached_tokens = sequence.cached_tokens
        sampling = request.sampling
        ends = token in sampling.stop_ids or (token in self._end_ids and not sampling.ignore_eos)
        if ends and number > sampling.min_new_tokens:
            new.finish = Finish.STOP
            self._end(sequence)
        elif known == sequence.max_length:
            new.finish = Finish.LENGTH
            self._end(sequence)
        return new

    def _end(self, sequence: Sequence) -> None:
        sequence.finished = True
        if sequence.state is State.WAITING:
            self._waiting_tokens -= sequence.known
            if sequence not in self._trials:
                self._waiting.forget_one()
        else:
            self._running.leave(sequence)
        self._trials.leave(sequence)
        del self._open[sequence.request.id]
        self._bulk.discard(sequence)
        self._deadlines.sweep(len(self._open))
        self._stuck = False

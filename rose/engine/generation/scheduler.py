"""Which tokens of which sequences make up the next batch, and what the drawn tokens mean.

Every decoding sequence gets one token a batch; prompts share what is left of the budget, in order of arrival and in
chunks. Batches are planned ahead of the tokens they follow from: a plan only needs to know that a token was drawn, not
which one. So `max_new_tokens` ends a sequence exactly, and an end token is seen after one more token was planned, which
is thrown away. When pages run out, the youngest running sequence loses its own and starts again from the tokens it has
so far; the oldest one never does, so everything ends. Plain Python; knows neither devices nor models.

One stream: batches run on the device in the order they were planned. So a page, a lane or a row of recurrent state may
go to another sequence as soon as no *later* batch uses it, even while a launched batch still writes to it: whoever gets
it uses it in a later batch. Content is offered to others only once its batch has ended well.

Class BULK yields: its sequences start after all others, and lose lane and pages to them. It never starves: what was
passed over or lost its pages too often counts as ONLINE from then on, with the age it has.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass

import numpy as np

from rose.engine.generation.limits import GenerationLimits, check_limits
from rose.engine.generation.pages import PagePool
from rose.engine.generation.request import Finish, GenerateRequest, NewToken
from rose.engine.generation.sequence import BatchPlan, Chunk, Sequence, State
from rose.engine.generation.validation import check_generate
from rose.engine.generation.waiting import Deadlines, WaitingLine
from rose.engine.request import Priority
from rose.errors import DeadlineExceeded, RoseError

# Batches the oldest BULK sequence may be left out of before it counts as ONLINE: seconds, at the 5 to 20 ms of a batch.
BULK_PATIENCE = 256
# How often a BULK sequence may lose its pages before it does.
BULK_PREEMPTIONS = 4
# Pages left free when a sequence starts beside others: one for each running one, so that all can go on for a while,
# and at least this share of the cache.
HEADROOM_SHARE = 100


@dataclass(slots=True)
class SchedulerMetrics:
    """Counters since start.

    Attributes:
        preemptions: sequences whose pages were taken from them.
        recomputed_tokens: tokens that had been computed, or found, and were lost that way.
        promotions: BULK sequences that came to count as ONLINE.
        wasted_tokens: drawn after their sequence had ended, and thrown away.
    """

    preemptions: int = 0
    recomputed_tokens: int = 0
    promotions: int = 0
    wasted_tokens: int = 0


class GenerationScheduler:
    """The open requests of one generating engine.

    `next_batch` plans a batch, which is launched at once, or given to `fail_batch`. Plans end in the order they were
    made, each by `commit` or `fail_batch`.

    Attributes:
        queued_tokens: tokens whose ids are known and which no planned batch computes yet: prompts, and what sequences
            without pages have so far.
        running: sequences that have pages and tokens left to plan.
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
        self.pages = PagePool(limits.num_pages, limits.page_size, reuse=limits.prefix_cache)
        self.metrics = SchedulerMetrics()
        self.queued_tokens = 0
        self._end_ids = frozenset(end_ids)
        self._open: dict[int, Sequence] = {}
        self._bulk: dict[int, Sequence] = {}
        self._waiting = WaitingLine()
        self._deadlines = Deadlines()
        self._prefilling: list[Sequence] = []
        self._decoding: dict[int, Chunk] = {}
        self._drained: dict[int, Sequence] = {}
        self._spent: list[Sequence] = []
        self._lanes = list(range(limits.max_running, 0, -1))
        self._in_flight: deque[BatchPlan] = deque()
        self._serial = 0
        self._stuck = False
        self._blocked: tuple[int, int, int] | None = None
        self._bulk_mark = (0, 0)
        self._bulk_passed_over = 0

    @property
    def open_requests(self) -> int:
        return len(self._open)

    @property
    def running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def queued_requests(self) -> int:
        """Requests that have no pages: not started, or started and set back."""
        return len(self._open) - self.running - len(self._drained)

    @property
    def in_flight(self) -> int:
        """Plans neither committed nor failed."""
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
        prompt, sampling = len(request.ids), request.sampling
        ids = np.empty(prompt + sampling.max_new_tokens, dtype=np.int32)
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
            self._bulk[sequence.serial] = sequence
        self._waiting.push(sequence)
        self._deadlines.push(sequence)
        self.queued_tokens += prompt
        self._stuck = False

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
        """Plan a batch, or None if nothing can be computed before a plan in flight ends. Call `expire` before."""
        self._recycle_lanes()
        self._grow()
        started: list[int] = []
        line = self._waiting
        if line.first(0) is not None:
            self._admit(0, self._prompt_budget(), started)
        chunks = self._decode()
        decodes = len(chunks)
        budget = self._prefill(chunks, self.limits.batch_tokens - decodes)
        if budget and line.first(0) is None and line.first(1) is not None:
            self._admit(1, budget, started)
            self._prefill(chunks, budget)
        if self._bulk:
            self._watch_bulk()
        if not chunks:
            self._stuck = True
            return None
        plan = BatchPlan(chunks, decodes, started)
        self._in_flight.append(plan)
        return plan

    def commit(self, plan: BatchPlan, tokens: ListLike[int]) -> list[NewToken | None]:
        """Take the tokens a batch has drawn.

        Args:
            plan: the oldest in flight.
            tokens: one for each chunk that samples, in the order of the plan.

        Returns:
            The same, told apart: None for a token that is thrown away, because its sequence has ended meanwhile.

        Raises:
            RuntimeError: another plan than the oldest, or another number of tokens.
        """
        if len(tokens) != sum(chunk.samples for chunk in plan.chunks):
            raise RuntimeError(f"{len(tokens)} tokens for a plan that draws another number of them")
        if not self._in_flight or self._in_flight[0] is not plan:
            raise RuntimeError("plans are committed in the order they were made, each once")
        self._in_flight.popleft()
        self._stuck = False
        news: list[NewToken | None] = []
        drawn = iter(tokens)
        reuse, page_size = self.pages.reuse, self.limits.page_size
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.in_flight -= 1
            if not chunk.samples:
                if reuse and not sequence.finished:
                    self._keep(sequence, chunk.start + chunk.length)
                continue
            token = next(drawn)
            if sequence.finished:
                self.metrics.wasted_tokens += 1
                news.append(None)
                continue
            known = sequence.known
            # What was known before the token has been computed now.
            if reuse and known - sequence.kept * page_size >= page_size:
                self._keep(sequence, known)
            sequence.ids[known] = token
            sequence.known = known = known + 1
            if sequence.state is State.WAITING:
                self.queued_tokens += 1
            new = NewToken(sequence.request.id, token)
            if known == sequence.prompt_length + 1:
                new.cached_tokens = sequence.cached_tokens
            if self._is_end(sequence, token):
                new.finish = Finish.STOP
                self._end(sequence)
            elif known == sequence.max_length:
                new.finish = Finish.LENGTH
                self._end(sequence)
            news.append(new)
        return news

    def fail(self, sequence: Sequence) -> bool:
        """End a sequence whose numbers cannot be trusted; nobody finds its pages again.

        For one whose drawn token is of no use, call it before the `commit` of that plan, with any token in its place.

        Returns:
            Whether it had not ended before.
        """
        if sequence.finished:
            return False
        self.pages.forget(sequence.pages)
        self._end(sequence)
        return True

    def fail_batch(self, plan: BatchPlan) -> list[int]:
        """End every sequence of a plan that could not be launched or whose forward failed.

        Args:
            plan: any in flight.

        Returns:
            The requests that ended so.
        """
        # By identity: plans are compared by value otherwise.
        where = next((index for index, other in enumerate(self._in_flight) if other is plan), None)
        if where is None:
            raise RuntimeError("this plan has ended already")
        del self._in_flight[where]
        self._stuck = False
        failed: list[int] = []
        for chunk in plan.chunks:
            chunk.sequence.in_flight -= 1
            if self.fail(chunk.sequence):
                failed.append(chunk.sequence.request.id)
        return failed

    # Planning

    def _recycle_lanes(self) -> None:
        """Lanes of sequences that drew their last token in the batch before this one."""
        for sequence in self._spent:
            self._release_lane(sequence)
        self._spent.clear()

    def _grow(self) -> None:
        """A page for every decoding sequence that has filled its last one, oldest first."""
        short = [c.sequence for c in self._decoding.values() if c.sequence.computed >= c.sequence.capacity]
        if len(short) > self.pages.available:
            short.sort(key=_age)
        for sequence in short:
            if sequence.state is State.DECODE and self._page_is_free_for(sequence):
                sequence.pages += self.pages.take(1)
                sequence.capacity += self.limits.page_size

    def _page_is_free_for(self, sequence: Sequence) -> bool:
        """Take pages from others, or from the sequence itself where it is the youngest, until one is free."""
        while not self.pages.available:
            if any(drained.pages for drained in self._drained.values()):
                # Nothing more is computed for them.
                for drained in self._drained.values():
                    self._release_pages(drained)
                continue
            youngest = max(self._runners(), key=_age)
            self._preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def _decode(self) -> list[Chunk]:
        """One token of every decoding sequence."""
        chunks = list(self._decoding.values())
        last: list[Sequence] = []
        for chunk in chunks:
            sequence = chunk.sequence
            start = chunk.start = sequence.computed
            sequence.computed = start + 1
            sequence.drawn = drawn = start + 2
            sequence.in_flight += 1
            if drawn == sequence.max_length:
                last.append(sequence)
        for sequence in last:
            del self._decoding[sequence.serial]
            self._drain(sequence)
        return chunks

    def _prompt_budget(self) -> int:
        """Tokens left for prompts that start now."""
        due = sum(_left(sequence) for sequence in self._prefilling if sequence.rank == 0)
        return self.limits.batch_tokens - len(self._decoding) - due

    def _prefill(self, chunks: list[Chunk], budget: int) -> int:
        """Chunks of prompts that have pages, in their order. Returns what is left of the budget."""
        done = 0
        for sequence in self._prefilling:
            if budget == 0:
                break
            length = min(budget, _left(sequence))
            chunk = Chunk(sequence, sequence.computed, length, length == _left(sequence))
            chunks.append(chunk)
            budget -= length
            self.queued_tokens -= length
            sequence.computed += length
            sequence.in_flight += 1
            if chunk.samples:
                done += 1
                sequence.drawn += 1
        for sequence in self._prefilling[:done]:
            if sequence.drawn == sequence.max_length:
                self._drain(sequence)
            else:
                sequence.state = State.DECODE
                self._decoding[sequence.serial] = Chunk(sequence, sequence.computed, 1, samples=True, from_device=True)
        del self._prefilling[:done]
        return budget

    def _drain(self, sequence: Sequence) -> None:
        sequence.state = State.DRAINED
        self._drained[sequence.serial] = sequence
        # Its lane is named by the batch being planned, so another may have it from the next one on.
        self._spent.append(sequence)

    # Starting and setting back

    def _admit(self, rank: int, budget: int, started: list[int]) -> None:
        """Start waiting sequences of a rank in their order, as long as there are tokens, lanes and pages for them."""
        while budget > 0 and (head := self._waiting.first(rank)) is not None:
            attempt = (head.serial, self.pages.releases, len(self._lanes))
            # A sequence that was set back starts again once all its tokens are on the host.
            if head.in_flight or attempt == self._blocked:
                return
            found = self._pages_to_start(head)
            if found is None and rank == 0:
                before = len(self._decoding)
                found = self._yielded_by_bulk(head)
                budget += before - len(self._decoding)
            if found is None:
                self._blocked = (head.serial, self.pages.releases, len(self._lanes))
                return
            self._waiting.pop(rank)
            self._start(head, found)
            budget -= _left(head)
            if head.preemptions == 0:
                started.append(head.request.id)

    def _pages_to_start(self, head: Sequence) -> list[int] | None:
        """The pages found for a waiting sequence, if a lane and all other pages it needs now are there; else None."""
        if not self._lanes:
            return None
        # At least the last token is computed, and into a page of its own: full pages are never written to.
        found = self.pages.match(head.ids, head.digests, (head.known - 1) // self.limits.page_size)
        missing = self.limits.pages_for(head.known) - len(found) + self._headroom(self.running)
        return found if self.pages.available_beside(found) >= missing else None

    def _headroom(self, running: int) -> int:
        return max(running, self.pages.total // HEADROOM_SHARE) if running else 0

    def _yielded_by_bulk(self, head: Sequence) -> list[int] | None:
        """As `_pages_to_start`, with what running BULK sequences give up for it: all it takes, or nothing."""
        bulk = sorted((s for s in self._runners() if s.rank > 0), key=_age)
        gain = sum(self.pages.held_once(sequence.pages) for sequence in bulk)
        wanted = self.limits.pages_for(head.known) + self._headroom(self.running - len(bulk))
        if self.pages.available + gain < wanted:
            return None
        while bulk:
            self._preempt(bulk.pop())
            found = self._pages_to_start(head)
            if found is not None:
                return found
        return None

    def _start(self, sequence: Sequence, found: list[int]) -> None:
        limits = self.limits
        self.pages.share(found)
        total = limits.pages_for(sequence.known)
        sequence.pages = found + self.pages.take(total - len(found))
        sequence.capacity = total * limits.page_size
        sequence.kept = len(found)
        sequence.computed = len(found) * limits.page_size
        self.queued_tokens -= sequence.computed
        if sequence.preemptions == 0:
            sequence.cached_tokens = sequence.computed
        sequence.lane = self._lanes.pop()
        sequence.state = State.PREFILL
        insort(self._prefilling, sequence, key=_age)

    def _preempt(self, sequence: Sequence) -> None:
        """Take lane and pages from a running sequence; it waits at its old place, with the tokens it has."""
        self.metrics.preemptions += 1
        self.metrics.recomputed_tokens += sequence.computed
        self.queued_tokens += sequence.known - _left(sequence)
        self._leave(sequence)
        self._release_pages(sequence)
        self._release_lane(sequence)
        sequence.state = State.WAITING
        sequence.computed = 0
        sequence.preemptions += 1
        if sequence.rank and sequence.preemptions >= BULK_PREEMPTIONS:
            self._promote(sequence)
        self._waiting.push(sequence)

    def _watch_bulk(self) -> None:
        """Count the batches that left out the oldest BULK sequence."""
        oldest = next(iter(self._bulk.values()))
        mark = (oldest.serial, oldest.computed)
        if mark != self._bulk_mark:
            self._bulk_mark, self._bulk_passed_over = mark, 0
            return
        self._bulk_passed_over += 1
        if self._bulk_passed_over >= BULK_PATIENCE:
            waits = oldest.state is State.WAITING
            if waits:
                self._waiting.forget_one()
            self._promote(oldest)
            if waits:
                self._waiting.push(oldest)
            else:
                self._prefilling.sort(key=_age)

    def _promote(self, sequence: Sequence) -> None:
        self.metrics.promotions += 1
        del self._bulk[sequence.serial]
        sequence.rank = 0

    # Ending

    def _is_end(self, sequence: Sequence, token: int) -> bool:
        sampling = sequence.request.sampling
        if token not in sampling.stop_ids and (sampling.ignore_eos or token not in self._end_ids):
            return False
        return sequence.known - sequence.prompt_length > sampling.min_new_tokens

    def _keep(self, sequence: Sequence, computed: int) -> None:
        """Offer the full pages among the first `computed` tokens to others."""
        full = min(computed // self.limits.page_size, len(sequence.pages))
        for index in range(sequence.kept, full):
            digest = self.pages.digest_of(sequence.ids, sequence.digests, index)
            self.pages.keep(sequence.pages[index], digest)
        sequence.kept = full

    def _end(self, sequence: Sequence) -> None:
        self.queued_tokens -= _left(sequence)
        self._leave(sequence)
        sequence.finished = True
        self._release_pages(sequence)
        self._release_lane(sequence)
        del self._open[sequence.request.id]
        self._bulk.pop(sequence.serial, None)
        self._deadlines.sweep(len(self._open))
        self._stuck = False

    def _leave(self, sequence: Sequence) -> None:
        """Take a sequence out of the collection its state names."""
        if sequence.state is State.DECODE:
            del self._decoding[sequence.serial]
        elif sequence.state is State.DRAINED:
            del self._drained[sequence.serial]
        elif sequence.state is State.PREFILL:
            self._prefilling.remove(sequence)
        else:
            self._waiting.forget_one()

    def _release_pages(self, sequence: Sequence) -> None:
        if sequence.pages:
            self.pages.release(sequence.pages)
            sequence.pages = []
            sequence.capacity = sequence.kept = 0

    def _release_lane(self, sequence: Sequence) -> None:
        if sequence.lane:
            self._lanes.append(sequence.lane)
            sequence.lane = 0

    def _runners(self) -> Iterable[Sequence]:
        yield from self._prefilling
        for chunk in self._decoding.values():
            yield chunk.sequence


def _age(sequence: Sequence) -> tuple[int, int]:
    """Smaller is served earlier and set back later."""
    return sequence.rank, sequence.serial


def _left(sequence: Sequence) -> int:
    """Tokens that are known and in no planned batch."""
    return sequence.known - sequence.computed if sequence.state <= State.PREFILL else 0

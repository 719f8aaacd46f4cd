"""The sequences that have a lane and pages: what each of them adds to a batch, and how they get room and lose it.

One stream: batches run on the device in the order they were planned. So a page, a lane or a row of recurrent state may
go to another sequence as soon as no *later* batch is planned to use it, even while a launched one still writes to it:
whoever gets it uses it in a later batch. Plain Python; knows neither who waits nor why.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator

from rose.engine.generation.limits import GenerationLimits
from rose.engine.generation.pages import PagePool
from rose.engine.generation.saved_states import SavedStates
from rose.engine.generation.sequence import BatchPlan, Chunk, Sequence, State, StateSave

# Pages left free when a sequence starts beside others: one for each running one, so that all can go on for a while,
# and at least this share of the cache.
HEADROOM_SHARE = 100


def age(sequence: Sequence) -> tuple[int, int]:
    """Smaller is served earlier and set back later."""
    return sequence.rank, sequence.serial


class Running:
    """Lanes, pages, and who has them.

    Attributes:
        pages: the cache's pages.
        states: rows of recurrent state behind beginnings that may come again.
    """

    def __init__(self, limits: GenerationLimits) -> None:
        self._limits = limits
        self._page_size = limits.page_size
        self.pages = PagePool(limits.num_pages, limits.page_size, reuse=limits.prefix_cache)
        self._prefilling: list[Sequence] = []
        self._decoding: dict[int, Chunk] = {}
        self._drained: dict[int, Sequence] = {}
        self._spent: list[Sequence] = []
        self._lanes = list(range(limits.max_running, 0, -1))
        self.states = SavedStates(limits.max_running + 1, limits.saved_states)
        # Of the batch that is planned now.
        self._resumes: list[tuple[int, int]] = []
        self._saves: list[StateSave] = []
        self._cut: set[int] = set()

    def __len__(self) -> int:
        """Sequences that have tokens left to plan."""
        return len(self._prefilling) + len(self._decoding)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._prefilling
        for chunk in self._decoding.values():
            yield chunk.sequence

    @property
    def holders(self) -> int:
        """The same, and those whose last tokens are on their way."""
        return len(self) + len(self._drained)

    @property
    def due_tokens(self) -> int:
        """Tokens of prompts that are in no planned batch."""
        return sum(sequence.known - sequence.computed for sequence in self._prefilling)

    @property
    def free_lanes(self) -> int:
        return len(self._lanes)

    def prompt_budget(self) -> int:
        """Tokens that the next batch has for prompts of rank 0 that start now."""
        due = sum(sequence.known - sequence.computed for sequence in self._prefilling if sequence.rank == 0)
        return self._limits.batch_tokens - len(self._decoding) - due

    def recycle_lanes(self) -> None:
        """Take back the lanes of sequences that drew their last token in the batch before the one planned now."""
        for sequence in self._spent:
            self._release_lane(sequence)
        self._spent.clear()
        self._cut.clear()

    def grow(self) -> list[Sequence]:
        """A page for every decoding sequence that has filled its last one.

        Returns:
            The sequences that were set back for that, youngest first.
        """
        short = [c.sequence for c in self._decoding.values() if c.sequence.computed >= c.sequence.capacity]
        lost: list[Sequence] = []
        for sequence in short:
            if sequence.state is State.DECODE and self._find_page(sequence, lost):
                sequence.pages += self.pages.take(1)
                sequence.capacity += self._page_size
        return lost

    def _find_page(self, sequence: Sequence, lost: list[Sequence]) -> bool:
        """Set others back until a page is free; False if the youngest is the sequence itself."""
        if not self.pages.available:
            # Nothing more is computed for these.
            for drained in self._drained.values():
                self._release_pages(drained)
        while not self.pages.available:
            youngest = max(self, key=age)
            self.set_back(youngest)
            lost.append(youngest)
            if youngest is sequence:
                return False
        return True

    def decode(self, only: Sequence | None = None) -> list[Chunk]:
        """One token of every decoding sequence, or of one; all of them have room for it."""
        chunks = list(self._decoding.values()) if only is None else [self._decoding[only.serial]]
        last: list[Sequence] = []
        for chunk in chunks:
            sequence = chunk.sequence
            start = chunk.start = sequence.computed
            sequence.computed = start + 1
            sequence.drawn = drawn = start + 2
            sequence.in_flight += 1
            if drawn == sequence.max_length:
                last.append(sequence)
        if self.states:
            for chunk in chunks:
                self._save(chunk.sequence, decoded=True)
        for sequence in last:
            del self._decoding[sequence.serial]
            self._drain(sequence)
        return chunks

    def prefill(self, chunks: list[Chunk], budget: int, only: Sequence | None = None) -> int:
        """Append chunks of prompts, in the order of their age, or of one. Returns what is left of the budget."""
        done: list[Sequence] = []
        for sequence in self._prefilling if only is None else (only,):
            if budget <= 0:
                break
            if sequence.serial in self._cut:
                continue
            left = sequence.known - sequence.computed
            length = min(budget, left)
            if self.states:
                length = self._until_saved(sequence, length)
            chunks.append(Chunk(sequence, sequence.computed, length, samples=length == left))
            budget -= length
            sequence.computed += length
            sequence.in_flight += 1
            if self.states:
                self._resume(sequence)
                self._save(sequence, decoded=False)
            if length == left:
                done.append(sequence)
            else:
                self._cut.add(sequence.serial)
        for sequence in done:
            self._prefilling.remove(sequence)
            sequence.drawn += 1
            if sequence.drawn == sequence.max_length:
                self._drain(sequence)
            else:
                sequence.state = State.DECODE
                self._decoding[sequence.serial] = Chunk(sequence, sequence.computed, 1, samples=True, from_device=True)
        return budget

    def pages_to_start(self, sequence: Sequence) -> list[int] | None:
        """The pages found for a waiting sequence, if a lane and all other pages it needs now are there; else None."""
        if not self._lanes:
            return None
        # At least the last token is computed, and into a page of its own: full pages are never written to.
        found = self.pages.match(sequence.ids, sequence.digests, (sequence.known - 1) // self._page_size)
        if self.states:
            while found and sequence.digests[len(found) - 1] not in self.states:
                found.pop()
        missing = self._limits.pages_for(sequence.known) - len(found) + self._headroom(len(self))
        return found if self.pages.available_beside(found) >= missing else None

    def could_start(self, sequence: Sequence, givers: list[Sequence]) -> bool:
        """Whether lanes and pages of these running sequences would be enough for a waiting one."""
        gain = sum(self.pages.held_once(giver.pages) for giver in givers)
        wanted = self._limits.pages_for(sequence.known) + self._headroom(len(self) - len(givers))
        return bool(givers) and self.pages.available + gain >= wanted

    def start(self, sequence: Sequence, found: list[int]) -> None:
        """Give a waiting sequence a lane, the pages that `pages_to_start` found, and the others it needs now."""
        self.pages.share(found)
        total = self._limits.pages_for(sequence.known)
        sequence.pages = found + self.pages.take(total - len(found))
        sequence.capacity = total * self._page_size
        sequence.kept = len(found)
        sequence.computed = sequence.saved = len(found) * self._page_size
        if self.states and found:
            sequence.resumes = self.states.want(sequence.digests[len(found) - 1])
        if sequence.preemptions == 0:
            sequence.cached_tokens = sequence.computed
        sequence.lane = self._lanes.pop()
        sequence.state = State.PREFILL
        insort(self._prefilling, sequence, key=age)

    def set_back(self, sequence: Sequence) -> None:
        """Take lane and pages from a running sequence; it waits, with the tokens it has as its prompt."""
        self.leave(sequence)
        sequence.state = State.WAITING
        sequence.computed = 0
        sequence.preemptions += 1

    def leave(self, sequence: Sequence) -> None:
        """Take back whatever a sequence that is not waiting has."""
        if sequence.state is State.DECODE:
            del self._decoding[sequence.serial]
        elif sequence.state is State.DRAINED:
            del self._drained[sequence.serial]
        else:
            self._prefilling.remove(sequence)
        self._release_pages(sequence)
        self._release_lane(sequence)
        if sequence.resumes:
            self.states.unwant(sequence.resumes)
            sequence.resumes = 0

    def aged(self) -> None:
        """The rank of a sequence has changed."""
        self._prefilling.sort(key=age)

    def keep(self, sequence: Sequence, computed: int) -> None:
        """Offer the full pages among the first `computed` tokens to others: their batch has ended well."""
        full = min(computed // self._page_size, len(sequence.pages))
        for index in range(sequence.kept, full):
            digest = self.pages.digest_of(sequence.ids, sequence.digests, index)
            self.pages.keep(sequence.pages[index], digest)
        sequence.kept = full

    def planned(self, plan: BatchPlan) -> None:
        """Hand a plan the states to copy before and after it."""
        plan.resumes, self._resumes = self._resumes, []
        plan.saves, self._saves = self._saves, []

    def settle(self, saves: Iterable[StateSave]) -> None:
        """Offer the states that a batch left behind: it has ended well. Not those of sequences that have ended, or
        whose tokens mean nothing."""
        for save in saves:
            sequence = save.sequence
            if sequence.finished or sequence.void:
                self.states.give_back(save.row)
                continue
            digest = self._digest(sequence, save.tokens)
            kept = self.states.keep(save.row, digest)
            if save.decoded and kept:
                # Of a text that grows only its latest state is worth a row.
                if sequence.latest_state is not None:
                    self.states.forget([sequence.latest_state])
                sequence.latest_state = digest

    def unsettle(self, saves: Iterable[StateSave]) -> None:
        """Their batch has failed."""
        for save in saves:
            self.states.give_back(save.row)

    def forget(self, sequence: Sequence) -> None:
        """Let nobody find what a sequence has computed."""
        self.pages.forget(sequence.pages)
        self.states.forget(sequence.digests)

    def _until_saved(self, sequence: Sequence, length: int) -> int:
        """Tokens of a chunk of up to `length`: fewer where it can end with a page, behind which a state is worth
        saving. That of the last token is nobody's to find: one token at least is always computed."""
        size, start = self._page_size, sequence.computed
        end = min((start + length) // size, (sequence.known - 1) // size) * size
        worth = end > start and end - sequence.saved >= self._limits.state_tokens
        return end - start if worth and self._digest(sequence, end) not in self.states else length

    def _save(self, sequence: Sequence, *, decoded: bool) -> None:
        """Plan to keep the state that a sequence has behind the batch planned now, if that is worth it."""
        tokens = sequence.computed
        if tokens % self._page_size or tokens - sequence.saved < self._limits.state_tokens:
            return
        sequence.saved = tokens
        if not decoded and self._digest(sequence, tokens) in self.states:
            return
        row = self.states.take()
        if row is not None:
            self._saves.append(StateSave(sequence, row, sequence.lane, tokens, decoded))

    def _resume(self, sequence: Sequence) -> None:
        if sequence.resumes:
            self._resumes.append((sequence.resumes, sequence.lane))
            self.states.unwant(sequence.resumes)
            sequence.resumes = 0

    def _digest(self, sequence: Sequence, tokens: int) -> bytes:
        """Of the leading whole pages of a sequence, which are known."""
        last = tokens // self._page_size - 1
        for index in range(len(sequence.digests), last + 1):
            self.pages.digest_of(sequence.ids, sequence.digests, index)
        return sequence.digests[last]

    def _headroom(self, others: int) -> int:
        return max(others, self.pages.total // HEADROOM_SHARE) if others else 0

    def _drain(self, sequence: Sequence) -> None:
        sequence.state = State.DRAINED
        self._drained[sequence.serial] = sequence
        # The batch planned now names its lane, so another may have it from the next one on.
        self._spent.append(sequence)

    def _release_pages(self, sequence: Sequence) -> None:
        if sequence.pages:
            self.pages.release(sequence.pages)
            sequence.pages = []
            sequence.capacity = 0

    def _release_lane(self, sequence: Sequence) -> None:
        if sequence.lane:
            self._lanes.append(sequence.lane)
            sequence.lane = 0

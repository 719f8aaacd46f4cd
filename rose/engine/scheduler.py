"""Which waiting sequences make up the next batch.

First come, first served among equals, in rounds: every open request gets one part a round, so that a job of ten
thousand sequences does not sit in front of a short query. Requests that may share a batch (same outputs, all with spans
or all without) wait in one lane; the lane whose first request has waited longest goes next. Plain Python; knows neither
devices nor models.

While a single query waits, a batch holds at most `online_tokens` and a larger request gets a quarter of that a round;
otherwise a batch holds `bulk_tokens` and a part may fill all of it, so that equal jobs end one after another, not
all at the end. Cost a batch: O(log n) a part, whatever the size of the requests.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import deque
from typing import NamedTuple

from rose.config import EngineConfig
from rose.engine.open_request import OpenRequest, Run, Work
from rose.engine.request import Priority, Request
from rose.engine.validation import check_ids, check_request
from rose.errors import DeadlineExceeded, RoseError

# Requests looked at past the first that does not fit into what is left of a batch.
LOOK_PAST = 8
# While single queries wait, a larger request gets 1 / PARTS of the batch a round: up to three of them open, a query
# that arrives still joins the very next batch.
PARTS = 4
# So long after a single query another one is expected, and larger requests get `shared_tokens` a batch.
EXPECT_SECONDS = 0.25
# Batches class BULK may be passed over before it gets one part: it yields, but never starves.
BULK_PATIENCE = 16
# Lanes of a class that are kept although nothing waits in them; a lane for each set of outputs somebody once asked for.
MAX_LANES = 32


class LaneKey(NamedTuple):
    """What requests must have in common to share a batch. `alone`: they do not, each sequence is one."""

    outputs: tuple[str, ...]
    spans: bool
    alone: bool


class Lane:
    """Requests that may share a batch, in the order of their turns."""

    def __init__(self, key: LaneKey) -> None:
        self.key = key
        self.ring: deque[OpenRequest] = deque()
        self._closed = 0

    def first(self) -> OpenRequest | None:
        ring = self.ring
        while ring:
            request = ring[0]
            if not request.closed:
                return request
            ring.popleft()
            self._closed -= 1
        return None

    def forget_one(self) -> None:
        """One request in the ring was closed. Searching for it would cost O(n): they are swept out by the half."""
        self._closed += 1
        if self._closed > 64 and 2 * self._closed > len(self.ring):
            self.ring = deque(request for request in self.ring if not request.closed)
            self._closed = 0


class Draft:
    """A batch being filled."""

    def __init__(self, max_tokens: int, max_sequences: int, shared_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._shared_tokens = shared_tokens
        self._max_sequences = max_sequences
        self.runs: list[Run] = []
        self.tokens = 0
        self.sequences = 0

    @property
    def full(self) -> bool:
        return self.tokens >= self._max_tokens or self.sequences >= self._max_sequences

    def take(self, request: OpenRequest, divisor: int) -> bool:
        """Take one part of `request`: at most 1 / divisor of the batch, but at least one sequence if that fits; of a
        larger request no more than makes the batch `shared_tokens` long.

        A sequence longer than any batch is taken alone.

        Returns:
            Whether the request has had its part; False if less was left of this batch than that.
        """
        most_tokens = self._max_tokens if request.single else self._shared_tokens
        room, places = most_tokens - self.tokens, self._max_sequences - self.sequences
        part, part_places = -(-self._max_tokens // divisor), -(-self._max_sequences // divisor)
        first, ends = request.next, request.ends
        most = first + min(places, part_places)
        end = ends[first] + min(room, part)
        if end >= ends[-1] and most >= len(request.lengths):
            stop = len(request.lengths)
        else:
            stop = bisect_right(ends, end, lo=first) - 1
            if stop == first and (request.lengths[first] <= room or not self.runs):
                stop = first + 1
            stop = min(stop, most)
        if stop > first:
            self.runs.append(request.take(stop))
            self.tokens += ends[stop] - ends[first]
            self.sequences += stop - first
        return stop > first and room >= part and places >= part_places


class Scheduler:
    """The queue of one engine.

    Attributes:
        queued_tokens, queued_sequences: what waits, that is, was added and neither batched nor dropped.
    """

    def __init__(self, config: EngineConfig, vocab_size: int, type_vocab_size: int | None = None) -> None:
        """
        Args:
            type_vocab_size: token types the model has, or None where nobody knows.
        """
        self._config = config
        self._vocab_size = vocab_size
        self._type_vocab_size = type_vocab_size
        self._open: dict[int, OpenRequest] = {}
        self._lanes: dict[Priority, dict[tuple[tuple[str, ...], bool, bool], Lane]] = {p: {} for p in Priority}
        self._deadlines: list[tuple[float, int, int]] = []
        self._serial = 0
        self._singles = 0
        self._bulk_passed_over = 0
        self._single_at = -math.inf
        self._now = -math.inf
        self.queued_tokens = 0
        self.queued_sequences = 0

    @property
    def queued_requests(self) -> int:
        return len(self._open)

    @property
    def single_waits(self) -> bool:
        return self._singles > 0

    @property
    def budget(self) -> int:
        """Most tokens of the next batch."""
        if self._singles:
            return self._config.online_tokens
        return self._shared_tokens

    @property
    def _shared_tokens(self) -> int:
        """Most tokens of a batch that holds larger requests."""
        config = self._config
        if self._now - self._single_at < EXPECT_SECONDS:
            return min(config.shared_tokens, config.online_tokens, config.bulk_tokens)
        return config.online_tokens if self._singles else config.bulk_tokens

    @property
    def full(self) -> bool:
        """Whether waiting longer could not make the next batch larger."""
        return self.queued_tokens >= self.budget or self.queued_sequences >= self._config.max_sequences

    def at(self, now: float) -> None:
        """Tell the time by which `add` and `next_batch` go."""
        self._now = now

    def add(self, request: Request, outputs: tuple[str, ...]) -> None:
        """Queue a request.

        Args:
            outputs: what to compute for it; only requests with the same outputs share a batch.

        Raises:
            InvalidInput: no sequence, an empty one, one longer than max_tokens, an id outside the vocabulary, token
                types or spans that do not fit, or a request id that is open already. Nothing is queued then.
        """
        config = self._config
        lengths = check_request(request, config.max_tokens, self._open, self._type_vocab_size)
        few = min(config.single_tokens, config.online_tokens)
        single = request.priority is Priority.ONLINE and (len(lengths) == 1 or sum(lengths) <= few)
        opened = OpenRequest(request, outputs, lengths, self._next_serial(), single=single)
        if not request.checked:
            check_ids(opened, self._vocab_size)
        self._open[request.id] = opened
        self._lane_of(opened).ring.append(opened)
        self.queued_tokens += opened.ends[-1]
        self.queued_sequences += len(lengths)
        if single:
            self._singles += 1
            self._single_at = self._now
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, opened.serial, request.id))

    def abort(self, request_id: int) -> bool:
        """Drop what waits of a request. Returns whether anything did."""
        request = self._open.get(request_id)
        if request is None:
            return False
        self._drop(request)
        return True

    def expire(self, now: float) -> dict[int, RoseError]:
        """Drop every request whose deadline has passed, wherever it waits; request id -> error."""
        expired: dict[int, RoseError] = {}
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, serial, request_id = heapq.heappop(self._deadlines)
            request = self._open.get(request_id)
            if request is not None and request.serial == serial:
                expired[request_id] = DeadlineExceeded(
                    f"the deadline passed {(now - deadline) * 1000:.0f} ms ago with {request.sequences_left} of"
                    f" {len(request.lengths)} sequences not yet run"
                )
                self._drop(request)
        return expired

    def next_deadline(self) -> float | None:
        """The earliest deadline of what waits."""
        while self._deadlines:
            deadline, serial, request_id = self._deadlines[0]
            request = self._open.get(request_id)
            if request is not None and request.serial == serial:
                return deadline
            heapq.heappop(self._deadlines)
        return None

    def next_batch(self) -> Work | None:
        """The sequences to run next, or None if nothing waits. Call `expire` before."""
        if len(self._open) == 1 and (only := self._only()) is not None:
            return only
        online, bulk = self._next_lane(Priority.ONLINE), self._next_lane(Priority.BULK)
        overdue = bulk is not None and self._bulk_passed_over >= BULK_PATIENCE
        leader = bulk if overdue or online is None else online
        if leader is None:
            return None
        oldest_bulk = None if bulk is None else bulk.first()
        waits_at = -1 if oldest_bulk is None else oldest_bulk.next
        sequences = 1 if leader.key.alone else self._config.max_sequences
        draft = Draft(self.budget, sequences, self._shared_tokens)
        if overdue or leader.key.alone:
            self._fill(draft, leader, turns=1)
        if not leader.key.alone:
            for lanes in self._lanes.values():
                companions = lanes.get(leader.key)
                if companions is not None:
                    self._fill(draft, companions)
        self.queued_tokens -= draft.tokens
        self.queued_sequences -= draft.sequences
        # The oldest one counts: others may fit into what ONLINE leaves batch after batch.
        passed_over = oldest_bulk is not None and oldest_bulk.next == waits_at
        self._bulk_passed_over = self._bulk_passed_over + 1 if passed_over else 0
        return Work(draft.runs, leader.key.outputs)

    def _only(self) -> Work | None:
        """A query that is all that waits: whatever the budgets and turns, it is the batch."""
        request = next(iter(self._open.values()))
        if len(request.lengths) > 1:
            return None
        lane = self._lane_of(request)
        lane.first()
        lane.ring.popleft()
        work = Work([request.take(1)], request.outputs)
        self._close(request)
        self.queued_tokens = self.queued_sequences = self._bulk_passed_over = 0
        return work

    def _fill(self, draft: Draft, lane: Lane, turns: int | None = None) -> None:
        cut_short: list[OpenRequest] = []
        while turns != 0 and len(cut_short) < LOOK_PAST and not draft.full and (request := lane.first()) is not None:
            lane.ring.popleft()
            had_its_part = draft.take(request, 1 if request.single or not self._singles else PARTS)
            if request.next == len(request.lengths):
                self._close(request)
            elif had_its_part:
                request.turn = self._next_serial()
                lane.ring.append(request)
            else:
                cut_short.append(request)
            turns = None if turns is None else turns - 1
        if cut_short:
            lane.ring.extendleft(reversed(cut_short))

    def _next_lane(self, priority: Priority) -> Lane | None:
        lanes = self._lanes[priority]
        best: Lane | None = None
        turn = 0
        for lane in lanes.values():
            first = lane.first()
            if first is not None and (best is None or first.turn < turn):
                best, turn = lane, first.turn
        if len(lanes) > MAX_LANES:
            self._lanes[priority] = {key: lane for key, lane in lanes.items() if lane.ring}
        return best

    def _lane_of(self, request: OpenRequest) -> Lane:
        lanes = self._lanes[request.priority]
        # A bare tuple is the same key, made at a fifth of the price.
        lane = lanes.get((request.outputs, request.spans is not None, request.alone))
        if lane is None:
            key = LaneKey(request.outputs, request.spans is not None, request.alone)
            lane = lanes[key] = Lane(key)
        return lane

    def _drop(self, request: OpenRequest) -> None:
        self.queued_tokens -= request.tokens_left
        self.queued_sequences -= request.sequences_left
        lane = self._lane_of(request)
        self._close(request)
        lane.forget_one()

    def _close(self, request: OpenRequest) -> None:
        request.closed = True
        request.release()
        del self._open[request.id]
        self._singles -= request.single
        # Deadlines of closed requests stay in the heap: without this a long default deadline would keep millions.
        if len(self._deadlines) > 64 + 2 * len(self._open):
            serials = {opened.serial for opened in self._open.values()}
            self._deadlines = [entry for entry in self._deadlines if entry[1] in serials]
            heapq.heapify(self._deadlines)

    def _next_serial(self) -> int:
        self._serial += 1
        return self._serial

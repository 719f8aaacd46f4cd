"""The batches in flight, oldest first, and when the next one should follow.

A launched batch can neither grow nor be cancelled, so the second is launched only when waiting could not improve it, or
when the device is about to need it. Knows tickets and times; knows neither requests nor devices.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from rose.engine.buckets import BatchKey
from rose.engine.estimate import Durations
from rose.engine.execution import Ticket

# The second batch is launched this long before the first should end: staging and launching take about 0.1 ms, and an
# estimate is off by a few percent.
LEAD_SECONDS = 0.3e-3
LEAD_FRACTION = 0.1


class _InFlight(NamedTuple):
    ticket: Ticket[object]
    key: BatchKey
    launched_at: float


class Pipeline:
    """At most `depth` batches in flight.

    Attributes:
        failed: batches whose forward raised.
        device_seconds: that batches which ended took the device, in all.
    """

    def __init__(self, depth: int, clock: Callable[[], float]) -> None:
        self._depth = depth
        self._clock = clock
        self._in_flight: deque[_InFlight] = deque()
        self._durations = Durations()
        self.failed = 0
        self.device_seconds = 0.0

    def __len__(self) -> int:
        self.retire()
        return len(self._in_flight)

    def push(self, ticket: Ticket[object], key: BatchKey) -> None:
        self._in_flight.append(_InFlight(ticket, key, self._clock()))

    def retire(self) -> None:
        """Take out what has finished and learn how long it took."""
        while self._in_flight and self._in_flight[0].ticket.ready():
            ended = self._in_flight.popleft()
            seconds = ended.ticket.seconds()
            if seconds is None:
                self.failed += 1
            else:
                self.device_seconds += seconds
                self._durations.observe(ended.key, seconds)

    def expect(self, key: BatchKey) -> float | None:
        """Seconds a batch of `key` should take the device, or None if nothing of its size has run yet."""
        return self._durations.expect(key)

    @property
    def expected_end(self) -> float | None:
        """When the oldest batch should end; None if nothing runs or nothing of its size has run before."""
        self.retire()
        return self._in_flight[0].ticket.expected_end if self._in_flight else None

    @property
    def oldest_seconds(self) -> float:
        """Age of the oldest batch; 0 if nothing runs."""
        self.retire()
        return self._clock() - self._in_flight[0].launched_at if self._in_flight else 0.0

    def launch_at(self, *, full: bool, single_waits: bool) -> float:
        """From when on the next batch may be launched; -inf: at once, inf: not before one has finished.

        Args:
            full: the next batch would be as large as it may be.
            single_waits: it would hold a query somebody waits for.
        """
        self.retire()
        if not self._in_flight:
            return -math.inf
        if len(self._in_flight) >= self._depth:
            return math.inf
        first = self._in_flight[0]
        end = first.ticket.expected_end
        # A full batch of single queries cannot get any better. One of bulk work waits until the device needs it: a
        # query that arrives meanwhile still goes before it.
        if full and (single_waits or end is None):
            return -math.inf
        if end is None:
            return math.inf
        return end - max(LEAD_SECONDS, LEAD_FRACTION * (self._durations.expect(first.key) or 0.0))

"""Waiting for whichever comes first: a socket, a finished batch, a point in time.

An executor with a descriptor (CPU) is watched by the poller like a socket. One without (CUDA) has only an event to ask:
with a batch in flight that ends soon the thread asks event and sockets in turn, else it first sleeps until shortly
before the expected end, waking for sockets. An epoll timeout is a whole number of milliseconds, so finer sleeps wait in
select() for the epoll descriptor itself, which is readable whenever one of its sockets is.
Knows clocks and descriptors; knows neither requests nor results.
"""

from __future__ import annotations

import ctypes
import math
import select
import time
from collections.abc import Callable

# A batch that ends within this time is not slept through. A processor that went to sleep wakes up late and with cold
# caches: on an H200 host answers over the link left 0.55 to 0.8 ms after those of the same engine in a process that
# never sleeps, at every length.
SPIN_S = 3e-3
# How early a longer sleep ends: a sleep of 300 µs was measured to take 360 µs at the median, 405 µs at p99.
EARLY_S = 500e-6
# Sockets are asked this long after the last batch before the thread blocks: who sends one query after the other finds
# the server awake. An idle server never gets here.
LINGER_S = 200e-6
# Polling goes on this long past the expected end, then gives way to short sleeps: a batch that is late by more was
# held up by something, and a core should not be.
LATE_S = 2e-3
# The short sleep, for late batches and for shapes nobody has timed yet. Costs about a tenth of a core.
SLICE_S = 100e-6
# How often the event is asked between two looks at the sockets: about 50 µs. A look is a system call, which takes
# several times as long as an event to answer and leaves the caches to the kernel just before the answer has to go out.
ASKS = 32
# select() takes descriptors below this only.
SELECT_LIMIT = 1024

PR_SET_TIMERSLACK = 29

Events = list[tuple[int, int]]


class Waiter:
    """The poller and the clockwork around it."""

    def __init__(self) -> None:
        self.poller = select.epoll()
        self._awake_until = 0.0

    def close(self) -> None:
        self.poller.close()

    def wait(self, timeout_s: float | None) -> Events:
        """Block until a descriptor is ready or `timeout_s` has passed (rounded up to milliseconds); None: for ever."""
        while time.monotonic() < self._awake_until:
            if events := self.poller.poll(0):
                return events
        return self.poller.poll(-1 if timeout_s is None else max(timeout_s, 0.0))

    def wait_for_batch(self, ready: Callable[[], bool], expected_end: float | None, timeout_s: float | None) -> Events:
        """Wait for a batch that can only be asked, for sockets, or for `timeout_s` to pass.

        Args:
            ready: whether the batch has finished.
            expected_end: time.monotonic() at which it should, or None.
        """
        start = time.monotonic()
        timeout = math.inf if timeout_s is None else start + timeout_s
        if expected_end is None or start > expected_end + LATE_S:
            self._sleep(min(SLICE_S, timeout - start))
            return self.poller.poll(0)
        if expected_end - start > SPIN_S:
            self._sleep(min(expected_end - EARLY_S, timeout) - start)
        until = min(expected_end + LATE_S, timeout)
        while not (events := self.poller.poll(0)) and (now := time.monotonic()) < until:
            self._awake_until = now + LINGER_S
            for _ in range(ASKS):
                if ready():
                    return events
        return events

    def _sleep(self, seconds: float) -> None:
        if seconds <= 0:
            return
        descriptor = self.poller.fileno()
        if descriptor < SELECT_LIMIT:
            select.select((descriptor,), (), (), seconds)
        elif seconds >= 2e-3:
            # Only a program with a thousand open files before its server gets here. Whole milliseconds, rounded down.
            self.poller.poll(int(seconds * 1e3 - 1) * 1e-3)


def sharpen_sleep() -> None:
    """Let this thread's sleeps end on time instead of up to 50 µs late, which is what Linux adds to save power."""
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(1000), 0, 0, 0)

"""When a loaded engine may be timed: once no batch of a new shape has come for a while.

The first run of a shape may compile kernels and the second captures a graph; under load either stands in the way of
every request that is open. Which shapes come depends on how requests fall together, so no warm-up knows them all: the
load itself is watched. Knows counters and clocks; knows neither loads nor clients.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from rose.errors import DeadlineExceeded, RoseError

POLL_S = 0.1
# First runs of a shape, captures of it, captures that failed.
FIRSTS = ("graph_new_keys", "graph_captures", "graph_failed")


class NotSteadyError(RoseError):
    """New shapes kept coming: what could be timed is the start of serving, not serving, and there is no row."""


def first_runs(counters: Mapping[str, int]) -> int:
    """Batches so far that were the first, or the first captured, of their shape.

    Raises:
        KeyError: an engine that does not tell one of them, whose windows nothing would be known of.
    """
    return sum(counters[name] for name in FIRSTS)


def await_steady(
    counters: Callable[[], Mapping[str, int]] | None,
    quiet_s: float,
    limit_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> float:
    """Wait, under load, until nothing has run for the first time for `quiet_s`; returns the seconds that took.

    An engine that is held up answers when it is free again, with counters that have grown: the wait begins anew then.

    Args:
        counters: the engine's own; None for a server that tells none, for which `quiet_s` is simply waited.
        limit_s: longest wait, at least `quiet_s`.

    Raises:
        NotSteadyError: it was not quiet so long within the limit.
    """
    began = clock()
    if counters is None:
        sleep(quiet_s)
        return clock() - began
    pause = min(POLL_S, max(quiet_s / 10, 1e-3))
    start = seen = _first_runs_so_far(counters)
    since = clock()
    end = since + max(limit_s, quiet_s)
    while clock() - since < quiet_s:
        sleep(pause)
        now = _first_runs_so_far(counters)
        if now is None:
            since = clock()
        elif now != seen:
            start = now if start is None else start
            seen, since = now, clock()
        if clock() > end and clock() - since < quiet_s:
            raise NotSteadyError(_never_quiet(start, seen, clock() - began, quiet_s))
    return clock() - began


def _never_quiet(start: int | None, seen: int | None, took_s: float, quiet_s: float) -> str:
    """Counts from the engine's first answer on; where they never grew, stalls alone made the wait begin anew."""
    if start is None or seen is None or start == seen:
        what = f"the engine was held up again and again, or all of {took_s:.1f} s under load, and told no counters then"
    else:
        what = (
            f"batches of new shapes kept coming: {seen - start} first runs and captures in {took_s:.1f} s under load, "
            f"never {quiet_s:g} s without one"
        )
    return f"{what}; wait longer (--steady-within) or for less (--warm)"


def _first_runs_so_far(counters: Callable[[], Mapping[str, int]]) -> int | None:
    """None where the engine is held up for longer than it is asked."""
    try:
        return first_runs(counters())
    except DeadlineExceeded:
        return None

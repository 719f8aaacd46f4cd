"""When a window begins: quiet under load, a limit, and a stall that nothing hides; on a clock that tests move."""

from __future__ import annotations

import pytest

from rose.bench.fleet import window
from rose.bench.steady import FIRSTS, NotSteadyError, await_steady, first_runs
from rose.errors import DeadlineExceeded
from tests.support.moved_clock import Clock

REQUEST_S = 0.0156


class Engine:
    """Serves 16 clients, each a request of 15.6 ms after the other, and stands still while it compiles.

    Args:
        stalls: (begin, end) on the clock; nothing is answered meanwhile, counters neither.
    """

    def __init__(self, clock: Clock, stalls: list[tuple[float, float]]) -> None:
        self._clock = clock
        self._stalls = stalls

    def counters(self) -> dict[str, int]:
        self._clock.now = self._after(self._clock.now)
        done = sum(begin <= self._clock.now for begin, _ in self._stalls)
        return {
            "graph_new_keys": 3 + done,
            "graph_captures": 7,
            "graph_failed": 0,
            "graph_plain": int(self._clock.now * 50),
        }

    def spans(self, begin: float, end: float) -> list[tuple[float, float]]:
        """Of every request sent from `begin` to `end`."""
        found = []
        for client in range(16):
            start = begin + client * 1e-3
            while start < end:
                found.append((start, start := self._ended(start)))
        return found

    def _ended(self, start: float) -> float:
        end = start + REQUEST_S
        for stall, over in self._stalls:
            if start < over and end > stall:
                end += over - stall
        return end

    def _after(self, now: float) -> float:
        return next((over for stall, over in self._stalls if stall <= now < over), now)


def settle(engine: Engine, clock: Clock, quiet_s: float = 1.0, limit_s: float = 30.0) -> float:
    return await_steady(engine.counters, quiet_s, limit_s, clock=clock, sleep=clock.sleep)


def test_a_window_waits_until_no_new_shape_has_come_for_so_long():
    clock = Clock()
    engine = Engine(clock, [(100.4, 102.9), (103.5, 103.6)])
    took = settle(engine, clock)
    assert clock.now == pytest.approx(104.6, abs=0.15)
    assert took == pytest.approx(clock.now - 100)
    found = window(engine.spans(100, clock.now + 3), clock.now, clock.now + 3)
    assert found.longest == pytest.approx(REQUEST_S)
    assert len(found.seconds) == pytest.approx(16 * 3 / REQUEST_S, rel=0.01), "the whole window was served in"


def test_a_quiet_engine_waits_only_that_long_whatever_runs_plain():
    clock = Clock()
    assert settle(Engine(clock, []), clock) == pytest.approx(1.0, abs=0.15)
    assert settle(Engine(clock, []), clock, quiet_s=0.0) == 0.0


def test_a_stall_across_the_windows_begin_shows_in_max_and_in_the_percentiles():
    """A server that tells no counters: nobody can wait for it, and its window opens in the middle of a stall."""
    clock = Clock()
    engine = Engine(clock, [(100.4, 103.0)])
    await_steady(None, 1.0, 30.0, clock=clock, sleep=clock.sleep)
    begin, end = clock.now, clock.now + 3
    assert begin == 101.0
    found = window(engine.spans(100, end), begin, end)
    assert found.longest == max(found.seconds) == pytest.approx(2.6 + REQUEST_S)
    assert sorted(found.seconds)[-17:][0] < 0.02 < sorted(found.seconds)[-16:][0], "all that waited are told"


def test_an_engine_that_is_never_steady_gives_no_row():
    clock = Clock()
    engine = Engine(clock, [(100 + 0.7 * i, 100.1 + 0.7 * i) for i in range(100)])
    with pytest.raises(NotSteadyError, match=r"14 first runs and captures in 10\.\d s under load, never 1 s without"):
        settle(engine, clock, limit_s=10.0)


def test_an_engine_that_is_held_up_for_longer_than_it_is_asked_is_waited_for():
    clock = Clock()

    def counters() -> dict[str, int]:
        if clock.now < 112:
            clock.sleep(10)
            raise DeadlineExceeded("no answer within 10 s")
        return {"graph_new_keys": 4, "graph_captures": 0, "graph_failed": 0}

    assert await_steady(counters, 1.0, 60.0, clock=clock, sleep=clock.sleep) == pytest.approx(21.2, abs=0.2)
    clock.now = 0.0
    with pytest.raises(NotSteadyError, match="the engine was held up"):
        await_steady(counters, 1.0, 15.0, clock=clock, sleep=clock.sleep)


def test_first_runs_are_counted_from_the_first_answer_that_comes():
    """An engine with 1000 first runs behind it that is held up when it is first asked."""
    clock = Clock()

    def counters() -> dict[str, int]:
        if clock.now == 100.0:
            clock.sleep(10)
            raise DeadlineExceeded("no answer within 10 s")
        return {"graph_new_keys": 1000 + int((clock.now - 110) / 0.5), "graph_captures": 0, "graph_failed": 0}

    with pytest.raises(NotSteadyError, match=r": 10 first runs and captures in 15\.\d s under load, never 1 s without"):
        await_steady(counters, 1.0, 5.0, clock=clock, sleep=clock.sleep)


def test_a_limit_shorter_than_the_quiet_is_no_limit():
    clock = Clock()
    assert settle(Engine(clock, []), clock, quiet_s=5.0, limit_s=1.0) == pytest.approx(5.0, abs=0.15)


def test_captures_and_their_failures_count_as_first_runs():
    counters = {"graph_new_keys": 1, "graph_captures": 20, "graph_failed": 300, "graph_plain": 4000, "graph_hits": 5}
    assert first_runs(counters) == 321
    for name in FIRSTS:
        with pytest.raises(KeyError, match=name):
            first_runs({other: 1 for other in counters if other != name})

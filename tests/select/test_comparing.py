"""When an answer is clear: rounds, rotation, ties, drift, ways that fail."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest

from rose.select.comparing import MAX_ROUNDS, MIN_ROUNDS, compare, interval, is_clear, spread
from tests.select.fakes import noisy, scripted


def test_clear_differences_end_after_the_fewest_rounds() -> None:
    found = compare({"slow": noisy(110, 1), "fast": noisy(100, 2), "slower": noisy(120, 3)})
    assert found.clear
    assert found.rounds == MIN_ROUNDS
    assert sorted(found.us, key=found.us.__getitem__) == ["fast", "slow", "slower"]
    assert found.us["fast"] == pytest.approx(100, rel=0.01)


def test_equals_end_as_a_tie_and_doubt_goes_on() -> None:
    tie = compare({"a": noisy(100, 1, 0.003), "b": noisy(100.1, 2, 0.003)})
    assert tie.clear
    assert tie.rounds < MAX_ROUNDS
    doubtful = compare({"a": noisy(100, 1, 0.2), "b": noisy(101.5, 2, 0.2)})
    assert doubtful.rounds == MAX_ROUNDS
    assert not doubtful.clear


def test_every_round_runs_each_once_in_rotated_order() -> None:
    order: list[str] = []

    def way(name: str, us: float):
        def sample() -> float:
            order.append(name)
            return us

        return sample

    compare({"a": way("a", 10), "b": way("b", 11), "c": way("c", 12)}, min_rounds=9, max_rounds=9)
    assert "".join(order[:9]) == "abcbcacab"
    assert {name: order.count(name) for name in "abc"} == {"a": 9, "b": 9, "c": 9}


def test_drift_that_hits_all_does_not_blur_the_order() -> None:
    """The machine gets slower by half while it is measured: paired differences do not see it."""
    ticks = itertools.count()

    def way(us: float):
        return lambda: us * (1 + 0.001 * next(ticks))

    found = compare({"a": way(100), "b": way(103)}, max_rounds=16)
    assert found.clear
    assert found.us["a"] < found.us["b"]


def test_what_is_hopeless_is_left_alone_early_but_keeps_its_time() -> None:
    calls = {"a": 0, "c": 0}

    def counted(name: str, us: float):
        def sample() -> float:
            calls[name] += 1
            return us

        return sample

    found = compare({"a": counted("a", 100), "c": counted("c", 1000)})
    assert calls == {"a": MIN_ROUNDS, "c": 3}
    assert found.us["c"] == 1000
    assert found.clear


def test_a_way_that_raises_or_gives_no_time_is_left_out_with_the_reason() -> None:
    def broken() -> float:
        raise RuntimeError("illegal memory access")

    found = compare({"a": noisy(100), "b": broken, "c": scripted(90, math.nan), "d": scripted(-1.0)})
    assert set(found.us) == {"a"}
    assert found.failed["b"] == "RuntimeError: illegal memory access"
    assert "nan" in found.failed["c"]
    assert "-1.0" in found.failed["d"]
    assert found.clear
    nothing = compare({"b": broken})
    assert nothing.us == {}
    assert set(nothing.failed) == {"b"}


def test_no_time_left_ends_it_with_what_there_is() -> None:
    found = compare({"a": noisy(100, 1, 0.2), "b": noisy(101, 2, 0.2)}, time_left=lambda: False)
    assert found.rounds == 3
    assert not found.clear
    assert set(found.us) == {"a", "b"}


def test_one_way_alone_is_clear_and_none_is_nothing() -> None:
    assert compare({"a": noisy(100)}).rounds == MIN_ROUNDS
    assert compare({}).us == {}


def test_too_few_values_say_nothing_and_eight_hold_the_median() -> None:
    assert interval([1.0] * 7) == (-math.inf, math.inf)
    assert interval([float(n) for n in range(8)]) == (0.0, 7.0)
    low, high = interval([float(n) for n in range(40)])
    assert (low, high) == (11.0, 28.0)  # ranks 12 and 29 of 40, as tables of the sign test have them


def test_the_interval_covers_the_median_as_often_as_it_says() -> None:
    generator = random.Random(5)
    for n in (8, 13, 25):
        held = 0
        for _ in range(2000):
            low, high = interval([generator.expovariate(1.0) for _ in range(n)])
            held += low <= math.log(2) <= high
        assert held / 2000 >= 0.985


def test_order_of_names_does_not_matter() -> None:
    generator = random.Random(1)
    times = {name: [us * generator.uniform(0.99, 1.01) for _ in range(8)] for name, us in (("a", 100), ("b", 130))}
    assert is_clear(times) == is_clear(dict(reversed(times.items()))) is True


def test_spread_is_half_the_distance_of_the_quartiles() -> None:
    assert spread([5.0]) == 0.0
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    assert spread(values) == (high - low) / 2 == 1.0

"""Which of several ways is fastest, and when that is known: rounds in rotated order, medians, an answer's confidence.

In each round every way runs once, so that what slows the machine down slows all of them. The order is clear when the
99 % interval of the median of the paired differences to the fastest leaves nobody in doubt: each other is slower, or as
fast. Knows samples; knows neither devices nor backends.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rose.attention_backends.choose import TIE

# µs of one run.
Sample = Callable[[], float]
MIN_ROUNDS, MAX_ROUNDS = 8, 40
# After so many rounds, ways that were always this much slower than the fastest are left alone.
HOPELESS_ROUNDS, HOPELESS = 3, 0.5
CONFIDENCE = 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What came of it, in µs.

    Attributes:
        us: median by name. spread_us: half the distance between the quartiles.
        rounds: of the fastest.
        clear: the order of the fastest against each other is known, ties included.
        failed: by name, why a way gave no time.
    """

    us: Mapping[str, float]
    spread_us: Mapping[str, float]
    rounds: int
    clear: bool
    failed: Mapping[str, str]


def compare(
    ways: Mapping[str, Sample],
    *,
    min_rounds: int = MIN_ROUNDS,
    max_rounds: int = MAX_ROUNDS,
    time_left: Callable[[], bool] = lambda: True,
) -> Comparison:
    """Run every way until the answer is clear, `max_rounds` are done, or there is no time left.

    A way that raises, or gives a time that is none, is left out with the reason; the others go on.
    """
    times: dict[str, list[float]] = {name: [] for name in ways}
    failed: dict[str, str] = {}
    running = list(ways)
    rounds = 0
    while running and rounds < max_rounds:
        shift = rounds % len(running)
        for name in [*running[shift:], *running[:shift]]:
            try:
                us = ways[name]()
            except Exception as error:  # noqa: BLE001  third-party kernels raise kinds of their own
                failed[name] = f"{type(error).__name__}: {str(error)[:200]}"
                continue
            if not 0 < us < math.inf:
                failed[name] = f"its time came as {us} µs"
                continue
            times[name].append(us)
        running = [name for name in running if name not in failed]
        rounds += 1
        good = {name: times[name] for name in running}
        if rounds == HOPELESS_ROUNDS:
            running = _hopeful(good)
        enough = rounds >= min_rounds and is_clear({name: times[name] for name in running})
        if enough or (rounds >= HOPELESS_ROUNDS and not time_left()):
            break
    kept = {name: taken for name, taken in times.items() if taken and name not in failed}
    still = {name: taken for name, taken in kept.items() if name in running}
    return Comparison(
        us={name: statistics.median(taken) for name, taken in kept.items()},
        spread_us={name: spread(taken) for name, taken in kept.items()},
        rounds=rounds,
        clear=len(still) <= 1 or is_clear(still),
        failed=failed,
    )


def is_clear(times: Mapping[str, Sequence[float]]) -> bool:
    """Whether each way is known to be slower than the fastest, or as fast as it (within TIE). Equally many of each."""
    if len(times) <= 1:
        return True
    best = min(times, key=lambda name: (statistics.median(times[name]), name))
    for name, taken in times.items():
        if name == best:
            continue
        low, high = interval([other / mine - 1 for other, mine in zip(taken, times[best], strict=True)])
        if not (low > 0 or (low > -TIE and high < TIE)):
            return False
    return True


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The interval between two order statistics that holds the median at CONFIDENCE, whatever the distribution; all
    numbers, where there are too few of them."""
    ordered, n = sorted(values), len(values)
    if 2 * 0.5**n > 1 - CONFIDENCE:
        return -math.inf, math.inf
    cut, tail = 0, 0.5**n
    # Values below the median follow Binomial(n, 1/2): `cut` of them may be dropped on either side.
    while 2 * (tail + math.comb(n, cut + 1) * 0.5**n) <= 1 - CONFIDENCE:
        cut += 1
        tail += math.comb(n, cut) * 0.5**n
    return ordered[cut], ordered[n - 1 - cut]


def spread(values: Sequence[float]) -> float:
    """Half the distance between the quartiles; 0 of one value."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2


def _hopeful(times: Mapping[str, Sequence[float]]) -> list[str]:
    """All but those whose best time is HOPELESS behind the fastest's median."""
    if not times:
        return []
    fastest = min(statistics.median(taken) for taken in times.values())
    return [name for name, taken in times.items() if min(taken) <= fastest * (1 + HOPELESS)]

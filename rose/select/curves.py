"""What measured curves say: where a batch gains nothing more, where a graph gains nothing, what fine padding saves.

Pure arithmetic of (tokens, µs). Knows neither engines nor devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# Share of the best rate that a bulk batch has to reach, and one of single queries: those wait for each other only where
# more of them wait than run, and then most of the rate is what shortens the wait.
FULL, GOOD = 0.97, 0.95
# A plain run this close to its graph's replay is as fast.
AS_FAST = 0.02
# What fine steps of padding must save to be worth four times the graphs.
WORTH = 0.02
STEP = 256


class Budgets(NamedTuple):
    online_tokens: int
    bulk_tokens: int


def saturation(curve: Sequence[tuple[int, float]], share: float = FULL) -> int | None:
    """The fewest measured tokens at whose rate `share` of the best is reached; None of no points."""
    if not curve:
        return None
    best = max(tokens / us for tokens, us in curve)
    return min(tokens for tokens, us in curve if tokens / us >= share * best)


def budgets(curve: Sequence[tuple[int, float]]) -> Budgets | None:
    """Tokens of a batch: online where most of the rate is reached, bulk where all of it is."""
    bulk, online = saturation(curve), saturation(curve, GOOD)
    return None if bulk is None or online is None else Budgets(online, bulk)


def inflection(curve: Sequence[tuple[int, float, float, float]]) -> int | None:
    """Tokens up to which graphs are worth capturing.

    Args:
        curve: (tokens, µs of the CPU to launch a plain batch, µs of that batch, µs of a graph's replay), ascending.

    Returns:
        The largest measured tokens at which a graph gains more than AS_FAST, or at which launching takes longer than
        the device; the smallest measured if none does; None of no points. A multiple of 256 where the points are.
    """
    if not curve:
        return None
    gains = [t for t, launch, plain, graph in curve if plain > (1 + AS_FAST) * graph or launch > graph]
    return max(gains, default=min(tokens for tokens, *_ in curve))


def fine_padding(curve: Sequence[tuple[int, float, float]]) -> int | None:
    """Tokens up to which steps of 64 pay.

    Args:
        curve: (tokens, µs padded to 64, µs padded to 256), ascending in tokens.

    Returns:
        A multiple of 256; the end of the last run of points that save more than WORTH; None of no points.
    """
    if not curve:
        return None
    reached = 0
    for tokens, fine, coarse in curve:
        if 1 - fine / coarse <= WORTH:
            break
        reached = tokens + STEP
    return max(STEP, reached // STEP * STEP)


def padded_means(times: Sequence[float]) -> tuple[float, float]:
    """Mean µs of a batch whose tokens lie evenly in the 256 above a bound: (padded to 64, padded to 256).

    Args:
        times: µs at 64, 128, 192 and 256 tokens above the bound.
    """
    return sum(times) / len(times), times[-1]

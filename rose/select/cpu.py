"""A CPU's own questions: how many threads, which dtype, how many tokens a batch.

Knows engines and counts; knows no attention backends, of which a CPU has one.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rose.attention_backends.choose import TIE
from rose.config.serving import CPU_TOKENS
from rose.select.comparing import Sample, compare, interval
from rose.select.numbers import Curve, even, saturation_curve
from rose.select.session import Budget, Progress, Silent

LENGTH = 64
BATCHES = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
# Tokens of the batch that threads and dtypes are compared by.
COMPARED = 512
# Share of the best rate at which the online default stays: a query that arrives waits for the end of a batch.
GOOD = 0.80
# What a size must gain on the default bulk size; less is what a flat curve moves by between two runs.
WORTH_CHANGING = 0.05
# In which the sizes are compared; fewer than comparing.MIN_ROUNDS change nothing.
ROUNDS = 10
# What another dtype must gain before it is worth telling of.
WORTH_TELLING = 0.10


# Tokens of a batch -> µs a token, of each round.
Times = Mapping[int, Sequence[float]]


class CpuNumbers(NamedTuple):
    """As `ModelNumbers` has them. `threads`: (dtype, threads, µs of a batch of COMPARED tokens)."""

    num_threads: int
    fastest_dtype: str | None
    online_tokens: int | None
    bulk_tokens: int | None
    saturation: Curve
    threads: tuple[tuple[str, int, float], ...]


def thread_counts(cpus: int) -> tuple[int, ...]:
    """1, 2, 4 .. and all, fewest first; half of the logical ones is often the number of real cores."""
    powers = [1 << n for n in range(cpus.bit_length()) if 1 << n <= cpus]
    return tuple(sorted({*powers, max(1, cpus // 2), cpus}))


# (dtype, threads, lengths) -> a sample of such a batch.
Prepare = Callable[[str, int, tuple[int, ...]], Sample]


def measure_cpu(
    prepare: Prepare,
    *,
    dtypes: Sequence[str],
    max_tokens: int,
    budget: Budget,
    progress: Progress | None = None,
    cpus: int | None = None,
) -> CpuNumbers:
    """Threads and dtype by the time of one batch, then the budget by the rates of growing ones.

    Args:
        dtypes: those the model runs in; the first is served unless another is asked for.
    """
    length = min(LENGTH, max_tokens)
    counts = thread_counts(cpus or os.cpu_count() or 1)
    batch = even(COMPARED, length)
    with (progress or Silent()).stage("cpu", 3) as advance:
        ways = {f"{dtypes[0]} {count}": prepare(dtypes[0], count, batch) for count in counts}
        found = compare(ways, max_rounds=16, time_left=budget.share(3))
        best = fewest(found.us, [f"{dtypes[0]} {count}" for count in counts])
        threads = int(best.rpartition(" ")[2])
        rows = [
            (dtypes[0], count, found.us[f"{dtypes[0]} {count}"])
            for count in counts
            if _named(found.us, dtypes[0], count)
        ]
        advance(f"{threads} threads")
        kinds = {dtype: prepare(dtype, threads, batch) for dtype in dtypes}
        by_dtype = compare(kinds, max_rounds=16, time_left=budget.share(2)) if len(kinds) > 1 else None
        fastest = None
        if by_dtype is not None:
            served = by_dtype.us[dtypes[0]]
            other = min((d for d in by_dtype.us if d != dtypes[0]), key=lambda d: by_dtype.us[d], default=None)
            if other is not None and by_dtype.us[other] < served * (1 - WORTH_TELLING):
                fastest = other
            rows += [(dtype, threads, us) for dtype, us in by_dtype.us.items() if dtype != dtypes[0]]
        advance(f"{fastest or dtypes[0]}")
        times = rates(lambda lengths: prepare(dtypes[0], threads, lengths), length, budget.share(1))
        online, bulk = budgets(times)
        advance(f"{bulk or CPU_TOKENS['bulk_tokens']} tokens")
    curve = tuple((tokens, round(statistics.median(us) * tokens, 1)) for tokens, us in times.items())
    return CpuNumbers(threads, fastest, online, bulk, curve, tuple((d, n, round(us, 1)) for d, n, us in rows))


def rates(
    prepare: Callable[[tuple[int, ...]], Sample], length: int, time_left: Callable[[], bool]
) -> dict[int, list[float]]:
    """Tokens of a batch -> µs a token, of each round. One look at growing sizes says which there are; in the rounds all
    take turns, so that what a neighbour does meets all of them, and not the one that was being timed.

    Args:
        length: of each sequence.
    """
    samples: dict[int, Sample] = {}

    def kept(lengths: tuple[int, ...]) -> Sample:
        return samples.setdefault(sum(lengths), prepare(lengths))

    seen = saturation_curve(kept, BATCHES, length, time_left, at_least=CPU_TOKENS["bulk_tokens"], repeats=1)
    times = {tokens: [us / tokens] for tokens, us in seen}
    sizes = list(times)
    for number in range(1, ROUNDS):
        if not time_left():
            break
        shift = number % len(sizes)
        for tokens in (*sizes[shift:], *sizes[:shift]):
            times[tokens].append(samples[tokens]() / tokens)
    return times


def budgets(times: Times) -> tuple[int | None, int | None]:
    """(online, bulk) tokens of a batch: the defaults, unless they are known to be slower than what others reach.

    A bulk batch holds at least the online default: one short text is no bulk, whatever its rate. None where time did
    not reach to the default: it serves, then.

    Args:
        times: as `rates` gives them.
    """
    online, bulk = CPU_TOKENS["online_tokens"], CPU_TOKENS["bulk_tokens"]
    most = _kept_or_nearest({tokens: us for tokens, us in times.items() if tokens >= online}, bulk, 1 - WORTH_CHANGING)
    few = _kept_or_nearest(times, online, GOOD)
    return (few if few is None or most is None else min(few, most)), most


def _kept_or_nearest(times: Times, default: int, share: float) -> int | None:
    """The default, unless some size leaves it under `share` of its rate with the confidence of `interval`; then the
    nearest of those that reach that share of the best, in octaves."""
    if default not in times:
        return None
    mine = times[default]
    gains = [[us / own - 1 for us, own in zip(times[tokens], mine, strict=True)] for tokens in times]
    if not any(interval(gain)[1] < share - 1 for gain in gains):
        return default
    medians = {tokens: statistics.median(us) for tokens, us in times.items()}
    good = [tokens for tokens, us in medians.items() if us * share <= min(medians.values())]
    return min(good, key=lambda tokens: abs(math.log2(tokens / default)))


def fewest(us: Mapping[str, float], order: Sequence[str]) -> str:
    """The first of `order` that is as fast as the fastest: more threads that gain nothing are left to others."""
    best = min(us.values())
    return next(name for name in order if name in us and us[name] <= best * (1 + TIE))


def _named(us: Mapping[str, float], dtype: str, count: int) -> bool:
    return f"{dtype} {count}" in us

"""The numbers of one model from whole batches: saturation, where graphs stop to gain, what fine padding saves.

Knows engines and curves; knows no attention.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rose.select import curves
from rose.select.comparing import Sample
from rose.select.model_ways import Bench
from rose.select.session import Budget, Progress, Silent

Curve = tuple[tuple[int, float], ...]
LENGTH = 512
REPEATS = 7
# Tokens of batches of 512-token texts; of batches around which padding is compared.
BATCHES = (512, 1024, 2048, 4096, 8192, 12288, 16384, 24576, 32768, 49152)
PADDED = (0, 256, 512, 768, 1024, 2048, 3072)
# Two more rates of no more than this above the best end the curve: it is flat.
FLAT = 0.01
# A rate so far below a smaller batch's is measured once more: it was the machine's, not the batch's.
ODD = 0.05


class Numbers(NamedTuple):
    """Curves as `ModelNumbers` has them."""

    saturation: Curve
    launch: tuple[tuple[int, float, float, float], ...]
    padding: tuple[tuple[int, float, float], ...]


def median_of(sample: Sample, repeats: int = REPEATS) -> float:
    return statistics.median(sample() for _ in range(repeats))


def saturation_curve(
    prepare: Callable[[tuple[int, ...]], Sample],
    tokens: Sequence[int],
    length: int,
    time_left: Callable[[], bool],
    at_least: int = 0,
    repeats: int = REPEATS,
) -> Curve:
    """(tokens, µs of a batch) in ascending order, until the rate is flat or there is no time left.

    Args:
        prepare: lengths of a batch -> its sample.
        length: of each sequence. at_least: tokens up to which it is measured even where it is flat.
    """
    curve: list[tuple[int, float]] = []
    flat = 0
    for count in tokens:
        if not time_left() or (flat >= 2 and curve[-1][0] >= at_least):
            break
        us = median_of(prepare(even(count, length)), repeats)
        best = max((t / u for t, u in curve), default=0.0)
        if count / us < best * (1 - ODD):
            us = min(us, median_of(prepare(even(count, length)), repeats))
        flat = flat + 1 if count / us <= best * (1 + FLAT) else 0
        curve.append((count, round(us, 1)))
    return tuple(curve)


def measure_numbers(
    graphs: Callable[[int], Bench],
    plain: Callable[[int], Bench],
    *,
    max_tokens: int,
    batch_tokens: int,
    seed: int,
    budget: Budget,
    progress: Progress | None,
) -> Numbers:
    """The three curves on a GPU.

    Args:
        graphs, plain: tokens of a batch -> the engine of the best backend for it, with and without graphs.
    """
    length = min(LENGTH, max_tokens)
    sizes = [tokens for tokens in BATCHES if tokens <= batch_tokens]

    def prepare(lengths: tuple[int, ...]) -> Sample:
        bench = graphs(sum(lengths))
        bench.clear()
        sequences = bench.inputs(lengths, seed)
        bench.warm(sequences)
        return lambda: bench.timed(sequences)

    with (progress or Silent()).stage("numbers", 3) as advance:
        saturation = saturation_curve(prepare, sizes, length, budget.share(3))
        advance("saturation")
        replays = dict(saturation)
        launch = _launches(plain, replays, length, seed, budget.share(2))
        advance("launching")
        padding = []
        left = budget.share(1)
        for tokens in PADDED:
            if tokens + curves.STEP > batch_tokens or not left():
                break
            times = [median_of(prepare(even(tokens + more, length))) for more in range(64, curves.STEP + 1, 64)]
            fine, coarse = curves.padded_means(times)
            padding.append((tokens, round(fine, 1), round(coarse, 1)))
        advance("padding")
    return Numbers(saturation, launch, tuple(padding))


def _launches(
    plain: Callable[[int], Bench], replays: dict[int, float], length: int, seed: int, time_left: Callable[[], bool]
) -> tuple[tuple[int, float, float, float], ...]:
    curve = []
    for tokens, replay in replays.items():
        if not time_left():
            break
        bench = plain(tokens)
        sequences = bench.inputs(even(tokens, length), seed)
        bench.sample(sequences)
        runs = [bench.launch(sequences) for _ in range(REPEATS)]
        launch, took = (statistics.median(values) for values in zip(*runs, strict=True))
        curve.append((tokens, round(launch, 1), round(took, 1), replay))
    return tuple(curve)


def even(tokens: int, length: int) -> tuple[int, ...]:
    """Sequences of about `length` tokens, no longer; as many as a bucket has, so that no dummies are needed."""
    needed = -(-tokens // length)
    power = 1 << (needed - 1).bit_length()
    # Buckets hold 1, 2, 3, 4, 6, 8, 12, 16, 24 ... sequences.
    count = power * 3 // 4 if power >= 4 and power * 3 // 4 >= needed else power
    short, longer = divmod(tokens, count)
    return (short + 1,) * longer + (short,) * (count - longer)

"""Which layers hurt, and the fewest of them that must stay plain for the answers to hold.

Each layer is quantised alone and what that does to the answers is measured; then all are, and as long as the gate fails
the worst ones are put back: 1, 2, 4, ..., then the least number between. It must hold on the texts that were held out,
and then on all, whose worst one is among the others more often than not. Knows layers and answers; knows no gate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
from torch import nn

from rose.convert.calibrate.cache import CacheScales
from rose.convert.calibrate.layers import Layer, quantized
from rose.convert.calibrate.subject import Array, Judge, Subject, Verdict, damage


@dataclass(slots=True)
class Trial:
    """One answer to "and if these stay plain?".

    Attributes:
        verdict: on the texts that were held out.
        over_all: on all, or None where the first failed.
    """

    kept: int
    verdict: Verdict
    over_all: Verdict | None

    @property
    def passed(self) -> bool:
        return self.over_all is not None and self.over_all.passed


@dataclass(slots=True)
class Found:
    """
    Attributes:
        kept: layers that stay plain, the worst first.
        damages: layer -> what quantising it alone does to the answers.
        cache_damage: what rounding keys and values alone does, or None where that was not asked for.
    """

    kept: list[str]
    damages: dict[str, float]
    trials: list[Trial] = field(default_factory=list)
    cache_damage: float | None = None

    @property
    def trial(self) -> Trial:
        """Of what was settled on."""
        return next(trial for trial in self.trials if trial.kept == len(self.kept))


def search(
    subject: Subject,
    layers: Sequence[Layer],
    made: Mapping[str, nn.Module],
    probe: Sequence[int],
    held_out: Sequence[int],
    others: Sequence[int],
    judge: Judge,
    advance: Callable[[int], None],
    *,
    cache: CacheScales | None = None,
) -> Found:
    """
    Args:
        made: the layers as codes, by name.
        probe: texts on which single layers are tried. held_out, others: texts on which the gate is.
        advance: is told the layers tried so far.
        cache: rounds keys and values in every trial.
    """
    damages: dict[str, float] = {}
    plain = subject.answers(probe)
    for at, layer in enumerate(layers, 1):
        with quantized(subject.backbone, [layer], made):
            damages[layer.name] = damage(subject.kind, plain, subject.answers(probe))
        advance(at)
    worst = sorted(damages, key=lambda name: -damages[name])
    found = Found([], damages)
    if cache is not None:
        with cache.rounded(subject):
            found.cache_damage = damage(subject.kind, plain, subject.answers(probe))
    reference, rest = subject.answers(held_out), subject.answers(others)

    def holds(kept: int) -> bool:
        for trial in found.trials:
            if trial.kept == kept:
                return trial.passed
        plain_ones = set(worst[:kept])
        own = _answers(subject, layers, made, plain_ones, held_out, cache)
        verdict, over_all = judge(reference, own), None
        if verdict.passed:
            more = _answers(subject, layers, made, plain_ones, others, cache)
            over_all = judge(np.concatenate([reference, rest]), np.concatenate([own, more]))
        found.trials.append(Trial(kept, verdict, over_all))
        return found.trials[-1].passed

    found.kept = worst[: _least(holds, len(layers))]
    return found


def _answers(
    subject: Subject,
    layers: Sequence[Layer],
    made: Mapping[str, nn.Module],
    kept: set[str],
    which: Sequence[int],
    cache: CacheScales | None,
) -> Array:
    chosen = [layer for layer in layers if layer.name not in kept]
    with quantized(subject.backbone, chosen, made), nullcontext() if cache is None else cache.rounded(subject):
        return subject.answers(which)


def _least(holds: Callable[[int], bool], most: int) -> int:
    """The least number that holds, if more never hurt; `most` where none below does."""
    low, high = -1, 0
    while high < most and not holds(high):
        low, high = high, min(most, max(1, 2 * high))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    if high == most:
        holds(high)  # so that its verdict is there to be told
    return high

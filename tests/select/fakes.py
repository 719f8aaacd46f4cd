"""Ways that need no device: times from a script, answers from a seed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping

import torch

from rose.config.profile import AttentionShape
from rose.select.grid import GridLoad
from rose.select.ways import Ready

SHAPE = AttentionShape(num_heads=16, num_kv_heads=16, head_dim=64, dtype="bfloat16", causal=False)


class Clock:
    """Stands still until told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def noisy(us: float, seed: int = 0, noise: float = 0.01) -> Callable[[], float]:
    """µs around `us`."""
    generator = random.Random(seed)
    return lambda: us * (1 + generator.uniform(-noise, noise))


def scripted(*us: float) -> Callable[[], float]:
    return itertools.cycle(us).__next__


class FakeWays:
    """`times`: name -> load -> µs. Behaviour by name can be replaced in `answers` and `samples`."""

    of = "model"
    shape = SHAPE
    reference = "torch_sdpa"

    def __init__(self, times: Mapping[str, Callable[[GridLoad], float]], *, clock: Clock | None = None) -> None:
        self.times = times
        self.names = tuple(times)
        self.missing: dict[str, str] = {}
        self.excluded: dict[str, str] = {}
        self.answers: dict[str, Callable[[GridLoad, torch.Tensor], torch.Tensor]] = {}
        self.samples: dict[str, Callable[[], float]] = {}
        self.prepared: list[tuple[str, str, int]] = []
        self.closed: list[str] = []
        self._clock = clock

    def serves(self, name: str, load: GridLoad) -> bool:
        return name != "triton_short" or load.max_length <= 256

    def prepare(self, name: str, load: GridLoad, seed: int) -> Ready:
        self.prepared.append((name, load.name, seed))
        answer = torch.randn(4, 32, generator=torch.Generator().manual_seed(seed))
        if name in self.answers:
            answer = self.answers[name](load, answer)
        us = self.times[name](load)
        around = noisy(us, seed=seed + len(name), noise=0.002)

        def sample() -> float:
            if self._clock is not None:
                self._clock.now += us * 1e-6
            return self.samples[name]() if name in self.samples else around()

        return Ready(answer=answer, sample=sample, close=lambda: self.closed.append(name))

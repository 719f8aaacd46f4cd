"""A model whose forward breaks off when it is told to, and leaves garbage in all that it was to write."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rose.batch import Batch
from rose.engine.generation.engine import GenerationEngine
from tests.engine.generation.driving import build

Broken = Callable[[int, Batch], bool]


class Breaking:
    """The model behind it.

    Attributes:
        breaks: told the number of the call, from 1, and the batch with the ids it computes.
        calls, broken: forwards so far, and those that broke off.
        company: real sequences of each that did.
    """

    def __init__(self, model, breaks: Broken) -> None:
        self._model = model
        self.breaks = breaks
        self.engine: GenerationEngine
        self.calls = self.broken = 0
        self.company: list[int] = []

    def __getattr__(self, name: str):
        return getattr(self._model, name)

    def __call__(self, batch: Batch, rows):
        self.calls += 1
        logits = self._model(batch, rows)
        if self.breaks(self.calls, batch):
            self.broken += 1
            self.company.append(real_sequences(batch))
            self._spoil(batch)
            raise ArithmeticError("the forward broke")
        return logits

    def _spoil(self, batch: Batch) -> None:
        """NaN where its keys, values and states were to be; page 0 and row 0 are the dummies', who must stay finite."""
        assert batch.paged is not None
        side = self.engine._side
        slots = batch.paged.slots.long()
        for layer in side.model.kv_layers:
            for part in side.backend.cache.layer(layer):
                part.flatten(0, 1)[slots[slots >= side.page_size]] = torch.nan
        if side.states is not None:
            assert batch.paged.states is not None
            lanes = batch.paged.states.long()
            for pool in (side.states._conv, side.states._states):
                for states in pool.values():
                    states[lanes[lanes > 0]] = torch.nan


def breaking(folder, device: str, model, breaks: Broken, **limits) -> tuple[GenerationEngine, Breaking]:
    """An engine as `driving.build` makes it, with such a model."""
    wrapped = Breaking(model, breaks)
    engine = build(folder, device, model=wrapped, **limits)
    wrapped.engine = engine
    return engine, wrapped


def real_sequences(batch: Batch) -> int:
    assert batch.paged is not None
    return int((batch.paged.page_table[:, 0] > 0).sum())


def once(when: Broken) -> Broken:
    """The first time it holds, and never again."""
    found: list[int] = []

    def breaks(call: int, batch: Batch) -> bool:
        if found or not when(call, batch):
            return False
        found.append(call)
        return True

    return breaks


def is_mixed(call: int, batch: Batch) -> bool:
    assert batch.paged is not None
    return 0 < batch.paged.decodes < batch.num_sequences

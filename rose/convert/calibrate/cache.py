"""Scales of keys and values for engines that keep them as e4m3: one for a layer's keys, one for its values.

Watched and rounded where attention gets them, behind norm and rotation: that is how a cache stores them. The scale
holds the largest that came; compressed-tensors writes it as `k_scale` and `v_scale` beside the attention's weights.
Knows batches and attention plans; knows no model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rose.batch import AttentionPlan
from rose.config import ModelFolder
from rose.convert.calibrate.observe import Observer
from rose.convert.calibrate.subject import Subject
from rose.convert.calibrate.targets import coarse
from rose.convert.checkpoint import Checkpoint
from rose.convert.families import FAMILIES
from rose.convert.heads import LM_HEAD
from rose.convert.stream import plan_weights
from rose.errors import CheckpointError, InvalidInput
from rose.kernels.quantize import FP8, LARGEST, LEAST_SCALE, quantize_static_ref
from rose.models.registry import find_entry

_VALUES = re.compile(r"(.*\blayers\.(\d+)\.self_attn)\.v_proj\.weight")


@dataclass(frozen=True, slots=True)
class CacheScale:
    """One layer's.

    Attributes:
        module: the attention's name in the checkpoint.
        keys, values: [1] fp32.
    """

    module: str
    keys: Tensor
    values: Tensor


class CacheScales:
    """Of all attending layers of a language model.

    Attributes:
        seen: layer -> what its keys and its values were while `watched` was open.
        settled: layer -> its scales, once `settle` has run.
    """

    def __init__(self, subject: Subject) -> None:
        """Raises InvalidInput as `check_keeps_cache`."""
        check_keeps_cache(subject.folder)
        self._modules = _attentions(subject.folder)
        self.seen = {layer: (Observer(), Observer()) for layer in self._modules}
        self.settled: dict[int, CacheScale] = {}

    @contextmanager
    def watched(self, subject: Subject) -> Iterator[None]:
        with _instead(subject, lambda plan: _Watched(plan, self.seen)):
            yield

    @contextmanager
    def rounded(self, subject: Subject) -> Iterator[None]:
        """Keys and values are what their codes stand for while the context is open."""
        with _instead(subject, lambda plan: _Rounded(plan, self.settled)):
            yield

    def settle(self) -> None:
        """Raises CheckpointError where something that is not finite came."""
        for layer, own in self.seen.items():
            if any(one.odd for one in own):
                raise CheckpointError(f"keys or values of {self._modules[layer]} were not finite: no scale holds them")
            scales = (torch.tensor([max(one.largest / LARGEST[FP8], LEAST_SCALE)]) for one in own)
            self.settled[layer] = CacheScale(self._modules[layer], *map(coarse, scales))

    def tensors(self) -> dict[str, Tensor]:
        """As they are stored."""
        return {
            f"{own.module}.{leaf}": scale
            for own in self.settled.values()
            for leaf, scale in (("k_scale", own.keys), ("v_scale", own.values))
        }

    def report(self) -> list[dict[str, Any]]:
        return [
            {
                "name": own.module,
                "keys_largest": self.seen[layer][0].largest,
                "values_largest": self.seen[layer][1].largest,
                "k_scale": float(own.keys),
                "v_scale": float(own.values),
            }
            for layer, own in self.settled.items()
        ]


def check_keeps_cache(folder: ModelFolder) -> None:
    """Raises InvalidInput for a model that keeps no keys and values."""
    if folder.generation is None:
        raise InvalidInput("--kv-cache is for language models: embedders and rerankers keep no keys and values")


class _Watched:
    def __init__(self, plan: AttentionPlan, seen: Mapping[int, tuple[Observer, Observer]]) -> None:
        self._plan, self._seen = plan, seen

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        for observer, x in zip(self._seen[layer], (k, v), strict=True):
            observer.see(x)
        return self._plan.run(q, k, v, layer)


class _Rounded:
    def __init__(self, plan: AttentionPlan, settled: Mapping[int, CacheScale]) -> None:
        self._plan, self._settled = plan, settled

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        own = self._settled[layer]
        return self._plan.run(q, _through_codes(k, own.keys), _through_codes(v, own.values), layer)


def _through_codes(x: Tensor, scale: Tensor) -> Tensor:
    scale = scale.to(x.device)
    return (quantize_static_ref(x, scale).float() * scale).to(x.dtype)


@contextmanager
def _instead(subject: Subject, wrap: Callable[[AttentionPlan], AttentionPlan]) -> Iterator[None]:
    before, subject.wrap_attention = subject.wrap_attention, wrap
    try:
        yield
    finally:
        subject.wrap_attention = before


def _attentions(folder: ModelFolder) -> dict[int, str]:
    """Layer -> its attention's name in the checkpoint; layers that keep a recurrent state have none."""
    tied = folder.architecture.tie_word_embeddings
    with Checkpoint(folder.backbone_path) as checkpoint:
        family = FAMILIES[find_entry(folder.architecture).rules]
        plan = plan_weights(checkpoint, family, tied=tied, head=() if tied else LM_HEAD)
    found = (_VALUES.fullmatch(source) for step in plan.steps for source in step.sources)
    return {int(one[2]): one[1] for one in found if one is not None}

"""The layers of a loaded model that may be quantised, put in and taken out again.

Each knows the tensors it was fused from, so that codes made here in memory are those that are written: a scale a
tensor, not a scale a fused layer. Knows layers and names; runs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from rose.config import ModelFolder
from rose.convert.calibrate.observe import Observed, Observer
from rose.convert.calibrate.targets import coarse, quantize_weight
from rose.convert.checkpoint import Checkpoint
from rose.convert.families import FAMILIES, HEADS
from rose.convert.heads import LM_HEAD
from rose.convert.quantized.place import Part, build_layer, replace_module
from rose.convert.quantized.reading import Coded
from rose.convert.quantized.schemes import Scheme
from rose.convert.rules import Rename
from rose.convert.stream import plan_weights
from rose.errors import CheckpointError, InvalidInput
from rose.kernels.quantize import FP8, LARGEST
from rose.kernels.scaled_mm import dequantize
from rose.layers.linear import GatedLinear, Linear
from rose.layers.parameter import Builds
from rose.models.registry import find_entry


@dataclass(slots=True)
class Layer:
    """
    Attributes:
        name: in the model.
        sources: its tensors in the checkpoint, in the order of their rows.
        rows: of each.
        coded: which of them become codes.
        plain: the layer as it was loaded.
        input_scale: settled for its inputs, or None.
        error: of the weight: ‖dequantised - plain‖ / ‖plain‖.
    """

    name: str
    sources: tuple[str, ...]
    rows: tuple[int, ...]
    coded: tuple[bool, ...]
    plain: Linear | GatedLinear
    input_scale: Tensor | None = None
    error: float = 0.0

    @property
    def coded_sources(self) -> tuple[str, ...]:
        return tuple(source for source, coded in zip(self.sources, self.coded, strict=True) if coded)

    @property
    def parameters(self) -> int:
        """Of the parts that become codes."""
        width = self.weight.shape[1]
        return sum(rows for rows, coded in zip(self.rows, self.coded, strict=True) if coded) * width

    @property
    def weight(self) -> Tensor:
        """[N, K] on the model's device."""
        weight: Tensor = self.plain.weight
        return weight.to_dense() if weight.is_mkldnn else weight

    def quantized(self, scheme: Scheme) -> nn.Module:
        """A layer of codes, ready to run."""
        parts, off, whole = [], 0.0, 0.0
        for weight, coded in zip(self.weight.split(self.rows), self.coded, strict=True):
            if not coded:
                parts.append(Part(len(weight), plain=weight))
                continue
            codes, scale = quantize_weight(weight, scheme)
            own = scale if scheme.weight == "block" else scale.flatten()
            off += float((dequantize(codes, own) - weight).square().sum())
            whole += float(weight.square().sum())
            parts.append(Part(len(weight), scheme, Coded(codes, own, self.input_scale)))
        self.error = (off / whole) ** 0.5 if whole else 0.0
        device = self.weight.device
        layer = build_layer(self.plain, parts, device, self.weight.dtype)
        for module in layer.modules():
            if isinstance(module, Builds):
                module.build(device)
        return layer


def find_layers(folder: ModelFolder, backbone: nn.Module, keep: Iterable[str] = ()) -> tuple[list[Layer], list[str]]:
    """(layers that may be quantised in the order of the model, linear layers' tensors that are kept).

    Embeddings and heads are no such layers, and what a recurrence's gates are made of is kept.

    Args:
        keep: patterns, as of file names, of layers in the model or tensors in the checkpoint.

    Raises:
        CheckpointError: a checkpoint that does not fit its config. InvalidInput: a pattern that names nothing.
    """
    entry = find_entry(folder.architecture)
    modules = dict(backbone.named_modules())
    layers: list[Layer] = []
    kept: list[str] = []
    unused = set(keep)
    with Checkpoint(folder.backbone_path) as checkpoint:
        tied = folder.architecture.tie_word_embeddings
        plan = plan_weights(checkpoint, FAMILIES[entry.rules], tied=tied, head=_head(folder, tied))
        for step in plan.steps:
            name = step.targets[0].removesuffix(".weight")
            module = modules.get(name)
            if not isinstance(module, Linear | GatedLinear) or not step.targets[0].endswith(".weight"):
                continue
            matched = {p for p in keep if any(fnmatchcase(n, p) for n in (name, *step.sources))}
            unused -= matched
            rows = tuple(checkpoint.entries[source].shape[0] for source in step.sources)
            if matched:
                kept += step.sources
                continue
            coded = tuple(not _narrow(own, rows) for own in rows)
            kept += [source for source, is_coded in zip(step.sources, coded, strict=True) if not is_coded]
            layers.append(Layer(name, step.sources, rows, coded, module))
    if unused:
        raise InvalidInput(f"--keep {', '.join(sorted(unused))} names no layer")
    order = {name: at for at, name in enumerate(modules)}
    return sorted(layers, key=lambda layer: order[layer.name]), kept


def _head(folder: ModelFolder, tied: bool) -> Sequence[Rename]:
    """Where the head's tensors are, so that they are not taken for unknown ones."""
    if folder.reranker is not None and folder.reranker.head != "yes_no":
        return HEADS[find_entry(folder.architecture).classifier]
    return LM_HEAD if folder.generation is not None and not tied else ()


def _narrow(rows: int, fused: tuple[int, ...]) -> bool:
    """A part of a few rows in a fused product: a recurrence's gates, whose rounding a whole state would remember."""
    return rows < 128 and rows * 16 < max(fused)


@contextmanager
def observed(backbone: nn.Module, layers: Iterable[Layer]) -> Iterator[dict[str, Observer]]:
    """Layer name -> what arrived at it while the context was open."""
    observers: dict[str, Observer] = {}
    chosen = list(layers)
    try:
        for layer in chosen:
            observers[layer.name] = Observer()
            replace_module(backbone, layer.name, Observed(layer.plain, observers[layer.name]))
        yield observers
    finally:
        for layer in chosen:
            replace_module(backbone, layer.name, layer.plain)


@contextmanager
def quantized(backbone: nn.Module, layers: Iterable[Layer], made: Mapping[str, nn.Module]) -> Iterator[None]:
    """These layers as codes while the context is open."""
    chosen = list(layers)
    try:
        for layer in chosen:
            replace_module(backbone, layer.name, made[layer.name])
        yield
    finally:
        for layer in chosen:
            replace_module(backbone, layer.name, layer.plain)


def settle_inputs(layers: Iterable[Layer], observers: Mapping[str, Observer], percentile: float) -> None:
    """Give each layer the scale of its inputs.

    Raises:
        CheckpointError: a layer at which nothing arrived, or something that is not finite.
    """
    for layer in layers:
        seen = observers[layer.name]
        if seen.odd or not seen.largest:
            what = f"{seen.odd} values that are not finite" if seen.odd else "nothing but zeros"
            raise CheckpointError(f"{what} arrived at {layer.name}: no scale can be settled for it")
        layer.input_scale = coarse(torch.tensor([seen.percentile(percentile) / LARGEST[FP8]])).to(layer.weight.device)

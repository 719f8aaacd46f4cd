"""Layers of a built model replaced by quantised ones, filled from the plan's coded weights.

Parts of a fused product keep their own scales: one a tensor becomes one a row, which is the same numbers. Parts that
cannot be one product without a change (other types, other input scales, blocks that end between parts) stay parts.
What is no linear layer, and what takes inputs as they are, is left to be read as plain numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from rose.convert.quantized.reading import Coded, QuantizedCheckpoint
from rose.convert.quantized.schemes import BLOCK, Scheme
from rose.convert.stream import Step, WeightPlan
from rose.layers.linear import GatedLinear, Linear
from rose.layers.quantized import Activations, PartedLinear, QuantizedLinear

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a fused product that came from one tensor: codes, or plain numbers."""

    rows: int
    scheme: Scheme | None = None
    coded: Coded | None = None
    plain: Tensor | None = None


def place_quantized(backbone: nn.Module, plan: WeightPlan, device: torch.device, dtype: torch.dtype) -> frozenset[str]:
    """Replace layers of `backbone` whose weights the plan's checkpoint holds as codes.

    Args:
        dtype: of the model, and of parts that are no codes.

    Returns:
        the plan's targets that are done; biases are none of them.

    Raises:
        CheckpointError: as `QuantizedCheckpoint.coded`.
    """
    checkpoint = plan.checkpoint
    if not isinstance(checkpoint, QuantizedCheckpoint):
        return frozenset()
    done: set[str] = set()
    named: set[str] = set()
    for step in plan.steps:
        owner = _owner(backbone, step, checkpoint)
        if owner is None:
            continue
        name = step.targets[0].removesuffix(".weight")
        parts = [_part(checkpoint, source) for source in step.sources]
        replace_module(backbone, name, build_layer(owner, parts, device, dtype))
        done.add(step.targets[0])
        named |= {part.scheme.name for part in parts if part.scheme is not None}
    if done:
        _log.info("%d layers of 8-bit codes: %s", len(done), ", ".join(sorted(named)))
    return frozenset(done)


def _owner(backbone: nn.Module, step: Step, checkpoint: QuantizedCheckpoint) -> Linear | GatedLinear | None:
    """The layer that a step fills, where it is to be a quantised one."""
    schemes = [checkpoint.schemes.get(source) for source in step.sources]
    if not any(scheme is not None and scheme.activations for scheme in schemes):
        return None
    if len(step.targets) != 1 or not step.targets[0].endswith(".weight"):
        return None
    try:
        owner = backbone.get_submodule(step.targets[0].removesuffix(".weight"))
    except AttributeError:
        return None  # a head's
    return owner if isinstance(owner, Linear | GatedLinear) else None


def _part(checkpoint: QuantizedCheckpoint, source: str) -> Part:
    rows = checkpoint.entries[source].shape[0]
    scheme = checkpoint.schemes.get(source)
    if scheme is None or scheme.activations is None:
        return Part(rows, plain=checkpoint.read(source))
    return Part(rows, scheme, checkpoint.coded(source))


def replace_module(root: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(root.get_submodule(parent), leaf, module)


def build_layer(
    owner: Linear | GatedLinear, parts: Sequence[Part], device: torch.device, dtype: torch.dtype
) -> QuantizedLinear | PartedLinear:
    """What takes the place of `owner`; its bias goes along."""
    gated = isinstance(owner, GatedLinear)
    runs = _runs(parts)
    bias = cast("Tensor | None", owner.bias)
    if len(runs) == 1:
        return _quantized(runs[0], device, dtype, bias=bias, activation=owner.activation, gated=gated)
    layers = [_plain(run[0], device, dtype) if run[0].coded is None else _quantized(run, device, dtype) for run in runs]
    return PartedLinear(layers, bias=bias, activation=owner.activation, gated=gated)


def _runs(parts: Sequence[Part]) -> list[list[Part]]:
    """Neighbours that can be one product, exactly."""
    runs: list[list[Part]] = [[parts[0]]]
    for part in parts[1:]:
        if _fits(runs[-1], part):
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


def _fits(run: Sequence[Part], part: Part) -> bool:
    last = run[-1]
    if last.coded is None or part.coded is None or last.scheme is None or part.scheme is None:
        return False
    if (last.scheme.codes, last.scheme.activations) != (part.scheme.codes, part.scheme.activations):
        return False
    if part.scheme.activations == "static":
        assert last.coded.input_scale is not None
        assert part.coded.input_scale is not None
        return torch.equal(last.coded.input_scale, part.coded.input_scale)
    return part.scheme.activations != "group" or last.rows % BLOCK == 0


def _plain(part: Part, device: torch.device, dtype: torch.dtype) -> Linear:
    assert part.plain is not None
    with torch.device("meta"):
        layer = Linear(part.plain.shape[1], part.rows)
    layer.weight = nn.Parameter(part.plain.to(device, dtype, copy=True).contiguous(), requires_grad=False)
    return layer


def _quantized(
    run: Sequence[Part],
    device: torch.device,
    dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    gated: bool = False,
) -> QuantizedLinear:
    coded = [cast(Coded, part.coded) for part in run]
    scheme = cast(Scheme, run[0].scheme)
    inputs = coded[0].input_scale
    # A copy: what was read may be a view of the mapped file.
    codes = torch.cat([one.codes.view(torch.uint8) for one in coded]).view(coded[0].codes.dtype)
    return QuantizedLinear(
        (codes.clone() if len(run) == 1 else codes).to(device),
        fused_scales(coded).to(device),
        cast(Activations, scheme.activations),
        dtype=dtype,
        input_scale=None if inputs is None else inputs.clone().to(device),
        bias=bias,
        activation=activation,
        gated=gated,
    )


def fused_scales(coded: Sequence[Coded]) -> Tensor:
    """Scales of the parts, one below the other: [1] where all are the same one, else a row each, or blocks."""
    if coded[0].scale.dim() == 2:
        return torch.cat([one.scale for one in coded])
    values = torch.cat([one.scale for one in coded])
    if all(len(one.scale) == 1 for one in coded) and bool((values == values[0]).all()):
        return values[:1].clone()
    return torch.cat([one.scale.expand(len(one.codes)) for one in coded])

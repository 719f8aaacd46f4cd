"""A folder becomes a model, whole or not at all.

The model is built on torch's `meta` device, every name and shape is checked against the headers, and only then is data
read: straight onto the device, one target at a time. Knows nothing of serving.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from rose.config import ModelFolder
from rose.convert.checkpoint import Checkpoint
from rose.convert.families import FAMILIES
from rose.convert.rules import Family
from rose.convert.stream import WeightPlan, plan_weights
from rose.errors import CheckpointError
from rose.layers.linear import pack_linears
from rose.layers.rotary import Rotary
from rose.models.base import ServedModel
from rose.models.embedder import Embedder, build_embedder
from rose.models.registry import find_entry

# The files of a Dense module hold what the module calls its own: no prefix, no rules.
_DENSE = Family(anchor="linear.weight", prefixes=("",))
_NAMED = 5  # names of an error before it says "and N more"


def load_model(
    folder: ModelFolder, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> ServedModel:
    """The folder's embedder, ready to run: weights on `device`, in eval mode, without gradients.

    Args:
        dtype: of the backbone. None means fp32 on the CPU, where halves are slow or inexact, and bf16 elsewhere. The
            head computes in fp32 whatever is asked.

    Raises:
        CheckpointError: a tensor that is missing, unknown, defined twice, of a wrong shape or kind; with its file.
    """
    device = torch.device(device)
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    with torch.device("meta"):
        model = build_embedder(folder)
    family = FAMILIES[find_entry(folder.architecture).rules]
    _fill(model.backbone, folder.backbone_path, family, device, dtype, tied=folder.architecture.tie_word_embeddings)
    for module, config in zip(model.head.dense, folder.dense, strict=True):
        _fill(module, folder.path / config.folder, _DENSE, device, torch.float32, tied=False)
    _build_tables(model, device)
    pack_linears(model)
    return model.eval()


def _fill(
    module: nn.Module, path: Path, family: Family, device: torch.device, dtype: torch.dtype, *, tied: bool
) -> None:
    with Checkpoint(path) as checkpoint:
        plan = plan_weights(checkpoint, family, tied=tied)
        check_plan(plan, {name: tuple(p.shape) for name, p in module.named_parameters()}, path)
        for name, tensor in plan.stream():
            _place(module, name, tensor, device, dtype)


def check_plan(plan: WeightPlan, expected: Mapping[str, tuple[int, ...]], path: Path) -> None:
    """Whether the plan fills exactly the `expected` names, with their shapes.

    Raises:
        CheckpointError: it does not; names the tensors, the files and both shapes.
    """
    shapes = plan.shapes()
    unknown = [name for name in shapes if name not in expected]
    if unknown:
        raise CheckpointError(f"the model has no place for {_list([plan.origin(name) for name in unknown])}")
    missing = [name for name in expected if name not in shapes]
    if missing:
        raise CheckpointError(f"{path} lacks {_list(missing)}")
    for name, shape in shapes.items():
        if shape != expected[name]:
            raise CheckpointError(f"{plan.origin(name)} has shape {shape}, and the model takes {expected[name]}")


def _place(module: nn.Module, name: str, tensor: Tensor, device: torch.device, dtype: torch.dtype) -> None:
    """Into the parameter's slot: a contiguous copy that outlives the mapped file, cast on the device it goes to."""
    owner_name, _, leaf = name.rpartition(".")
    owner = module.get_submodule(owner_name)
    value = tensor.to(device).to(dtype, copy=tensor.device == device).contiguous()
    setattr(owner, leaf, nn.Parameter(value, requires_grad=False))


def _build_tables(model: Embedder, device: torch.device) -> None:
    for module in model.modules():
        if isinstance(module, Rotary):
            module.build(device)


def _list(names: list[str]) -> str:
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")

"""A folder becomes a model, whole or not at all.

The model is built on torch's `meta` device, every name and shape is checked against the headers, and only then is data
read: straight onto the device, one target at a time. Knows nothing of serving.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from rose.config import ModelFolder
from rose.config.sentence_transformers import missing_pooling
from rose.convert.checkpoint import Checkpoint
from rose.convert.families import FAMILIES, HEADS
from rose.convert.heads import LINEAR, LM_HEAD, check_tied, colbert_width, yes_no_row
from rose.convert.quantized import open_checkpoint, place_quantized
from rose.convert.quantized.flows import hand_over_codes
from rose.convert.report import left_out
from rose.convert.rules import Family, Rename, fill
from rose.convert.stream import HEAD_PREFIX, WeightPlan, plan_weights
from rose.errors import CheckpointError
from rose.layers.linear import pack_linears
from rose.layers.parameter import Builds
from rose.models.base import ServedModel
from rose.models.causal_lm import CausalLM, build_causal_lm
from rose.models.embedder import Embedder, build_embedder
from rose.models.registry import check_dtype, find_entry
from rose.models.reranker import Reranker, build_reranker

# The files of a Dense module hold what the module calls its own: no prefix, no rules.
DENSE = Family(anchor="linear.weight", prefixes=("",))
_KINDS = ("weight", "bias")
_NAMED = 5  # names of an error before it says "and N more"
_Model = TypeVar("_Model", bound=nn.Module)
_log = logging.getLogger(__name__)


def load_model(
    folder: ModelFolder, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> ServedModel:
    """The folder's embedder or reranker, ready to run: weights on `device`, in eval mode, without gradients.

    Args:
        dtype: of the backbone. None means fp32 on the CPU, where halves are slow or inexact, and bf16 elsewhere. The
            heads compute in fp32 whatever is asked.

    Raises:
        CheckpointError: a tensor that is missing, unknown, defined twice, of a wrong shape or kind, with its file; a
            head that is not there; a dtype in which the architecture overflows; or a folder that is for generating.
    """
    if folder.generation is not None:
        raise missing_pooling(folder.path, could_rerank=True)
    device, dtype = _where(folder, device, dtype)
    read = _load_embedder if folder.reranker is None else _load_reranker
    return _ready(read(folder, device, dtype), device)


def load_generative(
    folder: ModelFolder, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> CausalLM:
    """The folder's language model, ready to run: weights on `device`, in eval mode, without gradients.

    Args:
        folder: read as one that generates (`folder.generation`).
        dtype: as `load_model`; the head's matrix is kept in it too, and multiplied with fp32 sums.

    Raises:
        CheckpointError: as `load_model`; or a head and an embedding that are tied by the config and differ.
    """
    device, dtype = _where(folder, device, dtype)
    return _ready(_load_causal_lm(folder, device, dtype), device)


def _where(
    folder: ModelFolder, device: torch.device | str, dtype: torch.dtype | None
) -> tuple[torch.device, torch.dtype]:
    device = torch.device(device)
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    check_dtype(folder.architecture, str(dtype).removeprefix("torch."))
    return device, dtype


def _ready(model: _Model, device: torch.device) -> _Model:
    _build_tables(model, device)
    pack_linears(model)
    return model.eval()


def _load_embedder(folder: ModelFolder, device: torch.device, dtype: torch.dtype) -> Embedder:
    width = colbert_width(folder)
    with torch.device("meta"):
        model = build_embedder(folder, width)
    family = FAMILIES[find_entry(folder.architecture).rules]
    _fill(model.backbone, folder.backbone_path, family, device, dtype, tied=folder.architecture.tie_word_embeddings)
    hand_over_codes(model.backbone, find_entry(folder.architecture).rules)
    for module, config in zip(model.head.dense, folder.dense, strict=True):
        _fill(module, folder.path / config.folder, DENSE, device, torch.float32)
    for head in folder.token_heads:
        owner = {"sparse": model.lexical, "colbert": model.colbert}[head.name]
        if owner is not None:
            _fill(cast(nn.Module, owner.linear), folder.path / head.file, LINEAR, device, torch.float32)
    return model


def _load_reranker(folder: ModelFolder, device: torch.device, dtype: torch.dtype) -> Reranker:
    with torch.device("meta"):
        model = build_reranker(folder)
    entry, config = find_entry(folder.architecture), folder.reranker
    assert config is not None
    path, tied = folder.backbone_path, folder.architecture.tie_word_embeddings
    with open_checkpoint(path) as checkpoint:
        rules = () if config.head == "yes_no" else HEADS[entry.classifier]
        plan = plan_weights(checkpoint, FAMILIES[entry.rules], tied=tied, head=rules)
        expected = _shapes(model.backbone)
        if config.head == "yes_no":
            row = yes_no_row(checkpoint, plan.prefix, config, tied=tied, path=path)
            _place(model.head, "weight", row, device, torch.float32, f"the yes and no rows of {path}")
        else:
            expected |= {HEAD_PREFIX + name: shape for name, shape in _shapes(model.head).items()}
        _check_head(plan, expected, rules, path)
        check_plan(plan, expected, path)
        _tell(plan, FAMILIES[entry.rules], path)
        done = place_quantized(model.backbone, plan, device, dtype)
        for name, tensor in plan.stream(done):
            if name.startswith(HEAD_PREFIX):
                leaf = name.removeprefix(HEAD_PREFIX)
                _place(model.head, leaf, tensor, device, torch.float32, plan.origin(name))
            else:
                _place(model.backbone, name, tensor, device, dtype, plan.origin(name))
    hand_over_codes(model.backbone, entry.rules)
    return model


def _load_causal_lm(folder: ModelFolder, device: torch.device, dtype: torch.dtype) -> CausalLM:
    with torch.device("meta"):
        model = build_causal_lm(folder)
    path, tied = folder.backbone_path, folder.architecture.tie_word_embeddings
    rules = () if tied else LM_HEAD
    entry = find_entry(folder.architecture)
    with open_checkpoint(path) as checkpoint:
        family = FAMILIES[entry.rules]
        plan = plan_weights(checkpoint, family, tied=tied, head=rules)
        if tied:
            check_tied(checkpoint, plan.prefix)
        own = {HEAD_PREFIX + name: shape for name, shape in _shapes(model.lm_head).items()}
        if own and not own.keys() & plan.shapes().keys():
            raise CheckpointError(
                f"{path} lacks lm_head.weight, which tokens are drawn with, and tie_word_embeddings is false, so that "
                "the embedding cannot stand for it"
            )
        check_plan(plan, _shapes(model.backbone) | own, path)
        _tell(plan, family, path)
        done = place_quantized(model.backbone, plan, device, dtype)
        for name, tensor in plan.stream(done):
            module = model.lm_head if name.startswith(HEAD_PREFIX) else model.backbone
            _place(module, name.removeprefix(HEAD_PREFIX), tensor, device, dtype, plan.origin(name))
    hand_over_codes(model.backbone, entry.rules)
    return model


def _fill(
    module: nn.Module, path: Path, family: Family, device: torch.device, dtype: torch.dtype, *, tied: bool = False
) -> None:
    with open_checkpoint(path) if path.is_dir() else Checkpoint(path) as checkpoint:
        plan = plan_weights(checkpoint, family, tied=tied)
        check_plan(plan, _shapes(module), path)
        _tell(plan, family, path)
        done = place_quantized(module, plan, device, dtype)
        for name, tensor in plan.stream(done):
            _place(module, name, tensor, device, dtype, plan.origin(name))


def _tell(plan: WeightPlan, family: Family, path: Path) -> None:
    for line in left_out(plan.dropped, family, plan.prefix):
        _log.info("%s: %s", path, line)


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in module.named_parameters()}


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


def _check_head(plan: WeightPlan, expected: Mapping[str, tuple[int, ...]], rules: Sequence[Rename], path: Path) -> None:
    """Whether the head is there, by the checkpoint's own names: without it every pair would score alike."""
    shapes = plan.shapes()
    names = {fill(rule.target, {"kind": k}): fill(rule.source, {"kind": k}) for rule in rules for k in _KINDS}
    missing = [names[target] for target in names if HEAD_PREFIX + target in expected.keys() - shapes.keys()]
    if missing:
        raise CheckpointError(f"{path} lacks {_list(missing)}, which a reranker scores with")


def _place(module: nn.Module, name: str, tensor: Tensor, device: torch.device, dtype: torch.dtype, origin: str) -> None:
    """Into the parameter's slot: a contiguous copy that outlives the mapped file, cast on the device it goes to.

    Raises:
        CheckpointError: a value that is not finite, in the file or once cast. Some attention kernels turn NaN into
            zeros, so that it would come out as a wrong vector and not as NaN.
    """
    owner_name, _, leaf = name.rpartition(".")
    owner = module.get_submodule(owner_name)
    dtype = torch.float32 if leaf in getattr(owner, "fp32_parameters", ()) else dtype
    value = tensor.to(device).to(dtype, copy=tensor.device == device).contiguous()
    # The sum of absolute values is finite if all are (or overflows in the 1e38s): one pass, no mask of the same size.
    if not bool(value.abs().sum(dtype=torch.float32).isfinite()) and not bool(value.isfinite().all()):
        raise CheckpointError(f"{origin} holds values that are not finite as {str(dtype).removeprefix('torch.')}")
    setattr(owner, leaf, nn.Parameter(value, requires_grad=False))


def _build_tables(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        if isinstance(module, Builds):
            module.build(device)


def _list(names: list[str]) -> str:
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")

"""Which tensor of the checkpoint becomes which of the result.

The result has the family's plain names: an embedder's without a prefix, as transformers saves a bare model. Every
name and shape is checked here against the model that will serve it, from headers alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from rose.config import RerankerConfig
from rose.config.architecture import ArchitectureConfig
from rose.convert.families import FAMILIES, HEADS
from rose.convert.heads import yes_no_row
from rose.convert.load import check_plan
from rose.convert.offline.weights import FolderWeights
from rose.convert.stream import HEAD_PREFIX, Step, WeightPlan, plan_weights
from rose.errors import CheckpointError
from rose.models.registry import BACKBONES, build_backbone, find_entry

SCORE = "score.weight"
_PREFIX = "model."


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensors:
    """
    Attributes:
        architecture: class name of the result.
        prefix: before every name of the backbone, in the checkpoint.
        shapes: of the result, by its names, in the checkpoint's order.
        sources: name in the result -> name in the checkpoint; SCORE has none where it is made of two rows.
        dropped: names in the checkpoint that are left out.
        head: the matrix that SCORE is made of, or "".
        exact: names in the checkpoint that keep their dtype, since the model keeps them in fp32 whatever it runs in.
    """

    architecture: str
    prefix: str
    shapes: Mapping[str, tuple[int, ...]]
    sources: Mapping[str, str]
    dropped: tuple[str, ...]
    head: str = ""
    exact: frozenset[str] = frozenset()


def name_tensors(weights: FolderWeights, architecture: ArchitectureConfig, reranker: RerankerConfig | None) -> Tensors:
    """
    Raises:
        CheckpointError: a tensor that is missing, unknown, twice there or of a wrong shape, or no head.
    """
    entry, checkpoint = find_entry(architecture), weights.checkpoint
    classifies = reranker is not None and reranker.head != "yes_no"
    rules = HEADS[entry.classifier] if classifies else ()
    plan = plan_weights(checkpoint, FAMILIES[entry.rules], tied=architecture.tie_word_embeddings, head=rules)
    heads = {target for step in plan.steps for target in step.targets if target.startswith(HEAD_PREFIX)}
    if classifies and not any(target.endswith("weight") for target in heads):
        raise CheckpointError(f"the checkpoint lacks the head of {architecture.architecture}, which scores the pair")
    with torch.device("meta"):
        backbone = build_backbone(architecture)
    shapes = plan.shapes()
    expected = {name: tuple(p.shape) for name, p in backbone.named_parameters()}
    check_plan(plan, expected | {head: shapes[head] for head in heads}, next(iter(checkpoint.entries.values())).file)
    sources: dict[str, str] = {}
    for step in plan.steps:
        sources |= dict(zip(_new_names(step, plan.prefix, whole=classifies), step.sources, strict=True))
    dropped = set(plan.dropped)
    if reranker is None:
        pooler = {name.removeprefix(plan.prefix): name for name in dropped if name.startswith(f"{plan.prefix}pooler.")}
        sources |= pooler  # transformers' bare BERT has it, and would draw random numbers in its place
        dropped -= set(pooler.values())
    result = {new: checkpoint.entries[old].shape for new, old in sources.items()}
    head = ""
    if reranker is not None and reranker.head == "yes_no":
        sources = {_PREFIX + new: old for new, old in sources.items()}
        result = {_PREFIX + new: shape for new, shape in result.items()} | {SCORE: (1, architecture.hidden_size)}
        # Checks that the ids are rows of it, and that a tied pair is one matrix.
        tied = architecture.tie_word_embeddings
        yes_no_row(
            checkpoint, plan.prefix, reranker, tied=tied, path=next(iter(checkpoint.entries.values())).file.parent
        )
        matrices = ("lm_head.weight", f"{plan.prefix}lm_head.weight", f"{plan.prefix}embed_tokens.weight")
        head = next(name for name in matrices if name in checkpoint.entries)
        dropped.discard(head)
    return Tensors(
        architecture=_class_name(architecture, reranker),
        prefix=plan.prefix,
        shapes=result,
        sources=sources,
        dropped=tuple(sorted(dropped)),
        head=head,
        exact=exact_sources(plan, backbone),
    )


def exact_sources(plan: WeightPlan, backbone: nn.Module) -> frozenset[str]:
    """Names in the checkpoint of what the backbone keeps in fp32."""
    kept = {
        f"{path}.{leaf}" for path, module in backbone.named_modules() for leaf in getattr(module, "fp32_parameters", ())
    }
    return frozenset(source for step in plan.steps if kept & {*step.targets} for source in step.sources)


def _new_names(step: Step, prefix: str, *, whole: bool) -> list[str]:
    """The sources' names in the result. A single tensor has its target's, which is the newer one where it has two."""
    if whole:
        return list(step.sources)
    if len(step.sources) == len(step.targets) == 1:
        return list(step.targets)
    return [source.removeprefix(prefix) for source in step.sources]


def _class_name(architecture: ArchitectureConfig, reranker: RerankerConfig | None) -> str:
    name, entry = architecture.architecture, find_entry(architecture)
    entry = BACKBONES[entry.alone] if entry.alone else entry
    if reranker is not None:
        return name if name in entry.classifiers else entry.classifiers[0]
    return name if name.endswith("Model") and name in entry.architectures else entry.architectures[0]

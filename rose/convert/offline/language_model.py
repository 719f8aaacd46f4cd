"""A language model stays one: its own names, its head and its configs, with adapters merged and perhaps another dtype.

Every name and shape is checked against the model that will serve it, from headers alone. Writes nothing.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rose.config.architecture import ArchitectureConfig
from rose.config.generation import GenerationConfig, read_generation
from rose.config.json_file import JsonFile
from rose.config.tokenizer_files import TokenizerFiles
from rose.convert.families import FAMILIES
from rose.convert.heads import LM_HEAD, check_tied
from rose.convert.load import check_plan
from rose.convert.offline.choices import Choice
from rose.convert.offline.names import Tensors, exact_sources
from rose.convert.offline.source import Source
from rose.convert.offline.weights import FolderWeights
from rose.convert.rules import match
from rose.convert.stream import HEAD_PREFIX, WeightPlan, plan_weights
from rose.errors import CheckpointError
from rose.models.registry import Entry, build_backbone, find_entry

if TYPE_CHECKING:
    from rose.convert.offline.decide import Wishes

_HEAD = LM_HEAD[0].source
_EMBEDDING = "embed_tokens.weight"
_PREFIX = "model."
# Buffers that older versions stored: computed from the config.
_COMPUTED = ("rotary_emb.inv_freq", "{path*}.rotary_emb.inv_freq")
_COPIED = (
    *("generation_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
    "processor_config.json",
)
TEMPLATES = "additional_chat_templates"


def check_llm(source: Source, wishes: Wishes, architecture: ArchitectureConfig) -> GenerationConfig:
    """What the source says about generating.

    Raises:
        CheckpointError: a wish that has no meaning for a language model, or a class that cannot become one.
    """
    pointless = {
        "pooling": wishes.pooling,
        "normalize": wishes.normalize,
        "prompt": wishes.prompts,
        "default-prompt": wishes.default_prompt,
        "rerank-template": wishes.template,
        "max-tokens": wishes.max_tokens,
        "causal": wishes.causal,
    }
    for name, value in pointless.items():
        if value is not None:
            shown = "bidirectional" if name == "causal" and value is False else name
            raise CheckpointError(f"a language model is kept as it is: leave --{shown} out")
    named = _as_llm(architecture)
    return read_generation(source.config, named, TokenizerFiles(source.tokenizer), source="the flag --to")


def llm_tensors(weights: FolderWeights, architecture: ArchitectureConfig) -> Tensors:
    """Every tensor under its own name; a bare model's get the prefix that the class with a head has.

    Raises:
        CheckpointError: a tensor that is missing, unknown, twice there or of a wrong shape, or no head.
    """
    entry, checkpoint, tied = find_entry(architecture), weights.checkpoint, architecture.tie_word_embeddings
    plan = plan_weights(checkpoint, FAMILIES[entry.rules], tied=tied, head=() if tied else LM_HEAD)
    file = next(iter(checkpoint.entries.values())).file
    backbone = _check_shapes(plan, architecture, file.parent)
    if tied:
        check_tied(checkpoint, plan.prefix)
    bare = architecture.architecture not in entry.generates
    embedding = f"{plan.prefix}{_EMBEDDING}"
    sources: dict[str, str] = {}
    for name in checkpoint.entries:
        own = name.removeprefix(plan.prefix)
        if any(match(template, own) is not None for template in _COMPUTED):
            continue
        if tied and own == _HEAD:  # the same matrix once more, or the only copy of it, whose name is the embedding's
            if embedding in checkpoint.entries:
                continue
            sources[(_PREFIX if bare else plan.prefix) + _EMBEDDING] = name
        elif bare:
            if name in plan.dropped:
                continue
            sources[_HEAD if own == _HEAD else _PREFIX + own] = name
        else:
            sources[name] = name
    kept = set(sources.values())
    return Tensors(
        architecture=_as_llm(architecture).architecture,
        prefix=plan.prefix,
        shapes={new: checkpoint.entries[old].shape for new, old in sources.items()},
        sources=sources,
        dropped=tuple(sorted(name for name in checkpoint.entries if name not in kept)),
        exact=exact_sources(plan, backbone),
    )


def llm_files(source: Source, dtype: str, name: str) -> dict[str, Any]:
    """config.json with the class and the dtype of the result, and the small files beside it as they are."""
    config = {key: value for key, value in source.config.data.items() if key not in ("torch_dtype", "_name_or_path")}
    files: dict[str, Any] = {"config.json": config | {"architectures": [name], "dtype": dtype}}
    for copied in _COPIED:
        found = JsonFile.read_if_there(source.backbone / copied)
        if found.data:
            files[copied] = found.data
    return files


def llm_choices(generation: GenerationConfig) -> tuple[Choice, ...]:
    ends = ", ".join(map(str, generation.end_ids)) or "none"
    templates = ", ".join(generation.templates) or "none"
    return (
        Choice("end tokens", ends, generation.end_source),
        Choice("chat templates", templates, "chat_template.jinja or tokenizer_config.json"),
    )


def _as_llm(architecture: ArchitectureConfig) -> ArchitectureConfig:
    """The same with the name of the class that has a head."""
    entry, name = find_entry(architecture), architecture.architecture
    if name in entry.generates:
        return architecture
    headed = f"{name.removesuffix('Model')}ForCausalLM"
    if not name.endswith("Model") or headed not in entry.generates or not _plain(entry):
        there_are = f"; there are {', '.join(entry.generates)}" if entry.generates else ""
        raise CheckpointError(f"{name} is no language model{there_are}")
    return replace(architecture, architecture=headed)


def _plain(entry: Entry) -> bool:
    """Whether the class with a head differs from the bare one by a prefix and the head alone."""
    return not any(name.endswith("ForConditionalGeneration") for name in entry.architectures)


def _check_shapes(plan: WeightPlan, architecture: ArchitectureConfig, folder: Path) -> nn.Module:
    with torch.device("meta"):
        backbone = build_backbone(architecture)
    expected = {name: tuple(p.shape) for name, p in backbone.named_parameters()}
    if not architecture.tie_word_embeddings:
        head = f"{HEAD_PREFIX}weight"
        if head not in plan.shapes():
            raise CheckpointError(f"{folder} lacks {_HEAD}, which a language model draws tokens with")
        expected[head] = (architecture.vocab_size, architecture.hidden_size)
    check_plan(plan, expected, folder)
    return backbone

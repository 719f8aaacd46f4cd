"""What comes after an embedder's backbone: pooling, Dense chain, normalisation, prompts, as choices and as files.

Module types are written under the older names, which every version of sentence-transformers reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rose.config.architecture import ArchitectureConfig
from rose.config.sentence_transformers import (
    POOL_FLAGS,
    POOL_MODES,
    DenseConfig,
    PoolingConfig,
    asked_pooling,
    missing_pooling,
)
from rose.convert.checkpoint import Checkpoint
from rose.convert.load import DENSE, check_plan
from rose.convert.offline.choices import Choice, flag
from rose.convert.offline.source import Source
from rose.convert.stream import plan_weights
from rose.errors import CheckpointError

if TYPE_CHECKING:
    from rose.convert.offline.decide import Wishes

_TYPES = "sentence_transformers.models."
_QUANTIZER = "st_quantize.FlexibleQuantizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedderParts:
    """
    Attributes:
        files: modules.json and what it names, by relative path; Dense folders are copied by the caller.
    """

    pooling: PoolingConfig
    normalize: bool
    prompts: Mapping[str, str]
    files: Mapping[str, Any]
    choices: tuple[Choice, ...]


def embedder_parts(source: Source, wishes: Wishes, architecture: ArchitectureConfig) -> EmbedderParts:
    """
    Raises:
        CheckpointError: an encoder whose pooling neither file nor flag states, a template for an embedder, a default
            prompt that there is not, or a Dense module without its weights.
    """
    if wishes.template is not None:
        raise CheckpointError("an embedder scores no pairs: leave --rerank-template out")
    if source.modules.logit_score is not None:
        raise CheckpointError(f"{source.modules.logit_score.source} makes {source.root} a reranker; use --to reranker")
    pooling, pooling_choice = _pooling(source, wishes, architecture)
    normalize, normalize_choice = _normalize(source, wishes)
    prompts, prompt_choices, sentence_config = _prompts(source, wishes)
    modules = source.modules
    named = "modules.json"
    dense = [
        Choice("dense", f"{d.in_features} to {d.out_features}, {d.activation or 'linear'}", named)
        for d in modules.dense
    ]
    for module in modules.dense:
        _check_dense(source.root / module.folder, module)
    if not dense:
        dense = [Choice("dense", "none", named if modules.pooling else "default")]
    quantizer = [Choice("quantiser", modules.quantizer, named)] if modules.quantizer else []
    return EmbedderParts(
        pooling=pooling,
        normalize=normalize,
        prompts=prompts,
        files=_files(source, pooling, normalize, architecture.hidden_size)
        | {"config_sentence_transformers.json": sentence_config},
        choices=(pooling_choice, *dense, normalize_choice, *quantizer, *prompt_choices),
    )


def _pooling(source: Source, wishes: Wishes, architecture: ArchitectureConfig) -> tuple[PoolingConfig, Choice]:
    stated = source.modules.pooling
    if wishes.pooling is not None:
        pooling = asked_pooling(wishes.pooling, stated)
        beside = "" if stated is None else f" (over {stated.source}: {' + '.join(stated.modes)})"
        return pooling, Choice("pooling", pooling.modes[0], flag("pooling") + beside)
    if stated is not None:
        return stated, Choice("pooling", stated.told, stated.source)
    if architecture.rope_theta is None:  # an encoder is trained for one of mean and cls, and nothing tells which
        raise missing_pooling(source.root, could_rerank=False)
    mode = "last" if architecture.causal else "mean"
    why = "default of a causal model" if architecture.causal else "default of a bidirectional decoder"
    return PoolingConfig(modes=(mode,), source=why), Choice("pooling", mode, why)


def _check_dense(folder: Path, config: DenseConfig) -> None:
    """Raises CheckpointError unless the folder holds the module's weights, by their headers."""
    shape = (config.out_features, config.in_features)
    expected: dict[str, tuple[int, ...]] = {"linear.weight": shape}
    if config.bias:
        expected["linear.bias"] = shape[:1]
    if config.residual and config.in_features != config.out_features:
        expected["residual.weight"] = shape
    with Checkpoint(folder) as checkpoint:
        check_plan(plan_weights(checkpoint, DENSE, tied=False), expected, folder)


def _normalize(source: Source, wishes: Wishes) -> tuple[bool, Choice]:
    stated = source.modules
    if wishes.normalize is not None:
        value, where = wishes.normalize, flag("normalize" if wishes.normalize else "no-normalize")
    elif stated.pooling is not None:
        value, where = (
            stated.normalize,
            "modules.json" if (source.root / "modules.json").exists() else "no modules.json",
        )
    else:
        value, where = True, "default of a new embedder"
    return value, Choice("normalise", "yes" if value else "no", where)


def _prompts(source: Source, wishes: Wishes) -> tuple[dict[str, str], list[Choice], dict[str, Any]]:
    written = source.sentence_config
    stated = written.child("prompts")
    prompts = {name: stated.text(name) for name in stated.data if name in stated}
    where, default = written.path.name, written.text("default_prompt_name", "") or None
    if wishes.prompts is not None:
        prompts, where, default = dict(wishes.prompts), flag("prompt"), None
    default = wishes.default_prompt or default
    if default is not None and default not in prompts:
        raise CheckpointError(f"--default-prompt {default!r} is none of the prompts: {', '.join(prompts) or 'none'}")
    similarity = written.text("similarity_fn_name", "cosine")
    choices = [Choice("prompt", f"{name}: {text!r}", where) for name, text in prompts.items()]
    choices = choices or [Choice("prompt", "none", where if written.data or wishes.prompts is not None else "default")]
    choices.append(
        Choice("default prompt", default or "none", flag("default-prompt") if wishes.default_prompt else where)
    )
    choices.append(
        Choice("similarity", similarity, written.path.name if "similarity_fn_name" in written else "default")
    )
    config: dict[str, Any] = {"model_type": "SentenceTransformer", "prompts": prompts, "default_prompt_name": default}
    if "truncate_dim" in written:
        config["truncate_dim"] = written.integer("truncate_dim")
        choices.append(Choice("cut to", f"{config['truncate_dim']} dimensions", f"{written.path.name}: truncate_dim"))
    return prompts, choices, config | {"similarity_fn_name": similarity}


def _files(source: Source, pooling: PoolingConfig, normalize: bool, width: int) -> dict[str, Any]:
    flags = {key: POOL_MODES[name] in pooling.modes for key, name in POOL_FLAGS.items()}
    files: dict[str, Any] = {
        "1_Pooling/config.json": {"word_embedding_dimension": width}
        | flags
        | {"include_prompt": pooling.include_prompt}
    }
    chain = [("", _TYPES + "Transformer"), ("1_Pooling", _TYPES + "Pooling")]
    chain += [(dense.folder, _TYPES + "Dense") for dense in source.modules.dense]
    if normalize:
        taken = {folder for folder, _ in chain}
        folder = next(f"{n}_Normalize" for n in range(len(chain), 100) if f"{n}_Normalize" not in taken)
        chain.append((folder, _TYPES + "Normalize"))
        files[f"{folder}/config.json"] = {}
    if source.modules.quantizer:
        chain.append(("", _QUANTIZER))
    files["modules.json"] = [{"idx": i, "name": str(i), "path": p, "type": kind} for i, (p, kind) in enumerate(chain)]
    return files

"""Everything about the result, settled before a byte of it is written: choices with their sources, configs, tensors.

Reads small files and headers. Knows the formats of both sides; writes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rose.config.architecture import ArchitectureConfig, check_mode_is_known, read_architecture
from rose.config.reranker import RerankerConfig, read_reranker
from rose.config.tokenizer_files import TokenizerFiles
from rose.convert.offline.blocks import Slot
from rose.convert.offline.choices import Choice, flag
from rose.convert.offline.embedder import EmbedderParts, embedder_parts
from rose.convert.offline.language_model import (
    TEMPLATES,
    check_llm,
    llm_choices,
    llm_files,
    llm_tensors,
)
from rose.convert.offline.names import Tensors, name_tensors
from rose.convert.offline.reranker import reranker_choices, reranker_files
from rose.convert.offline.source import Source
from rose.convert.offline.weights import LETTERS, FolderWeights
from rose.errors import CheckpointError
from rose.models.registry import check_dtype, find_entry

Kind = Literal["embedder", "reranker", "llm"]
DTYPE_LETTERS = {str(dtype).removeprefix("torch."): letters for dtype, letters in LETTERS.items()}
_NAMES = {letters: name for name, letters in DTYPE_LETTERS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the caller asked for; None leaves a thing to the files, then to a default.

    Attributes:
        prompts: replace the folder's.
        max_tokens: lowers the folder's limit.
        dtype: "float32", "bfloat16" or "float16"; None keeps each tensor's.
        template: as `rose.config.read_model_folder`.
    """

    to: Kind
    causal: bool | None = None
    pooling: str | None = None
    normalize: bool | None = None
    prompts: Mapping[str, str] | None = None
    default_prompt: str | None = None
    max_tokens: int | None = None
    dtype: str | None = None
    template: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """
    Attributes:
        choices: in the order in which they are printed.
        files: JSON or text files of the result besides the weights, by their relative paths.
        folders: source folders, relative to `source.root`, that are copied whole (Dense modules).
        slots: what is written, in the checkpoint's order.
        tensors: where each slot comes from.
        expected: what the written folder must say of itself when it is read again.
    """

    source: Source
    wishes: Wishes
    choices: tuple[Choice, ...]
    files: Mapping[str, Any]
    folders: tuple[str, ...] = ()
    slots: tuple[Slot, ...]
    tensors: Tensors
    reranker: RerankerConfig | None = None
    expected: Mapping[str, Any] = field(default_factory=dict)


def decide(source: Source, wishes: Wishes, weights: FolderWeights) -> Plan:
    """
    Raises:
        CheckpointError: an architecture that is not served, a choice that neither a file nor a flag settles, or
            tensors that are missing, unknown or of a wrong shape.
    """
    architecture = read_architecture(source.config, wishes.causal)
    find_entry(architecture)
    if wishes.to == "llm":
        return _language_model(source, wishes, weights, architecture)
    check_mode_is_known(source.config, architecture)
    reranker = _reranker(source, wishes, architecture) if wishes.to == "reranker" else None
    parts = embedder_parts(source, wishes, architecture) if reranker is None else None
    tensors = name_tensors(weights, architecture, reranker)
    dtype, slots, dtype_choice = _slots(tensors, weights, architecture, wishes)
    limit, limit_choice = _max_tokens(source, wishes, architecture)
    config = _config(source, architecture, dtype, tensors.architecture)
    files: dict[str, Any] = {"config.json": config}
    if parts is not None:
        files |= parts.files
    if reranker is not None:
        files |= reranker_files(source, reranker, config, limit, asked=wishes.template == "qwen3")
    else:
        files["sentence_bert_config.json"] = {"max_seq_length": limit, "do_lower_case": _lowers(source)}
    tokenizer, pools_last = TokenizerFiles(source.tokenizer), parts is not None and "last" in parts.pooling.modes
    choices = (
        *_backbone(weights, architecture, tensors, "an embedder or a scoring head reads none of them"),
        _attention(architecture, wishes),
        *(parts.choices if parts is not None else reranker_choices(reranker, tensors)),
        Choice("end token", tokenizer.end_told(pools_last=pools_last), "tokenizer.json: post_processor"),
        limit_choice,
        Choice("lower case", "yes" if _lowers(source) else "no", source.transformer_config.path.name),
        dtype_choice,
        _tied(architecture),
    )
    return Plan(
        source=source,
        wishes=wishes,
        choices=choices,
        files=files,
        folders=() if parts is None else tuple(dense.folder for dense in source.modules.dense),
        slots=slots,
        tensors=tensors,
        reranker=reranker,
        expected=_expected(architecture, parts, reranker, limit) | {"architecture": tensors.architecture},
    )


def _language_model(source: Source, wishes: Wishes, weights: FolderWeights, architecture: ArchitectureConfig) -> Plan:
    generation = check_llm(source, wishes, architecture)
    tensors = llm_tensors(weights, architecture)
    dtype, slots, dtype_choice = _slots(tensors, weights, architecture, wishes)
    limit = architecture.max_positions
    choices = (
        *_backbone(weights, architecture, tensors, "computed from the config, or a second copy"),
        _attention(architecture, wishes),
        *llm_choices(generation),
        Choice("max tokens", str(limit), "config.json: the position range"),
        dtype_choice,
        _tied(architecture),
    )
    return Plan(
        source=source,
        wishes=wishes,
        choices=choices,
        files=llm_files(source, dtype, tensors.architecture),
        folders=(TEMPLATES,) if (source.root / TEMPLATES).is_dir() else (),
        slots=slots,
        tensors=tensors,
        expected={
            "architecture": tensors.architecture,
            "causal": True,
            "max_tokens": limit,
            "generates": True,
            "end_ids": generation.end_ids,
        },
    )


def _slots(
    tensors: Tensors, weights: FolderWeights, architecture: ArchitectureConfig, wishes: Wishes
) -> tuple[str, tuple[Slot, ...], Choice]:
    """(dtype of the result, what is written, the choice)."""
    stored = [weights.entries[name].dtype for name in tensors.sources.values()]
    dtype = wishes.dtype or _NAMES[max(set(stored), key=stored.count)]
    check_dtype(architecture, dtype)
    slots = tuple(
        Slot(new, _letters(tensors, new, weights, wishes.dtype), tensors.shapes[new]) for new in tensors.shapes
    )
    where = flag("dtype") if wishes.dtype else f"as stored: {', '.join(sorted(set(stored)))}"
    return dtype, slots, Choice("dtype", dtype, where)


def _letters(tensors: Tensors, new: str, weights: FolderWeights, dtype: str | None) -> str:
    if new not in tensors.sources:
        return "F32"  # a row made of two; its difference is exact in fp32 only
    source = tensors.sources[new]
    return weights.entries[source].dtype if dtype is None or source in tensors.exact else DTYPE_LETTERS[dtype]


def _reranker(source: Source, wishes: Wishes, architecture: ArchitectureConfig) -> RerankerConfig:
    for name, value in (("pooling", wishes.pooling), ("normalize", wishes.normalize), ("prompt", wishes.prompts)):
        if value is not None:
            raise CheckpointError(f"a reranker makes no vector: leave --{name} out")
    if architecture.architecture.endswith("ForCausalLM") and not architecture.causal:
        raise CheckpointError("the yes or no of a language model is read causally: leave --bidirectional out")
    found = read_reranker(
        source.config,
        architecture,
        source.modules.logit_score,
        source.sentence_config,
        TokenizerFiles(source.tokenizer),
        name=source.root.resolve().name,
        task="rerank",
        template=wishes.template,
    )
    assert found is not None  # the task is stated
    return found


def _backbone(
    weights: FolderWeights, architecture: ArchitectureConfig, tensors: Tensors, why_left_out: str
) -> tuple[Choice, ...]:
    before = f"{architecture.architecture}, names {tensors.prefix!r}..."
    choices = [
        Choice("backbone", before, "config.json: architectures, and the weights' headers"),
        Choice("written as", f"{tensors.architecture}, {len(tensors.shapes)} tensors", "what the result is for"),
    ]
    if tensors.dropped:
        named = ", ".join(sorted(tensors.dropped)[:3]) + (" ..." if len(tensors.dropped) > 3 else "")
        choices.append(Choice("left out", named, why_left_out))
    choices += [
        Choice("adapter", f"{path}: {what}", "merged in fp32, in this order") for path, what in weights.summaries
    ]
    return tuple(choices)


def _tied(architecture: ArchitectureConfig) -> Choice:
    value = "yes" if architecture.tie_word_embeddings else "no"
    return Choice("tied weights", value, "config.json: tie_word_embeddings")


def _attention(architecture: ArchitectureConfig, wishes: Wishes) -> Choice:
    value = "causal" if architecture.causal else "bidirectional"
    asked = flag("causal" if architecture.causal else "bidirectional")
    return Choice("attention", value, architecture.causal_source if wishes.causal is None else asked)


def _max_tokens(source: Source, wishes: Wishes, architecture: ArchitectureConfig) -> tuple[int, Choice]:
    """The least of all limits, which are those of `read_model_folder`."""
    tokenizer, transformer = TokenizerFiles(source.tokenizer).config, source.transformer_config
    limits = {"config.json: the position range": architecture.max_positions}
    if "max_seq_length" in transformer:
        limits[f"{transformer.path.name}: max_seq_length"] = transformer.integer("max_seq_length")
    if "model_max_length" in tokenizer:
        limits["tokenizer_config.json: model_max_length"] = int(min(tokenizer.number("model_max_length"), 1e12))
    where, limit = min(limits.items(), key=lambda item: item[1])
    if wishes.max_tokens is not None:
        if not 1 <= wishes.max_tokens <= architecture.max_positions:
            raise CheckpointError(f"--max-tokens is {wishes.max_tokens}, and must be 1 to {architecture.max_positions}")
        where, limit = flag("max-tokens"), wishes.max_tokens
    return limit, Choice("max tokens", str(limit), where)


def _lowers(source: Source) -> bool:
    return source.transformer_config.flag("do_lower_case", False)


def _config(source: Source, architecture: ArchitectureConfig, dtype: str, name: str) -> dict[str, Any]:
    """The source's config.json with the attention mode written out, in the keys that each reader heeds."""
    alone = find_entry(architecture).alone
    data = source.config.data
    if alone and "text_config" in source.config:
        # The tower around it stays behind, and with it the config that describes both.
        data = source.config.child("text_config").data | {"model_type": alone}
        data["tie_word_embeddings"] = architecture.tie_word_embeddings
    config = {key: value for key, value in data.items() if key not in ("torch_dtype", "_name_or_path")}
    config |= {"architectures": [name], "dtype": dtype, "is_causal": architecture.causal}
    if "retrieval_attention_contract" in config:
        config["retrieval_attention_contract"] = "causal" if architecture.causal else "bidirectional"
    if "use_bidirectional_attention" in config or not architecture.causal:
        config["use_bidirectional_attention"] = not architecture.causal
    if architecture.rope_theta is None:
        config["is_decoder"] = architecture.causal  # what BERT's own code goes by
        config.pop("use_bidirectional_attention", None)
    else:
        config.pop("is_decoder", None)
    return config


def _expected(
    architecture: ArchitectureConfig, parts: EmbedderParts | None, reranker: RerankerConfig | None, limit: int
) -> dict[str, Any]:
    expected: dict[str, Any] = {"causal": architecture.causal, "max_tokens": limit}
    if parts is not None:
        expected |= {
            "pooling": (parts.pooling.modes, parts.pooling.include_prompt),
            "normalize": parts.normalize,
            "prompts": dict(parts.prompts),
        }
    if reranker is not None:
        expected |= {"labels": reranker.labels, "activation": reranker.activation, "prefix": reranker.prefix}
    return expected

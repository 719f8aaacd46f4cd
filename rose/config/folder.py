"""A checkpoint folder as its own files describe it: architecture, pooling, heads, prompts, limits.

Reads config.json, the sentence-transformers files (modules.json, N_*/config.json, config_sentence_transformers.json,
sentence_bert_config.json) and the tokenizer's. Knows JSON; knows neither weights nor tokenisers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from rose.config.architecture import ArchitectureConfig, check_mode_is_known, quantized_by, read_architecture
from rose.config.generation import GenerationConfig, has_lm_head, read_generation
from rose.config.json_file import JsonFile
from rose.config.reranker import RerankerConfig, Task, read_reranker
from rose.config.sentence_transformers import (
    DenseConfig,
    PoolingConfig,
    SentenceModules,
    asked_pooling,
    missing_pooling,
    read_modules,
)
from rose.config.token_heads import TokenHeadConfig, read_token_heads
from rose.config.tokenizer_files import TokenizerFiles
from rose.errors import CheckpointError

__all__ = ["DenseConfig", "ModelFolder", "PoolingConfig", "read_model_folder"]

# pplx-embed-context: its own code pools each chunk by its mean and quantises it; no file says so.
_CONTEXTUAL = "PPLXQwen3ContextualModel"

# PEFT's.
ADAPTER_CONFIG = "adapter_config.json"
# Where sentence-transformers keeps max_seq_length and do_lower_case; the first file found counts.
TRANSFORMER_FILES = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """Everything a folder says about itself.

    Attributes:
        max_tokens: the longest sequence served, special tokens included: the least of the position table, the
            sentence-transformers limit and the tokenizer's limit (where that one is sane). Where it generates, the
            position table alone: the other two are about cutting texts.
        prompts: name -> text put before the input, verbatim.
        tokenizer_sha256: digest of tokenizer.json, or None where there is none.
        dimension: length of the vector that comes out at the end.
        truncate_dim: vectors are cut to this many numbers first (config_sentence_transformers.json), or None.
        quantizer: how the model's own integer form of the vector is made ("tanh_int8"), or None where it has none.
        do_lower_case: texts are lower-cased before the tokenizer sees them.
        subfolder: where config.json, the weights and the tokenizer lie, relative to `path`; nearly always "".
        matryoshka_dimensions: what the model was trained to be cut to; empty where it does not say.
        reranker: how it scores pairs, or None for an embedder; a reranker has no pooling, and `dimension` labels.
        token_heads: BGE-M3's lexical and ColBERT heads; empty for other models.
        contextual: chunks of a document are joined by `separator_id`, run as one sequence and pooled each by itself.
        separator: the tokenizer's sep token, or None where it names none.
        separator_id: its id; other tokens may have the same (padding in pplx-embed), so nothing is told by it.
        quantized_by: who made codes of some of its weights ("compressed-tensors", "fp8", "modelopt"), or None.
        generation: how it continues texts, or None for an embedder or reranker; with it there is neither pooling nor
            reranker, and `dimension` is 0.
    """

    path: Path
    architecture: ArchitectureConfig
    pooling: PoolingConfig | None
    dense: tuple[DenseConfig, ...] = ()
    normalize: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    max_tokens: int
    similarity: str | None = None
    tokenizer_sha256: str | None = None
    dimension: int
    quantizer: str | None = None
    do_lower_case: bool = False
    subfolder: str = ""
    matryoshka_dimensions: tuple[int, ...] = ()
    reranker: RerankerConfig | None = None
    token_heads: tuple[TokenHeadConfig, ...] = ()
    contextual: bool = False
    separator: str | None = None
    separator_id: int | None = None
    generation: GenerationConfig | None = None
    quantized_by: str | None = None
    truncate_dim: int | None = None

    @property
    def backbone_path(self) -> Path:
        """Folder of config.json, the weights and tokenizer.json."""
        return self.path / self.subfolder


def read_model_folder(
    path: str | Path,
    *,
    pooling: str | None = None,
    causal: bool | None = None,
    task: Task | None = None,
    template: str | None = None,
) -> ModelFolder:
    """Read a folder whole, or say what is missing.

    Args:
        pooling: settles the pooling of a folder that does not state one ("mean", "cls", "last"); wins over one that
            does, and `PoolingConfig.source` then tells both.
        causal: settles the attention mode where config.json leaves it open; wins likewise.
        task: "embed", "rerank" or "generate" settles what the folder is for. None leaves it to the folder: pooling or a
            head that scores say it themselves, and a causal language model with neither generates.
        template: how a reranker's pair is written where the folder does not say: "qwen3" or "none".

    Raises:
        CheckpointError: no config.json, an unknown architecture, malformed JSON, an unknown module type, no pooling
            where a vector needs one, or no head where a score needs one.
    """
    root = Path(path)
    if not root.is_dir():
        raise CheckpointError(f"{root} is not a folder")
    modules = read_modules(root)
    backbone = root / modules.subfolder
    _refuse_adapter(root, backbone)
    config = JsonFile.read(backbone / "config.json")
    architecture = read_architecture(config, causal)
    tokens = TokenizerFiles(backbone)
    sentence_config = JsonFile.read_if_there(root / "config_sentence_transformers.json")
    reranker = read_reranker(
        config,
        architecture,
        modules.logit_score,
        sentence_config,
        tokens,
        name="" if modules.pooling is not None or pooling is not None else root.resolve().name,
        task=task,
        template=template,
    )
    if reranker is not None and modules.pooling is not None and task is None:
        raise CheckpointError(
            f"{root} is both: {architecture.architecture} scores, and {modules.pooling.source} makes a vector; "
            "settle it with --task rerank or embed"
        )
    if reranker is not None and pooling is not None:
        raise CheckpointError(f"{root} scores pairs and pools nothing ({reranker.source}); leave --pooling out")
    generation = _generation(config, architecture, tokens, modules, pooling, task) if reranker is None else None
    if generation is None:
        check_mode_is_known(config, architecture)
    contextual = architecture.architecture == _CONTEXTUAL
    if contextual:
        modules = _with_the_classes_own(modules)
    pools = reranker is None and generation is None
    pooled = _pooling(root, modules, pooling, architecture) if pools else None
    transformer = _transformer_file(backbone)
    sentence_config = sentence_config if generation is None else JsonFile(sentence_config.path, {})
    truncate_dim = sentence_config.integer("truncate_dim") if pools and "truncate_dim" in sentence_config else None
    prompts, default_prompt, similarity = _read_prompts(sentence_config, reranker is not None)
    folder = ModelFolder(
        path=root,
        architecture=architecture,
        pooling=pooled,
        dense=modules.dense,
        normalize=modules.normalize,
        prompts=prompts,
        default_prompt_name=default_prompt,
        max_tokens=_max_tokens(architecture, transformer, tokens.config)
        if generation is None
        else architecture.max_positions,
        similarity=similarity,
        tokenizer_sha256=_sha256(backbone / "tokenizer.json"),
        dimension=_dimension(modules, pooled, config, architecture.hidden_size, truncate_dim)
        if pooled is not None
        else len(reranker.labels if reranker is not None else ()),
        quantizer=modules.quantizer,
        do_lower_case=transformer.flag("do_lower_case", False),
        subfolder=modules.subfolder,
        matryoshka_dimensions=_matryoshka(config),
        reranker=reranker,
        token_heads=read_token_heads(root, architecture, pooled, tokens),
        contextual=contextual,
        separator=tokens.text_of("sep"),
        separator_id=tokens.role_id("sep"),
        generation=generation,
        truncate_dim=truncate_dim,
        quantized_by=quantized_by(config) or ("modelopt" if (backbone / "hf_quant_config.json").exists() else None),
    )
    if contextual and folder.separator_id is None:
        raise CheckpointError(f"{root} joins chunks by a separator, and its tokenizer's files name no sep_token")
    return folder


def _refuse_adapter(*folders: Path) -> None:
    """Other libraries put an adapter on its base when they load it; served without it, the base would answer."""
    for folder in folders:
        if (folder / ADAPTER_CONFIG).exists():
            raise CheckpointError(
                f"{folder} holds an adapter ({ADAPTER_CONFIG}), which is not merged while serving; make a folder of it "
                f"and its base with `rose convert {folder} --to embedder` (or reranker, llm)"
            )


def _generation(
    config: JsonFile,
    architecture: ArchitectureConfig,
    tokens: TokenizerFiles,
    modules: SentenceModules,
    pooling: str | None,
    task: Task | None,
) -> GenerationConfig | None:
    """None for a folder that is to pool."""
    if task == "generate":
        if pooling is not None:
            raise config.error("a generating model pools nothing; leave --pooling out")
        return read_generation(config, architecture, tokens, source="the caller's choice")
    stated = modules.pooling is not None or pooling is not None
    if task is not None or stated or not has_lm_head(architecture) or not architecture.causal:
        return None
    source = f"config.json: {architecture.architecture}, and no file names a pooling or a score"
    return read_generation(config, architecture, tokens, source=source)


def _pooling(
    root: Path, modules: SentenceModules, asked: str | None, architecture: ArchitectureConfig
) -> PoolingConfig:
    if asked is not None:
        return asked_pooling(asked, modules.pooling)
    if modules.pooling is None:
        raise missing_pooling(root, could_rerank=architecture.architecture.endswith("ForCausalLM"))
    return modules.pooling


def _with_the_classes_own(modules: SentenceModules) -> SentenceModules:
    own = PoolingConfig(modes=("mean",), source=f"the code of {_CONTEXTUAL}")
    return replace(modules, pooling=modules.pooling or own, quantizer="tanh_int8")


def _dimension(
    modules: SentenceModules, pooling: PoolingConfig, config: JsonFile, hidden_size: int, truncate_dim: int | None
) -> int:
    """Width at the end of the chain; every module's stated width must be that of the one before."""
    if modules.pooling_width not in (None, hidden_size):
        raise config.error(f"hidden_size is {hidden_size}, and the pooling module takes {modules.pooling_width}")
    width = hidden_size * len(pooling.modes)
    for dense in modules.dense:
        if dense.in_features != width:
            raise config.error(f"{width} values arrive at {dense.folder}, and its in_features is {dense.in_features}")
        width = dense.out_features
    return width if truncate_dim is None else min(width, truncate_dim)


def _max_tokens(architecture: ArchitectureConfig, transformer: JsonFile, tokenizer: JsonFile) -> int:
    """The least of all limits. A tokenizer that states none writes 1e30, which the position limit undercuts."""
    limits = [architecture.max_positions]
    if "max_seq_length" in transformer:
        limits.append(transformer.integer("max_seq_length"))
    if "model_max_length" in tokenizer:
        limits.append(int(min(tokenizer.number("model_max_length"), 1e12)))
    return min(limit for limit in limits if limit > 0)


def _transformer_file(backbone: Path) -> JsonFile:
    for name in TRANSFORMER_FILES:
        if (backbone / name).exists():
            return JsonFile.read(backbone / name)
    return JsonFile(backbone / TRANSFORMER_FILES[0], {})


def _read_prompts(config: JsonFile, scores: bool) -> tuple[dict[str, str], str | None, str | None]:
    """(prompts, default_prompt_name, similarity) of config_sentence_transformers.json."""
    kind = config.text("model_type", "SentenceTransformer")
    if kind != "SentenceTransformer" and not (scores and kind == "CrossEncoder"):
        raise config.error(f"a {kind} is not served, only a SentenceTransformer, or a CrossEncoder with its head")
    written = config.child("prompts")
    prompts = {name: written.text(name) for name in written.data if name in written}
    default = config.text("default_prompt_name", "") or None
    if default is not None and default not in prompts:
        raise config.error(
            f"default_prompt_name {default!r} is none of its prompts: {', '.join(prompts) or 'it has none'}"
        )
    return prompts, default, config.text("similarity_fn_name", "") or None


def _matryoshka(config: JsonFile) -> tuple[int, ...]:
    sizes = config.data.get("matryoshka_dimensions") or []
    if not isinstance(sizes, list) or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise config.error(f"matryoshka_dimensions is {sizes!r}, and must be a list of whole numbers")
    return tuple(sorted(sizes))


def _sha256(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None

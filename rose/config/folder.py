"""A checkpoint folder as its own files describe it: architecture, pooling, heads, prompts, limits.

Reads config.json and the sentence-transformers files (modules.json, N_*/config.json, config_sentence_transformers.json,
sentence_bert_config.json). Knows JSON; knows neither weights nor tokenisers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rose.config.architecture import ArchitectureConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingConfig:
    """How token rows become one vector.

    Attributes:
        modes: in order; several are concatenated. Names of rose.kernels.pool.PoolMode.
        include_prompt: whether the prompt's tokens take part.
        source: the file or flag it was read from, for the start-up print.
    """

    modes: tuple[str, ...]
    include_prompt: bool = True
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseConfig:
    """One Dense module after pooling; `folder` holds its weights (`linear.weight`, `linear.bias`)."""

    folder: str
    in_features: int
    out_features: int
    bias: bool
    activation: str | None
    residual: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """Everything a folder says about itself.

    Attributes:
        max_tokens: the longest sequence served, special tokens included: the least of the position table, the
            sentence-transformers limit and the tokenizer's limit (where that one is sane).
        prompts: name -> text put before the input, verbatim.
        tokenizer_sha256: digest of tokenizer.json, or None where there is none.
        dimension: length of the vector that comes out at the end.
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


def read_model_folder(path: str | Path, *, pooling: str | None = None, causal: bool | None = None) -> ModelFolder:
    """Read a folder whole, or say what is missing.

    Args:
        pooling: settles the pooling of a folder that does not state one ("mean", "cls", "last").
        causal: settles the attention mode where config.json leaves it open.

    Raises:
        CheckpointError: no config.json, an unknown architecture, malformed JSON, an unknown module type.
    """
    raise NotImplementedError

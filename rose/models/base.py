"""What the engine asks of a model, whatever its architecture.

Knows batches and output names; knows neither checkpoints nor requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from rose.attention_backends.base import AttentionSpec
from rose.batch import Batch
from rose.config import ModelFolder
from rose.errors import Unsupported


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSpec:
    """One named output of a model.

    Attributes:
        dtype: "float32", "int8" or "uint8", as it arrives on the host.
        dimension: length of a row.
        per_token: rows are tokens, not sequences.
        normalized: rows have unit length; a cut vector is normalised again.
        unavailable: why it cannot be had from this checkpoint, or None.
        kind: "vector"; "weights" (lexical, one a token, per_token); "score" (raw logits, one a label).
        skip_tokens: per_token: leading tokens of a sequence that have no row in the answer (ColBERT's <s>).
        labels: names of a score's columns, as far as the checkpoint has them.
    """

    dtype: Literal["float32", "int8", "uint8"]
    dimension: int
    per_token: bool = False
    normalized: bool = False
    unavailable: str | None = None
    kind: Literal["vector", "weights", "score"] = "vector"
    skip_tokens: int = 0
    labels: tuple[str, ...] = ()


class ServedModel(Protocol):
    """A backbone with its heads, ready to run."""

    outputs: Mapping[str, OutputSpec]
    default_output: str
    vocab_size: int
    num_layers: int

    def attention_spec(self, device: torch.device, dtype: torch.dtype) -> AttentionSpec: ...

    def __call__(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        """Run the forward once and the heads that are asked for.

        Args:
            batch: with `attention` set.
            outputs: names of `self.outputs`.

        Returns:
            name -> [B, dimension], or [T, dimension] for per-token outputs, on the batch's device, in the output's
            dtype.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentSpec:
    """Recurrent state of one sequence, a layer that keeps some.

    Attributes:
        layers: indices of these layers.
        conv_channels, conv_width: of the causal convolution's latest inputs, [conv_channels, conv_width - 1].
        value_heads, key_dim, value_dim: of the state, [value_heads, key_dim, value_dim] fp32.
    """

    layers: tuple[int, ...]
    conv_channels: int
    conv_width: int
    value_heads: int
    key_dim: int
    value_dim: int


class GenerativeModel(Protocol):
    """A causal backbone with its language-model head, ready to run.

    Attributes:
        vocab_size: rows of the head; token ids of requests lie below it.
        kv_layers: indices of the layers that keep keys and values.
        recurrent: what the other layers keep, or None where there are none.
        max_tokens: longest sequence, prompt and new tokens together.
    """

    vocab_size: int
    num_layers: int
    kv_layers: tuple[int, ...]
    recurrent: RecurrentSpec | None
    max_tokens: int

    def attention_spec(self, device: torch.device, dtype: torch.dtype) -> AttentionSpec:
        """With layout "paged"."""
        ...

    def __call__(self, batch: Batch, rows: Tensor | None) -> Tensor:
        """Run the forward, and the head for some rows only.

        Args:
            batch: with `attention` and `paged` set.
            rows: [S] int32, rows of the packed axis whose next token is wanted; None for all of them.

        Returns:
            logits [S, vocab_size] fp32.
        """
        ...


def attention_spec(folder: ModelFolder, device: torch.device, dtype: torch.dtype) -> AttentionSpec:
    """What every layer of the folder's backbone asks of attention."""
    architecture = folder.architecture
    return AttentionSpec(
        num_heads=architecture.num_heads,
        num_kv_heads=architecture.num_kv_heads,
        head_dim=architecture.head_dim,
        dtype=dtype,
        device=device,
        causal=architecture.causal,
        scale=architecture.head_dim**-0.5,
        window=architecture.window,
        max_length=folder.max_tokens,
    )


def check_outputs(offered: Mapping[str, OutputSpec], asked: Sequence[str]) -> None:
    """
    Raises:
        Unsupported: a name that is not offered, or one that this checkpoint cannot give.
    """
    for name in asked:
        if name not in offered:
            raise Unsupported(f"there is no output {name!r}; there are {', '.join(offered)}", param="outputs")
        reason = offered[name].unavailable
        if reason is not None:
            raise Unsupported(f"output {name!r} cannot be had: {reason}", param="outputs")

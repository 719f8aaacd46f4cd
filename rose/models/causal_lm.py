"""A language model: any causal backbone with a head over the vocabulary behind it.

Knows which rows are wanted and what a backbone keeps between batches; knows neither sampling nor pages.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from rose.attention_backends.base import AttentionSpec
from rose.batch import Batch
from rose.config import ModelFolder
from rose.errors import CheckpointError
from rose.layers.embedding import Embedding
from rose.layers.lm_head import LMHead, TiedHead
from rose.models.base import RecurrentSpec, attention_spec
from rose.models.registry import build_backbone, find_entry


class CausalLM(nn.Module):
    """A rose.models.base.GenerativeModel.

    A backbone whose layers do not all keep keys and values says so with attributes `kv_layers` and `recurrent`.

    Attributes:
        vocab_limit: no token at or above it is to be drawn: the tokenizer has none, and the rows are padding.
    """

    def __init__(self, folder: ModelFolder, backbone: nn.Module, lm_head: LMHead | TiedHead) -> None:
        super().__init__()
        shape = folder.architecture
        self.folder = folder
        self.backbone = backbone
        self.lm_head = lm_head
        self.vocab_size = shape.vocab_size
        self.vocab_limit = shape.vocab_size if folder.generation is None else folder.generation.vocab_limit
        self.num_layers = shape.num_layers
        self.max_tokens = folder.max_tokens
        self.kv_layers: tuple[int, ...] = getattr(backbone, "kv_layers", tuple(range(shape.num_layers)))
        self.recurrent: RecurrentSpec | None = getattr(backbone, "recurrent", None)

    def attention_spec(self, device: torch.device, dtype: torch.dtype) -> AttentionSpec:
        """What every layer that keeps keys and values asks of attention."""
        return replace(attention_spec(self.folder, device, dtype), layout="paged")

    @torch.inference_mode()
    def forward(self, batch: Batch, rows: Tensor | None) -> Tensor:
        """
        Args:
            rows: [S] int32, rows of the packed axis whose next token is wanted; None for all of them.

        Returns:
            logits [S, vocab_size] fp32, right to fp32 in what comes after the hidden rows.
        """
        hidden: Tensor = self.backbone(batch)
        logits: Tensor = self.lm_head(hidden if rows is None else hidden.index_select(0, rows))
        return logits


def build_causal_lm(folder: ModelFolder) -> CausalLM:
    """With uninitialised weights, on torch's default device.

    Raises:
        CheckpointError: a folder that is not for generating, or an architecture that is not served so.
    """
    shape = folder.architecture
    if folder.generation is None:
        raise CheckpointError(f"{folder.path} was not read as a language model; read it with task 'generate'")
    served = find_entry(shape).generates
    if shape.architecture not in served:
        there_are = f"; there are {', '.join(served)}" if served else ""
        raise CheckpointError(f"{shape.architecture} is not served for generating{there_are}")
    backbone = build_backbone(shape)
    if shape.tie_word_embeddings:
        table = backbone.get_submodule("embed_tokens")
        assert isinstance(table, Embedding)
        return CausalLM(folder, backbone, TiedHead(table))
    return CausalLM(folder, backbone, LMHead(shape.vocab_size, shape.hidden_size))

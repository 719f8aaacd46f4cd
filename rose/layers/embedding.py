"""Token tables: the plain one, and BERT's sum of three with its LayerNorm."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from rose.batch import Batch
from rose.kernels.embed_layer_norm import embed_layer_norm
from rose.kernels.embed_rms_norm import embed_rms_norm
from rose.layers.norm import LayerNorm, RMSNorm, ZeroCentredRMSNorm
from rose.layers.parameter import parameter


class Embedding(nn.Module):
    """weight: [V, D]."""

    def __init__(self, rows: int, size: int) -> None:
        super().__init__()
        self.weight = parameter(rows, size)

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [T] int32 -> [T, D]."""
        return F.embedding(ids, self.weight)

    def normalised(self, ids: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
        """ids: [T] int32 -> (norm(rows) [T, D], rows [T, D]): in one pass where `norm` is one of this room's."""
        # Of these types and no others: what stands in for a norm may leave something else than rows.
        if type(norm) is RMSNorm:
            return embed_rms_norm(ids, self.weight, norm.weight, norm.eps)
        if type(norm) is ZeroCentredRMSNorm:
            return embed_rms_norm(ids, self.weight, norm.gain, norm.eps)
        rows = self(ids)
        return norm(rows), rows


class BertEmbeddings(nn.Module):
    """LayerNorm(word + position + token type).

    Args:
        position_offset: rows of the position table before the first token's (pad_token_id + 1 in the RoBERTa family).
        types: rows of the token type table; 0 leaves it out.
    """

    def __init__(
        self, vocab_size: int, positions: int, position_offset: int, types: int, size: int, eps: float
    ) -> None:
        super().__init__()
        self.position_offset = position_offset
        self.word_embeddings = Embedding(vocab_size, size)
        self.position_embeddings = Embedding(positions + position_offset, size)
        self.token_type_embeddings = Embedding(types, size) if types else None
        self.LayerNorm = LayerNorm(size, eps)

    def forward(self, batch: Batch) -> Tensor:
        """-> [T, D]."""
        types = self.token_type_embeddings
        return embed_layer_norm(
            batch.ids,
            batch.positions,
            batch.type_ids,
            self.word_embeddings.weight,
            self.position_embeddings.weight,
            None if types is None else types.weight,
            self.LayerNorm.weight,
            self.LayerNorm.bias,
            self.LayerNorm.eps,
            self.position_offset,
        )

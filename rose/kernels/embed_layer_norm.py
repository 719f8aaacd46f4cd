"""Embedding gather, sum and LayerNorm of the BERT family in one pass."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def embed_layer_norm_ref(
    ids: Tensor,
    positions: Tensor,
    type_ids: Tensor | None,
    word: Tensor,
    position: Tensor,
    token_type: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    position_offset: int = 0,
) -> Tensor:
    x = F.embedding(ids, word).float() + F.embedding(positions + position_offset, position).float()
    if token_type is not None:
        x = x + (token_type[0] if type_ids is None else F.embedding(type_ids, token_type)).float()
    return F.layer_norm(x, weight.shape, weight.float(), bias.float(), eps).to(word.dtype)


def embed_layer_norm(
    ids: Tensor,
    positions: Tensor,
    type_ids: Tensor | None,
    word: Tensor,
    position: Tensor,
    token_type: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    position_offset: int = 0,
) -> Tensor:
    """LayerNorm(word[ids] + position[positions + position_offset] + token_type[type_ids]).

    Args:
        ids, positions: [T] int32. type_ids: [T] int32, or None for type 0 throughout.
        word: [V, D]; position: [max_positions + position_offset, D]; token_type: [types, D] or None.
        weight, bias: [D].

    Returns:
        [T, D] in word's dtype; summed and normalised in fp32.
    """
    return embed_layer_norm_ref(
        ids, positions, type_ids, word, position, token_type, weight, bias, eps, position_offset
    )

"""Embedding gather, sum and LayerNorm of the BERT family in one pass."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rose.kernels.add_norm import layer_norm_row
from rose.kernels.launch import (
    Ptr,
    constexpr,
    jit,
    launch,
    next_power_of_2,
    require_contiguous,
    row_warps,
    runs_triton,
    tl,
)


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


@jit(do_not_specialize=["eps", "position_offset"])
def _embed_layer_norm(
    ids: Ptr,
    positions: Ptr,
    type_ids: Ptr,
    word: Ptr,
    position: Ptr,
    token_type: Ptr,
    weight: Ptr,
    bias: Ptr,
    out: Ptr,
    eps: Ptr,
    position_offset: Ptr,
    D: constexpr,
    BLOCK: constexpr,
    HAS_TYPES: constexpr,
    HAS_TYPE_IDS: constexpr,
    PDL: constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < D
    w = tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(bias + cols, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    word_row = tl.load(ids + row).to(tl.int64)
    position_row = tl.load(positions + row).to(tl.int64) + position_offset
    x = tl.load(word + word_row * D + cols, mask=mask, other=0.0).to(tl.float32)
    x += tl.load(position + position_row * D + cols, mask=mask, other=0.0).to(tl.float32)
    if HAS_TYPE_IDS:
        type_row = tl.load(type_ids + row).to(tl.int64)
        x += tl.load(token_type + type_row * D + cols, mask=mask, other=0.0).to(tl.float32)
    elif HAS_TYPES:
        x += tl.load(token_type + cols, mask=mask, other=0.0).to(tl.float32)
    y = layer_norm_row(x, mask, w, b, eps, D)
    tl.store(out + row.to(tl.int64) * D + cols, y.to(out.dtype.element_ty), mask=mask)


def embed_layer_norm_triton(
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
    require_contiguous(ids=ids, positions=positions, type_ids=type_ids, word=word, position=position)
    require_contiguous(token_type=token_type, weight=weight, bias=bias)
    T, D = ids.shape[0], word.shape[1]
    out = torch.empty(T, D, dtype=word.dtype, device=word.device)
    launch(
        _embed_layer_norm,
        (T,),
        ids,
        positions,
        ids if type_ids is None else type_ids,
        word,
        position,
        word if token_type is None else token_type,
        weight,
        bias,
        out,
        eps,
        position_offset,
        D=D,
        BLOCK=next_power_of_2(D),
        HAS_TYPES=token_type is not None,
        HAS_TYPE_IDS=token_type is not None and type_ids is not None,
        device=word.device,
        warps=row_warps(D, T),
    )
    return out


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
    run = embed_layer_norm_triton if runs_triton(word) else embed_layer_norm_ref
    return run(ids, positions, type_ids, word, position, token_type, weight, bias, eps, position_offset)

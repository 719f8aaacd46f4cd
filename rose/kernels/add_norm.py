"""Residual add and norm in one pass, summing the split-K pieces of the product before it.

The residual stream is in the model's dtype, norms are computed in fp32, and pieces are summed in a fixed order.
One program a row: rows are independent, so a row's value depends on nothing but itself.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

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


def _sum_pieces(partial: Tensor) -> Tensor:
    total = partial[0].float()
    for piece in partial[1:]:
        total = total + piece.float()
    return total


def add_layer_norm_ref(
    partial: Tensor, bias: Tensor | None, residual: Tensor, weight: Tensor, norm_bias: Tensor, eps: float
) -> Tensor:
    x = residual.float() + _sum_pieces(partial)
    if bias is not None:
        x = x + bias.float()
    return F.layer_norm(x, weight.shape, weight.float(), norm_bias.float(), eps).to(residual.dtype)


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def add_rms_norm_ref(partial: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x = residual.float() + _sum_pieces(partial)
    stream = x.to(residual.dtype)
    return rms_norm_ref(stream, weight, eps), stream


@jit
def layer_norm_row(x: Ptr, mask: Ptr, w: Ptr, b: Ptr, eps: Ptr, D: constexpr) -> Ptr:
    """(x - mean) / sqrt(var + eps) * w + b of one row in fp32; lanes outside the mask hold zero."""
    mean = tl.sum(x, 0) / D
    centred = tl.where(mask, x - mean, 0.0)
    variance = tl.sum(centred * centred, 0) / D
    return centred * tl.rsqrt(variance + eps) * w + b


@jit
def load_sum(partial: Ptr, residual: Ptr, piece_stride: Ptr, offset: Ptr, mask: Ptr, P: constexpr) -> Ptr:
    """residual + (partial[0] + partial[1] + ...), in that order."""
    total = tl.load(partial + offset, mask=mask, other=0.0).to(tl.float32)
    for p in tl.static_range(1, P):
        total += tl.load(partial + p * piece_stride + offset, mask=mask, other=0.0).to(tl.float32)
    return tl.load(residual + offset, mask=mask, other=0.0).to(tl.float32) + total


@jit(do_not_specialize=["eps"])
def _add_layer_norm(
    partial: Ptr,
    bias: Ptr,
    residual: Ptr,
    weight: Ptr,
    norm_bias: Ptr,
    out: Ptr,
    piece_stride: Ptr,
    eps: Ptr,
    P: constexpr,
    D: constexpr,
    BLOCK: constexpr,
    HAS_BIAS: constexpr,
    PDL: constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    cols = tl.arange(0, BLOCK)
    mask = cols < D
    w = tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(norm_bias + cols, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        product_bias = tl.load(bias + cols, mask=mask, other=0.0).to(tl.float32)
    offset = tl.program_id(0).to(tl.int64) * D + cols
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = load_sum(partial, residual, piece_stride, offset, mask, P)
    if HAS_BIAS:
        x += product_bias
    tl.store(out + offset, layer_norm_row(x, mask, w, b, eps, D).to(out.dtype.element_ty), mask=mask)


@jit(do_not_specialize=["eps"])
def _add_rms_norm(
    partial: Ptr,
    residual: Ptr,
    weight: Ptr,
    out: Ptr,
    stream: Ptr,
    piece_stride: Ptr,
    eps: Ptr,
    P: constexpr,
    D: constexpr,
    BLOCK: constexpr,
    PDL: constexpr,
) -> None:
    """P = 0: no pieces, `residual` is normalised as it is and the stream is not written."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    cols = tl.arange(0, BLOCK)
    mask = cols < D
    w = tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
    offset = tl.program_id(0).to(tl.int64) * D + cols
    if PDL:
        tl.extra.cuda.gdc_wait()
    if P == 0:
        x = tl.load(residual + offset, mask=mask, other=0.0).to(tl.float32)
    else:
        rounded = load_sum(partial, residual, piece_stride, offset, mask, P).to(stream.dtype.element_ty)
        tl.store(stream + offset, rounded, mask=mask)
        x = rounded.to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / D + eps) * w
    tl.store(out + offset, y.to(out.dtype.element_ty), mask=mask)


def add_layer_norm_triton(
    partial: Tensor, bias: Tensor | None, residual: Tensor, weight: Tensor, norm_bias: Tensor, eps: float
) -> Tensor:
    require_contiguous(partial=partial, bias=bias, residual=residual, weight=weight, norm_bias=norm_bias)
    T, D = residual.shape
    out = torch.empty_like(residual)
    launch(
        _add_layer_norm,
        (T,),
        partial,
        weight if bias is None else bias,
        residual,
        weight,
        norm_bias,
        out,
        T * D,
        eps,
        P=partial.shape[0],
        D=D,
        BLOCK=next_power_of_2(D),
        HAS_BIAS=bias is not None,
        device=residual.device,
        warps=row_warps(D, T),
    )
    return out


def _rms_norm_triton(partial: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    require_contiguous(partial=partial, residual=residual, weight=weight)
    T, D = residual.shape
    out = torch.empty_like(residual)
    stream = residual if partial is None else torch.empty_like(residual)
    launch(
        _add_rms_norm,
        (T,),
        residual if partial is None else partial,
        residual,
        weight,
        out,
        stream,
        T * D,
        eps,
        P=0 if partial is None else partial.shape[0],
        D=D,
        BLOCK=next_power_of_2(D),
        device=residual.device,
        warps=row_warps(D, T),
    )
    return out, stream


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _rms_norm_triton(None, x, weight, eps)[0]


def add_rms_norm_triton(partial: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _rms_norm_triton(partial, residual, weight, eps)


def add_layer_norm(
    partial: Tensor, bias: Tensor | None, residual: Tensor, weight: Tensor, norm_bias: Tensor, eps: float
) -> Tensor:
    """LayerNorm(residual + sum(partial) + bias) (post-norm, as BERT has it).

    Args:
        partial: [P, T, D]. bias: [D] or None. residual: [T, D]. weight, norm_bias: [D].

    Returns:
        [T, D] in residual's dtype.
    """
    run = add_layer_norm_triton if runs_triton(residual) else add_layer_norm_ref
    return run(partial, bias, residual, weight, norm_bias, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis (arXiv:1910.07467). x: [T, D] -> [T, D] in x's dtype."""
    return (rms_norm_triton if runs_triton(x) else rms_norm_ref)(x, weight, eps)


def add_rms_norm(partial: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The pre-norm step: new stream = residual + sum(partial), and RMSNorm(new stream).

    Args:
        partial: [P, T, D]. residual: [T, D]. weight: [D].

    Returns:
        (normalised [T, D], new stream [T, D]), both in residual's dtype. The norm is that of the rounded stream, as the
        reference implementations compute it.
    """
    return (add_rms_norm_triton if runs_triton(residual) else add_rms_norm_ref)(partial, residual, weight, eps)

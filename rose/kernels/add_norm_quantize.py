"""Residual add, norm, and e4m3 codes of the answer under a scale settled beforehand, in one pass.

The codes are those of `quantize_static` behind rose/kernels/add_norm.py, to the bit: the normalised value is rounded to
the model's dtype in between. A post-norm's answer is wanted itself too (it is the next residual); a pre-norm's is not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rose.kernels.add_norm import add_layer_norm_ref, add_rms_norm_ref, layer_norm_row, load_sum, rms_norm_ref
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
from rose.kernels.quantize import FP8, quantize_static_ref, static_codes


def add_layer_norm_quantize_ref(
    partial: Tensor, bias: Tensor | None, residual: Tensor, weight: Tensor, norm_bias: Tensor, eps: float, scale: Tensor
) -> tuple[Tensor, Tensor]:
    out = add_layer_norm_ref(partial, bias, residual, weight, norm_bias, eps)
    return out, quantize_static_ref(out, scale)


def rms_norm_quantize_ref(x: Tensor, weight: Tensor, eps: float, scale: Tensor) -> Tensor:
    return quantize_static_ref(rms_norm_ref(x, weight, eps), scale)


def add_rms_norm_quantize_ref(
    partial: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: Tensor
) -> tuple[Tensor, Tensor]:
    x, stream = add_rms_norm_ref(partial, residual, weight, eps)
    return quantize_static_ref(x, scale), stream


@jit(do_not_specialize=["eps"])
def _add_layer_norm_quantize(
    partial: Ptr,
    bias: Ptr,
    residual: Ptr,
    weight: Ptr,
    norm_bias: Ptr,
    scale: Ptr,
    out: Ptr,
    codes: Ptr,
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
    s = tl.load(scale)
    if HAS_BIAS:
        product_bias = tl.load(bias + cols, mask=mask, other=0.0).to(tl.float32)
    offset = tl.program_id(0).to(tl.int64) * D + cols
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = load_sum(partial, residual, piece_stride, offset, mask, P)
    if HAS_BIAS:
        x += product_bias
    y = layer_norm_row(x, mask, w, b, eps, D).to(out.dtype.element_ty)
    tl.store(out + offset, y, mask=mask)
    v = y.to(tl.float32)
    tl.store(codes + offset, static_codes(v, s).to(codes.dtype.element_ty), mask=mask)


@jit(do_not_specialize=["eps"])
def _add_rms_norm_quantize(
    partial: Ptr,
    residual: Ptr,
    weight: Ptr,
    scale: Ptr,
    codes: Ptr,
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
    s = tl.load(scale)
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
    v = y.to(stream.dtype.element_ty).to(tl.float32)
    tl.store(codes + offset, static_codes(v, s).to(codes.dtype.element_ty), mask=mask)


def add_layer_norm_quantize_triton(
    partial: Tensor, bias: Tensor | None, residual: Tensor, weight: Tensor, norm_bias: Tensor, eps: float, scale: Tensor
) -> tuple[Tensor, Tensor]:
    require_contiguous(partial=partial, bias=bias, residual=residual, weight=weight, norm_bias=norm_bias)
    T, D = residual.shape
    out, codes = torch.empty_like(residual), torch.empty(T, D, dtype=FP8, device=residual.device)
    launch(
        _add_layer_norm_quantize,
        (T,),
        partial,
        weight if bias is None else bias,
        residual,
        weight,
        norm_bias,
        scale,
        out,
        codes,
        T * D,
        eps,
        P=partial.shape[0],
        D=D,
        BLOCK=next_power_of_2(D),
        HAS_BIAS=bias is not None,
        device=residual.device,
        warps=row_warps(D, T),
    )
    return out, codes


def add_rms_norm_quantize_triton(
    partial: Tensor | None, residual: Tensor, weight: Tensor, eps: float, scale: Tensor
) -> tuple[Tensor, Tensor]:
    require_contiguous(partial=partial, residual=residual, weight=weight)
    T, D = residual.shape
    codes = torch.empty(T, D, dtype=FP8, device=residual.device)
    stream = residual if partial is None else torch.empty_like(residual)
    launch(
        _add_rms_norm_quantize,
        (T,),
        residual if partial is None else partial,
        residual,
        weight,
        scale,
        codes,
        stream,
        T * D,
        eps,
        P=0 if partial is None else partial.shape[0],
        D=D,
        BLOCK=next_power_of_2(D),
        device=residual.device,
        warps=row_warps(D, T),
    )
    return codes, stream


def add_layer_norm_quantize(
    partial: Tensor, bias: Tensor | None, residual: Tensor, weight: Tensor, norm_bias: Tensor, eps: float, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """`add_layer_norm`, and codes of its answer. scale: [1] fp32 -> ([T, D] in residual's dtype, e4m3 codes [T, D])."""
    run = add_layer_norm_quantize_triton if runs_triton(residual) else add_layer_norm_quantize_ref
    return run(partial, bias, residual, weight, norm_bias, eps, scale)


def rms_norm_quantize(x: Tensor, weight: Tensor, eps: float, scale: Tensor) -> Tensor:
    """`rms_norm` as e4m3 codes. x: [T, D], scale: [1] fp32 -> [T, D]."""
    if runs_triton(x):
        return add_rms_norm_quantize_triton(None, x, weight, eps, scale)[0]
    return rms_norm_quantize_ref(x, weight, eps, scale)


def add_rms_norm_quantize(
    partial: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` with its first answer as e4m3 codes. scale: [1] fp32 -> (codes [T, D], new stream [T, D])."""
    run = add_rms_norm_quantize_triton if runs_triton(residual) else add_rms_norm_quantize_ref
    return run(partial, residual, weight, eps, scale)

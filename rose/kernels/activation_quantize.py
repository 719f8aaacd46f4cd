"""Activations that leave e4m3 codes for the product behind them: one pass over a large product instead of two.

The codes are those of `quantize_static` behind `activate` or `gated_activation`, to the bit: the value is rounded to
the product's dtype in between.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rose.kernels.activation import activate, gated_activation_ref
from rose.kernels.gemm import activate_block
from rose.kernels.launch import Ptr, cdiv, constexpr, jit, launch, program_block, require_contiguous, runs_triton, tl
from rose.kernels.quantize import FP8, held_as, quantize_static_ref, static_codes


def activate_quantize_ref(x: Tensor, activation: str | None, scale: Tensor) -> Tensor:
    return quantize_static_ref(activate(x.float(), activation).to(x.dtype), scale)


def gated_activation_quantize_ref(x: Tensor, activation: str, scale: Tensor) -> Tensor:
    return quantize_static_ref(gated_activation_ref(x.float(), activation).to(x.dtype), scale)


@jit
def _activate_quantize(
    x: Ptr,
    scale: Ptr,
    out: Ptr,
    size: Ptr,
    N: constexpr,
    ACT: constexpr,
    GATED: constexpr,
    LARGE: constexpr,
    BLOCK: constexpr,
    PDL: constexpr,
) -> None:
    """A program makes BLOCK codes, wherever rows of N end. GATED: rows of x are 2 N wide. LARGE: x is counted in 64
    bits."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    s = tl.load(scale)
    block = tl.program_id(0)
    at = (block.to(tl.int64) if LARGE else block) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    source = at + at // N * N if GATED else at
    if PDL:
        tl.extra.cuda.gdc_wait()
    v = tl.load(x + source, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(x + source + N, mask=mask, other=0.0).to(tl.float32)
        v = activate_block(v, ACT) * up
    else:
        v = activate_block(v, ACT)
    v = static_codes(held_as(v, x.dtype.element_ty), s)
    tl.store(out + at, v.to(out.dtype.element_ty), mask=mask)


def activate_quantize_triton(x: Tensor, activation: str | None, scale: Tensor, *, gated: bool = False) -> Tensor:
    require_contiguous(x=x)
    T, N = x.shape[0], x.shape[1] // (2 if gated else 1)
    out = torch.empty(T, N, dtype=FP8, device=x.device)
    block, warps = program_block(T * N)
    launch(
        _activate_quantize,
        (cdiv(T * N, block),),
        x,
        scale,
        out,
        T * N,
        N=N,
        ACT=activation,
        GATED=gated,
        LARGE=x.numel() > 2**31 - block,
        BLOCK=block,
        device=x.device,
        warps=warps,
    )
    return out


def activate_quantize(x: Tensor, activation: str | None, scale: Tensor) -> Tensor:
    """x: [T, N], scale: [1] fp32 -> e4m3 codes [T, N] of activation(x)."""
    return (activate_quantize_triton if runs_triton(x) else activate_quantize_ref)(x, activation, scale)


def gated_activation_quantize(x: Tensor, activation: str | None, scale: Tensor) -> Tensor:
    """x: [T, 2 N], scale: [1] fp32 -> e4m3 codes [T, N] of activation(x[:, :N]) * x[:, N:]."""
    activation = activation or "silu"
    if runs_triton(x):
        return activate_quantize_triton(x, activation, scale, gated=True)
    return gated_activation_quantize_ref(x, activation, scale)

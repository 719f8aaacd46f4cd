"""Activations that leave e4m3 codes for the product behind them: one pass over a large product instead of two.

The codes are those of `quantize_static` behind `activate` or `gated_activation`, to the bit: the value is rounded to
the product's dtype in between.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rose.kernels.activation import activate, gated_activation_ref
from rose.kernels.gemm import activate_block
from rose.kernels.launch import Ptr, cdiv, constexpr, jit, launch, require_contiguous, runs_triton, tl
from rose.kernels.quantize import FP8, quantize_static_ref, static_codes

_BLOCK = 2048


def activate_quantize_ref(x: Tensor, activation: str | None, scale: Tensor) -> Tensor:
    return quantize_static_ref(activate(x.float(), activation).to(x.dtype), scale)


def gated_activation_quantize_ref(x: Tensor, activation: str, scale: Tensor) -> Tensor:
    return quantize_static_ref(gated_activation_ref(x.float(), activation).to(x.dtype), scale)


@jit
def _activate_quantize(
    x: Ptr,
    scale: Ptr,
    out: Ptr,
    N: constexpr,
    ACT: constexpr,
    GATED: constexpr,
    BLOCK: constexpr,
    PDL: constexpr,
) -> None:
    """Program (row, block of N columns); GATED: rows of x are 2 N wide."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    s = tl.load(scale)
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < N
    width = 2 * N if GATED else N
    if PDL:
        tl.extra.cuda.gdc_wait()
    v = activate_block(tl.load(x + row * width + col, mask=mask, other=0.0).to(tl.float32), ACT)
    if GATED:
        v *= tl.load(x + row * width + N + col, mask=mask, other=0.0).to(tl.float32)
    v = v.to(x.dtype.element_ty).to(tl.float32)
    tl.store(out + row * N + col, static_codes(v, s + tl.zeros_like(v)).to(out.dtype.element_ty), mask=mask)


def activate_quantize_triton(x: Tensor, activation: str | None, scale: Tensor, *, gated: bool = False) -> Tensor:
    require_contiguous(x=x)
    T, N = x.shape[0], x.shape[1] // (2 if gated else 1)
    out = torch.empty(T, N, dtype=FP8, device=x.device)
    grid = (T, cdiv(N, _BLOCK))
    launch(
        _activate_quantize,
        grid,
        x,
        scale,
        out,
        N=N,
        ACT=activation,
        GATED=gated,
        BLOCK=_BLOCK,
        device=x.device,
        warps=8,
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

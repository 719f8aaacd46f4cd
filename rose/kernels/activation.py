"""Activations as kernels of their own, for the token counts whose products the library computes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rose.kernels.gemm import activate_block
from rose.kernels.launch import Ptr, cdiv, constexpr, jit, launch, program_block, require_contiguous, runs_triton, tl


def activate(x: Tensor, activation: str | None) -> Tensor:
    """None, "gelu" (erf), "gelu_tanh", "relu" or "silu", elementwise."""
    if activation is None:
        return x
    if activation == "gelu":
        return F.gelu(x)
    if activation == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if activation == "relu":
        return F.relu(x)
    if activation == "silu":
        return F.silu(x)
    raise ValueError(f"unknown activation {activation!r}")


def gated_activation_ref(x: Tensor, activation: str) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return activate(gate, activation) * up


@jit
def _activate(x: Ptr, size: Ptr, ACT: constexpr, BLOCK: constexpr, PDL: constexpr) -> None:
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    if PDL:
        tl.extra.cuda.gdc_wait()
    v = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(x + at, activate_block(v, ACT).to(x.dtype.element_ty), mask=mask)


@jit
def _gated_activation(
    x: Ptr, out: Ptr, size: Ptr, N: constexpr, ACT: constexpr, LARGE: constexpr, BLOCK: constexpr, PDL: constexpr
) -> None:
    """A program makes BLOCK values, wherever rows of N end. LARGE: x is counted in 64 bits."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    block = tl.program_id(0)
    at = (block.to(tl.int64) if LARGE else block) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    source = at + at // N * N
    if PDL:
        tl.extra.cuda.gdc_wait()
    gate = tl.load(x + source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + source + N, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, (activate_block(gate, ACT) * up).to(out.dtype.element_ty), mask=mask)


def activate_in_place_triton(x: Tensor, activation: str) -> Tensor:
    require_contiguous(x=x)
    block, warps = program_block(x.numel())
    grid = (cdiv(x.numel(), block),)
    launch(_activate, grid, x, x.numel(), ACT=activation, BLOCK=block, device=x.device, warps=warps)
    return x


def gated_activation_triton(x: Tensor, activation: str) -> Tensor:
    require_contiguous(x=x)
    T, N = x.shape[0], x.shape[1] // 2
    out = torch.empty(T, N, dtype=x.dtype, device=x.device)
    block, warps = program_block(T * N)
    launch(
        _gated_activation,
        (cdiv(T * N, block),),
        x,
        out,
        T * N,
        N=N,
        ACT=activation,
        LARGE=x.numel() > 2**31 - block,
        BLOCK=block,
        device=x.device,
        warps=warps,
    )
    return out


def activate_in_place(x: Tensor, activation: str | None) -> Tensor:
    """`activate`, overwriting x [T, N] where the device has a kernel for it. Returns the result."""
    if activation is None or not runs_triton(x):
        return activate(x, activation)
    return activate_in_place_triton(x, activation)


def gated_activation(x: Tensor, activation: str = "silu") -> Tensor:
    """activation(x[:, :N]) * x[:, N:]. x: [T, 2 N] -> [T, N] in x's dtype."""
    return (gated_activation_triton if runs_triton(x) else gated_activation_ref)(x, activation)

"""Activations as kernels of their own, for the token counts whose products the library computes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rose.kernels.gemm import activate_block
from rose.kernels.launch import Ptr, cdiv, constexpr, jit, launch, require_contiguous, runs_triton, tl

_BLOCK = 2048


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
def _gated_activation(x: Ptr, out: Ptr, N: constexpr, ACT: constexpr, BLOCK: constexpr, PDL: constexpr) -> None:
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < N
    if PDL:
        tl.extra.cuda.gdc_wait()
    gate = tl.load(x + row * (2 * N) + col, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * (2 * N) + N + col, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * N + col, (activate_block(gate, ACT) * up).to(out.dtype.element_ty), mask=mask)


def activate_in_place_triton(x: Tensor, activation: str) -> Tensor:
    require_contiguous(x=x)
    grid = (cdiv(x.numel(), _BLOCK),)
    launch(_activate, grid, x, x.numel(), ACT=activation, BLOCK=_BLOCK, device=x.device, warps=8)
    return x


def gated_activation_triton(x: Tensor, activation: str) -> Tensor:
    require_contiguous(x=x)
    T, N = x.shape[0], x.shape[1] // 2
    out = torch.empty(T, N, dtype=x.dtype, device=x.device)
    grid = (T, cdiv(N, _BLOCK))
    launch(_gated_activation, grid, x, out, N=N, ACT=activation, BLOCK=_BLOCK, device=x.device, warps=8)
    return out


def activate_in_place(x: Tensor, activation: str | None) -> Tensor:
    """`activate`, overwriting x [T, N] where the device has a kernel for it. Returns the result."""
    if activation is None or not runs_triton(x):
        return activate(x, activation)
    return activate_in_place_triton(x, activation)


def gated_activation(x: Tensor, activation: str = "silu") -> Tensor:
    """activation(x[:, :N]) * x[:, N:]. x: [T, 2 N] -> [T, N] in x's dtype."""
    return (gated_activation_triton if runs_triton(x) else gated_activation_ref)(x, activation)

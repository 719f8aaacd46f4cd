"""Attention's answer times the sigmoid of a gate that lies beside each query head of the packed product."""

from __future__ import annotations

import torch
from torch import Tensor

from rose.kernels.launch import (
    Ptr,
    cdiv,
    constexpr,
    jit,
    launch,
    next_power_of_2,
    require_contiguous,
    runs_triton,
    tl,
)


def sigmoid_gate_ref(x: Tensor, packed: Tensor) -> Tensor:
    heads = x.shape[1]
    gate = packed[:, : 2 * heads * x.shape[2]].unflatten(-1, (heads, 2, -1))[:, :, 1]
    gated: Tensor = x.float() * gate.float().sigmoid()
    return gated.to(x.dtype).flatten(1)


@jit
def _sigmoid_gate(
    x: Ptr,
    packed: Ptr,
    out: Ptr,
    packed_row: Ptr,
    H: constexpr,
    HEAD_DIM: constexpr,
    BLOCK: constexpr,
    HEADS: constexpr,
    PDL: constexpr,
) -> None:
    """Program (t, h): HEADS neighbouring heads of one token."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    mask = (head < H) & (col < HEAD_DIM)
    if PDL:
        tl.extra.cuda.gdc_wait()
    v = tl.load(x + (token * H + head) * HEAD_DIM + col, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(packed + token * packed_row + (2 * head + 1) * HEAD_DIM + col, mask=mask, other=0.0).to(tl.float32)
    y = v / (1.0 + tl.exp(-gate))
    tl.store(out + (token * H + head) * HEAD_DIM + col, y.to(out.dtype.element_ty), mask=mask)


def sigmoid_gate_triton(x: Tensor, packed: Tensor) -> Tensor:
    T, H, head_dim = x.shape
    if packed.shape[1] < 2 * H * head_dim or packed.stride(1) != 1:
        raise ValueError(f"{H} heads and gates of {head_dim} do not fit rows of {tuple(packed.shape)}")
    require_contiguous(x=x)
    out = torch.empty(T, H * head_dim, dtype=x.dtype, device=x.device)
    heads = min(4, next_power_of_2(H))
    launch(
        _sigmoid_gate,
        (T, cdiv(H, heads)),
        x,
        packed,
        out,
        packed.stride(0),
        H=H,
        HEAD_DIM=head_dim,
        BLOCK=next_power_of_2(head_dim),
        HEADS=heads,
        device=x.device,
        warps=max(1, min(4, heads * head_dim // 256)),
    )
    return out


def sigmoid_gate(x: Tensor, packed: Tensor) -> Tensor:
    """x * sigmoid(gate).

    Args:
        x: [T, H, head_dim]. packed: [T, at least 2 H head_dim]: each query head followed by its gate.

    Returns:
        [T, H head_dim] in x's dtype.
    """
    return (sigmoid_gate_triton if runs_triton(x) else sigmoid_gate_ref)(x, packed)

"""RMSNorm of each head, times silu of a gate: the end of a gated delta net."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rose.kernels.causal_conv import silu
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


def gated_norm_ref(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    x32 = x.float()
    unit = (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    gated = unit.float() * weight.float() * F.silu(gate.float().view(x.shape))
    return gated.to(x.dtype).flatten(1)


@jit(do_not_specialize=["eps"])
def _gated_norm(
    x: Ptr,
    gate: Ptr,
    weight: Ptr,
    out: Ptr,
    gate_row: Ptr,
    eps: Ptr,
    H: constexpr,
    D: constexpr,
    BLOCK: constexpr,
    HEADS: constexpr,
    PDL: constexpr,
) -> None:
    """Program (t, h): HEADS neighbouring heads of one token."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    col = tl.arange(0, BLOCK)
    mask = (head < H)[:, None] & (col < D)[None, :]
    at = head[:, None] * D + col[None, :]
    w = tl.load(weight + col, mask=col < D, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    v = tl.load(x + token * (H * D) + at, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(gate + token * gate_row + at, mask=mask, other=0.0).to(tl.float32)
    unit = v * tl.rsqrt(tl.sum(v * v, 1) / D + eps)[:, None]
    # Rounded to the stored type between norm and weight, as the reference implementation does.
    y = unit.to(x.dtype.element_ty).to(tl.float32) * w[None, :] * silu(z)
    tl.store(out + token * (H * D) + at, y.to(out.dtype.element_ty), mask=mask)


def gated_norm_triton(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    T, H, D = x.shape
    if gate.shape != (T, H * D) or gate.stride(1) != 1:
        raise ValueError(
            f"gate must be {(T, H * D)}, rows of neighbours; it is {tuple(gate.shape)}, strides {gate.stride()}"
        )
    require_contiguous(x=x, weight=weight)
    out = torch.empty(T, H * D, dtype=x.dtype, device=x.device)
    heads = min(8, next_power_of_2(H))
    launch(
        _gated_norm,
        (T, cdiv(H, heads)),
        x,
        gate,
        weight,
        out,
        gate.stride(0),
        eps,
        H=H,
        D=D,
        BLOCK=next_power_of_2(D),
        HEADS=heads,
        device=x.device,
        warps=max(1, min(4, heads * D // 256)),
    )
    return out


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm(x) * weight * silu(gate) a head, in fp32.

    Args:
        x: [T, H, D]. gate: [T, H D], rows may be strided. weight: [D], shared by the heads.

    Returns:
        [T, H D] in x's dtype.
    """
    return (gated_norm_triton if runs_triton(x) else gated_norm_ref)(x, gate, weight, eps)

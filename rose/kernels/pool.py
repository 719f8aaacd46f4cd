"""From hidden rows to one vector a sequence, and the last step of each output kind, in fp32."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

PoolMode = Literal["cls", "mean", "last", "max", "mean_sqrt_len", "weightedmean"]
Finish = Literal["none", "l2", "tanh_int8", "sign_bits"]


def pool_ref(hidden: Tensor, cu_seqlens: Tensor, mode: PoolMode) -> Tensor:
    starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    if mode == "cls":
        return hidden[starts].float()
    if mode == "last":
        return hidden[ends - 1].float()
    lengths = ends - starts
    sequence_of_token = torch.repeat_interleave(torch.arange(len(lengths), device=hidden.device), lengths)
    x = hidden[: int(cu_seqlens[-1])].float()
    if mode == "max":
        out = torch.full((len(lengths), x.shape[1]), -torch.inf, device=x.device)
        return out.scatter_reduce(0, sequence_of_token[:, None].expand_as(x), x, "amax", include_self=True)
    if mode == "weightedmean":
        # Weight i + 1 for token i: arXiv:2202.08904, as sentence-transformers has it.
        weights = (torch.arange(len(x), device=x.device) - starts[sequence_of_token] + 1).float()
        sums = torch.zeros(len(lengths), x.shape[1], device=x.device).index_add_(
            0, sequence_of_token, x * weights[:, None]
        )
        return sums / (lengths * (lengths + 1) / 2).float()[:, None]
    sums = torch.zeros(len(lengths), x.shape[1], device=x.device).index_add_(0, sequence_of_token, x)
    divisor = lengths.float() if mode == "mean" else lengths.float().sqrt()
    return sums / divisor[:, None]


def pool(hidden: Tensor, cu_seqlens: Tensor, mode: PoolMode) -> Tensor:
    """One fp32 vector a sequence.

    Args:
        hidden: [T, D]; rows past cu_seqlens[-1] are ignored.
        cu_seqlens: [B + 1] int32, no empty sequence.

    Returns:
        [B, D] fp32.
    """
    return pool_ref(hidden, cu_seqlens, mode)


def finish_ref(pooled: Tensor, how: Finish) -> Tensor:
    if how == "none":
        return pooled
    if how == "l2":
        # Dividing by max(norm, tiny) leaves the zero vector zero instead of NaN.
        return pooled / pooled.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    if how == "tanh_int8":
        return (pooled.tanh() * 127).round().clamp(-128, 127).to(torch.int8)
    if how == "sign_bits":
        bits = (pooled >= 0).view(*pooled.shape[:-1], -1, 8).to(torch.uint8)
        weights = 2 ** torch.arange(8, device=pooled.device, dtype=torch.uint8)
        return (bits * weights).sum(-1, dtype=torch.uint8)
    raise ValueError(f"unknown finish {how!r}")


def finish(pooled: Tensor, how: Finish) -> Tensor:
    """The last step of an output kind.

    Args:
        pooled: [B, D] fp32.
        how: "none"; "l2" (unit length; zero stays zero); "tanh_int8" (round(127 tanh x), the pplx-embed model card);
            "sign_bits" (x >= 0, eight to a byte, least significant bit first; D a multiple of 8).

    Returns:
        [B, D] fp32, [B, D] int8 or [B, D / 8] uint8.
    """
    return finish_ref(pooled, how)


def pool_finish(hidden: Tensor, cu_seqlens: Tensor, mode: PoolMode, how: Finish) -> Tensor:
    """`finish(pool(hidden, cu_seqlens, mode), how)` in one pass."""
    return finish_ref(pool_ref(hidden, cu_seqlens, mode), how)

"""Residual add and norm in one pass, summing the split-K pieces of the product before it.

The residual stream is in the model's dtype, norms are computed in fp32, and pieces are summed in a fixed order.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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


def add_layer_norm(
    partial: Tensor, bias: Tensor | None, residual: Tensor, weight: Tensor, norm_bias: Tensor, eps: float
) -> Tensor:
    """LayerNorm(residual + sum(partial) + bias) (post-norm, as BERT has it).

    Args:
        partial: [P, T, D]. bias: [D] or None. residual: [T, D]. weight, norm_bias: [D].

    Returns:
        [T, D] in residual's dtype.
    """
    return add_layer_norm_ref(partial, bias, residual, weight, norm_bias, eps)


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis (arXiv:1910.07467). x: [T, D] -> [T, D] in x's dtype."""
    return rms_norm_ref(x, weight, eps)


def add_rms_norm_ref(partial: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x = residual.float() + _sum_pieces(partial)
    stream = x.to(residual.dtype)
    return rms_norm_ref(stream, weight, eps), stream


def add_rms_norm(partial: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The pre-norm step: new stream = residual + sum(partial), and RMSNorm(new stream).

    Args:
        partial: [P, T, D]. residual: [T, D]. weight: [D].

    Returns:
        (normalised [T, D], new stream [T, D]), both in residual's dtype. The norm is that of the rounded stream, as the
        reference implementations compute it.
    """
    return add_rms_norm_ref(partial, residual, weight, eps)

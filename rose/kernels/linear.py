"""Linear layers: bias and activation in the epilogue, a gated pair, and split-K partial sums left for the next norm.

`linear_partial` leaves its sum in P pieces so that a narrow product can fill the chip without a reduction kernel of its
own: the add + norm that follows reads the pieces anyway.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


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


def linear_ref(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Tensor:
    return activate(F.linear(x, weight, bias), activation)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Tensor:
    """activation(x @ weight.T + bias).

    Args:
        x: [T, K].
        weight: [N, K], as checkpoints store it.
        bias: [N] or None.
        activation: see `activate`.

    Returns:
        [T, N] in x's dtype; the sum is kept in fp32.
    """
    return linear_ref(x, weight, bias, activation)


def linear_partial_ref(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight).unsqueeze(0)


def linear_partial(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in P pieces that sum to it.

    Returns:
        [P, T, N]: fp32 where P > 1, x's dtype or fp32 where P = 1. To be summed in order 0..P-1 by the consumer.
    """
    return linear_partial_ref(x, weight)


def linear_gated_ref(x: Tensor, weight: Tensor, activation: str = "silu") -> Tensor:
    gate, up = F.linear(x, weight).chunk(2, dim=-1)
    return activate(gate, activation) * up


def linear_gated(x: Tensor, weight: Tensor, activation: str = "silu") -> Tensor:
    """activation(x @ gate.T) * (x @ up.T) (SwiGLU, arXiv:2002.05202).

    Args:
        x: [T, K].
        weight: [2 N, K]: the N gate rows, then the N up rows.

    Returns:
        [T, N] in x's dtype.
    """
    return linear_gated_ref(x, weight, activation)

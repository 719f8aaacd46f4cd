"""Linear layers: bias and activation in the epilogue, a gated pair, and split-K partial sums left for the next norm.

`linear_partial` leaves its sum in P pieces so that a narrow product can fill the chip without a reduction kernel of its
own: the add + norm that follows reads the pieces anyway. Few tokens go to rose/kernels/gemm.py with a tile from the
committed table; many go to the library, those with an activation to rose/kernels/gemm_epilogue.py where it serves.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rose.kernels import gemm_epilogue
from rose.kernels.activation import activate, activate_in_place, gated_activation, gated_activation_ref
from rose.kernels.gemm import gemm, gemm_gated
from rose.kernels.gemm_sm90 import gemm_sm90, runs_sm90
from rose.kernels.launch import runs_triton
from rose.kernels.onednn_linear import linear_onednn, runs_onednn
from rose.kernels.tiles import Op, Tile, choose, heuristic, prefers_epilogue

__all__ = [
    "activate",
    "linear",
    "linear_gated",
    "linear_gated_ref",
    "linear_partial",
    "linear_partial_ref",
    "linear_ref",
]

ACTIVATIONS = (None, "gelu", "gelu_tanh", "relu", "silu")


def tile_of(op: Op, x: Tensor, n: int) -> Tile | None:
    """None: the library serves this product."""
    if not runs_triton(x) or x.dtype not in (torch.bfloat16, torch.float16):
        return None
    if x.shape[0] * max(n, x.shape[1]) >= 2**31:  # the kernels count in 32 bits
        return None
    tile = choose(op, n, x.shape[1], x.shape[0])
    if tile is not None and tile.kind == "sm90" and not runs_sm90(x.device):
        return None if op == "logits" else heuristic(op, n, x.shape[1], x.shape[0])
    return tile


def run_tile(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    tile: Tile,
    *,
    pieces: bool,
    gated: bool,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """One product on the GPU with a given tile: [T, N]; with `pieces` [split, T, N], fp32 where split > 1.

    Args:
        dtype: of the answer, None for x's own; of products that are not gated.
    """
    if tile.kind == "sm90":
        return gemm_sm90(x, weight, bias, activation, tile, pieces=pieces, gated=gated, dtype=dtype)
    if gated:
        return gemm_gated(x, weight, activation or "none", tile)
    return gemm(x, weight, bias, activation, tile, pieces=pieces, dtype=dtype)


def _check(activation: str | None) -> None:
    if activation not in ACTIVATIONS:
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
    _check(activation)
    tile = tile_of("linear", x, weight.shape[0])
    if tile is None:
        if runs_onednn(x):
            return linear_onednn(x, weight, bias, activation)
        out = _epilogue("linear", x, weight, bias, activation)
        if out is not None:
            return out
        return activate_in_place(F.linear(x, weight, bias), activation)
    return run_tile(x, weight, bias, activation, tile, pieces=False, gated=False)


def _epilogue(op: Op, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor | None:
    """Where there is an activation to take along, or where it was measured to be faster without one."""
    n, k = weight.shape
    if activation is None and not prefers_epilogue(op, n, k, x.shape[0]):
        return None
    if not gemm_epilogue.serves(x, n, activation, gated=False):
        return None
    return gemm_epilogue.linear_epilogue(x, weight, bias, activation)


def linear_partial_ref(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight).unsqueeze(0)


def linear_partial(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in P pieces that sum to it.

    Returns:
        [P, T, N]: fp32 where P > 1, x's dtype or fp32 where P = 1. To be summed in order 0..P-1 by the consumer.
    """
    tile = tile_of("partial", x, weight.shape[0])
    if tile is not None:
        return run_tile(x, weight, None, None, tile, pieces=True, gated=False)
    if runs_onednn(x):
        return linear_onednn(x, weight, None, None).unsqueeze(0)
    out = _epilogue("partial", x, weight, None, None)
    return linear_partial_ref(x, weight) if out is None else out.unsqueeze(0)


def linear_gated_ref(x: Tensor, weight: Tensor, activation: str = "silu") -> Tensor:
    return gated_activation_ref(F.linear(x, weight), activation)


def linear_gated(x: Tensor, weight: Tensor, activation: str = "silu") -> Tensor:
    """activation(x @ gate.T) * (x @ up.T) (SwiGLU, arXiv:2002.05202).

    Args:
        x: [T, K].
        weight: [2 N, K]: the N gate rows, then the N up rows.

    Returns:
        [T, N] in x's dtype.
    """
    _check(activation)
    tile = tile_of("gated", x, weight.shape[0] // 2)
    if tile is None:
        if gemm_epilogue.serves(x, weight.shape[0], activation, gated=True):
            out = gemm_epilogue.linear_gated_epilogue(x, weight, activation)
            if out is not None:
                return out
        both = linear_onednn(x, weight, None, None) if runs_onednn(x) else F.linear(x, weight)
        return gated_activation(both, activation)
    return run_tile(x, weight, None, activation, tile, pieces=False, gated=True)

"""LayerNorm behind a residual add (post-norm), and RMSNorm with the residual stream threaded through (pre-norm)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rose.kernels.add_norm import add_layer_norm, add_rms_norm, rms_norm
from rose.layers.linear import Linear
from rose.layers.parameter import parameter


class LayerNorm(nn.Module):
    """weight, bias: [D]. Whoever owns it calls the fused kernel that fits."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = parameter(size)
        self.bias = parameter(size)


class DenseAddNorm(nn.Module):
    """LayerNorm(residual + dense(x)): the end of both halves of a BERT layer."""

    def __init__(self, in_features: int, size: int, eps: float) -> None:
        super().__init__()
        self.dense = Linear(in_features, size, bias=True)
        self.LayerNorm = LayerNorm(size, eps)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """x: [T, K], residual: [T, D] -> [T, D]."""
        norm = self.LayerNorm
        return add_layer_norm(self.dense.partial(x), self.dense.bias, residual, norm.weight, norm.bias, norm.eps)


class RMSNorm(nn.Module):
    """weight: [D]."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = parameter(size)

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, D] -> [T, D]."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, pieces: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
        """pieces: [P, T, D], stream: [T, D] -> (normalised new stream, new stream), both [T, D]."""
        return add_rms_norm(pieces, stream, self.weight, self.eps)


class ZeroCentredRMSNorm(nn.Module):
    """RMSNorm by 1 + weight. weight: [D], as the checkpoint has it: what the gain is above one.

    The gain is kept in fp32, where the reference implementations add; in bf16 it would be rounded to 1/128.
    """

    gain: Tensor

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = parameter(size)
        self.register_buffer("gain", torch.empty(size), persistent=False)

    def build(self, device: torch.device) -> None:
        self.gain = (1.0 + self.weight.float()).to(device)

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, D] -> [T, D]."""
        return rms_norm(x, self.gain, self.eps)

    def add(self, pieces: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
        """pieces: [P, T, D], stream: [T, D] -> (normalised new stream, new stream), both [T, D]."""
        return add_rms_norm(pieces, stream, self.gain, self.eps)

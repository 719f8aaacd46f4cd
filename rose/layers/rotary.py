"""The rotary table, computed once for all layers.

    angle(position, i) = position * frequency(i),  frequency(i) = theta ** (-2 i / head_dim), perhaps stretched

The stretched frequencies are written as transformers writes them, operation by operation: a last bit of a frequency is
a thousandth of a turn at position 10,000.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from rose.config.rope import RopeScaling
from rose.kernels.qk_norm_rope import rope_table


class Rotary(nn.Module):
    """cos and sin of every position, fp32 [max_positions, head_dim]; no checkpoint holds it."""

    table: Tensor

    def __init__(self, max_positions: int, head_dim: int, theta: float, scaling: RopeScaling | None = None) -> None:
        super().__init__()
        self.max_positions, self.head_dim, self.theta, self.scaling = max_positions, head_dim, theta, scaling
        self.register_buffer("table", torch.empty(max_positions, head_dim), persistent=False)

    def build(self, device: torch.device) -> None:
        """Fill in the table: models are built on `meta`, where nothing can be computed.

        Computed on the CPU for every device: a last bit of the frequencies is a thousandth at position 10,000.
        """
        self.table = rotary_table(self.max_positions, self.head_dim, self.theta, self.scaling).to(device)


def rotary_table(max_positions: int, head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """cos then sin, a half each: fp32 [max_positions, head_dim], on the CPU."""
    if scaling is None:
        return rope_table(max_positions, head_dim, theta)
    angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * stretched(head_dim, theta, scaling)
    return torch.cat([angles.cos(), angles.sin()], dim=-1) * scaling.attention_factor


def stretched(head_dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """Frequencies fp32 [head_dim / 2] of a scaled embedding."""
    powers = theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    plain = 1.0 / powers
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(plain, scaling)
    low, high = _yarn_ramp(head_dim, theta, scaling)
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (scaling.factor * powers) * (1 - kept) + plain * kept


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1: wavelengths above original / slow are stretched, those below original / fast kept."""
    wavelength = 2 * math.pi / plain
    longest, shortest = scaling.original / scaling.slow, scaling.original / scaling.fast
    result = torch.where(wavelength > longest, plain / scaling.factor, plain)
    weight = (scaling.original / wavelength - scaling.slow) / (scaling.fast - scaling.slow)
    between = (1 - weight) * result / scaling.factor + weight * result
    return torch.where((wavelength >= shortest) & (wavelength <= longest), between, result)


def _yarn_ramp(head_dim: int, theta: float, scaling: RopeScaling) -> tuple[float, float]:
    """The dimensions between which YaRN goes over from kept frequencies to divided ones."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(scaling.original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.fast), dimension(scaling.slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return low, high + 0.001 if low == high else high

"""What the chunked gated delta rule and its one-token step have in common: heads, gates, and their plain arithmetic.

Knows shapes; knows neither chunks nor batches.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rose.kernels.carried import Carried
from rose.kernels.launch import next_power_of_2, require_contiguous

# Added to the square of a query's or a key's length, as the reference implementations do.
NORM_EPS = 1e-6


class DeltaHeads(NamedTuple):
    """Heads of a gated delta net. Value head h goes with key head h // (value_heads // key_heads)."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def channels(self) -> int:
        """Of q, k and v side by side."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


class Gates(NamedTuple):
    """What the gates are made of.

    Attributes:
        logits: [T, 2 Hv], rows may be strided: b of each value head, then a.
        a_log, dt_bias: [Hv].
    """

    logits: Tensor
    a_log: Tensor
    dt_bias: Tensor

    def rows(self, start: int, end: int) -> Gates:
        """The same for some tokens."""
        return Gates(self.logits[start:end], self.a_log, self.dt_bias)


def gates_ref(gates: Gates) -> tuple[Tensor, Tensor]:
    """(beta, g), both [T, Hv] fp32."""
    b, a = gates.logits.float().chunk(2, dim=-1)
    return b.sigmoid(), -gates.a_log.float().exp() * F.softplus(a + gates.dt_bias.float())


def unit_heads_ref(qkv: Tensor, heads: DeltaHeads) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v) a value head, fp32 [T, Hv, dim]; q and k of unit length, q scaled."""
    keys = heads.key_heads * heads.key_dim
    q, k, v = qkv.float().split([keys, keys, heads.value_heads * heads.value_dim], dim=-1)
    q, k = (x.unflatten(-1, (heads.key_heads, heads.key_dim)) for x in (q, k))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS) for x in (q, k))
    q, k = (x.repeat_interleave(heads.value_heads // heads.key_heads, dim=1) for x in (q, k))
    return q * heads.key_dim**-0.5, k, v.unflatten(-1, (heads.value_heads, heads.value_dim))


def initial_states_ref(carried: Carried | None, lengths: Tensor, heads: DeltaHeads, device: torch.device) -> Tensor:
    """[B, Hv, key_dim, value_dim] fp32."""
    shape = (heads.value_heads, heads.key_dim, heads.value_dim)
    if carried is None:
        return torch.zeros(len(lengths), *shape, device=device)
    continues = carried.lengths.long() > lengths.long()
    return torch.where(continues[:, None, None, None], carried.pool[carried.rows.long()].float(), 0.0)


def check_heads(qkv: Tensor, gates: Gates, heads: DeltaHeads) -> None:
    """Raises ValueError where shapes or layouts do not belong together."""
    T = qkv.shape[0]
    if qkv.shape[1] != heads.channels or qkv.stride(1) != 1:
        raise ValueError(
            f"qkv must have {heads.channels} neighbours a row; it is {tuple(qkv.shape)}, strides {qkv.stride()}"
        )
    if gates.logits.shape != (T, 2 * heads.value_heads) or gates.logits.stride(1) != 1:
        raise ValueError(
            f"gate logits must be {(T, 2 * heads.value_heads)}, rows of neighbours; they are "
            f"{tuple(gates.logits.shape)}, strides {gates.logits.stride()}"
        )
    for name, dim in (("key", heads.key_dim), ("value", heads.value_dim)):
        if dim != next_power_of_2(dim) or not 16 <= dim <= 256:
            raise ValueError(f"{name} dim must be a power of two from 16 to 256; it is {dim}")
    require_contiguous(a_log=gates.a_log, dt_bias=gates.dt_bias)

"""Random numbers from counters alone: Philox 4x32-10 (Salmon et al., SC 2011, doi:10.1145/2063384.2063405).

A number is a function of (seed, step, token id): no state, so a row draws the same token whatever the batch, the device
or the replay. Integer arithmetic, the same bits in torch and in Triton. Knows counters; knows no logits.

Token id -> counter: one counter gives four words, and ids that lie 1024 apart within the same 4096 share one, so that a
kernel's block of 4096 ids is four plain vectors of 1024, one a word.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
GROUP = 1024
BLOCK = 4 * GROUP


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Four words of each counter. All values are int64 that hold 32 unsigned bits."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # int64 wraps at 2 ** 64, which leaves all 64 bits of the product in place.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def exponential_ref(seed: int, step: int, ids: Tensor) -> Tensor:
    """One exponentially distributed number (mean 1) for each token id, of 32 random bits each.

    Args:
        seed: any 64 bits. step: 32 bits. ids: [N] int64.

    Returns:
        [N] fp32, from 1.2e-10 to 16.7.
    """
    counter = ids // BLOCK * GROUP + ids % GROUP
    unique, inverse = torch.unique(counter, return_inverse=True)
    zero = torch.zeros_like(unique)
    words = torch.stack(philox((unique, zero + (step & _MASK), zero, zero), (seed & _MASK, (seed >> 32) & _MASK)))
    bits = words[ids // GROUP % 4, inverse]
    # -log(1 - u) for u = (bits + 1/2) / 2 ** 32: small values, which let unlikely tokens win, keep their precision.
    u = ((bits.float() + 0.5) * 2.0**-32).clamp_max(1 - 2.0**-24)
    return torch.where(u < 2.0**-7, u * (1 + u * (0.5 + u * (1 / 3 + u * 0.25))), -torch.log(1 - u))

"""Logits over the vocabulary: rows @ weight.T with fp32 out, whatever the two are stored in.

Halves would tie tokens that are not equally likely: bf16 keeps 8 bits, so that logits near 20 lie 0.125 apart. The
GPU's products sum in fp32 anyway, and only have to write it: the library's, or this project's own where the table of
tiles has a row for the head. Knows tensors; knows nothing of sampling.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rose.kernels.linear import run_tile, tile_of
from rose.kernels.onednn_linear import linear_onednn, runs_onednn

_ROWS = 8192  # of the weight cast at a time: some 32 MB in fp32 at width 1024


def logits_ref(x: Tensor, weight: Tensor) -> Tensor:
    if x.dtype == torch.float32:
        return F.linear(x, weight)
    wide = x.float()
    return torch.cat([F.linear(wide, block.float()) for block in weight.split(_ROWS)], dim=-1)


def logits(x: Tensor, weight: Tensor) -> Tensor:
    """
    Args:
        x: [S, D].
        weight: [V, D], in x's dtype.

    Returns:
        [S, V] fp32; products and sums of halves are fp32 too.
    """
    tile = tile_of("logits", x, weight.shape[0])
    if tile is not None:
        return run_tile(x, weight, None, None, tile, pieces=False, gated=False, dtype=torch.float32)
    if x.is_cuda and x.dtype != torch.float32:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    # On one core of an EPYC, [8, 576] times [49152, 576]: 13 ms against 31 by torch's own choice; the token table stays
    # as it is, since rows are looked up in it.
    return linear_onednn(x, weight, None, None) if runs_onednn(x) else logits_ref(x, weight)

"""Rows of the token table and their RMSNorm in one pass: how a pre-norm decoder begins.

The library's gather knows nothing of dependent launch: it waits for everything before it, and the norm behind waits for
all of it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rose.kernels.add_norm import rms_norm_ref
from rose.kernels.launch import (
    Ptr,
    constexpr,
    jit,
    launch,
    next_power_of_2,
    require_contiguous,
    row_warps,
    runs_triton,
    tl,
)


def embed_rms_norm_ref(ids: Tensor, table: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    stream = F.embedding(ids, table)
    return rms_norm_ref(stream, weight, eps), stream


@jit(do_not_specialize=["eps"])
def _embed_rms_norm(
    ids: Ptr,
    table: Ptr,
    weight: Ptr,
    out: Ptr,
    stream: Ptr,
    eps: Ptr,
    D: constexpr,
    BLOCK: constexpr,
    PDL: constexpr,
) -> None:
    """One program a token."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    cols = tl.arange(0, BLOCK)
    mask = cols < D
    w = tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
    offset = tl.program_id(0).to(tl.int64) * D + cols
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.load(ids + tl.program_id(0)).to(tl.int64) * D
    own = tl.load(table + row + cols, mask=mask, other=0.0)
    tl.store(stream + offset, own, mask=mask)
    x = own.to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / D + eps) * w
    tl.store(out + offset, y.to(out.dtype.element_ty), mask=mask)


def embed_rms_norm_triton(ids: Tensor, table: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    require_contiguous(ids=ids, table=table, weight=weight)
    T, D = ids.shape[0], table.shape[1]
    out, stream = (torch.empty(T, D, dtype=table.dtype, device=table.device) for _ in range(2))
    launch(
        _embed_rms_norm,
        (T,),
        ids,
        table,
        weight,
        out,
        stream,
        eps,
        D=D,
        BLOCK=next_power_of_2(D),
        device=table.device,
        warps=row_warps(D, T),
    )
    return out, stream


def embed_rms_norm(ids: Tensor, table: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """table[ids], and its RMSNorm.

    Args:
        ids: [T] int32, each a row of the table.
        table: [V, D]. weight: [D].

    Returns:
        (normalised [T, D], rows [T, D]), both in the table's dtype; the norm in fp32, the same bits as `rms_norm` of
        the rows.
    """
    return (embed_rms_norm_triton if runs_triton(table) else embed_rms_norm_ref)(ids, table, weight, eps)

"""The latest token of every lane, kept on the device: what a batch starts from before the host knows it.

In a batch's ids a negative one, -1 - lane, stands for the latest token of that lane.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rose.kernels.launch import Ptr, cdiv, constexpr, jit, launch, require_contiguous, runs_triton, tl

_BLOCK = 1024


def take_latest_ref(ids: Tensor, latest: Tensor) -> Tensor:
    return torch.where(ids < 0, latest[(-1 - ids).clamp_min(0).long()], ids)


def keep_latest_ref(drawn: Tensor, lanes: Tensor, latest: Tensor) -> None:
    latest.index_copy_(0, lanes.long(), drawn.clamp_min(0))


@jit(do_not_specialize=["T"])
def _take_latest(ids: Ptr, latest: Ptr, out: Ptr, T: Ptr, BLOCK: constexpr, PDL: constexpr) -> None:
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < T
    if PDL:
        # The first kernel of its batch: only once this one runs has what was staged arrived, for those after it too.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    found = tl.load(ids + i, mask=mask, other=0)
    found = tl.where(found < 0, tl.load(latest + (-1 - found), mask=mask & (found < 0), other=0), found)
    tl.store(out + i, found, mask=mask)


@jit(do_not_specialize=["S", "drawn_row"])
def _keep_latest(drawn: Ptr, lanes: Ptr, latest: Ptr, S: Ptr, drawn_row: Ptr, BLOCK: constexpr, PDL: constexpr) -> None:
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < S
    if PDL:
        tl.extra.cuda.gdc_wait()
    token = tl.maximum(tl.load(drawn + i * drawn_row, mask=mask, other=0), 0)
    tl.store(latest + tl.load(lanes + i, mask=mask, other=0), token, mask=mask)


def take_latest_triton(ids: Tensor, latest: Tensor) -> Tensor:
    require_contiguous(ids=ids, latest=latest)
    out = torch.empty_like(ids)
    blocks = cdiv(len(ids), _BLOCK)
    launch(_take_latest, (blocks,), ids, latest, out, len(ids), BLOCK=_BLOCK, device=ids.device, warps=4)
    return out


def keep_latest_triton(drawn: Tensor, lanes: Tensor, latest: Tensor) -> None:
    require_contiguous(lanes=lanes, latest=latest)
    row = drawn.stride(0)
    blocks = cdiv(len(lanes), _BLOCK)
    launch(_keep_latest, (blocks,), drawn, lanes, latest, len(lanes), row, BLOCK=_BLOCK, device=lanes.device, warps=4)


def take_latest(ids: Tensor, latest: Tensor) -> Tensor:
    """`ids` with every -1 - lane replaced by the latest token of that lane.

    Args:
        ids: [T] int32. latest: [lanes] int32.

    Returns:
        [T] int32, none negative if `latest` has none.
    """
    return (take_latest_triton if runs_triton(ids) else take_latest_ref)(ids, latest)


def keep_latest(drawn: Tensor, lanes: Tensor, latest: Tensor) -> None:
    """latest[lanes] = drawn, in place; a negative one, which is no token, as 0.

    Args:
        drawn: [S] int32, with any stride. lanes: [S] int32; where one comes twice, either token is kept.
        latest: [lanes] int32.
    """
    (keep_latest_triton if runs_triton(lanes) else keep_latest_ref)(drawn, lanes, latest)

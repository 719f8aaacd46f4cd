"""The kernels of greedy decoding: the first of the largest logits of each row, in blocks and then among these.

Knows logits; knows no requests.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rose.kernels.launch import Ptr, cdiv, constexpr, jit, launch, next_power_of_2, require_contiguous, tl

# Ids a program looks at: few, so that one row fills the chip.
_BLOCK = 1024


@jit
def load_block(row: Ptr, id_: Ptr, limit: Ptr) -> Ptr:
    """Logits; NaN as +inf, which says the same of a row, and -inf past the limit."""
    x = tl.load(row + id_, mask=id_ < limit, other=float("-inf")).to(tl.float32)
    return tl.where(x != x, float("inf"), x)


@jit
def first_of(value: Ptr, id_: Ptr) -> tuple[Ptr, Ptr]:
    """(largest value, lowest id that has it)"""
    best = tl.max(value, 0)
    return best, tl.min(tl.where(value == best, id_, 0x7FFFFFFF), 0)


@jit
def merge_first(values: Ptr, ids: Ptr, row: Ptr, blocks: Ptr, LANES: constexpr) -> tuple[Ptr, Ptr]:
    """(largest value, its id) of a row from those of its blocks."""
    lane = tl.arange(0, LANES)
    at = row * blocks + lane
    value = tl.load(values + at, mask=lane < blocks, other=float("-inf"))
    best, first = first_of(value, tl.load(ids + at, mask=lane < blocks, other=0))
    return best, first


@jit
def _greedy_blocks(
    logits: Ptr, values: Ptr, ids: Ptr, row_stride: Ptr, limit: Ptr, BLOCK: constexpr, PDL: constexpr
) -> None:
    """Program (n, s): the first of the largest logits of block n of row s."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    block = tl.program_id(0)
    row = tl.program_id(1)
    id_ = block * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
    best, first = first_of(load_block(logits + row.to(tl.int64) * row_stride, id_, limit), id_)
    at = row * tl.num_programs(0) + block
    tl.store(values + at, best)
    tl.store(ids + at, first)


@jit(do_not_specialize=["blocks"])
def _greedy_merge(values: Ptr, ids: Ptr, out: Ptr, blocks: Ptr, LANES: constexpr, PDL: constexpr) -> None:
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    best, first = merge_first(values, ids, row, blocks, LANES)
    tl.store(out + row, tl.where(tl.abs(best) < float("inf"), first, -1))


def check_rows(logits: Tensor, vocab_limit: int, **rows: Tensor) -> None:
    if logits.dtype is not torch.float32 or logits.stride(1) != 1 or not 1 <= vocab_limit <= logits.shape[1]:
        raise ValueError(
            f"logits must be fp32 rows of at least {vocab_limit} values; they are {tuple(logits.shape)} {logits.dtype}"
        )
    require_contiguous(**rows)
    for name, row in rows.items():
        if row.shape != (logits.shape[0],):
            raise ValueError(f"{name} must have a value for each of {logits.shape[0]} rows; it is {tuple(row.shape)}")


def greedy_triton(logits: Tensor, vocab_limit: int) -> Tensor:
    """See `greedy` of sample.py."""
    check_rows(logits, vocab_limit)
    S, device = logits.shape[0], logits.device
    blocks = cdiv(vocab_limit, _BLOCK)
    values = torch.empty(S, blocks, device=device)
    ids = torch.empty(S, blocks, dtype=torch.int32, device=device)
    out = torch.empty(S, dtype=torch.int32, device=device)
    stride = logits.stride(0)
    launch(
        _greedy_blocks,
        (blocks, S),
        logits,
        values,
        ids,
        stride,
        vocab_limit,
        BLOCK=_BLOCK,
        device=device,
        warps=4,
    )
    launch(_greedy_merge, (S,), values, ids, out, blocks, LANES=next_power_of_2(blocks), device=device, warps=4)
    return out

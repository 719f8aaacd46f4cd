"""Causal depthwise convolution with SiLU over packed sequences, and its one-token step.

Each channel is the weighted sum of its own last W inputs; W is 4 in Qwen3.5, so a tap is a shifted read and no product
is worth a tensor core. Sequences never see each other's rows: what lies before a sequence's first token is the state it
brought, or zero.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rose.kernels.carried import Carried, check_carried
from rose.kernels.launch import (
    Ptr,
    cdiv,
    constexpr,
    jit,
    launch,
    require_contiguous,
    runs_triton,
    tl,
)
from rose.kernels.short_attention import sequence_of

# Tokens and channels of one program.
_TOKENS, _CHANNELS, _STEP_CHANNELS = 16, 128, 256
# Boundaries looked at in one load, always so many: one compiled kernel for any number of sequences.
_CHUNK = 1024


def causal_conv_ref(x: Tensor, weight: Tensor, cu_seqlens: Tensor, carried: Carried | None = None) -> Tensor:
    taps = weight.view(weight.shape[0], -1).float()
    reach = taps.shape[1] - 1
    starts = cu_seqlens[:-1].long()
    lengths = cu_seqlens[1:].long() - starts
    first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
    own = x[first:last].float()
    # One shifted pass a tap over all rows, as if they were one sequence; then the few rows that saw another's again.
    total = own * taps[:, reach]
    for lag in range(1, reach + 1):
        total[lag:].addcmul_(own[:-lag], taps[:, reach - lag])
    before = _brought(carried, lengths, taps.shape[0], reach, x.device)
    owner, index = _first_rows(lengths, reach)
    rows = starts[owner] - first + index
    again = torch.zeros(len(rows), taps.shape[0], device=x.device)
    for tap in range(reach + 1):
        at = index - (reach - tap)
        earlier = before[owner, :, (at + reach).clamp_max(reach - 1)]
        values = torch.where((at >= 0)[:, None], own[(rows - (reach - tap)).clamp_min(0)], earlier)
        again += values * taps[:, tap]
    total[rows] = again
    if carried is not None:
        _leave(carried, x, starts, lengths, before)
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    out[first:last] = F.silu(total)
    return out


def _first_rows(lengths: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(sequence, index in it) of the first `count` rows of each."""
    index = torch.arange(count, device=lengths.device).expand(len(lengths), -1)
    owner, at = (index < lengths[:, None]).nonzero().unbind(1)
    return owner, at


def _brought(carried: Carried | None, lengths: Tensor, channels: int, reach: int, device: torch.device) -> Tensor:
    """[B, C, reach] fp32: the inputs before each sequence's first token of the batch."""
    if carried is None:
        return torch.zeros(len(lengths), channels, reach, device=device)
    continues = carried.lengths.long() > lengths
    return torch.where(continues[:, None, None], carried.pool[carried.rows.long()].float(), 0.0)


def _leave(carried: Carried, x: Tensor, starts: Tensor, lengths: Tensor, before: Tensor) -> None:
    """Write the last inputs of each sequence to its row of the pool."""
    reach = before.shape[-1]
    for slot in range(reach):
        index = lengths - reach + slot
        latest = x[(starts + index).clamp_min(0)].float()
        old = before.gather(2, (index + reach).clamp_max(reach - 1)[:, None, None].expand(-1, before.shape[1], 1))
        value = torch.where((index >= 0)[:, None], latest, old[:, :, 0])
        carried.pool[carried.rows.long(), :, slot] = value.to(carried.pool.dtype)


def causal_conv_step_ref(x: Tensor, weight: Tensor, carried: Carried) -> Tensor:
    bounds = torch.arange(len(x) + 1, dtype=torch.int32, device=x.device)
    return causal_conv_ref(x, weight, bounds, carried)


@jit
def silu(x: Ptr) -> Ptr:
    return x / (1.0 + tl.exp(-x))


@jit
def _keep_latest(
    base: Ptr, own: Ptr, x_row: Ptr, first: Ptr, length: Ptr, inside: Ptr, continues: Ptr, W: constexpr
) -> None:
    """Write a sequence's last W - 1 inputs to its row, from the program of its first tokens: that one alone reads
    what is overwritten."""
    if first == 0:
        tl.debug_barrier()  # other warps of the program may still be reading
        for slot in tl.static_range(W - 1):
            index = length - (W - 1) + slot
            latest = tl.load(base + tl.cast(index, tl.int64) * x_row, mask=inside & (index >= 0), other=0.0)
            # Slots are written in order and each is read from a later one, by the thread that has the channel.
            old = tl.load(own + (index + W - 1), mask=inside & (index < 0) & continues, other=0.0)
            kept = latest.to(tl.float32) + old.to(tl.float32)
            tl.store(own + slot, kept.to(own.dtype.element_ty), mask=inside)


# Slices of a batch's arrays may begin anywhere, and must not each have a kernel of their own.
@jit(do_not_specialize=["B", "cu_seqlens", "rows", "lengths"])
def _causal_conv(
    x: Ptr,
    weight: Ptr,
    out: Ptr,
    cu_seqlens: Ptr,
    pool: Ptr,
    rows: Ptr,
    lengths: Ptr,
    B: Ptr,
    x_row: Ptr,
    pool_row: Ptr,
    C: constexpr,
    W: constexpr,
    BT: constexpr,
    BC: constexpr,
    CHUNK: constexpr,
    ONE_CHUNK: constexpr,
    CARRIED: constexpr,
    PDL: constexpr,
) -> None:
    """Program (i, c): BC channels of BT tokens of one sequence."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    col = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = col < C
    sequence, start, end = sequence_of(cu_seqlens, program, B, BT, CHUNK, ONE_CHUNK)
    length = end - start
    first = (program - start // BT - sequence) * BT
    if PDL:
        tl.extra.cuda.gdc_wait()
    if first < length:
        token = first + tl.arange(0, BT)
        here = (token < length)[:, None] & inside[None, :]
        base = x + tl.cast(start, tl.int64) * x_row + col
        total = tl.zeros((BT, BC), tl.float32)
        if CARRIED:
            own = pool + tl.load(rows + sequence).to(tl.int64) * pool_row + col * (W - 1)
            continues = tl.load(lengths + sequence) > length
        for tap in tl.static_range(W):
            at = token - (W - 1 - tap)
            values = tl.load(
                base[None, :] + at.to(tl.int64)[:, None] * x_row, mask=here & (at >= 0)[:, None], other=0.0
            ).to(tl.float32)
            if CARRIED:
                early = here & (at < 0)[:, None] & continues
                values += tl.load(own[None, :] + (at + W - 1)[:, None], mask=early, other=0.0).to(tl.float32)
            total += values * tl.load(weight + col * W + tap, mask=inside, other=0.0).to(tl.float32)[None, :]
        to = out + (tl.cast(start, tl.int64) + token)[:, None] * C + col[None, :]
        tl.store(to, silu(total).to(out.dtype.element_ty), mask=here)
        if CARRIED:
            _keep_latest(base, own, x_row, first, length, inside, continues, W)


@jit(do_not_specialize=["rows", "lengths"])
def _causal_conv_step(
    x: Ptr,
    weight: Ptr,
    out: Ptr,
    pool: Ptr,
    rows: Ptr,
    lengths: Ptr,
    x_row: Ptr,
    pool_row: Ptr,
    C: constexpr,
    W: constexpr,
    BC: constexpr,
    PDL: constexpr,
) -> None:
    """Program (i, c): BC channels of sequence i, which has one token."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    sequence = tl.program_id(0)
    col = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = col < C
    continues = tl.load(lengths + sequence) > 1
    own = pool + tl.load(rows + sequence).to(tl.int64) * pool_row + col * (W - 1)
    if PDL:
        tl.extra.cuda.gdc_wait()
    latest = tl.load(x + tl.cast(sequence, tl.int64) * x_row + col, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BC,), tl.float32)
    for tap in tl.static_range(W):
        if tap < W - 1:
            values = tl.load(own + tap, mask=inside & continues, other=0.0).to(tl.float32)
            if tap > 0:
                tl.store(own + tap - 1, values.to(pool.dtype.element_ty), mask=inside)
        else:
            values = latest
            tl.store(own + tap - 1, values.to(pool.dtype.element_ty), mask=inside)
        total += values * tl.load(weight + col * W + tap, mask=inside, other=0.0).to(tl.float32)
    to = out + tl.cast(sequence, tl.int64) * C + col
    tl.store(to, silu(total).to(out.dtype.element_ty), mask=inside)


def _check(x: Tensor, weight: Tensor, carried: Carried | None, sequences: int) -> tuple[int, int]:
    """(channels, width)."""
    C, W = weight.shape[0], weight.shape[-1]
    if x.shape[1] != C or x.stride(1) != 1:
        raise ValueError(f"x must have {C} neighbouring channels a row; it is {tuple(x.shape)}, strides {x.stride()}")
    if W < 2:
        raise ValueError(f"a convolution of width {W} sees no token before its own")
    require_contiguous(weight=weight)
    if carried is not None:
        check_carried(carried, sequences, (C, W - 1))
    return C, W


def causal_conv_triton(x: Tensor, weight: Tensor, cu_seqlens: Tensor, carried: Carried | None = None) -> Tensor:
    B = cu_seqlens.shape[0] - 1
    C, W = _check(x, weight, carried, B)
    require_contiguous(cu_seqlens=cu_seqlens)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    pool, rows, lengths = (x, cu_seqlens, cu_seqlens) if carried is None else carried
    launch(
        _causal_conv,
        (x.shape[0] // _TOKENS + B, cdiv(C, _CHANNELS)),
        x,
        weight,
        out,
        cu_seqlens,
        pool,
        rows,
        lengths,
        B,
        x.stride(0),
        pool.stride(0),
        C=C,
        W=W,
        BT=_TOKENS,
        BC=_CHANNELS,
        CHUNK=_CHUNK,
        ONE_CHUNK=B <= _CHUNK,
        CARRIED=carried is not None,
        device=x.device,
        warps=4,
    )
    return out


def causal_conv_step_triton(x: Tensor, weight: Tensor, carried: Carried) -> Tensor:
    C, W = _check(x, weight, carried, x.shape[0])
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    pool, rows, lengths = carried
    launch(
        _causal_conv_step,
        (x.shape[0], cdiv(C, _STEP_CHANNELS)),
        x,
        weight,
        out,
        pool,
        rows,
        lengths,
        x.stride(0),
        pool.stride(0),
        C=C,
        W=W,
        BC=_STEP_CHANNELS,
        device=x.device,
        warps=2,
    )
    return out


def causal_conv(x: Tensor, weight: Tensor, cu_seqlens: Tensor, carried: Carried | None = None) -> Tensor:
    """silu of the causal convolution of each channel within each sequence.

    Args:
        x: [T, C], rows may be strided.
        weight: [C, 1, W] (or [C, W]), as checkpoints store it; the last tap is the token's own.
        cu_seqlens: [B + 1] int32; rows of x outside of it are not read.
        carried: pool [rows, C, W - 1] of the latest inputs, oldest first; None where every sequence is whole.

    Returns:
        [T, C] in x's dtype, the sum in fp32. On a GPU rows outside cu_seqlens are not set.
    """
    return (causal_conv_triton if runs_triton(x) else causal_conv_ref)(x, weight, cu_seqlens, carried)


def causal_conv_step(x: Tensor, weight: Tensor, carried: Carried) -> Tensor:
    """The same for B sequences of one token each. x: [B, C] -> [B, C]."""
    return (causal_conv_step_triton if runs_triton(x) else causal_conv_step_ref)(x, weight, carried)

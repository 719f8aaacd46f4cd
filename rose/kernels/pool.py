"""From hidden rows to one vector a sequence, and the last step of each output kind, in fp32."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from rose.kernels.launch import (
    Ptr,
    cdiv,
    constexpr,
    jit,
    launch,
    next_power_of_2,
    require_contiguous,
    row_warps,
    runs_triton,
    tl,
)

PoolMode = Literal["cls", "mean", "last", "max", "mean_sqrt_len", "weightedmean"]
Finish = Literal["none", "l2", "tanh_int8", "sign_bits"]


def pool_ref(hidden: Tensor, cu_seqlens: Tensor, mode: PoolMode) -> Tensor:
    starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    if mode == "cls":
        return hidden[starts].float()
    if mode == "last":
        return hidden[ends - 1].float()
    lengths = ends - starts
    sequence_of_token = torch.repeat_interleave(torch.arange(len(lengths), device=hidden.device), lengths)
    x = hidden[: int(cu_seqlens[-1])].float()
    if mode == "max":
        out = torch.full((len(lengths), x.shape[1]), -torch.inf, device=x.device)
        return out.scatter_reduce(0, sequence_of_token[:, None].expand_as(x), x, "amax", include_self=True)
    if mode == "weightedmean":
        # Weight i + 1 for token i: arXiv:2202.08904, as sentence-transformers has it.
        weights = (torch.arange(len(x), device=x.device) - starts[sequence_of_token] + 1).float()
        sums = torch.zeros(len(lengths), x.shape[1], device=x.device).index_add_(
            0, sequence_of_token, x * weights[:, None]
        )
        return sums / (lengths * (lengths + 1) / 2).float()[:, None]
    sums = torch.zeros(len(lengths), x.shape[1], device=x.device).index_add_(0, sequence_of_token, x)
    divisor = lengths.float() if mode == "mean" else lengths.float().sqrt()
    return sums / divisor[:, None]


def pool_spans_ref(hidden: Tensor, spans: Tensor) -> Tensor:
    """Each span's rows are summed by themselves: differences of running sums would lose the small behind the large."""
    sums = torch.zeros(len(spans), hidden.shape[1], device=hidden.device)
    lengths = (spans[:, 1] - spans[:, 0]).clamp_min(0).long()
    span_of_row = torch.repeat_interleave(torch.arange(len(spans), device=hidden.device), lengths)
    before = lengths.cumsum(0) - lengths
    rows = torch.arange(len(span_of_row), device=hidden.device) + (spans[:, 0].long() - before)[span_of_row]
    sums.index_add_(0, span_of_row, hidden[rows].float())
    return sums / lengths.clamp_min(1).float()[:, None]


def finish_ref(pooled: Tensor, how: Finish) -> Tensor:
    if how == "none":
        return pooled
    if how == "l2":
        # Dividing by max(norm, tiny) leaves the zero vector zero instead of NaN.
        unit: Tensor = pooled / pooled.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        return unit
    if how == "tanh_int8":
        return (pooled.tanh() * 127).round().clamp(-128, 127).to(torch.int8)
    if how == "sign_bits":
        bits = (pooled >= 0).unflatten(-1, (pooled.shape[-1] // 8, 8)).to(torch.uint8)
        weights: Tensor = 2 ** torch.arange(8, device=pooled.device, dtype=torch.uint8)
        packed: Tensor = (bits * weights).sum(-1, dtype=torch.uint8)
        return packed
    raise ValueError(f"unknown finish {how!r}")


# (tokens, features) of one step of a pooling program: narrow, so that a long sequence keeps many programs busy.
_TOKENS, _FEATURES = 64, 32


@jit
def _nan_max(a: Ptr, b: Ptr) -> Ptr:
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit
def _pool_columns(
    hidden: Ptr, start: Ptr, end: Ptr, col: Ptr, mask: Ptr, D: constexpr, MODE: constexpr, BT: constexpr, BD: constexpr
) -> Ptr:
    """One sequence's pooled values in the columns `col`, fp32."""
    if MODE == "cls":
        return tl.load(hidden + start * D + col, mask=mask, other=0.0).to(tl.float32)
    if MODE == "last":
        return tl.load(hidden + (end - 1) * D + col, mask=mask, other=0.0).to(tl.float32)
    token = tl.arange(0, BT)
    if MODE == "max":
        best = tl.full((BT, BD), float("-inf"), tl.float32)
        for at in range(start, end, BT):
            inside = (at + token < end)[:, None] & mask[None, :]
            x = tl.load(hidden + (at + token)[:, None] * D + col[None, :], mask=inside, other=float("-inf"))
            best = tl.maximum(best, x.to(tl.float32), propagate_nan=tl.PropagateNan.ALL)
        return tl.reduce(best, 0, _nan_max)
    total = tl.zeros((BT, BD), tl.float32)
    for at in range(start, end, BT):
        inside = (at + token < end)[:, None] & mask[None, :]
        x = tl.load(hidden + (at + token)[:, None] * D + col[None, :], mask=inside, other=0.0).to(tl.float32)
        if MODE == "weightedmean":
            x = x * (at - start + token + 1).to(tl.float32)[:, None]
        total += x
    length = tl.maximum(end - start, 1).to(tl.float32)  # an empty span has a sum of 0, and divides it by 1
    if MODE == "weightedmean":
        length = length * (length + 1.0) / 2.0
    elif MODE == "mean_sqrt_len":
        length = tl.sqrt(length)
    return tl.sum(total, 0) / length


@jit
def _store_finished(
    x: Ptr, out: Ptr, row: Ptr, first: Ptr, col: Ptr, mask: Ptr, D: constexpr, BD: constexpr, HOW: constexpr
) -> None:
    """The last step, on the columns first .. first + BD of one row. "l2" needs them to be the whole row."""
    if HOW == "none":
        tl.store(out + row * D + col, x, mask=mask)
    elif HOW == "l2":
        norm = tl.sqrt(tl.sum(x * x, 0))
        # The smallest normal number: dividing by it leaves the zero vector zero instead of NaN.
        tl.store(
            out + row * D + col, x / tl.where(norm < 1.1754943508222875e-38, 1.1754943508222875e-38, norm), mask=mask
        )
    elif HOW == "tanh_int8":
        scaled = (1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)) * 127.0
        # Adding and taking away 1.5 * 2^23 rounds to the nearest integer, halves to even, as torch.round does.
        tl.store(out + row * D + col, ((scaled + 12582912.0) - 12582912.0).to(tl.int8), mask=mask)
    elif HOW == "sign_bits":
        weight = 1 << (tl.arange(0, BD) % 8)
        bits = tl.where(x >= 0.0, weight, 0).reshape(BD // 8, 8)
        byte = first // 8 + tl.arange(0, BD // 8)
        tl.store(out + row * (D // 8) + byte, tl.sum(bits, 1).to(tl.uint8), mask=byte < D // 8)


@jit
def _pool_finish(
    hidden: Ptr,
    bounds: Ptr,
    out: Ptr,
    STRIDE: constexpr,
    D: constexpr,
    BD: constexpr,
    BT: constexpr,
    MODE: constexpr,
    HOW: constexpr,
    PDL: constexpr,
) -> None:
    """Program (b, d): BD features of sequence b. Bounds lie one apart (cu_seqlens) or as pairs (spans)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    sequence = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BD
    col = first + tl.arange(0, BD)
    mask = col < D
    start = tl.load(bounds + sequence * STRIDE).to(tl.int64)
    end = tl.load(bounds + sequence * STRIDE + 1).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = _pool_columns(hidden, start, end, col, mask, D, MODE, BT, BD)
    _store_finished(x, out, sequence, first, col, mask, D, BD, HOW)


@jit
def _finish(pooled: Ptr, out: Ptr, D: constexpr, BD: constexpr, HOW: constexpr, PDL: constexpr) -> None:
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BD)
    mask = col < D
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(pooled + row * D + col, mask=mask, other=0.0).to(tl.float32)
    _store_finished(x, out, row, 0, col, mask, D, BD, HOW)


def _finished_like(B: int, D: int, how: Finish, device: torch.device) -> Tensor:
    if how == "tanh_int8":
        return torch.empty(B, D, dtype=torch.int8, device=device)
    if how == "sign_bits":
        return torch.empty(B, D // 8, dtype=torch.uint8, device=device)
    return torch.empty(B, D, dtype=torch.float32, device=device)


def _check(D: int, how: Finish) -> None:
    if how not in get_args(Finish):
        raise ValueError(f"unknown finish {how!r}")
    if how == "sign_bits" and D % 8:
        raise ValueError(f"sign_bits packs eight values to a byte: {D} features are not a multiple of 8")


def pool_finish_triton(hidden: Tensor, cu_seqlens: Tensor, mode: PoolMode, how: Finish) -> Tensor:
    require_contiguous(hidden=hidden, cu_seqlens=cu_seqlens)
    if mode not in get_args(PoolMode):
        raise ValueError(f"unknown pooling {mode!r}")
    B, D = cu_seqlens.shape[0] - 1, hidden.shape[1]
    _check(D, how)
    one_token = mode in ("cls", "last")
    if how == "l2" and not one_token:
        # The norm needs whole rows, the sum over tokens wants them cut up: two small kernels.
        return finish_triton(pool_finish_triton(hidden, cu_seqlens, mode, "none"), how)
    out = _finished_like(B, D, how, hidden.device)
    block = next_power_of_2(D) if one_token else _FEATURES
    launch(
        _pool_finish,
        (B, cdiv(D, block)),
        hidden,
        cu_seqlens,
        out,
        STRIDE=1,
        D=D,
        BD=max(8, block),
        BT=_TOKENS,
        MODE=mode,
        HOW=how,
        device=hidden.device,
        warps=row_warps(D) if one_token else 4,
    )
    return out


def pool_spans_triton(hidden: Tensor, spans: Tensor) -> Tensor:
    require_contiguous(hidden=hidden, spans=spans)
    S, D = spans.shape[0], hidden.shape[1]
    out = torch.empty(S, D, dtype=torch.float32, device=hidden.device)
    if S:
        launch(
            _pool_finish,
            (S, cdiv(D, _FEATURES)),
            hidden,
            spans,
            out,
            STRIDE=2,
            D=D,
            BD=_FEATURES,
            BT=_TOKENS,
            MODE="mean",
            HOW="none",
            device=hidden.device,
            warps=4,
        )
    return out


def finish_triton(pooled: Tensor, how: Finish) -> Tensor:
    require_contiguous(pooled=pooled)
    B, D = pooled.shape
    _check(D, how)
    out = _finished_like(B, D, how, pooled.device)
    if B:
        block = max(8, next_power_of_2(D))
        launch(_finish, (B,), pooled, out, D=D, BD=block, HOW=how, device=pooled.device, warps=row_warps(D))
    return out


def pool(hidden: Tensor, cu_seqlens: Tensor, mode: PoolMode) -> Tensor:
    """One fp32 vector a sequence.

    Args:
        hidden: [T, D]; rows past cu_seqlens[-1] are ignored.
        cu_seqlens: [B + 1] int32, no empty sequence.

    Returns:
        [B, D] fp32.
    """
    if runs_triton(hidden):
        return pool_finish_triton(hidden, cu_seqlens, mode, "none")
    return pool_ref(hidden, cu_seqlens, mode)


def pool_spans(hidden: Tensor, spans: Tensor) -> Tensor:
    """The mean of each span of rows, in fp32.

    Args:
        hidden: [T, D].
        spans: [S, 2] int32: first row and end; they may touch, overlap or be empty.

    Returns:
        [S, D] fp32; zeros for an empty span.
    """
    return (pool_spans_triton if runs_triton(hidden) else pool_spans_ref)(hidden, spans)


def finish(pooled: Tensor, how: Finish) -> Tensor:
    """The last step of an output kind.

    Args:
        pooled: [B, D] fp32.
        how: "none"; "l2" (unit length; zero stays zero); "tanh_int8" (round(127 tanh x), the pplx-embed model card);
            "sign_bits" (x >= 0, eight to a byte, least significant bit first; D a multiple of 8).

    Returns:
        [B, D] fp32, [B, D] int8 or [B, D / 8] uint8.
    """
    if how == "none":
        return pooled
    return (finish_triton if runs_triton(pooled) else finish_ref)(pooled, how)


def pool_finish(hidden: Tensor, cu_seqlens: Tensor, mode: PoolMode, how: Finish) -> Tensor:
    """`finish(pool(hidden, cu_seqlens, mode), how)` in one pass."""
    if runs_triton(hidden):
        return pool_finish_triton(hidden, cu_seqlens, mode, how)
    return finish_ref(pool_ref(hidden, cu_seqlens, mode), how)

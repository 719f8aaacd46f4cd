"""Products of 8-bit codes in plain Triton: e4m3 or int8 on both sides, scales and what follows in the epilogue.

out[T, N] = epilogue(scale_x * scale_w * (x[T, K] @ w[N, K].T)), or with a scale for each 128 inputs of a row and each
128 x 128 block of the weight, taken in as the sum goes. e4m3 sums are carried on into fp32 every 128 inputs: the tensor
cores' own accumulator keeps some 14 bits. With SPLIT > 1 the inputs are cut into pieces as in gemm.py, each stored
scaled in fp32. `rose/kernels/scaled_mm.py` has the reference.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rose.kernels.gemm import activate_block
from rose.kernels.launch import Ptr, cdiv, constexpr, jit, launch, require_contiguous, tl
from rose.kernels.quantize import GROUP, held_as, static_codes
from rose.kernels.tiles import Op, Tile, heuristic

ROUND = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@jit
def round_to(v: Ptr, TO: constexpr) -> Ptr:
    """fp32 as the model's dtype would hold it."""
    if TO == "bf16":
        v = held_as(v, tl.bfloat16)
    elif TO == "fp16":
        v = held_as(v, tl.float16)
    return v


@jit
def _multiply(
    x: Ptr,
    w: Ptr,
    x_scale: Ptr,
    w_scale: Ptr,
    row: Ptr,
    col: Ptr,
    k0: Ptr,
    acc: Ptr,
    K: constexpr,
    KS: constexpr,
    BK: constexpr,
    GROUPS: constexpr,
    EVEN_K: constexpr,
    WHOLE: constexpr,
) -> Ptr:
    """acc + x[row, k0 : k0 + KS] @ w[col, k0 : k0 + KS].T; with GROUPS > 0 each step by its own two scales."""
    k = k0 + tl.arange(0, BK)
    x_tile = x + row[:, None] * K + k[None, :]
    w_tile = w + col[None, :] * K + k[:, None]
    for step in range(0, KS, BK):
        if EVEN_K:
            a = tl.load(x_tile + step)
            b = tl.load(w_tile + step)
        else:
            inside = k + step < K
            a = tl.load(x_tile + step, mask=inside[None, :], other=0.0)
            b = tl.load(w_tile + step, mask=inside[:, None], other=0.0)
        if GROUPS > 0:
            group = (k0 + step) // 128
            sx = tl.load(x_scale + row * GROUPS + group)
            sw = tl.load(w_scale + (col // 128) * GROUPS + group)
            acc += tl.dot(a, b, out_dtype=tl.float32) * sx[:, None] * sw[None, :]
        elif WHOLE:
            acc = tl.dot(a, b, acc, out_dtype=tl.int32)
        else:
            acc = tl.dot(a, b, acc, max_num_imprecise_acc=128)
    return acc


@jit
def _scale(acc: Ptr, x_scale: Ptr, w_scale: Ptr, row: Ptr, col: Ptr, X_ROWS: constexpr, W_ROWS: constexpr) -> Ptr:
    sx = tl.load(x_scale + row)[:, None] if X_ROWS else tl.load(x_scale)
    sw = tl.load(w_scale + col)[None, :] if W_ROWS else tl.load(w_scale)
    return acc.to(tl.float32) * sx * sw


@jit(do_not_specialize=["M"])
def _scaled_gemm(
    x: Ptr,
    w: Ptr,
    x_scale: Ptr,
    w_scale: Ptr,
    bias: Ptr,
    out_scale: Ptr,
    out: Ptr,
    M: Ptr,
    N: constexpr,
    K: constexpr,
    BM: constexpr,
    BN: constexpr,
    BK: constexpr,
    SPLIT: constexpr,
    KS: constexpr,
    X_ROWS: constexpr,
    W_ROWS: constexpr,
    GROUPS: constexpr,
    WHOLE: constexpr,
    GATED: constexpr,
    ACT: constexpr,
    HAS_BIAS: constexpr,
    ROUND: constexpr,
    CODES: constexpr,
    LARGE: constexpr,
    PDL: constexpr,
) -> None:
    """Program (n, m, s). WHOLE: int8, sums in int32. GATED: w is [2 N, K]. CODES: out is e4m3 by out_scale. LARGE: rows
    are counted in 64 bits."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    col = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.program_id(1) * BM + tl.arange(0, BM)
    row = row.to(tl.int64) if LARGE else row
    k0 = tl.program_id(2) * KS
    in_col = tl.minimum(col, N - 1) if N % BN != 0 else col
    in_row = tl.minimum(row, M - 1)
    EVEN_K: tl.constexpr = K % (BK * SPLIT) == 0
    KIND: tl.constexpr = tl.int32 if WHOLE else tl.float32
    if PDL:
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros((BM, BN), KIND)
    acc = _multiply(x, w, x_scale, w_scale, in_row, in_col, k0, acc, K, KS, BK, GROUPS, EVEN_K, WHOLE)
    v = _scale(acc, x_scale, w_scale, in_row, in_col, X_ROWS, W_ROWS) if GROUPS == 0 else acc
    if HAS_BIAS:
        v += tl.load(bias + in_col).to(tl.float32)[None, :]
    if GATED:
        other = tl.zeros((BM, BN), KIND)
        up_col = in_col + N
        other = _multiply(x, w, x_scale, w_scale, in_row, up_col, k0, other, K, KS, BK, GROUPS, EVEN_K, WHOLE)
        up = _scale(other, x_scale, w_scale, in_row, up_col, X_ROWS, W_ROWS) if GROUPS == 0 else other
        if HAS_BIAS:
            up += tl.load(bias + up_col).to(tl.float32)[None, :]
        v = activate_block(v, ACT) * up
    else:
        v = activate_block(v, ACT)
    if CODES:
        v = static_codes(round_to(v, ROUND), tl.load(out_scale))
    mask = (row < M)[:, None] & (col < N)[None, :]
    piece = out + tl.program_id(2).to(tl.int64) * M * N
    tl.store(piece + row[:, None] * N + col[None, :], v.to(out.dtype.element_ty), mask=mask)


def scaled_tile(op: Op, n: int, k: int, tokens: int, groups: bool) -> Tile:
    """A sane tile: that of a bf16 product, twice as deep, since the values are half as wide."""
    tile = heuristic(op, n, k, tokens)
    bk = GROUP if groups or tile.bk == 64 else tile.bk
    # Tensor cores take 32 codes at a time.
    return replace(tile, bk=max(32, bk), bm=max(16, tile.bm), kind="plain", stages=4)


def scaled_gemm(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    activation: str | None,
    dtype: torch.dtype,
    tile: Tile,
    *,
    pieces: bool = False,
    gated: bool = False,
    out_scale: Tensor | None = None,
) -> Tensor:
    """As `scaled_linear` of scaled_mm.py; with `pieces` [split, T, N], fp32 where split > 1."""
    require_contiguous(x=x, weight=weight, x_scale=x_scale, w_scale=w_scale, bias=bias)
    (M, K), N = x.shape, weight.shape[0] // (2 if gated else 1)
    if tile.split > 1 and (not pieces or gated or bias is not None or activation is not None or out_scale is not None):
        raise ValueError("a split product has no epilogue of its own")
    groups = w_scale.shape[1] if w_scale.dim() == 2 else 0
    if groups and tile.bk != GROUP:
        raise ValueError(f"blocks of {GROUP} inputs are taken in one step each, and the tile has steps of {tile.bk}")
    out_dtype = torch.float32 if tile.split > 1 else dtype if out_scale is None else x.dtype
    out = torch.empty((tile.split, M, N) if pieces else (M, N), dtype=out_dtype, device=x.device)
    launch(
        _scaled_gemm,
        (cdiv(N, tile.bn), cdiv(M, tile.bm), tile.split),
        x,
        weight,
        x_scale,
        w_scale,
        w_scale if bias is None else bias,
        w_scale if out_scale is None else out_scale,
        out,
        M,
        N=N,
        K=K,
        BM=tile.bm,
        BN=tile.bn,
        BK=tile.bk,
        SPLIT=tile.split,
        KS=cdiv(cdiv(K, tile.bk), tile.split) * tile.bk,
        X_ROWS=x_scale.numel() > 1 or x_scale.dim() == 2,
        W_ROWS=w_scale.numel() > 1,
        GROUPS=groups,
        WHOLE=x.dtype == torch.int8,
        GATED=gated,
        ACT=activation,
        HAS_BIAS=bias is not None,
        ROUND=ROUND[dtype],
        CODES=out_scale is not None,
        LARGE=M * max(N, K) >= 2**31,
        device=x.device,
        warps=tile.warps,
        stages=tile.stages,
    )
    return out

"""Matrix products for few tokens in plain Triton. `rose/kernels/linear.py` has the references.

out[T, N] = epilogue(x[T, K] @ w[N, K].T), sums in fp32, every row summed in the same order whatever the other rows are.
With SPLIT > 1 the input features are cut into that many pieces, each stored by itself in fp32; nothing is added
atomically. Tails of T and N are read from the last valid row and never stored; tails of K are masked.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rose.kernels.launch import Ptr, cdiv, constexpr, has_dependent_launch, jit, launch, require_contiguous, tl
from rose.kernels.tiles import Tile


@jit
def _over_root(v: Ptr, d: Ptr) -> Ptr:
    """v / d, d above zero: by the root's reciprocal, one instruction, which the plain reciprocal is not in Triton."""
    root = tl.rsqrt(d)
    return v * root * root


@jit
def activate_block(v: Ptr, ACT: constexpr) -> Ptr:
    """The activation named ACT on fp32 values; NaN stays NaN."""
    if ACT == "gelu":
        # v Phi(v) = max(v, 0) - |v| Phi(-|v|), and log2 Phi(-z) is nearly a parabola: a polynomial of degree 7, fitted
        # to 0 <= z <= 7 (of the answer: absolute error below 1.3e-7, relative below 3.7e-5) and falling ever after. One
        # special function, and a third of the instructions of erf.
        z = tl.abs(v)
        p = -1.6804674e-06 * z + 5.87661e-05
        p = ((p * z - 0.00091175816) * z + 0.008455295) * z - 0.05391127
        p = ((p * z - 0.45844087) * z - 1.151298) * z - 0.9999842
        v = tl.maximum(v, 0.0) - z * tl.exp2(p)
    elif ACT == "gelu_tanh":
        # 0.5 (1 + tanh(u)) is the logistic function of 2 u.
        v = _over_root(v, 1.0 + tl.exp2(v * (-2.302208198144325 - 0.10294324 * (v * v))))
    elif ACT == "silu":
        v = _over_root(v, 1.0 + tl.exp2(-1.4426950408889634 * v))
    elif ACT == "relu":
        v = tl.where(v < 0.0, 0.0, v)
    return v


@jit
def _request_rows(
    w: Ptr, first_row: Ptr, k0: Ptr, asks: Ptr, K: constexpr, KS: constexpr, BN: constexpr, CHUNKS: constexpr
) -> None:
    """Ask the L2 cache for BN rows of KS values from column k0: CHUNKS bulk requests a row, one a thread.

    `asks` is false in the programs whose weights another program asks for.
    """
    if asks:
        row = tl.arange(0, BN)
        chunk = tl.arange(0, CHUNKS)
        address = w + (first_row + row)[:, None].to(tl.int64) * K + k0 + chunk[None, :] * (KS // CHUNKS)
        # 2 bytes a value: the bulk form takes addresses and sizes in multiples of 16 bytes.
        size = tl.full((BN, CHUNKS), KS // CHUNKS * 2, tl.int32)
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
            "=r,l,r",
            [address, size],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@jit
def _multiply(
    x: Ptr,
    w: Ptr,
    rows: Ptr,
    cols: Ptr,
    k0: Ptr,
    acc: Ptr,
    K: constexpr,
    KS: constexpr,
    BK: constexpr,
    EVEN_K: constexpr,
) -> Ptr:
    """acc + x[rows, k0 : k0 + KS] @ w[cols, k0 : k0 + KS].T"""
    k = k0 + tl.arange(0, BK)
    x_tile = x + rows[:, None] * K + k[None, :]
    w_tile = w + cols[None, :] * K + k[:, None]
    for step in range(0, KS, BK):
        if EVEN_K:
            a = tl.load(x_tile + step)
            b = tl.load(w_tile + step)
        else:
            inside = k + step < K
            a = tl.load(x_tile + step, mask=inside[None, :], other=0.0)
            b = tl.load(w_tile + step, mask=inside[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@jit(do_not_specialize=["M"])
def _gemm(
    x: Ptr,
    w: Ptr,
    bias: Ptr,
    out: Ptr,
    M: Ptr,
    N: constexpr,
    K: constexpr,
    BM: constexpr,
    BN: constexpr,
    BK: constexpr,
    SPLIT: constexpr,
    KS: constexpr,
    ACT: constexpr,
    HAS_BIAS: constexpr,
    CHUNKS: constexpr,
    PDL: constexpr,
) -> None:
    """Program (n, m, s): one tile of out, over the s-th KS input features. CHUNKS > 0: prefetch the weights."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    first_col = tl.program_id(0) * BN
    first_row = tl.program_id(1) * BM
    k0 = tl.program_id(2) * KS
    if CHUNKS > 0:
        _request_rows(w, first_col, k0, first_row == 0, K, KS, BN, CHUNKS)
    col = first_col + tl.arange(0, BN)
    row = first_row + tl.arange(0, BM)
    in_col = tl.minimum(col, N - 1) if N % BN != 0 else col
    in_col = in_col.to(tl.int64) if N * K >= 2**31 else in_col
    in_row = tl.minimum(row, M - 1)
    if HAS_BIAS:
        b = tl.load(bias + in_col).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros((BM, BN), tl.float32)
    acc = _multiply(x, w, in_row, in_col, k0, acc, K, KS, BK, K % (BK * SPLIT) == 0)
    if HAS_BIAS:
        acc += b[None, :]
    acc = activate_block(acc, ACT)
    mask = (row < M)[:, None] & (col < N)[None, :]
    piece = out + tl.program_id(2).to(tl.int64) * M * N
    tl.store(piece + row[:, None] * N + col[None, :], acc.to(out.dtype.element_ty), mask=mask)


@jit(do_not_specialize=["M"])
def _gemm_gated(
    x: Ptr,
    w: Ptr,
    out: Ptr,
    M: Ptr,
    N: constexpr,
    K: constexpr,
    BM: constexpr,
    BN: constexpr,
    BK: constexpr,
    ACT: constexpr,
    CHUNKS: constexpr,
    PDL: constexpr,
) -> None:
    """Program (n, m): ACT(x @ w[n].T) * (x @ w[N + n].T) for one tile of out [M, N]; w is [2 N, K]."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    first_col = tl.program_id(0) * BN
    first_row = tl.program_id(1) * BM
    if CHUNKS > 0:
        _request_rows(w, first_col, 0, first_row == 0, K, K, BN, CHUNKS)
        _request_rows(w, N + first_col, 0, first_row == 0, K, K, BN, CHUNKS)
    col = first_col + tl.arange(0, BN)
    row = first_row + tl.arange(0, BM)
    in_col = tl.minimum(col, N - 1) if N % BN != 0 else col
    in_row = tl.minimum(row, M - 1)
    k = tl.arange(0, BK)
    x_tile = x + in_row[:, None] * K + k[None, :]
    gate_tile = w + in_col[None, :] * K + k[:, None]
    up_tile = gate_tile + N * K
    if PDL:
        tl.extra.cuda.gdc_wait()
    gate = tl.zeros((BM, BN), tl.float32)
    up = tl.zeros((BM, BN), tl.float32)
    for step in range(0, K, BK):
        if K % BK == 0:
            a = tl.load(x_tile + step)
            g = tl.load(gate_tile + step)
            u = tl.load(up_tile + step)
        else:
            inside = k + step < K
            a = tl.load(x_tile + step, mask=inside[None, :], other=0.0)
            g = tl.load(gate_tile + step, mask=inside[:, None], other=0.0)
            u = tl.load(up_tile + step, mask=inside[:, None], other=0.0)
        gate = tl.dot(a, g, gate, input_precision="ieee")
        up = tl.dot(a, u, up, input_precision="ieee")
    v = activate_block(gate, ACT) * up
    mask = (row < M)[:, None] & (col < N)[None, :]
    tl.store(out + row[:, None] * N + col[None, :], v.to(out.dtype.element_ty), mask=mask)


def _chunks(tile: Tile, n: int, ks: int, x: Tensor) -> int:
    """Prefetch requests a row of weights: one a thread where 16-byte alignment and whole tiles allow it; 0: none."""
    if tile.kind != "prefetch" or not has_dependent_launch(x.device):
        return 0
    if x.element_size() != 2 or n % tile.bn or ks * tile.split != x.shape[1]:
        return 0
    chunks = max(1, tile.warps * 32 // tile.bn)
    while chunks > 1 and ks % (8 * chunks):
        chunks //= 2
    return 0 if ks % (8 * chunks) else chunks


def gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    tile: Tile,
    pieces: bool,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """[T, N] in `dtype`, None for x's own; with `pieces` [split, T, N], fp32 where split > 1."""
    require_contiguous(x=x, weight=weight, bias=bias)
    (M, K), N = x.shape, weight.shape[0]
    if tile.split > 1 and (not pieces or bias is not None or activation is not None):
        raise ValueError("a split product has no epilogue of its own")
    ks = cdiv(cdiv(K, tile.bk), tile.split) * tile.bk
    dtype = torch.float32 if tile.split > 1 else dtype or x.dtype
    out = torch.empty((tile.split, M, N) if pieces else (M, N), dtype=dtype, device=x.device)
    launch(
        _gemm,
        (cdiv(N, tile.bn), cdiv(M, tile.bm), tile.split),
        x,
        weight,
        weight if bias is None else bias,
        out,
        M,
        N=N,
        K=K,
        BM=tile.bm,
        BN=tile.bn,
        BK=tile.bk,
        SPLIT=tile.split,
        KS=ks,
        ACT=activation,
        HAS_BIAS=bias is not None,
        CHUNKS=_chunks(tile, N, ks, x),
        device=x.device,
        warps=tile.warps,
        stages=tile.stages,
    )
    return out


def gemm_gated(x: Tensor, weight: Tensor, activation: str, tile: Tile) -> Tensor:
    """activation(x @ weight[:N].T) * (x @ weight[N:].T): [T, N] in x's dtype."""
    require_contiguous(x=x, weight=weight)
    (M, K), N = x.shape, weight.shape[0] // 2
    out = torch.empty((M, N), dtype=x.dtype, device=x.device)
    launch(
        _gemm_gated,
        (cdiv(N, tile.bn), cdiv(M, tile.bm)),
        x,
        weight,
        out,
        M,
        N=N,
        K=K,
        BM=tile.bm,
        BN=tile.bn,
        BK=tile.bk,
        ACT=activation,
        CHUNKS=_chunks(tile, N, K, x),
        device=x.device,
        warps=tile.warps,
        stages=tile.stages,
    )
    return out

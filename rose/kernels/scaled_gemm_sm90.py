"""The small products of e4m3 codes for Hopper: the kernel of gemm_sm90.py with scales, in Gluon.

Weights are on their way to shared memory before the dependency wait, with the scales that were settled beforehand;
activations and their scales come after it. The tensor cores' own accumulator of e4m3 keeps some 14 bits, so that each
128 inputs are summed from zero and added in fp32, as in scaled_gemm.py: a product waits only for the one before it, and
one is always running. Epilogues are those of scaled_gemm.py.

Takes one scale for a side, one for each output or one for each token. Blocks and int8 are scaled_gemm.py's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rose.kernels.gemm import activate_block
from rose.kernels.gemm_sm90 import (
    descriptor,
    gl,
    gluon_jit,
    gluon_kernel,
    hopper,
    load_w,
    load_x,
)
from rose.kernels.launch import Ptr, cdiv, constexpr, launch, require_contiguous, tl
from rose.kernels.quantize import static_codes
from rose.kernels.scaled_gemm import ROUND, round_to
from rose.kernels.tiles import Tile, slots_of, sm90_reason

# Codes of a row in a swizzled tile, and inputs that are summed before fp32 takes them over.
_PART = 128


@gluon_jit
def _columns(at: Ptr, BN: constexpr, LAYOUT: constexpr) -> Ptr:
    """[1, BN] fp32: one value an output."""
    values = gl.load(at + gl.arange(0, BN, layout=gl.SliceLayout(0, LAYOUT))).to(gl.float32)
    return gl.expand_dims(values, 0)


@gluon_kernel
def _scaled_gemm_sm90(
    x: Ptr,
    w: Ptr,
    x_scale: Ptr,
    w_scale: Ptr,
    bias: Ptr,
    out_scale: Ptr,
    out: Ptr,
    M: Ptr,
    N: constexpr,
    BM: constexpr,
    BN: constexpr,
    BK: constexpr,
    PART: constexpr,
    STEPS: constexpr,
    X_SLOTS: constexpr,
    W_SLOTS: constexpr,
    X_ROWS: constexpr,
    W_ROWS: constexpr,
    ACT: constexpr,
    HAS_BIAS: constexpr,
    GATED: constexpr,
    ROUND: constexpr,
    CODES: constexpr,
    LATE_LAUNCH: constexpr,
    WARPS: constexpr,
    PDL: constexpr,
) -> None:
    """Program (n, m, s) as in gemm_sm90.py. PART: inputs that are summed before fp32 takes them over. X_ROWS, W_ROWS: a
    scale for each token, each output. CODES: out is e4m3 by out_scale."""
    if PDL and not LATE_LAUNCH:
        tl.extra.cuda.gdc_launch_dependents()
    col0 = gl.program_id(0) * BN
    row0 = gl.program_id(1) * BM
    k0 = gl.program_id(2) * (STEPS * BK)
    HALVES: gl.constexpr = 2 if GATED else 1
    PARTS: gl.constexpr = BK // PART
    X_BYTES: gl.constexpr = BM * BK
    W_BYTES: gl.constexpr = HALVES * BN * BK
    x_smem = gl.allocate_shared_memory(x.dtype, [X_SLOTS, BM, BK], x.layout)
    w_smem = gl.allocate_shared_memory(w.dtype, [W_SLOTS * HALVES, BN, BK], w.layout)
    # A swizzled row has 128 bytes: a tile of more columns is such tiles one after the other.
    x_parts = x_smem._reinterpret(x.dtype, [X_SLOTS * PARTS, BM, PART], x.layout)
    w_parts = w_smem._reinterpret(w.dtype, [W_SLOTS * HALVES * PARTS, BN, PART], w.layout)
    x_bar = gl.allocate_shared_memory(gl.int64, [X_SLOTS, 1], hopper.mbarrier.MBarrierLayout())
    w_bar = gl.allocate_shared_memory(gl.int64, [W_SLOTS, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(W_SLOTS):
        hopper.mbarrier.init(w_bar.index(i), count=1)
    for i in gl.static_range(X_SLOTS):
        hopper.mbarrier.init(x_bar.index(i), count=1)
    hopper.fence_async_shared()
    for i in gl.static_range(W_SLOTS):
        load_w(w, w_bar, w_smem, i, col0, k0 + i * BK, N, GATED, W_BYTES)
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BN, 32])
    # Parameters, all of them: at rest before the wait.
    sw = _columns(w_scale + col0, BN, mma) if W_ROWS else gl.load(w_scale)
    if HAS_BIAS:
        b = _columns(bias + col0, BN, mma)
    if GATED:
        sw_up = _columns(w_scale + N + col0, BN, mma) if W_ROWS else sw
        if HAS_BIAS:
            b_up = _columns(bias + N + col0, BN, mma)
    if CODES:
        so = gl.load(out_scale)
    if not X_ROWS:
        sx = gl.load(x_scale)
    for i in gl.static_range(X_SLOTS):
        hopper.mbarrier.expect(x_bar.index(i), X_BYTES)
    if PDL:
        tl.extra.cuda.gdc_wait()
        if LATE_LAUNCH:
            tl.extra.cuda.gdc_launch_dependents()
    for i in gl.static_range(X_SLOTS):
        hopper.tma.async_copy_global_to_shared(x, [row0, k0 + i * BK], x_bar.index(i), x_smem.index(i))
    row = row0 + gl.arange(0, BM, layout=gl.SliceLayout(1, mma))
    if X_ROWS:
        sx = gl.expand_dims(gl.load(x_scale + gl.minimum(row, M - 1)), 1)
    # Products in turn: `last` is on its way, the registers of the one before it are free for the next.
    free = gl.zeros([BM, BN], gl.float32, layout=mma)
    last = free
    acc = gl.zeros([BM, BN], gl.float32, layout=mma)
    if GATED:
        up = gl.zeros([BM, BN], gl.float32, layout=mma)
    for i in gl.static_range(STEPS):
        hopper.mbarrier.wait(w_bar.index(i % W_SLOTS), (i // W_SLOTS) & 1)
        hopper.mbarrier.wait(x_bar.index(i % X_SLOTS), (i // X_SLOTS) & 1)
        for part in gl.static_range(PARTS):
            for half in gl.static_range(HALVES):
                xs = x_parts.index(i % X_SLOTS * PARTS + part)
                ws = w_parts.index((i % W_SLOTS * HALVES + half) * PARTS + part).permute((1, 0))
                new = hopper.warpgroup_mma(xs, ws, free, use_acc=False, is_async=True)
                if i + part + half > 0:
                    # All products but this one are done: of a gated pair the one before is the other half's. The sums
                    # go along, since the compiler would put all additions off to the end, and hold all products.
                    if GATED and half == 0:
                        done, up = hopper.warpgroup_mma_wait(1, deps=(last, up))
                        up += done
                    else:
                        done, acc = hopper.warpgroup_mma_wait(1, deps=(last, acc))
                        acc += done
                    free = done
                if i >= 1 and part + half == 0 and (i - 1 + X_SLOTS < STEPS or i - 1 + W_SLOTS < STEPS):
                    # In all warps: the slots of step i - 1 are free.
                    gl.thread_barrier()
                    if i - 1 + X_SLOTS < STEPS:
                        k_next = k0 + (i - 1 + X_SLOTS) * BK
                        load_x(x, x_bar, x_smem, (i - 1) % X_SLOTS, row0, k_next, X_BYTES)
                    if i - 1 + W_SLOTS < STEPS:
                        k_next = k0 + (i - 1 + W_SLOTS) * BK
                        load_w(w, w_bar, w_smem, (i - 1) % W_SLOTS, col0, k_next, N, GATED, W_BYTES)
                last = new
    done = hopper.warpgroup_mma_wait(0, deps=(last,))
    if GATED:
        up = (up + done) * sx * sw_up
        v = acc * sx * sw
        if HAS_BIAS:
            v += b
            up += b_up
        v = activate_block(v, ACT) * up
    else:
        v = (acc + done) * sx * sw
        if HAS_BIAS:
            v += b
        v = activate_block(v, ACT)
    if CODES:
        v = static_codes(round_to(v, ROUND), so)
    col = col0 + gl.arange(0, BN, layout=gl.SliceLayout(0, mma))
    at = out + gl.program_id(2) * (M * N) + gl.expand_dims(row, 1) * N + gl.expand_dims(col, 0)
    gl.store(at, v.to(out.dtype.element_ty), mask=gl.expand_dims(row < M, 1))


def scaled_gemm_sm90(
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
    """As `scaled_gemm` of scaled_gemm.py; e4m3, no blocks, tiles for which `sm90_reason` of one byte is None.

    Raises:
        ValueError: another shape, type or kind of scales.
    """
    require_contiguous(x=x, weight=weight, x_scale=x_scale, w_scale=w_scale, bias=bias)
    (M, K), N = x.shape, weight.shape[0] // (2 if gated else 1)
    reason = scaled_sm90_reason(x, weight, w_scale, tile, gated=gated)
    if reason is not None:
        raise ValueError(reason)
    if tile.split > 1 and (not pieces or gated or bias is not None or activation is not None or out_scale is not None):
        raise ValueError("a split product has no epilogue of its own")
    out_dtype = torch.float32 if tile.split > 1 else dtype if out_scale is None else x.dtype
    out = torch.empty((tile.split, M, N) if pieces else (M, N), dtype=out_dtype, device=x.device)
    steps, x_slots, w_slots = slots_of(tile, K)
    launch(
        _scaled_gemm_sm90,
        (N // tile.bn, cdiv(M, tile.bm), tile.split),
        descriptor(x, tile.bm, tile.bk),
        descriptor(weight, tile.bn, tile.bk),
        x_scale,
        w_scale,
        w_scale if bias is None else bias,
        w_scale if out_scale is None else out_scale,
        out,
        M,
        N=N,
        BM=tile.bm,
        BN=tile.bn,
        BK=tile.bk,
        PART=_PART,
        STEPS=steps,
        X_SLOTS=x_slots,
        W_SLOTS=w_slots,
        X_ROWS=x_scale.numel() > 1 or x_scale.dim() == 2,
        W_ROWS=w_scale.numel() > 1,
        ACT=activation,
        HAS_BIAS=bias is not None,
        GATED=gated,
        ROUND=ROUND[dtype],
        CODES=out_scale is not None,
        LATE_LAUNCH=tile.late_launch,
        WARPS=tile.warps,
        device=x.device,
        warps=tile.warps,
    )
    return out


def scaled_sm90_reason(x: Tensor, weight: Tensor, w_scale: Tensor, tile: Tile, *, gated: bool) -> str | None:
    """None if this kernel takes the product with this tile; else why not."""
    if x.dtype != torch.float8_e4m3fn or weight.dtype != torch.float8_e4m3fn:
        return f"codes are e4m3 on both sides, not {x.dtype} and {weight.dtype}"
    if w_scale.dim() == 2:
        return "a scale for each block of the weight would have to be taken in as the sum goes"
    return sm90_reason(tile, weight.shape[0] // (2 if gated else 1), x.shape[1], gated=gated, size=1)

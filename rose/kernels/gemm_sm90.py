"""The small products of gemm.py for Hopper, in Gluon (Triton's lower-level dialect).

Of a product with few tokens the activations are on the critical path and the weights are not: they can be on their way
to shared memory while the kernel before still runs. `tl.dot` leaves no place to say so. Here the copy engine takes the
first tiles of weights before the dependency wait and the activations after it, and asynchronous warpgroup products read
both from shared memory. The loop over the input features is unrolled: slots and phases are constants.

Knows shapes and tiles; gemm.py serves what this kernel does not take.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rose.kernels.gemm import activate_block
from rose.kernels.launch import Ptr, cdiv, constexpr, has_dependent_launch, launch, require_contiguous, tl
from rose.kernels.tiles import LARGE, Tile, bucket, slots_of, sm90_reason

if TYPE_CHECKING:
    gluon: Any
    gl: Any
    hopper: Any
    TensorDescriptor: Any
else:
    try:
        from triton.experimental import gluon
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.language.nvidia import hopper
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    except ImportError:  # no Triton, or one without this dialect
        gluon = gl = hopper = TensorDescriptor = None


def gluon_jit(function: Any) -> Any:
    return function if gluon is None else gluon.jit(function)


def gluon_kernel(function: Any) -> Any:
    return function if gluon is None else gluon.jit(function, do_not_specialize=["M"])


@gluon_jit
def load_x(x: Ptr, bar: Ptr, smem: Ptr, slot: constexpr, row: Ptr, k: Ptr, BYTES: constexpr) -> None:
    """The activations of one step into one slot."""
    hopper.mbarrier.expect(bar.index(slot), BYTES)
    hopper.tma.async_copy_global_to_shared(x, [row, k], bar.index(slot), smem.index(slot))


@gluon_jit
def load_w(
    w: Ptr, bar: Ptr, smem: Ptr, slot: constexpr, row: Ptr, k: Ptr, N: constexpr, GATED: constexpr, BYTES: constexpr
) -> None:
    """The weight tile (where gated: both) of one step into one slot."""
    hopper.mbarrier.expect(bar.index(slot), BYTES)
    if GATED:
        hopper.tma.async_copy_global_to_shared(w, [row, k], bar.index(slot), smem.index(2 * slot))
        hopper.tma.async_copy_global_to_shared(w, [N + row, k], bar.index(slot), smem.index(2 * slot + 1))
    else:
        hopper.tma.async_copy_global_to_shared(w, [row, k], bar.index(slot), smem.index(slot))


@gluon_kernel
def _gemm_sm90(
    x: Ptr,
    w: Ptr,
    bias: Ptr,
    out: Ptr,
    M: Ptr,
    N: constexpr,
    BM: constexpr,
    BN: constexpr,
    BK: constexpr,
    STEPS: constexpr,
    X_SLOTS: constexpr,
    W_SLOTS: constexpr,
    ACT: constexpr,
    HAS_BIAS: constexpr,
    GATED: constexpr,
    LATE_LAUNCH: constexpr,
    WIDE_STORES: constexpr,
    WARPS: constexpr,
    PDL: constexpr,
) -> None:
    """Program (n, m, s): one tile of out, over STEPS * BK input features from s * STEPS * BK. x, w: descriptors."""
    if PDL and not LATE_LAUNCH:
        tl.extra.cuda.gdc_launch_dependents()
    col0 = gl.program_id(0) * BN
    row0 = gl.program_id(1) * BM
    k0 = gl.program_id(2) * (STEPS * BK)
    HALVES: gl.constexpr = 2 if GATED else 1
    X_BYTES: gl.constexpr = BM * BK * 2
    W_BYTES: gl.constexpr = HALVES * BN * BK * 2
    x_smem = gl.allocate_shared_memory(x.dtype, [X_SLOTS, BM, BK], x.layout)
    w_smem = gl.allocate_shared_memory(w.dtype, [W_SLOTS * HALVES, BN, BK], w.layout)
    x_bar = gl.allocate_shared_memory(gl.int64, [X_SLOTS, 1], hopper.mbarrier.MBarrierLayout())
    w_bar = gl.allocate_shared_memory(gl.int64, [W_SLOTS, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(W_SLOTS):
        hopper.mbarrier.init(w_bar.index(i), count=1)
    for i in gl.static_range(X_SLOTS):
        hopper.mbarrier.init(x_bar.index(i), count=1)
    hopper.fence_async_shared()
    for i in gl.static_range(W_SLOTS):
        load_w(w, w_bar, w_smem, i, col0, k0 + i * BK, N, GATED, W_BYTES)
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BN, 16])
    if HAS_BIAS:
        b = gl.load(bias + col0 + gl.arange(0, BN, layout=gl.SliceLayout(0, mma))).to(gl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        if LATE_LAUNCH:
            tl.extra.cuda.gdc_launch_dependents()
    for i in gl.static_range(X_SLOTS):
        load_x(x, x_bar, x_smem, i, row0, k0 + i * BK, X_BYTES)
    acc = gl.zeros([BM, BN], gl.float32, layout=mma)
    if GATED:
        up = gl.zeros([BM, BN], gl.float32, layout=mma)
    for i in gl.static_range(STEPS):
        hopper.mbarrier.wait(w_bar.index(i % W_SLOTS), (i // W_SLOTS) & 1)
        hopper.mbarrier.wait(x_bar.index(i % X_SLOTS), (i // X_SLOTS) & 1)
        a = x_smem.index(i % X_SLOTS)
        b0 = w_smem.index(i % W_SLOTS * HALVES).permute((1, 0))
        acc = hopper.warpgroup_mma(a, b0, acc, is_async=True)
        if GATED:
            b1 = w_smem.index(i % W_SLOTS * HALVES + 1).permute((1, 0))
            up = hopper.warpgroup_mma(a, b1, up, is_async=True)
        if i >= 1 and (i - 1 + X_SLOTS < STEPS or i - 1 + W_SLOTS < STEPS):
            # The slots of step i - 1 are free once its products are done in all warps and only this step's are not.
            if GATED:
                acc, up = hopper.warpgroup_mma_wait(HALVES, deps=(acc, up))
            else:
                acc = hopper.warpgroup_mma_wait(HALVES, deps=(acc,))
            gl.thread_barrier()
            if i - 1 + X_SLOTS < STEPS:
                load_x(x, x_bar, x_smem, (i - 1) % X_SLOTS, row0, k0 + (i - 1 + X_SLOTS) * BK, X_BYTES)
            if i - 1 + W_SLOTS < STEPS:
                load_w(w, w_bar, w_smem, (i - 1) % W_SLOTS, col0, k0 + (i - 1 + W_SLOTS) * BK, N, GATED, W_BYTES)
    if GATED:
        acc, up = hopper.warpgroup_mma_wait(0, deps=(acc, up))
        v = activate_block(acc, ACT) * up
    else:
        v = hopper.warpgroup_mma_wait(0, deps=(acc,))
        if HAS_BIAS:
            v += gl.expand_dims(b, 0)
        v = activate_block(v, ACT)
    # As products lie in registers a thread has two neighbours: short stores, no detour. By way of shared memory: eight.
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BN, BN // 8], [WARPS, 1], [1, 0])
    store: gl.constexpr = wide if WIDE_STORES else mma
    y = gl.convert_layout(v.to(out.dtype.element_ty), store)
    row = row0 + gl.arange(0, BM, layout=gl.SliceLayout(1, store))
    col = col0 + gl.arange(0, BN, layout=gl.SliceLayout(0, store))
    at = out + gl.program_id(2) * (M * N) + gl.expand_dims(row, 1) * N + gl.expand_dims(col, 0)
    gl.store(at, y, mask=gl.expand_dims(row < M, 1))


@cache
def runs_sm90(device: torch.device) -> bool:
    """Whether the device is a Hopper and Triton has the dialect."""
    return gluon is not None and has_dependent_launch(device) and torch.cuda.get_device_capability(device)[0] == 9


def descriptor(x: Tensor, rows: int, cols: int) -> Any:
    """Of x's tiles of `rows` x `cols` as the tensor cores read them."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * x.element_size(), rank=2)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, cols], layout)


def gemm_sm90(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    tile: Tile,
    *,
    pieces: bool,
    gated: bool,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """As `gemm` and `gemm_gated` of gemm.py; bf16 or fp16, shapes and tiles for which `sm90_reason` is None."""
    require_contiguous(x=x, weight=weight, bias=bias)
    (M, K), N = x.shape, weight.shape[0] // (2 if gated else 1)
    if reason := sm90_reason(tile, N, K, gated=gated):
        raise ValueError(reason)
    if tile.split > 1 and (not pieces or gated or bias is not None or activation is not None):
        raise ValueError("a split product has no epilogue of its own")
    dtype = torch.float32 if tile.split > 1 else dtype or x.dtype
    out = torch.empty((tile.split, M, N) if pieces else (M, N), dtype=dtype, device=x.device)
    steps, x_slots, w_slots = slots_of(tile, K)
    launch(
        _gemm_sm90,
        (N // tile.bn, cdiv(M, tile.bm), tile.split),
        descriptor(x, tile.bm, tile.bk),
        descriptor(weight, tile.bn, tile.bk),
        weight if bias is None else bias,
        out,
        M,
        N=N,
        BM=tile.bm,
        BN=tile.bn,
        BK=tile.bk,
        STEPS=steps,
        X_SLOTS=x_slots,
        W_SLOTS=w_slots,
        ACT=activation,
        HAS_BIAS=bias is not None,
        GATED=gated,
        LATE_LAUNCH=tile.late_launch,
        WIDE_STORES=tile.split == 1 and bucket(M) == LARGE,
        WARPS=tile.warps,
        device=x.device,
        warps=tile.warps,
    )
    return out

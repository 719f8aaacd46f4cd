"""Rows as 8-bit codes and fp32 scales, such that code * scale is near the value: e4m3 (arXiv:2209.05433) and int8.

A code is value / scale, clamped to what the type holds and rounded to nearest even; the quotient is exact to the last
bit, so that codes are the same on every device. A row with a value that is not finite has a scale, or codes, that are
not a number: no clamp turns an infinity into 448. Nor one of the quotient, which has no end below 2**128 scales.
Knows tensors; which scale a layer takes is the layer's business.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rose.kernels.launch import (
    Ptr,
    cdiv,
    constexpr,
    jit,
    launch,
    next_power_of_2,
    program_block,
    require_contiguous,
    row_warps,
    runs_triton,
    tl,
)

FP8 = torch.float8_e4m3fn
# The largest finite number of e4m3, and of int8 on both sides of zero.
LARGEST = {FP8: 448.0, torch.int8: 127.0}
GROUP = 128
# A row of zeros must not be divided by zero. Other engines have the same floor, 1 / (448 * 512).
LEAST_SCALE = 1.0 / (448.0 * 512.0)
_ROUND = 12582912.0  # 1.5 * 2**23: adding and taking it away rounds an fp32 below 2**22 to nearest even


def quantize_static_ref(x: Tensor, scale: Tensor) -> Tensor:
    v = x.float() / scale.float()
    v = v + (v - v)  # infinity becomes NaN, which a clamp keeps
    return v.clamp(-LARGEST[FP8], LARGEST[FP8]).to(FP8)


def quantize_groups_ref(x: Tensor, dtype: torch.dtype, size: int) -> tuple[Tensor, Tensor]:
    rows, width = x.shape
    groups = cdiv(width, size)
    v = torch.nn.functional.pad(x.float(), (0, groups * size - width)).view(rows, groups, size)
    largest = LARGEST[dtype]
    most = v.abs().amax(-1)
    # Divided by a tensor: by a number CUDA multiplies with its reciprocal, and the last bit differs.
    scale = (most / torch.full_like(most, largest)).clamp(min=LEAST_SCALE)
    scale = torch.where(scale.isfinite(), scale, torch.nan)
    v = v / scale.unsqueeze(-1)
    if dtype == torch.int8:
        v = v.round().nan_to_num(0.0)  # a code cannot be NaN: the scale is
    codes = v.clamp(-largest, largest).to(dtype)
    return codes.view(rows, groups * size)[:, :width].contiguous(), scale


@jit
def held_as(v: Ptr, TYPE: constexpr) -> Ptr:
    """fp32 values as TYPE would hold them, in fp32.

    bf16 is packed beside a zero, which is the answer's other half already: the compiler's own conversion of one value
    (F2F) runs at an eighth of the rate of an addition, a packing (F2FP) at half of it.
    """
    if tl.bfloat16 == TYPE:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $1, 0f00000000;", "=r,f", [v], dtype=tl.int32, is_pure=True, pack=1
        ).to(tl.float32, bitcast=True)
    return v.to(TYPE).to(tl.float32)


@jit
def static_codes(v: Ptr, scale: Ptr) -> Ptr:
    """fp32 values and one scale -> quotients that e4m3 holds once rounded; NaN where they are not finite.

    Only the reciprocal of the scale is divided for. Its product with v is within 1.5 units of the last place; one step
    with the remainder, which fma has exactly, gives the rounding of the quotient itself (P. Markstein, "Computation of
    elementary functions on the IBM RISC System/6000 processor", 1990). 4 instructions a value with the clamp, where a
    division has about 20. Of an infinite quotient the remainder is infinite too, and their sum NaN.
    """
    inverse = tl.math.div_rn(1.0, scale)
    quotient = v * inverse
    quotient = tl.fma(tl.fma(quotient, -scale, v), inverse, quotient)
    return tl.clamp(quotient, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)


@jit
def _quantize_static(x: Ptr, scale: Ptr, out: Ptr, size: Ptr, BLOCK: constexpr, PDL: constexpr) -> None:
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    s = tl.load(scale)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    if PDL:
        tl.extra.cuda.gdc_wait()
    v = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, static_codes(v, s).to(out.dtype.element_ty), mask=mask)


@jit
def _quantize_groups(
    x: Ptr,
    out: Ptr,
    scales: Ptr,
    WIDTH: constexpr,
    SIZE: constexpr,
    GROUPS: constexpr,
    GROUPS_UP: constexpr,
    SIZE_UP: constexpr,
    LARGEST: constexpr,
    LEAST: constexpr,
    ROUND: constexpr,
    PDL: constexpr,
) -> None:
    """One program a row. ROUND > 0: codes are whole numbers, and rounded by adding and taking ROUND away."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS_UP)
    inner = tl.arange(0, SIZE_UP)
    col = group[:, None] * SIZE + inner[None, :]
    mask = (inner < SIZE)[None, :] & (col < WIDTH)
    if PDL:
        tl.extra.cuda.gdc_wait()
    v = tl.load(x + row * WIDTH + col, mask=mask, other=0.0).to(tl.float32)
    # A maximum may drop NaN; this sum is zero, or NaN where a value is not finite.
    odd = tl.sum(v - v, 1)
    scale = tl.math.div_rn(tl.max(tl.abs(v), 1), tl.full((GROUPS_UP,), LARGEST, tl.float32))
    scale = tl.where(scale > LEAST, scale, LEAST) + odd
    v = tl.math.div_rn(v, scale[:, None] + tl.zeros_like(v))
    v = tl.where(v > LARGEST, LARGEST, v)
    v = tl.where(v < -LARGEST, -LARGEST, v)
    if ROUND > 0:
        v = (v + ROUND) - ROUND
        v = tl.where(v == v, v, 0.0)
    tl.store(out + row * WIDTH + col, v.to(out.dtype.element_ty), mask=mask)
    tl.store(scales + row * GROUPS + group, scale, mask=group < GROUPS)


def quantize_static_triton(x: Tensor, scale: Tensor) -> Tensor:
    require_contiguous(x=x)
    out = torch.empty(x.shape, dtype=FP8, device=x.device)
    block, warps = program_block(x.numel())
    grid = (cdiv(x.numel(), block),)
    launch(_quantize_static, grid, x, scale, out, x.numel(), BLOCK=block, device=x.device, warps=warps)
    return out


def quantize_groups_triton(x: Tensor, dtype: torch.dtype, size: int) -> tuple[Tensor, Tensor]:
    require_contiguous(x=x)
    rows, width = x.shape
    groups = cdiv(width, size)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    scales = torch.empty(rows, groups, dtype=torch.float32, device=x.device)
    launch(
        _quantize_groups,
        (rows,),
        x,
        out,
        scales,
        WIDTH=width,
        SIZE=size,
        GROUPS=groups,
        GROUPS_UP=next_power_of_2(groups),
        SIZE_UP=next_power_of_2(size),
        LARGEST=LARGEST[dtype],
        LEAST=LEAST_SCALE,
        ROUND=_ROUND if dtype == torch.int8 else 0.0,
        device=x.device,
        warps=row_warps(width, rows),
    )
    return out, scales


def quantize_static(x: Tensor, scale: Tensor) -> Tensor:
    """e4m3 codes of x under one scale that was settled beforehand.

    Args:
        x: [T, K] float. scale: [1] fp32, on x's device, above zero.

    Returns:
        [T, K] float8_e4m3fn; beyond 448 scales the nearest that there is.
    """
    return (quantize_static_triton if runs_triton(x) else quantize_static_ref)(x, scale)


def quantize_token(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Each row under a scale of its own, its largest magnitude / 448 (int8: / 127).

    Args:
        x: [T, K] float. dtype: float8_e4m3fn or int8.

    Returns:
        (codes [T, K], scales [T, 1] fp32).
    """
    return (quantize_groups_triton if runs_triton(x) else quantize_groups_ref)(x, dtype, x.shape[1])


def quantize_group(x: Tensor, size: int = GROUP) -> tuple[Tensor, Tensor]:
    """Each `size` neighbours of a row under a scale of their own; the last group may be shorter.

    Args:
        x: [T, K] float. size: a power of two.

    Returns:
        (e4m3 codes [T, K], scales [T, ceil(K / size)] fp32).
    """
    return (quantize_groups_triton if runs_triton(x) else quantize_groups_ref)(x, FP8, size)

"""Linear layers on 8-bit codes: quantised rows times a quantised weight, bias and activation behind.

Few tokens go to rose/kernels/scaled_gemm.py, or on Hopper to scaled_gemm_sm90.py where the table of tiles says so;
many e4m3 ones go to the library (`torch._scaled_mm`), which takes no blocks and no int8, or with an activation that is
to leave codes to gemm_epilogue.py where it serves. On the CPU the reference
serves: codes and scales are the GPU's to the bit, products are fp32 of them.
Scales of a weight: [1] for all, [N] a row, or [ceil(N / 128), ceil(K / 128)] a block; of rows: [1] for all, [T, 1]
each, or [T, ceil(K / 128)] for each 128 inputs (with blocks, and only with them).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rose.kernels import gemm_epilogue
from rose.kernels.activation import activate, activate_in_place, gated_activation, gated_activation_ref
from rose.kernels.activation_quantize import activate_quantize, gated_activation_quantize
from rose.kernels.gemm_sm90 import runs_sm90
from rose.kernels.launch import runs_triton
from rose.kernels.quantize import FP8, GROUP, quantize_static_ref
from rose.kernels.scaled_gemm import scaled_gemm, scaled_tile
from rose.kernels.scaled_gemm_sm90 import scaled_gemm_sm90
from rose.kernels.tiles import Op, Tile, choose_codes, halves


def expand_blocks(scale: Tensor, rows: int, width: int) -> Tensor:
    """[ceil(rows / 128), ceil(width / 128)] -> [rows, width]."""
    return scale.repeat_interleave(GROUP, 0)[:rows].repeat_interleave(GROUP, 1)[:, :width]


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    """The values that codes [N, K] stand for under a weight's scales, in fp32."""
    if scale.dim() == 2:
        return codes.float() * expand_blocks(scale, *codes.shape)
    return codes.float() * scale.view(-1, 1)


def scaled_mm_ref(x: Tensor, x_scale: Tensor, weight: Tensor, w_scale: Tensor) -> Tensor:
    """[T, N] fp32."""
    if w_scale.dim() == 2:
        wide = x_scale.repeat_interleave(GROUP, 1)[:, : x.shape[1]]
        return F.linear(x.float() * wide, dequantize(weight, w_scale))
    if x.dtype == torch.int8 and weight.dtype == torch.int8:
        product = _int_product(x, weight)
    else:
        product = F.linear(x.float(), weight.float())
    return product * x_scale.view(-1, 1) * w_scale.view(1, -1)


# So many products of two int8 codes are at most 2**24: fp32 holds every sum of them exactly, in any order.
_EXACT = 1024


def _int_product(x: Tensor, weight: Tensor) -> Tensor:
    """Codes x [T, K] and weight [N, K] -> [T, N] fp32, rounded once from whole numbers.

    By fp32 products: torch._int_mm has no fast form for a CPU without VNNI, 238 against 8 ms for 512 rows of 384 inputs
    and 1536 outputs on one core of an AVX2 EPYC.
    """
    parts = zip(x.split(_EXACT, 1), weight.split(_EXACT, 1), strict=True)
    products = [F.linear(left.float(), right.float()) for left, right in parts]
    return products[0] if len(products) == 1 else torch.stack(products).double().sum(0).float()


def scaled_linear_ref(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    activation: str | None,
    dtype: torch.dtype,
    *,
    gated: bool = False,
    out_scale: Tensor | None = None,
) -> Tensor:
    y = scaled_mm_ref(x, x_scale, weight, w_scale)
    if bias is not None:
        y = y + bias.float()
    y = (gated_activation_ref(y, activation or "silu") if gated else activate(y, activation)).to(dtype)
    return y if out_scale is None else quantize_static_ref(y, out_scale)


def scaled_linear(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    activation: str | None,
    dtype: torch.dtype,
    *,
    gated: bool = False,
    out_scale: Tensor | None = None,
    columns: Tensor | None = None,
) -> Tensor:
    """activation(scale_x * scale_w * (x @ weight.T) + bias), or of a gated pair as `linear_gated`.

    Args:
        x: [T, K] e4m3 or int8. weight: [N, K] in the same type (gated: [2 N, K], gate rows first). x_scale, w_scale:
            fp32, as the room's docstring says.
        bias: [N] ([2 N]) or None.
        dtype: of the answer.
        out_scale: [1]; the answer as e4m3 codes under it, made of what `dtype` would have held.
        columns: what `library_columns` made of these scales, once for all calls.

    Returns:
        [T, N] in `dtype`, or float8_e4m3fn. Sums are fp32 (int8: whole numbers).
    """
    if not runs_triton(x):
        return scaled_linear_ref(x, x_scale, weight, w_scale, bias, activation, dtype, gated=gated, out_scale=out_scale)
    tile = _tile("gated" if gated else "linear", x, weight, w_scale, dtype)
    if tile is None:
        if out_scale is not None:
            codes = _epilogue(x, x_scale, weight, w_scale, bias, activation, out_scale, gated=gated)
            if codes is not None:
                return codes
        y = _library(x, x_scale, weight, w_scale, bias, dtype, columns)
        if out_scale is not None:
            made = gated_activation_quantize if gated else activate_quantize
            return made(y, activation if not gated else activation or "silu", out_scale)
        return gated_activation(y, activation or "silu") if gated else activate_in_place(y, activation)
    return run_codes(x, x_scale, weight, w_scale, bias, activation, dtype, tile, gated=gated, out_scale=out_scale)


def _epilogue(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    activation: str | None,
    out_scale: Tensor,
    *,
    gated: bool,
) -> Tensor | None:
    """Codes out of the product's own kernel, where it has an activation and is served there."""
    activation = activation or ("silu" if gated else None)
    if activation is None or (gated and bias is not None):
        return None
    if not gemm_epilogue.serves_codes(x, x_scale, weight, w_scale, activation, gated=gated):
        return None
    return gemm_epilogue.codes_epilogue(x, x_scale, weight, w_scale, bias, activation, out_scale, gated=gated)


def scaled_partial(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    w_scale: Tensor,
    dtype: torch.dtype,
    columns: Tensor | None = None,
) -> Tensor:
    """The product alone in P pieces that sum to it, for an add + norm: [P, T, N], fp32 where P > 1, else `dtype`."""
    if not runs_triton(x):
        return scaled_linear_ref(x, x_scale, weight, w_scale, None, None, dtype).unsqueeze(0)
    tile = _tile("partial", x, weight, w_scale, dtype)
    if tile is None:
        return _library(x, x_scale, weight, w_scale, None, dtype, columns).unsqueeze(0)
    return run_codes(x, x_scale, weight, w_scale, None, None, dtype, tile, pieces=True)


def run_codes(
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
    """One product on the GPU with a given tile: [T, N]; with `pieces` [split, T, N], fp32 where split > 1."""
    kernel = scaled_gemm_sm90 if tile.kind == "sm90" else scaled_gemm
    return kernel(
        x, x_scale, weight, w_scale, bias, activation, dtype, tile, pieces=pieces, gated=gated, out_scale=out_scale
    )


def _tile(op: Op, x: Tensor, weight: Tensor, w_scale: Tensor, dtype: torch.dtype) -> Tile | None:
    """None: the library serves this product."""
    (tokens, k), n, blocks = x.shape, weight.shape[0] // halves(op), w_scale.dim() == 2
    plain = scaled_tile(op, n, k, tokens, blocks)
    if x.dtype != FP8 or blocks:
        return plain
    tile = choose_codes(op, n, k, tokens, plain)
    if tile is None:
        return None if _library_takes(x, weight, dtype) else plain
    return plain if tile.kind == "sm90" and not runs_sm90(x.device) else tile


def _library_takes(x: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether the library's e4m3 kernels do: whole 16s, bf16 out, a GPU that has them."""
    aligned = weight.shape[0] % 16 == 0 and x.shape[1] % 16 == 0
    return aligned and dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device) >= (8, 9)


def library_columns(weight: Tensor, w_scale: Tensor, x_scale: Tensor | None) -> Tensor | None:
    """[1, N] fp32: the scales of the weight's side as the library takes them, which do not change from call to call.

    Made anew at every product they are two kernels of some 2 µs with their gaps: 576 for 200 texts of BGE-M3.

    Args:
        x_scale: [1], settled beforehand, which goes to the weight's side; None: a scale a row, at its own.

    Returns:
        None where the library takes the scales as they are (one a side), or takes none such (blocks).
    """
    if w_scale.dim() == 2 or (x_scale is not None and w_scale.numel() == 1):
        return None
    joint = w_scale if x_scale is None else w_scale * x_scale
    return joint.expand(weight.shape[0]).reshape(1, -1).contiguous()


# Columns of ones, by device: the rows' scales where the settled one is at the weight's side. Graphs read from their
# addresses for as long as they live, so that none is ever let go; each is twice the one before it at least.
_ones: dict[torch.device, list[Tensor]] = {}
_FEWEST_ONES = 1 << 14


def _column_of_ones(rows: int, device: torch.device) -> Tensor:
    """[rows, 1] fp32, to be read only."""
    held = _ones.setdefault(device, [])
    if held and held[-1].shape[0] >= rows:
        return held[-1][:rows]
    if _captures(device):
        # Not so in serving: what is captured has run plain before. Held, it would outlive the graph whose memory it is.
        return torch.ones(rows, 1, device=device)
    made = torch.ones(max(rows, 2 * held[-1].shape[0] if held else _FEWEST_ONES), 1, device=device)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # other streams read it too, and wait for nothing
    held.append(made)
    return made[:rows]


def _captures(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _library(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    columns: Tensor | None = None,
) -> Tensor:
    """[T, N]. One scale a side, or one a row on both sides: nothing between is taken."""
    settled = x_scale.dim() == 1
    if columns is None:
        columns = library_columns(weight, w_scale, x_scale if settled else None)
    if columns is not None:
        w_scale = columns
        x_scale = _column_of_ones(x.shape[0], x.device) if settled else x_scale
    return torch._scaled_mm(x, weight.t(), scale_a=x_scale, scale_b=w_scale, bias=bias, out_dtype=dtype)

"""What quack's kernels do to each sum of a product: scales, bias, activation and e4m3 codes, in CuTe DSL.

Plain functions over fp32 values, traced into the kernel. Their arithmetic is that of rose/kernels/gemm.py
(`activate_block`) and quantize.py (`static_codes`), so that codes are those of the passes apart wherever the sums are.
Needs CUTLASS and quack: without them `MISSING` says why, and `codes_epilogue` and `register` raise it. Knows values;
not shapes, not who serves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

MISSING: Exception | None = None
try:
    import cutlass.cute as cute
    from cutlass import Float32
    from cutlass._mlir.dialects import llvm
    from cutlass.cutlass_dsl import T, dsl_user_op
    from quack.activation import act_fn_map
    from quack.epilogue.frontend import EpiMod, gemm_epilogue
    from quack.epilogue.math import unpack
    from quack.epilogue.ops import RowVecLoad, TileStore
except Exception as error:  # noqa: BLE001  a mismatched compiler package raises kinds of its own
    MISSING = error
    TileStore = EpiMod = object

    def dsl_user_op(function: Any) -> Any:
        return function


# quack keeps what it compiled on disk, and knows the functions of an installed package by their names alone.
_SOURCE = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]


def _ptx(text: str, *values: Any, loc: Any, ip: Any) -> Any:
    operands = [Float32(value).ir_value(loc=loc, ip=ip) for value in values]
    constraints = ",".join(["=f", *["f"] * len(values)])
    result = llvm.inline_asm(
        T.f32(),
        operands,
        text,
        constraints,
        has_side_effects=False,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    return Float32(result)


@dsl_user_op  # type: ignore[untyped-decorator, unused-ignore]
def fma(a: Any, b: Any, c: Any, *, loc: Any = None, ip: Any = None) -> Any:
    return _ptx("fma.rn.f32 $0, $1, $2, $3;", a, b, c, loc=loc, ip=ip)


@dsl_user_op  # type: ignore[untyped-decorator, unused-ignore]
def as_bf16(v: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """fp32 as bf16 would hold it: packed beside a zero, which is the answer's other half already."""
    return _ptx("cvt.rn.bf16x2.f32 $0, $1, 0f00000000;", v, loc=loc, ip=ip)


def gelu(v: Any, **place: Any) -> Any:
    """The polynomial of `activate_block`: 9 instructions and one special function, where erf takes some 30."""
    z = cute.arch.fmax(v, -v)
    p = fma(z, -1.6804674e-06, 5.87661e-05)
    for coefficient in (-0.00091175816, 0.008455295, -0.05391127, -0.45844087, -1.151298, -0.9999842):
        p = fma(p, z, coefficient)
    return fma(-z, cute.math.exp2(p, fastmath=True), cute.arch.fmax(v, 0.0))


def _over(v: Any, d: Any) -> Any:
    return v * cute.arch.rcp_approx(d)


def silu(v: Any) -> Any:
    return _over(v, 1.0 + cute.math.exp2(v * -1.4426950408889634, fastmath=True))


def gelu_tanh(v: Any) -> Any:
    return _over(v, 1.0 + cute.math.exp2(v * fma(v * v, -0.10294324, -2.302208198144325), fastmath=True))


def relu(v: Any) -> Any:
    return cute.arch.fmax(v, 0.0, nan=True)


ACTIVATIONS: dict[str, Callable[..., Any]] = {"gelu": gelu, "gelu_tanh": gelu_tanh, "silu": silu, "relu": relu}


def codes(v: Any, scale: Any) -> Any:
    """What e4m3 holds of bf16(v) / scale once the store has rounded it, which ends at 448 by itself."""
    v, inverse = as_bf16(v), 1.0 / scale
    quotient = v * inverse
    return fma(fma(quotient, -scale, v), inverse, quotient)


class _ByteStore(TileStore):  # type: ignore[misc, unused-ignore]
    """The half-width output of a gated pair, one byte a value, on Hopper too.

    quack moves narrow values between threads and stores them as it does on other chips; its check knows those alone.
    """

    def to_params(self, gemm: Any, args: Any) -> Any:
        assert gemm.cta_tile_shape_mnk[1] % 32 == 0
        self.gated = False  # what the check looks at; the tile's width is settled by epi_tile_fn
        try:
            return super().to_params(gemm, args)
        finally:
            self.gated = True


def _named(function: Callable[..., Any]) -> Callable[..., Any]:
    function.__qualname__ = f"{function.__qualname__}_{_SOURCE}"
    return function


@cache
def codes_epilogue(activation: str, *, gated: bool, rows: bool, bias: bool) -> EpiMod:
    """A kernel whose output is e4m3: of activation(x_scale w_scale sum + bias), or of a gated pair (output `codes`).

    Args:
        rows: w_scale is one for each output [1, N] (gated: [1, 2 N]), else [1].
    """
    if MISSING is not None:
        raise MISSING
    act = ACTIVATIONS[activation]
    pinned = {name: RowVecLoad(name) for name, there in (("w_scale", rows), ("bias", bias)) if there}
    if gated:

        def gated_codes(acc: Any, x_scale: Any, w_scale: Any, out_scale: Any) -> dict[str, Any]:
            gate, up = unpack(acc * x_scale * w_scale)
            return {"codes": codes(act(gate) * up, out_scale)}

        return gemm_epilogue(outputs=(_ByteStore("codes", gated=True),), ops=pinned, mode="acc_pair")(
            _named(gated_codes)
        )
    if bias:

        def biased_codes(acc: Any, x_scale: Any, w_scale: Any, bias: Any, out_scale: Any) -> dict[str, Any]:
            return {"D": codes(act(fma(acc * x_scale, w_scale, bias)), out_scale)}

        return gemm_epilogue(ops=pinned)(_named(biased_codes))

    def plain_codes(acc: Any, x_scale: Any, w_scale: Any, out_scale: Any) -> dict[str, Any]:
        return {"D": codes(act(acc * x_scale * w_scale), out_scale)}

    return gemm_epilogue(ops=pinned)(_named(plain_codes))


def register() -> str:
    """GELU under a name of quack's own table of activations, for its kernels of 16-bit products."""
    if MISSING is not None:
        raise MISSING
    name = f"rose_gelu_{_SOURCE}"
    act_fn_map[name] = gelu
    return name

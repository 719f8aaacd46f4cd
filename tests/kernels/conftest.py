"""Where kernels run in these tests, and how close they must come.

`TRITON_INTERPRET=1 python -m pytest tests/kernels` runs every kernel in Triton's interpreter on the CPU: Triton reads
the variable when it is imported, so this is a process of its own. The plain run compiles every kernel for sm_90 without
a GPU; `-m gpu` runs the same numbers on a CUDA device.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def _let_scalars_index() -> None:
    """Triton 3.6's interpreter calls int() on one-element arrays, which NumPy refuses since 2.4."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def _let_e4m3_round() -> None:
    """Its conversion to e4m3 loses the carry of a rounding and makes NaN finite; torch's is that of the hardware."""
    from triton import language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def converted(value, from_type, to_type, rounding):
        if to_type != tl.float8e4nv or from_type != tl.float32:
            return convert(value, from_type, to_type, rounding)
        return torch.from_numpy(value.copy()).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    interpreter._convert_float = converted


def _let_fma_round_once() -> None:
    """Its fma rounds the product by itself. In 64 bits a product of two of 32 is exact, and a sum that is rounded to
    odd there (the last bit says that something was left) can be rounded to 32 as if it were exact."""
    import numpy as np
    from triton.runtime import interpreter

    def fma(self, x, y, z):
        with np.errstate(all="ignore"):
            product, add = x.data.astype(np.float64) * y.data, z.data.astype(np.float64)
            total = product + add
            back = total - product
            left = (product - (total - back)) + (add - back)
            even = (total.view(np.int64) & 1 == 0) & np.isfinite(left) & (left != 0)
            odd = np.where(even, np.nextafter(total, np.copysign(np.inf, left)), total)
            return interpreter.TensorHandle(odd.astype(z.data.dtype), z.dtype.scalar)

    interpreter.InterpreterBuilder.create_fma = fma


def _patch_once_a_launch() -> None:
    """It makes the language over at every call of a device function, a third of its time; once a launch is enough."""
    from triton.runtime import interpreter

    patch, run = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched = {}

    def patched_once(fn):
        if fn not in patched:
            patched[fn] = patch(fn)
        return patched[fn]

    def launched(self, *args, **kwargs):
        patched.clear()  # the end of a launch undoes what was patched
        return run(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patched_once, launched


if INTERPRETED:
    _let_scalars_index()
    _let_e4m3_round()
    _let_fma_round_once()
    _patch_once_a_launch()


@dataclass(frozen=True)
class Place:
    """A device and a dtype, and the relative error ‖out - ref‖ / ‖ref‖ that rounding to the dtype explains."""

    device: torch.device
    dtype: torch.dtype
    tolerance: float

    def randn(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape) * scale).to(self.device, self.dtype)

    def tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


_TOLERANCE = {torch.float32: 2e-6, torch.float16: 8e-4, torch.bfloat16: 6e-3}


@pytest.fixture(
    params=[
        pytest.param(("cpu", torch.float32), id="interpreted-float32"),
        pytest.param(("cpu", torch.float16), id="interpreted-float16"),
        pytest.param(("cuda", torch.float32), id="cuda-float32", marks=pytest.mark.gpu),
        pytest.param(("cuda", torch.bfloat16), id="cuda-bfloat16", marks=pytest.mark.gpu),
    ]
)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    device, dtype = request.param
    if device == "cpu" and not INTERPRETED:
        pytest.skip("runs under TRITON_INTERPRET=1, in a process of its own")
    if device == "cuda" and (INTERPRETED or not torch.cuda.is_available()):
        pytest.skip("needs a CUDA device")
    torch.manual_seed(1234)
    # Deterministic mode fills torch.empty with NaN: an element that a kernel leaves out is found.
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield Place(torch.device(device), dtype, _TOLERANCE[dtype])
    torch.use_deterministic_algorithms(False)


def relative_error(out: Tensor, ref: Tensor) -> float:
    out64, ref64 = out.double().cpu(), ref.double().cpu()
    assert out64.shape == ref64.shape
    return float((out64 - ref64).norm() / ref64.norm())


@pytest.fixture
def close(place: Place):
    """assert close(out, fp64 reference): NaN and unwritten elements never pass."""

    def check(out: Tensor, ref: Tensor, factor: float = 1.0) -> None:
        error = relative_error(out, ref)
        assert error <= place.tolerance * factor, f"relative error {error:.2e} over {place.tolerance * factor:.2e}"

    return check


# -- compiling for sm_90 without a GPU

MODULES = (
    "activation",
    "activation_quantize",
    "add_norm",
    "add_norm_quantize",
    "causal_conv",
    "embed_layer_norm",
    "embed_rms_norm",
    "gated_delta_rule",
    "gated_delta_step",
    "gated_norm",
    "gated_qk_norm_rope",
    "gemm",
    "gemm_sm90",
    "greedy",
    "latest",
    "paged_decode",
    "paged_prefill",
    "pool",
    "qk_norm_rope",
    "quantize",
    "sample_triton",
    "scaled_gemm",
    "scaled_gemm_sm90",
    "short_attention",
    "sigmoid_gate",
    "store_kv",
)
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.float8_e4m3fn: "*fp8e4nv",
}


def signature(kernel, args, constants):
    """What the launcher would specialise on: types, multiples of 16, ones."""
    types, values, attributes = {}, {}, {}
    given = dict(zip([p.name for p in kernel.params], args, strict=False)) | constants
    for index, param in enumerate(kernel.params):
        value = given[param.name]
        if param.is_constexpr or (value == 1 if isinstance(value, int) and not param.do_not_specialize else False):
            types[param.name], values[param.name] = "constexpr", value
            continue
        if hasattr(value, "block_shape"):
            types[param.name] = f"tensordesc<{TYPES[value.base.dtype][1:]}{value.block_shape},{value.layout!r}>"
        elif isinstance(value, torch.Tensor):
            types[param.name] = TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            types[param.name] = "fp32"
        else:
            types[param.name] = "i32"
            if value % 16 == 0 and not param.do_not_specialize:
                attributes[(index,)] = [["tt.divisibility", 16]]
    return types, values, attributes


def compile_sm90(kernel, args, constants, warps, stages):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    types, values, attributes = signature(kernel, args, constants)
    source = GluonASTSource if kernel.is_gluon() else ASTSource
    return triton.compile(
        source(kernel, types, values, attributes),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": warps, "num_stages": stages, "launch_pdl": True},
    )


@pytest.fixture
def compiled(monkeypatch):
    """The compiled kernels that the calls of a test would have launched."""
    found = []

    def launch(kernel, grid, *args, device, warps, stages=1, **constants):
        assert all(isinstance(n, int) and n > 0 for n in grid)
        found.append(compile_sm90(kernel, args, {**constants, "PDL": True}, warps, stages))

    for name in MODULES:
        module = importlib.import_module(f"rose.kernels.{name}")
        monkeypatch.setattr(module, "launch", launch)
        if hasattr(module, "has_dependent_launch"):
            monkeypatch.setattr(module, "has_dependent_launch", lambda device: True)
    return found


@pytest.fixture
def kernel_modules() -> tuple[str, ...]:
    """The files of rose/kernels whose launches `compiled` catches."""
    return MODULES

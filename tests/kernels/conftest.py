"""Where kernels run in these tests, and how close they must come.

`TRITON_INTERPRET=1 python -m pytest tests/kernels` runs every kernel in Triton's interpreter on the CPU: Triton reads
the variable when it is imported, so this is a process of its own. The plain run compiles every kernel for sm_90 without
a GPU; `-m gpu` runs the same numbers on a CUDA device.
"""

from __future__ import annotations

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


if INTERPRETED:
    _let_scalars_index()
    _let_e4m3_round()


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

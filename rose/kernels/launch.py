"""How kernels of this room are launched: the guarded Triton import, device facts, and the rule of dependent launch.

Knows the device; does not know what any kernel computes.

Dependent launch (CUDA "programmatic dependent launch", compute capability 9.0 and up) lets a kernel start while the one
before it still runs: 0.94 instead of 1.19 µs for a tiny kernel in a chain, and weights are on their way before the
activations are ready. Every kernel here follows one rule, and is safe in any order with any other kernel because of it:

1. `gdc_launch_dependents` at the top (or right after the wait): the next kernel may start as soon as all programs of
   this one have come that far.
2. Before `gdc_wait` a kernel writes nothing, and reads only what is at rest: parameters (weights, biases, rotary
   tables: loading ends with a device synchronisation), the description of the batch (positions, cu_seqlens, lengths,
   pages), staged before the batch's first kernel, and rows of a cache that earlier batches stored. That first kernel
   reads everything after its wait; where there is a cache it lets the next one start only then, so that no kernel of a
   batch runs beside one of an earlier batch.
3. Every program calls `gdc_wait` before it first reads anything that an earlier kernel of the batch wrote, and before
   it first writes anything at all. No program returns without having called it.

`gdc_wait` returns when the kernel just before has finished and its writes are visible. That kernel called `gdc_wait`
too, so everything before it had finished by then: completion is transitive, whatever was started early. So a write
after `gdc_wait` cannot hit a buffer that an earlier kernel still reads, and memory that the allocator hands out again
in stream order is free of readers. Kernels of other libraries that know nothing of this wait by themselves for
everything before them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias, overload

import torch
from torch import Tensor

if TYPE_CHECKING:
    triton: Any
    tl: Any
    constexpr: TypeAlias = Any
    Ptr: TypeAlias = Any
else:
    try:
        import triton
        import triton.language as tl

        # Annotations of kernel arguments. Triton resolves them, so they must be its own; it only acts on constexpr.
        constexpr, Ptr = tl.constexpr, tl.tensor
    except ImportError:  # an installation for CPU only: the references serve
        triton = tl = None
        constexpr = Ptr = Any


@overload
def jit(function: Callable[..., Any]) -> Any: ...
@overload
def jit(*, do_not_specialize: Sequence[str]) -> Callable[[Callable[..., Any]], Any]: ...
def jit(function: Callable[..., Any] | None = None, *, do_not_specialize: Sequence[str] = ()) -> Any:
    """`triton.jit`, or the plain function where Triton is not installed (never launched there)."""
    if function is None:
        return lambda f: f if triton is None else triton.jit(f, do_not_specialize=list(do_not_specialize))
    return function if triton is None else triton.jit(function)


def runs_triton(x: Tensor) -> bool:
    """Whether the kernels of this room serve `x`: on a CUDA device, with Triton installed."""
    return x.is_cuda and triton is not None


@cache
def has_dependent_launch(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def launch(
    kernel: Any, grid: tuple[int, ...], *args: Any, device: torch.device, warps: int, stages: int = 1, **constants: Any
) -> None:
    """Launch `kernel` on the current stream, with dependent launch where the device has it.

    Args:
        grid: programs along each axis; nothing is launched where one of them is zero.
        device: of the tensors; must be the current CUDA device.
        constants: the kernel's compile-time arguments other than PDL.
    """
    if 0 in grid:
        return
    pdl = has_dependent_launch(device)
    options = {"launch_pdl": True} if pdl else {}
    kernel[grid](*args, **constants, PDL=pdl, num_warps=warps, num_stages=stages, **options)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def row_warps(width: int, rows: int = 1) -> int:
    """Warps for each of `rows` rows of `width` elements: four elements a thread, eight where rows fill the chip anyway.

    24 layers of BGE-M3 at 128 tokens took 627 to 631 µs with eight warps for 1024 elements, 636 to 638 with four. At
    16,384 rows add + LayerNorm took 30.6 µs with eight and 25.4 with four, where the bytes alone take 23.9 (H200).
    """
    return min(8, max(1, next_power_of_2(width) // (256 if rows > 1024 else 128)))


def program_block(size: int) -> tuple[int, int]:
    """(values, warps) of a program that goes over `size` values one by one: 16 values a thread where they fill the chip
    anyway, so that what a thread does once weighs little; else 8, spread over more multiprocessors."""
    return (4096, 8) if size >= 2**22 else (1024, 4)


def require_contiguous(**tensors: Tensor | None) -> None:
    """Raises ValueError naming the tensor whose layout these kernels do not take."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous; it has shape {tuple(tensor.shape)}, strides {tensor.stride()}"
            )

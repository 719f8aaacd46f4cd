"""Products of many tokens with what follows in their epilogue: quack's CuTe DSL kernels for Hopper.

The library (cuBLAS) has no epilogue with the erf form of GELU or with a gated pair, so that each costs a pass over the
product: of 100 x 512 tokens of BGE-M3 8 %, and 17 % where the pass makes e4m3 codes. quack (Apache 2.0) takes them into
a persistent kernel of its own: of 16-bit values with an activation, of e4m3 codes with an activation and new codes.

It compiles at the first use of a shape's layout (seconds): `warm_up` of the engine runs every product of a batch before
serving. Knows shapes; linear.py decides which tokens come here.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

_log = logging.getLogger(__name__)

# ROSE's names -> quack's; its own GELU by erf has 30 instructions, so that it is one of epilogue_functions.py.
# silu(gate) * up and gelu(gate) * up are its swiglu and geglu (tanh form: not ours).
_GELU = "gelu"
_ACTIVATIONS: dict[str | None, str | None] = {
    None: None,
    "gelu": _GELU,
    "gelu_tanh": "gelu_tanh_approx",
    "relu": "relu",
    "silu": "silu",
}
_GATED: dict[str | None, str | None] = {"silu": "swiglu", "gelu_tanh": "geglu", "relu": "reglu"}
_OF_CODES = ("gelu", "gelu_tanh", "silu", "relu")


class CodesTiling(NamedTuple):
    """Tile of a product of codes: outputs and sums of each 128 inputs, added in fp32, share the registers of a thread,
    so that it has half the values of a 16-bit one. pingpong: one warpgroup multiplies while the other does its
    epilogue, which has some 19 instructions a value. dynamic: tiles are handed out as programs come free.

    Of nine tilings this one was fastest for a gated pair at 12,800 and 25,600 tokens (178 and 368 µs, 64 x 192 with
    pingpong 194 and 382) and for GELU at 25,600 (278 and 289); at 12,800 GELU takes 139 and 136 to 148 (H200)."""

    tile_m: int = 192
    tile_n: int = 128
    pingpong: bool = False
    cluster_m: int = 2
    cluster_n: int = 1
    dynamic: bool = True


@cache
def _quack() -> Any:
    """quack's interface, or None where it cannot be had."""
    try:
        return importlib.import_module("quack.gemm_interface")
    except Exception as error:  # noqa: BLE001  a mismatched compiler package raises kinds of its own
        _log.info("large products keep their activations apart: quack cannot be imported (%s)", error)
        return None


@cache
def _functions() -> Any:
    return importlib.import_module("rose.kernels.epilogue_functions")


@cache
def _gelu() -> str:
    """quack's name of our GELU, or of its own where ours cannot be had."""
    try:
        name: str = _functions().register()
    except Exception as error:  # noqa: BLE001  as above
        _log.info("large products with GELU keep quack's own: %s", error)
        return "gelu_erf"
    return name


# What could not be compiled or launched here, by (activation, gated, codes): asked for once, then left to the library.
_failed: set[tuple[str | None, bool, bool]] = set()


@cache
def _on_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9


def serves(x: Tensor, n: int, activation: str | None, *, gated: bool) -> bool:
    """Whether a product of x [T, K] with `n` output features (of both halves where gated) can be done here."""
    known = activation in (_GATED if gated else _ACTIVATIONS) and (activation, gated, False) not in _failed
    aligned = n % 64 == 0 and x.shape[1] % 64 == 0 and x.dtype in (torch.bfloat16, torch.float16)
    return known and aligned and _on_hopper(x.device) and _quack() is not None


def serves_codes(x: Tensor, x_scale: Tensor, weight: Tensor, w_scale: Tensor, activation: str, *, gated: bool) -> bool:
    """Whether a product of codes x [T, K] and weight [N, K] (gated: [2 N, K]) that ends in e4m3 codes can be done here:
    one scale for all rows, one for the weight or for each of its outputs."""
    (n, k), fp8 = weight.shape, torch.float8_e4m3fn
    known = activation in _OF_CODES and (activation, gated, True) not in _failed
    scales = x_scale.numel() == 1 and x_scale.dim() == 1 and w_scale.dim() == 1
    aligned = n % 64 == 0 and k % 128 == 0 and x.dtype == fp8 and weight.dtype == fp8
    return known and scales and aligned and _on_hopper(x.device) and _quack() is not None


def _run(x: Tensor, what: tuple[str | None, bool, bool], call: Callable[[], Tensor]) -> Tensor | None:
    """The answer of one of quack's kernels; None where it failed, once and for all."""
    try:
        return call()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler raises kinds of its own
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            raise
        _failed.add(what)
        kept = f"{what[0] or 'bias'} and codes" if what[2] else what[0] or "bias"
        _log.warning("large products keep their %s apart, quack cannot run here: %s", kept, error)
        return None


def _act(x: Tensor, weight: Tensor, activation: str | None, *, gated: bool, **more: Any) -> Tensor | None:
    def call() -> Tensor:
        name = (_GATED if gated else _ACTIVATIONS)[activation]
        name = _gelu() if name == _GELU else name
        out: Tensor = _quack().gemm_act(x, weight.t(), activation=name, store_preact=False, tuned=False, **more)[1]
        return out

    return _run(x, (activation, gated, False), call)


def linear_epilogue(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, config: Any = None
) -> Tensor | None:
    """activation(x @ weight.T + bias).

    Args:
        config: a quack.gemm_config.GemmConfig in place of quack's own choice for the chip.

    Returns:
        [T, N] in x's dtype; None where quack failed, which then no longer `serves`.
    """
    return _act(x, weight, activation, gated=False, bias=bias, config=config)


def linear_gated_epilogue(x: Tensor, weight: Tensor, activation: str, config: Any = None) -> Tensor | None:
    """activation(x @ gate.T) * (x @ up.T), weight [2 N, K] with the gate rows first: [T, N], or None as above."""
    # The halves lie one after the other; quack would have them row by row in turn.
    return _act(x, weight, activation, gated=True, config=config, concat_layout=("B",))


def codes_epilogue(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    activation: str,
    out_scale: Tensor,
    *,
    gated: bool,
    tiling: CodesTiling | None = None,
) -> Tensor | None:
    """e4m3 codes under out_scale [1] of activation(x_scale w_scale (x @ weight.T) + bias), or of a gated pair as above.

    The value is rounded to bf16 before it is divided, as in the passes apart; the product is not rounded before its
    activation, where theirs is. Sums of each 128 inputs are added in fp32.

    Args:
        x, x_scale, weight, w_scale: as `serves_codes` takes them. bias: [N] of a product that is not gated, or None.
        tiling: in place of what was chosen for the chip.

    Returns:
        [T, N] float8_e4m3fn, or None as above.
    """

    tile_m, tile_n, pingpong, cluster_m, cluster_n, dynamic = tiling or CodesTiling()

    def call() -> Tensor:
        rows = w_scale.numel() > 1
        kernel = _functions().codes_epilogue(activation, gated=gated, rows=rows, bias=bias is not None)
        n = weight.shape[0] // (2 if gated else 1)
        out = torch.empty(x.shape[0], n, dtype=torch.float8_e4m3fn, device=x.device)
        given = {"x_scale": x_scale, "w_scale": w_scale.view(1, -1) if rows else w_scale, "out_scale": out_scale}
        if bias is not None:
            given["bias"] = bias.view(1, -1)
        if gated:
            given["codes"] = out
        kernel.gemm(
            x,
            weight,
            None if gated else out,
            epi_args=given,
            tile_M=tile_m,
            tile_N=tile_n,
            cluster_M=cluster_m,
            cluster_N=cluster_n,
            pingpong=pingpong,
            is_dynamic_persistent=dynamic,
            tile_count_semaphore=torch.zeros(1, dtype=torch.int32, device=x.device) if dynamic else None,
            concat_layout=(("B", "w_scale") if rows else ("B",)) if gated else None,
        )
        return out

    return _run(x, (activation, gated, True), call)

"""Products of many tokens with the activation in their epilogue: quack's CuTe DSL kernels for Hopper.

The library (cuBLAS) has no epilogue with the erf form of GELU or with a gated pair, so that each costs a pass over the
product: of 100 x 512 tokens of BGE-M3 8 %. quack (Apache 2.0) takes both into a persistent kernel of its own.

It compiles at the first use of a shape's layout (seconds): `warm_up` of the engine runs every product of a batch before
serving. Knows shapes; linear.py decides which tokens come here.
"""

from __future__ import annotations

import importlib
import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor

_log = logging.getLogger(__name__)

# ROSE's names -> quack's. silu(gate) * up and gelu(gate) * up are its swiglu and geglu (tanh form: not ours).
_ACTIVATIONS: dict[str | None, str | None] = {
    None: None,
    "gelu": "gelu_erf",
    "gelu_tanh": "gelu_tanh_approx",
    "relu": "relu",
    "silu": "silu",
}
_GATED: dict[str | None, str | None] = {"silu": "swiglu", "gelu_tanh": "geglu", "relu": "reglu"}


@cache
def _quack() -> Any:
    """quack's interface, or None where it cannot be had."""
    try:
        return importlib.import_module("quack.gemm_interface")
    except Exception as error:  # noqa: BLE001  a mismatched compiler package raises kinds of its own
        _log.info("large products keep their activations apart: quack cannot be imported (%s)", error)
        return None


# What could not be compiled or launched here, by (activation, gated): asked for once, then left to the library.
_failed: set[tuple[str | None, bool]] = set()


@cache
def _on_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9


def serves(x: Tensor, n: int, activation: str | None, *, gated: bool) -> bool:
    """Whether a product of x [T, K] with `n` output features (of both halves where gated) can be done here."""
    known = activation in (_GATED if gated else _ACTIVATIONS) and (activation, gated) not in _failed
    aligned = n % 64 == 0 and x.shape[1] % 64 == 0 and x.dtype in (torch.bfloat16, torch.float16)
    return known and aligned and _on_hopper(x.device) and _quack() is not None


def _run(x: Tensor, weight: Tensor, activation: str | None, *, gated: bool, **more: Any) -> Tensor | None:
    names = _GATED if gated else _ACTIVATIONS
    try:
        out: Tensor = _quack().gemm_act(
            x, weight.t(), activation=names[activation], store_preact=False, tuned=False, **more
        )[1]
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler raises kinds of its own
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            raise
        _failed.add((activation, gated))
        _log.warning("large products keep their %s apart, quack cannot run here: %s", activation or "bias", error)
        return None
    return out


def linear_epilogue(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, config: Any = None
) -> Tensor | None:
    """activation(x @ weight.T + bias).

    Args:
        config: a quack.gemm_config.GemmConfig in place of quack's own choice for the chip.

    Returns:
        [T, N] in x's dtype; None where quack failed, which then no longer `serves`.
    """
    return _run(x, weight, activation, gated=False, bias=bias, config=config)


def linear_gated_epilogue(x: Tensor, weight: Tensor, activation: str, config: Any = None) -> Tensor | None:
    """activation(x @ gate.T) * (x @ up.T), weight [2 N, K] with the gate rows first: [T, N], or None as above."""
    # The halves lie one after the other; quack would have them row by row in turn.
    return _run(x, weight, activation, gated=True, config=config, concat_layout=("B",))

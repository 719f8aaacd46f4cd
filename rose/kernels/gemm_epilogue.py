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
_ACTIVATIONS = {"gelu": "gelu_erf", "gelu_tanh": "gelu_tanh_approx", "relu": "relu", "silu": "silu"}
_GATED = {"silu": "swiglu", "gelu_tanh": "geglu", "relu": "reglu"}


@cache
def _quack() -> Any:
    """quack's interface, or None where it cannot be had."""
    try:
        return importlib.import_module("quack.gemm_interface")
    except Exception as error:  # noqa: BLE001  a mismatched compiler package raises kinds of its own
        _log.info("large products keep their activations apart: quack cannot be imported (%s)", error)
        return None


@cache
def _on_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9


def serves(x: Tensor, n: int, activation: str | None, *, gated: bool) -> bool:
    """Whether a product of x [T, K] with `n` output features (of both halves where gated) can be done here."""
    known = activation in (_GATED if gated else _ACTIVATIONS)
    aligned = n % 64 == 0 and x.shape[1] % 64 == 0 and x.dtype in (torch.bfloat16, torch.float16)
    return known and aligned and _on_hopper(x.device) and _quack() is not None


def linear_epilogue(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, config: Any = None) -> Tensor:
    """activation(x @ weight.T + bias): [T, N] in x's dtype.

    Args:
        config: a quack.gemm_config.GemmConfig in place of quack's own choice for the chip.
    """
    out: Tensor = _quack().gemm_act(
        x, weight.t(), bias=bias, activation=_ACTIVATIONS[activation], store_preact=False, tuned=False, config=config
    )[1]
    return out


def linear_gated_epilogue(x: Tensor, weight: Tensor, activation: str, config: Any = None) -> Tensor:
    """activation(x @ gate.T) * (x @ up.T), weight [2 N, K] with the gate rows first: [T, N] in x's dtype."""
    out: Tensor = _quack().gemm_act(
        x,
        weight.t(),
        activation=_GATED[activation],
        store_preact=False,
        tuned=False,
        config=config,
        # The halves lie one after the other; quack would have them row by row in turn.
        concat_layout=("B",),
    )[1]
    return out

"""What a model can be calibrated to, in ROSE's names and in compressed-tensors' own words.

Source of the words: compressed_tensors.quantization.quant_scheme (FP8, FP8_DYNAMIC, FP8_BLOCK, INT8). Knows formats;
knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rose.convert.quantized.schemes import BLOCK, Scheme
from rose.kernels.quantize import FP8, LARGEST, LEAST_SCALE


@dataclass(frozen=True, slots=True)
class Target:
    """
    Attributes:
        format: compressed-tensors' name of the file format.
        inputs: its words for input_activations.
    """

    scheme: Scheme
    format: str
    inputs: dict[str, Any]


def _scheme(name: str, codes: Any, weight: Any, activations: Any) -> Scheme:
    return Scheme(name=name, codes=codes, weight=weight, activations=activations)


def _inputs(kind: str, strategy: str, *, dynamic: bool, **more: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": dynamic, **more}


SCHEMES: dict[str, Target] = {
    "fp8-tensor": Target(
        _scheme("fp8-tensor", "F8_E4M3", "tensor", "static"),
        "float-quantized",
        _inputs("float", "tensor", dynamic=False),
    ),
    "fp8-channel": Target(
        _scheme("fp8-channel", "F8_E4M3", "channel", "token"),
        "float-quantized",
        _inputs("float", "token", dynamic=True),
    ),
    "fp8-block": Target(
        _scheme("fp8-block", "F8_E4M3", "block", "group"),
        "float-quantized",
        _inputs("float", "group", dynamic=True, group_size=BLOCK),
    ),
    "int8": Target(_scheme("int8", "I8", "channel", "token"), "int-quantized", _inputs("int", "token", dynamic=True)),
}


def quantization_config(target: Target, ignore: Sequence[str], *, kv_cache: bool = False) -> dict[str, Any]:
    """The object of config.json.

    Args:
        ignore: linear layers that stay as they are, by the names of their tensors.
        kv_cache: scales of e4m3 keys and values are stored.
    """
    kind = "float" if target.scheme.codes == "F8_E4M3" else "int"
    weights = _inputs(kind, target.scheme.weight, dynamic=False)
    if target.scheme.weight == "block":
        weights["block_structure"] = [BLOCK, BLOCK]
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": target.inputs,
        "output_activations": None,
        "format": target.format,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": target.format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
        "kv_cache_scheme": _inputs("float", "tensor", dynamic=False) if kv_cache else None,
    }


def coarse(scale: Tensor) -> Tensor:
    """Scales rounded up to bf16, in fp32: other engines keep them so, and would round what was not."""
    up = torch.nextafter(scale.bfloat16(), torch.tensor(torch.inf, dtype=torch.bfloat16))
    return torch.where(scale.bfloat16().float() >= scale, scale.bfloat16(), up).float()


def quantize_weight(weight: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """
    Args:
        weight: [N, K], of one tensor of the checkpoint.

    Returns:
        (codes [N, K], scales as they are stored: [1], [N, 1] or [ceil(N / 128), ceil(K / 128)]).
    """
    w = weight.float()
    dtype = FP8 if scheme.codes == "F8_E4M3" else torch.int8
    if scheme.weight == "block":
        largest = _block_maxima(w)
    elif scheme.weight == "channel":
        largest = w.abs().amax(1, keepdim=True)
    else:
        largest = w.abs().amax().view(1)
    scale = coarse((largest / LARGEST[dtype]).clamp(min=LEAST_SCALE / LARGEST[dtype]))
    wide = scale
    if scheme.weight == "block":
        wide = scale.repeat_interleave(BLOCK, 0)[: len(w)].repeat_interleave(BLOCK, 1)[:, : w.shape[1]]
    value = w / wide
    value = value.round() if dtype == torch.int8 else value
    return value.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype), scale


def _block_maxima(w: Tensor) -> Tensor:
    rows, width = w.shape
    padded: Tensor = torch.nn.functional.pad(w.abs(), (0, -width % BLOCK, 0, -rows % BLOCK))
    tiles: Tensor = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    return tiles.amax((1, 3))

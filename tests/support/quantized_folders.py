"""A plain folder quantised by hand, in each dialect that is served: nothing here is ROSE's own arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.tiny_checkpoints import edit_json, write_json

FP8 = torch.float8_e4m3fn
INPUTS = 6.0  # the largest input that a static scale holds


def _args(kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False, **more}


COMPRESSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tensor-static": (_args("float", "tensor"), _args("float", "tensor")),
    "tensor-token": (_args("float", "tensor"), _args("float", "token", dynamic=True)),
    "channel-token": (_args("float", "channel"), _args("float", "token", dynamic=True)),
    "channel-static": (_args("float", "channel"), _args("float", "tensor")),
    "block": (
        _args("float", "block", block_structure=[128, 128]),
        _args("float", "group", group_size=128, dynamic=True),
    ),
    "int8": (_args("int", "channel"), _args("int", "token", dynamic=True)),
}
DIALECTS = (
    *COMPRESSED,
    *(
        "fp8-block",
        "fp8-static",
        "fp8-dynamic",
        "fp8-block-e8m0",
        "fp8-static-transformers",
        "fp8-dynamic-transformers",
    ),
    *("modelopt", "modelopt-file", "modelopt-channel"),
)


def codes_of(weight: Tensor, how: str, *, powers: bool = False) -> tuple[Tensor, Tensor]:
    """(codes, scale as stored) by "tensor", "channel", "block" or "int8"; `powers`: a block's is a power of two."""
    w = weight.float()
    if how == "block":
        rows, width = w.shape
        up = torch.zeros(-(-rows // 128) * 128, -(-width // 128) * 128)
        up[:rows, :width] = w
        tiles = up.view(up.shape[0] // 128, 128, up.shape[1] // 128, 128)
        scale = tiles.abs().amax((1, 3)).clamp(min=1e-12) / 448
        scale = torch.exp2(scale.log2().ceil()) if powers else scale
        codes = (tiles / scale[:, None, :, None]).view_as(up)[:rows, :width]
        return codes.clamp(-448, 448).to(FP8).contiguous(), scale
    if how == "tensor":
        scale = w.abs().max().view(1) / 448
        return (w / scale).clamp(-448, 448).to(FP8), scale
    scale = w.abs().amax(1, keepdim=True) / (127 if how == "int8" else 448)
    if how == "int8":
        return (w / scale).round().clamp(-128, 127).to(torch.int8), scale
    return (w / scale).clamp(-448, 448).to(FP8), scale


def plain(codes: Tensor, scale: Tensor) -> Tensor:
    if (scale.dim() == 2 and scale.shape[1] > 1) or scale.shape[0] not in (1, codes.shape[0]):
        rows, width = codes.shape
        return codes.float() * scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :width]
    return codes.float() * scale.view(-1, 1)


def is_product(name: str, tensor: Tensor) -> bool:
    """A linear layer of the backbone."""
    outside = ("embed", "lm_head", "score", "classifier", "pooler", "conv1d", "mtp", "visual")
    return tensor.dim() == 2 and name.endswith(".weight") and not any(part in name for part in outside)


def quantize_folder(path: Path, dialect: str, *, keep: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Rewrite a folder's one weight file and config in place.

    Args:
        dialect: of DIALECTS. keep: parts of names that stay as they are.

    Returns:
        name -> the values that its codes stand for, in fp32.
    """
    tensors = load_file(path / "model.safetensors")
    how = _how(dialect)
    values: dict[str, Tensor] = {}
    ignored: list[str] = ["lm_head"]
    for name, tensor in list(tensors.items()):
        module = name.removesuffix(".weight")
        if not is_product(name, tensor) or any(part in name for part in keep):
            ignored += [module] if tensor.dim() == 2 and name.endswith(".weight") else []
            continue
        codes, scale = codes_of(tensor, how, powers=dialect.endswith("e8m0"))
        tensors[name] = codes
        values[name] = plain(codes, scale)
        of_transformers = dialect.endswith("transformers")
        leaf = (
            "weight_scale_inv" if (how == "block" and dialect.startswith("fp8")) or of_transformers else "weight_scale"
        )
        scalar = (dialect.startswith("modelopt") and how == "tensor") or of_transformers
        stored = scale.to(torch.float8_e8m0fnu) if dialect.endswith("e8m0") else scale
        tensors[f"{module}.{leaf}"] = stored.view(()) if scalar else stored
        if "static" in dialect or dialect in ("modelopt", "modelopt-file"):
            leaf, inputs = "input_scale", torch.tensor([INPUTS / 448])
            if of_transformers:
                leaf, inputs = "activation_scale", inputs.view(())
            tensors[f"{module}.{leaf}"] = inputs
    save_file(tensors, path / "model.safetensors")
    _write_config(path, dialect, ignored)
    return values


def _how(dialect: str) -> str:
    if dialect.startswith(("fp8-static", "fp8-dynamic")) or dialect in ("modelopt", "modelopt-file"):
        return "tensor"
    return dialect.removeprefix("fp8-").removeprefix("modelopt-").partition("-")[0]


def _write_config(path: Path, dialect: str, ignored: list[str]) -> None:
    if dialect in COMPRESSED:
        weights, inputs = COMPRESSED[dialect]
        form = "int-quantized" if dialect == "int8" else "float-quantized"
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": form}
        config: dict[str, Any] = {"quant_method": "compressed-tensors", "format": form}
        config |= {"config_groups": {"group_0": group}, "ignore": ignored, "quantization_status": "compressed"}
    elif dialect.startswith("fp8"):
        config = {"quant_method": "fp8", "fmt": "e4m3", "modules_to_not_convert": ignored}
        config["activation_scheme"] = "static" if "static" in dialect else "dynamic"
        if "block" in dialect:
            config["weight_block_size"] = [128, 128]
        if dialect.endswith("e8m0"):
            config["scale_fmt"] = "ue8m0"
    else:
        algorithm = "FP8_PER_CHANNEL_PER_TOKEN" if dialect == "modelopt-channel" else "FP8"
        inner = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": ignored}
        if dialect == "modelopt-file":
            write_json(path / "hf_quant_config.json", {"producer": {"name": "modelopt"}, "quantization": inner})
            return
        config = {"quant_method": "modelopt", **inner}
    edit_json(path / "config.json", quantization_config=config)

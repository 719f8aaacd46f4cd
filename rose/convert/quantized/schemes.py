"""What a folder says about how its weights are quantised: which modules, into what, and what their inputs become.

Three dialects: compressed-tensors (llm-compressor), `fp8` (DeepSeek, Qwen, transformers' fine-grained FP8) and modelopt
(hf_quant_config.json). Sources: compressed_tensors.quantization.quant_scheme, transformers' FineGrainedFP8Config,
modelopt.torch.export. What is not served is refused by name. Knows JSON; knows no tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rose.config.architecture import quantization_of
from rose.config.json_file import JsonFile
from rose.errors import CheckpointError

BLOCK = 128
_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "mixed-precision", "dense")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How one layer is quantised.

    Attributes:
        name: as errors and reports call it.
        codes: safetensors' name of the weight's type: "F8_E4M3" or "I8".
        weight: one scale for the "tensor", a "channel" (row), or a "block" of 128 x 128.
        activations: "static": one scale, stored; "token": one a row, found as it comes; "group": one for each 128
            inputs of a row; None: inputs stay as they are.
        scales: leaf names of the weight's scales, which multiply; the first that is there counts.
        input_scales: likewise, of the inputs' scale.
    """

    name: str
    codes: Literal["F8_E4M3", "I8"]
    weight: Literal["tensor", "channel", "block"]
    activations: Literal["static", "token", "group"] | None
    scales: tuple[str, ...] = ("weight_scale",)
    input_scales: tuple[str, ...] = ("input_scale",)


@dataclass(frozen=True, slots=True)
class Quantization:
    """
    Attributes:
        method: "compressed-tensors", "fp8" or "modelopt".
        find: name of a module, as the checkpoint has it -> how it is quantised, or None where it is not.
    """

    method: str
    find: Callable[[str], Scheme | None]


def read_quantization(folder: Path) -> Quantization | None:
    """What the folder's config.json, or hf_quant_config.json beside it, says; None where nothing is quantised.

    Raises:
        CheckpointError: a method, format or scheme that is not served, by its name.
    """
    config = JsonFile.read_if_there(folder / "config.json")
    stated = quantization_of(config)
    if stated is not None:
        return _read(stated)
    exported = JsonFile.read_if_there(folder / "hf_quant_config.json")
    return _modelopt(exported.child("quantization")) if exported.data else None


def _read(own: JsonFile) -> Quantization:
    method = own.text("quant_method", "")
    reader = _READERS.get(method)
    if reader is None:
        raise own.error(f"quant_method {method!r} is not served; there are {', '.join(_READERS)}")
    return reader(own)


def _compressed(own: JsonFile) -> Quantization:
    form = own.text("format", "dense")
    if form not in _FORMATS:
        raise own.error(f"format {form!r} of compressed-tensors is not served; there are {', '.join(_FORMATS)}")
    sparsity = own.child("sparsity_config").text("format", "dense")
    if sparsity != "dense":
        raise own.error(f"sparsity_config has format {sparsity!r}; only dense weights are served")
    groups: list[tuple[str, Scheme]] = []
    for name in own.child("config_groups").data:
        group = own.child("config_groups").child(name)
        group_form = group.text("format", form)
        if group_form not in _FORMATS:
            raise own.error(f"{name} has format {group_form!r}; there are {', '.join(_FORMATS)}")
        scheme = _group_scheme(name, group)
        groups += [(target, scheme) for target in group.texts("targets")]
    if not groups:
        raise own.error("config_groups is missing or empty")
    ignored = own.texts("ignore")

    def find(module: str) -> Scheme | None:
        if any(_named(pattern, module) for pattern in ignored):
            return None
        # A module's own name counts before a pattern, and a pattern before the class.
        for fits in (lambda t: t == module, lambda t: t.startswith("re:") and _named(t, module), _is_class):
            for target, scheme in groups:
                if fits(target):
                    return scheme
        return None

    return Quantization("compressed-tensors", find)


def _named(pattern: str, module: str) -> bool:
    if not pattern.startswith("re:"):
        return pattern == module
    try:
        return re.match(pattern[3:], module) is not None
    except re.error as error:
        raise CheckpointError(f"quantization_config: {pattern!r} is no pattern: {error}") from error


def _is_class(target: str) -> bool:
    return target == "Linear"


def _group_scheme(name: str, group: JsonFile) -> Scheme:
    weights, inputs = group.child("weights"), group.child("input_activations")
    kind, bits = weights.text("type", "int"), weights.integer("num_bits", 8)
    strategy = weights.text("strategy", "tensor")
    told = f"{name}: weights of {bits}-bit {kind} by {strategy}"
    if group.data.get("output_activations") is not None:
        raise group.error(f"{name}: output_activations are not served")
    if bits != 8 or kind not in ("int", "float"):
        raise group.error(f"{told} are not served; only 8-bit float and 8-bit int are")
    allowed = ("tensor", "channel", "block") if kind == "float" else ("tensor", "channel")
    if strategy not in allowed:
        raise group.error(f"{told} are not served; there are {', '.join(allowed)}")
    if not weights.flag("symmetric", True) or weights.data.get("dynamic"):
        raise group.error(f"{told} are asymmetric or dynamic, which is not served")
    if strategy == "block" and weights.data.get("block_structure") not in ([BLOCK, BLOCK], f"{BLOCK}x{BLOCK}"):
        raise group.error(f"{told}: block_structure {weights.data.get('block_structure')!r} is not [128, 128]")
    acts = _group_inputs(name, group, inputs, kind, strategy) if inputs.data else None
    return Scheme(
        name=f"{kind}8 by {strategy}, inputs {acts or 'as they are'}",
        codes="F8_E4M3" if kind == "float" else "I8",
        weight=strategy,  # type: ignore[arg-type]
        activations=acts,
    )


def _group_inputs(
    name: str, group: JsonFile, inputs: JsonFile, kind: str, weight: str
) -> Literal["static", "token", "group"]:
    own, bits, strategy = inputs.text("type", "int"), inputs.integer("num_bits", 8), inputs.text("strategy", "tensor")
    dynamic = inputs.data.get("dynamic") or False
    told = f"{name}: input_activations of {bits}-bit {own} by {strategy}, {'dynamic' if dynamic else 'static'}"
    if (bits, own) != (8, kind) or not inputs.flag("symmetric", True):
        raise group.error(f"{told} are not served beside weights of 8-bit {kind}; the same type, symmetric, is")
    if weight == "block":
        if dynamic is True and strategy == "group" and inputs.integer("group_size", 0) == BLOCK:
            return "group"
        raise group.error(f"{told} are not served beside blocks; dynamic ones by groups of {BLOCK} are")
    # One scale for a whole batch would make an answer depend on its company: a finer one takes its place.
    if dynamic is True and strategy in ("token", "tensor"):
        return "token"
    if dynamic is False and strategy == "tensor" and kind == "float":
        return "static"
    raise group.error(f"{told} are not served; dynamic by token or tensor, and static e4m3 by tensor, are")


def _fp8(own: JsonFile) -> Quantization:
    """DeepSeek's and Qwen's, and what transformers writes, which has names of its own: it calls a scale a tensor
    `weight_scale_inv` too, where vLLM's writers have `weight_scale`, and the inputs' `activation_scale`."""
    form = own.text("fmt", "e4m3")
    if form != "e4m3":
        raise own.error(f"fmt {form!r} is not served, only e4m3")
    scheme, block = own.text("activation_scheme", "dynamic"), own.data.get("weight_block_size")
    if scheme not in ("dynamic", "static"):
        raise own.error(f"activation_scheme {scheme!r} is not served; there are dynamic, static")
    if block is not None and (list(block) != [BLOCK, BLOCK] or scheme != "dynamic"):
        raise own.error(f"weight_block_size {block!r} with {scheme} activations is not served; [128, 128], dynamic, is")
    acts: Any = "group" if block else ("static" if scheme == "static" else "token")
    one = Scheme(
        name=f"fp8 by {'block' if block else 'tensor'}, inputs {acts}",
        codes="F8_E4M3",
        weight="block" if block else "tensor",
        activations=acts,
        scales=("weight_scale_inv", "weight_scale"),
        input_scales=("input_scale", "activation_scale"),
    )
    kept = (*own.texts("ignored_layers"), *own.texts("modules_to_not_convert"))
    return Quantization("fp8", lambda module: None if module in kept else one)


_MODELOPT: dict[str, tuple[Literal["tensor", "channel", "block"], Literal["static", "token", "group"]]] = {
    "FP8": ("tensor", "static"),
    "FP8_PER_CHANNEL_PER_TOKEN": ("channel", "token"),
    "FP8_PB_WO": ("block", "group"),
}


def _modelopt(own: JsonFile) -> Quantization:
    inner = own.child("quantization") if "quantization" in own else own
    algorithm = inner.text("quant_algo", "")
    if algorithm not in _MODELOPT:
        raise own.error(f"quant_algo {algorithm!r} of modelopt is not served; there are {', '.join(_MODELOPT)}")
    weight, acts = _MODELOPT[algorithm]
    one = Scheme(name=f"modelopt {algorithm}", codes="F8_E4M3", weight=weight, activations=acts)
    excluded = (*inner.texts("exclude_modules"), *inner.texts("ignore"))
    patterns = [re.compile("".join(".*" if c == "*" else re.escape(c) for c in name)) for name in excluded]
    return Quantization(
        "modelopt", lambda module: None if any(p.fullmatch(module) is not None for p in patterns) else one
    )


_READERS: dict[str, Callable[[JsonFile], Quantization]] = {
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "modelopt": _modelopt,
}

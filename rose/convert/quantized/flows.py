"""Which layer's answer is read by which quantised layer, and by it alone, so that it can be handed over as codes.

A table by family, since a model's file says it only in code: (who answers, who reads). Applied from outside once a
model is filled: where the reader takes codes under a scale settled beforehand, the answer is made in them, and a pass
over the rows falls away. What a table does not name is quantised by the layer that reads it.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from rose.convert.quantized.place import replace_module
from rose.convert.rules import fill, match
from rose.layers.norm import DenseAddNorm, RMSNorm, ZeroCentredRMSNorm
from rose.layers.quantized import CodedAddNorm, CodedRMSNorm, QuantizedLinear

Flow = tuple[str, str]

_BERT: tuple[Flow, ...] = (
    ("encoder.layer.{n}.attention.output", "encoder.layer.{n}.intermediate.dense"),
    ("encoder.layer.{n}.intermediate.dense", "encoder.layer.{n}.output.dense"),
    ("encoder.layer.{n}.output", "encoder.layer.{next}.attention.self.qkv_proj"),
)
_LLAMA: tuple[Flow, ...] = (
    ("layers.{n}.input_layernorm", "layers.{n}.self_attn.qkv_proj"),
    ("layers.{n}.post_attention_layernorm", "layers.{n}.mlp.gate_up_proj"),
    ("layers.{n}.mlp.gate_up_proj", "layers.{n}.mlp.down_proj"),
)
FLOWS: dict[str, tuple[Flow, ...]] = {
    "bert": _BERT,
    "llama": _LLAMA,
    "qwen3": _LLAMA,
    "qwen3_5": (*_LLAMA, ("layers.{n}.input_layernorm", "layers.{n}.linear_attn.in_proj")),
}


def hand_over_codes(backbone: nn.Module, family: str) -> int:
    """Let layers answer in codes where their reader takes them so.

    Args:
        family: of FLOWS; the registry's name of the rules.

    Returns:
        how many do.
    """
    modules, count = dict(backbone.named_modules()), 0
    for name, reader_name in _pairs(modules, FLOWS.get(family, ())):
        reader = modules.get(reader_name)
        if not isinstance(reader, QuantizedLinear) or reader.input_scale is None:
            continue
        module, scale = modules[name], reader.input_scale
        if isinstance(module, QuantizedLinear):
            module.output_scale = scale
        elif isinstance(module, RMSNorm | ZeroCentredRMSNorm):
            replace_module(backbone, name, CodedRMSNorm(module, scale))
        elif isinstance(module, DenseAddNorm):
            replace_module(backbone, name, CodedAddNorm(module, scale))
        else:
            continue
        count += 1
    return count


def _pairs(modules: dict[str, nn.Module], flows: tuple[Flow, ...]) -> Iterator[tuple[str, str]]:
    for source, target in flows:
        for name in modules:
            gaps = match(source, name)
            if gaps is not None:
                yield name, fill(target, gaps | {"next": str(int(gaps["n"]) + 1)})

"""Which class serves which config.json, imported only when asked for.

Knows names; knows neither weights nor heads.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import cast

from torch import nn

from rose.config import ArchitectureConfig
from rose.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Entry:
    """One row of the table.

    Attributes:
        module, class_name: where the backbone's class is.
        rules: name of its rule table in rose.convert.families.
        architectures: class names of config.json whose backbone this is, whatever head sits on it.
    """

    module: str
    class_name: str
    rules: str
    architectures: tuple[str, ...]


def _roberta(name: str) -> Entry:
    heads = (f"{name}Model", f"{name}ForMaskedLM")
    return Entry("rose.models.xlm_roberta", "XLMRoberta", "bert", heads)


# model_type -> row. A classifier's class name is missing on purpose: its answer is not this backbone's vector.
BACKBONES: dict[str, Entry] = {
    "bert": Entry("rose.models.bert", "Bert", "bert", ("BertModel", "BertForMaskedLM", "BertForPreTraining")),
    "roberta": _roberta("Roberta"),
    "xlm-roberta": _roberta("XLMRoberta"),
    "camembert": _roberta("Camembert"),
    "qwen3": Entry("rose.models.qwen3", "Qwen3", "qwen3", ("Qwen3Model", "Qwen3ForCausalLM")),
    "bidirectional_pplx_qwen3": Entry("rose.models.qwen3", "Qwen3", "qwen3", ("PPLXQwen3Model",)),
}


def find_entry(config: ArchitectureConfig) -> Entry:
    """
    Raises:
        CheckpointError: no row for this model_type, or the architecture is not one of the row's.
    """
    entry = BACKBONES.get(config.model_type)
    if entry is None:
        raise CheckpointError(f"model_type {config.model_type!r} is not served; there are {', '.join(BACKBONES)}")
    if config.architecture not in entry.architectures:
        served = ", ".join(entry.architectures)
        raise CheckpointError(f"architecture {config.architecture!r} is not served as an embedder; there are {served}")
    return entry


def build_backbone(config: ArchitectureConfig) -> nn.Module:
    """The backbone with uninitialised weights, on torch's default device."""
    entry = find_entry(config)
    backbone = getattr(importlib.import_module(entry.module), entry.class_name)(config)
    return cast(nn.Module, backbone)

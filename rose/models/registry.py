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


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One row of the table.

    Attributes:
        module, class_name: where the backbone's class is.
        rules: name of its rule table in rose.convert.families.
        architectures: class names of config.json whose backbone this is, whatever head sits on it.
        classifiers: class names with a head that scores a sequence.
        classifier: that head: a name of rose.convert.families.HEADS.
        generates: class names with a language model's head, which can continue a text.
        attention: what it sees where config.json states nothing: "bidirectional" or "causal".
        dtypes: what the backbone may run in.
        refused: why not in the others.
        oracles: what its answers are compared with in the tests.
        alone: model_type of the backbone by itself, where config.json may nest it in `text_config`.
    """

    module: str
    class_name: str
    rules: str
    architectures: tuple[str, ...]
    classifiers: tuple[str, ...] = ()
    classifier: str = ""
    generates: tuple[str, ...] = ()
    attention: str
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    refused: str = ""
    oracles: tuple[str, ...]
    alone: str = ""


_LIBRARIES = ("transformers", "sentence-transformers")
_OUTGROWS = "activations of this family outgrow it (65504 is its largest number), and rows become NaN"


def _roberta(name: str, *oracles: str) -> Entry:
    return Entry(
        module="rose.models.xlm_roberta",
        class_name="XLMRoberta",
        rules="bert",
        architectures=(f"{name}Model", f"{name}ForMaskedLM"),
        classifiers=(f"{name}ForSequenceClassification",),
        classifier="roberta",
        attention="bidirectional",
        oracles=(*_LIBRARIES, *oracles),
    )


def _qwen3(
    architectures: tuple[str, ...], attention: str, oracles: tuple[str, ...], classifiers: bool = False
) -> Entry:
    return Entry(
        module="rose.models.qwen3",
        class_name="Qwen3",
        rules="qwen3",
        architectures=architectures,
        classifiers=("Qwen3ForSequenceClassification",) if classifiers else (),
        classifier="last" if classifiers else "",
        generates=tuple(name for name in architectures if name.endswith("ForCausalLM")),
        attention=attention,
        dtypes=("float32", "bfloat16"),
        refused=_OUTGROWS,
        oracles=oracles,
    )


def _llama(name: str, refused: str = "") -> Entry:
    return Entry(
        module="rose.models.llama",
        class_name="Llama",
        rules="llama",
        architectures=(f"{name}Model", f"{name}ForCausalLM"),
        classifiers=(f"{name}ForSequenceClassification",),
        classifier="last",
        generates=(f"{name}ForCausalLM",),
        attention="causal",
        dtypes=("float32", "bfloat16") if refused else ("float32", "bfloat16", "float16"),
        refused=refused,
        oracles=_LIBRARIES,
    )


def _qwen3_5(*architectures: str, classifiers: tuple[str, ...] = ()) -> Entry:
    return Entry(
        module="rose.models.qwen3_5",
        class_name="Qwen35",
        rules="qwen3_5",
        architectures=architectures,
        classifiers=classifiers,
        classifier="last" if classifiers else "",
        generates=tuple(name for name in architectures if not name.endswith("Model")),
        attention="causal",
        dtypes=("float32", "bfloat16"),
        refused=_OUTGROWS,
        oracles=("transformers",),
        alone="qwen3_5_text",
    )


# model_type -> row.
BACKBONES: dict[str, Entry] = {
    "bert": Entry(
        module="rose.models.bert",
        class_name="Bert",
        rules="bert",
        architectures=("BertModel", "BertForMaskedLM", "BertForPreTraining"),
        classifiers=("BertForSequenceClassification",),
        classifier="bert",
        attention="bidirectional",
        oracles=_LIBRARIES,
    ),
    "roberta": _roberta("Roberta"),
    "xlm-roberta": _roberta("XLMRoberta", "FlagEmbedding"),
    "camembert": _roberta("Camembert"),
    "qwen3": _qwen3(("Qwen3Model", "Qwen3ForCausalLM"), "causal", _LIBRARIES, classifiers=True),
    "bidirectional_pplx_qwen3": _qwen3(
        ("PPLXQwen3Model", "PPLXQwen3ContextualModel"),
        "bidirectional",
        ("transformers' Qwen3Model under an all-to-all mask", "the published head maths"),
    ),
    "llama": _llama("Llama"),
    "mistral": _llama("Mistral"),
    "qwen2": _llama("Qwen2", _OUTGROWS),
    "qwen3_5": _qwen3_5("Qwen3_5Model", "Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"),
    "qwen3_5_text": _qwen3_5(
        "Qwen3_5TextModel", "Qwen3_5ForCausalLM", classifiers=("Qwen3_5TextForSequenceClassification",)
    ),
}


def find_entry(config: ArchitectureConfig) -> Entry:
    """
    Raises:
        CheckpointError: no row for this model_type, or the architecture is not one of the row's.
    """
    entry = BACKBONES.get(config.model_type)
    if entry is None:
        raise CheckpointError(f"model_type {config.model_type!r} is not served; there are {', '.join(BACKBONES)}")
    served = (*entry.architectures, *entry.classifiers)
    if config.architecture not in served:
        raise CheckpointError(f"architecture {config.architecture!r} is not served; there are {', '.join(served)}")
    return entry


def check_dtype(config: ArchitectureConfig, dtype: str) -> None:
    """
    Args:
        dtype: "float32", "bfloat16" or "float16".

    Raises:
        CheckpointError: the architecture does not run in it.
    """
    entry = find_entry(config)
    if dtype not in entry.dtypes:
        raise CheckpointError(
            f"{config.architecture} is not served in {dtype}: {entry.refused}; use {' or '.join(entry.dtypes[::-1])}"
        )


def build_backbone(config: ArchitectureConfig) -> nn.Module:
    """The backbone with uninitialised weights, on torch's default device."""
    entry = find_entry(config)
    backbone = getattr(importlib.import_module(entry.module), entry.class_name)(config)
    return cast(nn.Module, backbone)

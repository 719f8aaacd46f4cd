"""A PEFT adapter folder: its settings, and its tensors by the module they change.

Format: huggingface.co/docs/peft (adapter_config.json, adapter_model.safetensors or .bin). What would change the merge
and is not known here is refused by name. Knows files and names; the arithmetic is in `merge`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from rose.config.folder import ADAPTER_CONFIG
from rose.config.json_file import JsonFile
from rose.convert.checkpoint import Checkpoint
from rose.errors import CheckpointError

_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_ROOT = "base_model.model."
_LORA = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(?:\.(?!weight$|bias$)[^.]+)?(?:\.(?P<kind>weight|bias))?"
)
_REPLACED = re.compile(r"(?P<module>.+?)(?:\.modules_to_save(?:\.[^.]+)??|\.base_layer)?\.(?P<kind>weight|bias)")
# Settings under which a merge is another formula, or none at all.
_REFUSED = (
    *("alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "megatron_config"),
    *("monteclora_config", "target_parameters", "trainable_token_indices", "use_bdlora", "use_qalora", "velora_config"),
)
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initialisations that rewrite the base's weights


@dataclass(slots=True, kw_only=True)
class Change:
    """What an adapter does to one module: a low-rank delta, and before it perhaps tensors in place of the base's.

    Attributes:
        a, b: [r, in] and [out, r]; for an embedding [r, vocabulary] and [width, r].
        magnitude: DoRA: length of each row of the result (of each column, for an embedding).
        bias: delta of the bias, before scaling.
        replaced: "weight" or "bias" -> full tensor.
        scale: alpha / r, or alpha / sqrt(r).
    """

    embedding: bool = False
    a: Tensor | None = None
    b: Tensor | None = None
    magnitude: Tensor | None = None
    bias: Tensor | None = None
    replaced: dict[str, Tensor] = field(default_factory=dict)
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """
    Attributes:
        changes: module, by the adapter's own names without "base_model.model." -> what it does to it.
    """

    path: Path
    summary: str
    changes: dict[str, Change]


def read_adapter(path: Path) -> Adapter:
    """
    Raises:
        CheckpointError: not LoRA, a setting that is not served, half a pair, a rank that the tensors contradict, or
            nothing but zeros, which merged would be the base model itself.
    """
    config = JsonFile.read(path / ADAPTER_CONFIG)
    _check_settings(config)
    file = next((path / name for name in _FILES if (path / name).exists()), None)
    if file is None:
        raise CheckpointError(f"{path} holds no weights: neither {_FILES[0]} nor {_FILES[1]}")
    changes: dict[str, Change] = {}
    with Checkpoint(file) as checkpoint:
        for name in checkpoint.entries:
            _take(changes, name, checkpoint.read(name).clone(), file)
    if not changes:
        raise CheckpointError(f"{file} holds no tensors")
    for module, change in changes.items():
        _settle(change, module, config, file)
    if not any(_does_something(change) for change in changes.values()):
        raise CheckpointError(f"{path} changes nothing: every lora_B in it is zero, as before any training")
    return Adapter(path=path, summary=_summary(config, changes.values()), changes=changes)


def _check_settings(config: JsonFile) -> None:
    kind = config.text("peft_type", "LORA")
    if kind != "LORA":
        raise config.error(f"peft_type {kind!r} is not served, only 'LORA'")
    for key in _REFUSED:
        if config.data.get(key):
            raise config.error(f"{key} is set, and such an adapter cannot be merged here")
    start = str(config.data.get("init_lora_weights", ""))
    if start.startswith(_CHANGES_BASE):
        raise config.error(f"init_lora_weights {start!r} changes the base as well; convert the adapter to plain LoRA")


def _take(changes: dict[str, Change], name: str, tensor: Tensor, file: Path) -> None:
    bare = name.removeprefix(_ROOT)
    found = _LORA.fullmatch(bare)
    if found is None:
        full = _REPLACED.fullmatch(bare)
        if full is None or "lora_" in bare:
            raise CheckpointError(f"{file} holds {name}, which is no tensor of a LoRA adapter that is known here")
        changes.setdefault(full["module"], Change()).replaced[full["kind"]] = tensor
        return
    change, part = changes.setdefault(found["module"], Change()), found["part"]
    if part == "lora_magnitude_vector":
        change.magnitude = tensor
    elif part == "lora_B" and found["kind"] == "bias":
        change.bias = tensor
    elif part in ("lora_A", "lora_embedding_A"):
        change.a, change.embedding = tensor, part == "lora_embedding_A"
    else:
        change.b = tensor


def _settle(change: Change, module: str, config: JsonFile, file: Path) -> None:
    if change.a is None and change.b is None and change.magnitude is None and change.bias is None:
        return
    if change.a is None or change.b is None:
        lacking = "lora_A" if change.a is None else "lora_B"
        raise CheckpointError(f"{file} lacks {lacking} of {module}")
    if change.a.dim() != 2 or change.b.dim() != 2 or change.a.shape[0] != change.b.shape[1]:
        raise CheckpointError(f"{file}: lora_A {tuple(change.a.shape)} and lora_B {tuple(change.b.shape)} of {module}")
    rank = int(_setting(config, "r", "rank_pattern", module, 8))
    if change.a.shape[0] != rank:
        raise config.error(f"the rank of {module} is {rank}, and its tensors have {change.a.shape[0]}")
    if config.flag("use_dora", False) != (change.magnitude is not None):
        raise config.error(f"use_dora and the magnitude of {module} contradict each other")
    alpha = _setting(config, "lora_alpha", "alpha_pattern", module, 8)
    change.scale = alpha / (math.sqrt(rank) if config.flag("use_rslora", False) else rank)


def _setting(config: JsonFile, key: str, pattern_key: str, module: str, default: int) -> float:
    """The first pattern that fits the end of the module's name counts, as in PEFT."""
    patterns = config.child(pattern_key)
    for pattern in patterns.data:
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            return patterns.number(pattern)
    return config.number(key, default)


def _does_something(change: Change) -> bool:
    deltas = (change.b, change.bias, change.magnitude, *change.replaced.values())
    return any(tensor is not None and bool(tensor.any()) for tensor in deltas)


def _summary(config: JsonFile, changes: Iterable[Change]) -> str:
    changes = list(changes)
    low_rank = [change for change in changes if change.a is not None]
    scales = sorted({round(change.scale, 4) for change in low_rank})
    kind = "DoRA" if any(change.magnitude is not None for change in low_rank) else "LoRA"
    kind = f"rs{kind}" if config.flag("use_rslora", False) else kind
    replaced = sum(len(change.replaced) for change in changes)
    whole = f", {replaced} tensors replaced" if replaced else ""
    return f"{kind} on {len(low_rank)} modules, scale {', '.join(map(str, scales)) or 'none'}{whole}"

"""The calibrated folder: every tensor of the source, some as codes with their scales beside them, streamed one by one.

Tensors keep their names and places, small files are copied, config.json gets its `quantization_config`: what reads the
source and knows compressed-tensors reads this. It appears whole or not at all. Knows files; decides nothing.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from rose.config import ModelFolder
from rose.config.json_file import JsonFile
from rose.convert.calibrate.targets import Target, quantization_config, quantize_weight
from rose.convert.offline.blocks import Slot, byte_blocks
from rose.convert.offline.shards import split_shards, write_shards
from rose.convert.offline.weights import FolderWeights
from rose.convert.offline.write import whole_or_nothing

REPORT = "calibration.json"
_WEIGHTS = re.compile(
    r"(model|pytorch_model|tf_model|rust_model|flax_model|consolidated)[^/]*"
    r"\.(safetensors|bin|h5|ot|msgpack|index\.json|pth)|.*\.(onnx|gguf|ckpt)"
)
_FOLDERS = ("additional_chat_templates",)
_MADE_ELSEWHERE = ("lm_head", r"re:.*pooler\.dense")
_FLOATS = ("F32", "F16", "BF16", "F64")


@dataclass(frozen=True, slots=True)
class Sources:
    """
    Attributes:
        coded: tensors that become codes: name in the checkpoint -> the scale of its layer's inputs, or None.
        cache: scales of keys and values, by the names they get.
    """

    coded: Mapping[str, Tensor | None]
    cache: Mapping[str, Tensor] = field(default_factory=dict)


def write_folder(
    folder: ModelFolder,
    target: Path,
    to: Target,
    sources: Sources,
    report: Mapping[str, Any],
    *,
    check: Callable[[Path], None] = lambda made: None,
    shard_bytes: int = 5_000_000_000,
    advance: Callable[[int], None] = lambda done: None,
) -> Path:
    """
    Args:
        report: is written beside the weights.
        check: is given the folder before it appears, and raises where it is not what it should be.
        advance: is told the bytes of weights written so far.

    Raises:
        CheckpointError: a target that cannot be written, or what `check` raises; nothing is left behind.
    """
    with whole_or_nothing(target) as made, FolderWeights(folder.backbone_path) as weights:
        _copy_files(folder, made)
        backbone = made / folder.subfolder
        slots = list(_slots(weights, to, sources))
        config = JsonFile.read(folder.backbone_path / "config.json").data
        ignore = ignored(weights, sources)
        own = quantization_config(to, ignore, kv_cache=bool(sources.cache))
        _write_json(backbone / "config.json", config | {"quantization_config": own})
        reader = _Reader(weights, to, sources)
        shards = split_shards(slots, shard_bytes)
        write_shards(backbone, shards, lambda slot: byte_blocks([reader.read(slot.name)], slot, slot.name), advance)
        _write_json(made / REPORT, report)
        check(made)
    return target


def ignored(weights: FolderWeights, sources: Sources) -> list[str]:
    """Modules whose matrices stay plain, so that no reader looks for scales beside them; and those that other readers
    make where the checkpoint has none: a tied head, a pooler of random numbers."""
    plain = [
        name.removesuffix(".weight")
        for name, entry in weights.entries.items()
        if name.endswith(".weight") and len(entry.shape) == 2 and name not in sources.coded
    ]
    return plain + [name for name in _MADE_ELSEWHERE if name not in plain]


def _slots(weights: FolderWeights, to: Target, sources: Sources) -> list[Slot]:
    slots: list[Slot] = []
    for name, entry in weights.entries.items():
        if name not in sources.coded:
            if entry.dtype in _FLOATS:  # the others are buffers that older versions stored, such as position ids
                slots.append(Slot(name, entry.dtype, entry.shape))
            continue
        module, (rows, width) = name.removesuffix(".weight"), entry.shape
        shape = {"tensor": (1,), "channel": (rows, 1), "block": (-(-rows // 128), -(-width // 128))}[to.scheme.weight]
        slots += [Slot(name, to.scheme.codes, entry.shape), Slot(f"{module}.weight_scale", "F32", shape)]
        if sources.coded[name] is not None:
            slots.append(Slot(f"{module}.input_scale", "F32", (1,)))
    return slots + [Slot(name, "F32", (1,)) for name in sources.cache]


class _Reader:
    """Tensors by their names in the result. A weight's scales are kept until they are asked for, which is next."""

    def __init__(self, weights: FolderWeights, to: Target, sources: Sources) -> None:
        self.weights, self.to, self.sources = weights, to, sources
        self._scales: dict[str, Tensor] = {}

    def read(self, name: str) -> Tensor:
        if name in self.sources.coded:
            module = name.removesuffix(".weight")
            codes, scale = quantize_weight(self.weights.read(name), self.to.scheme)
            self._scales[f"{module}.weight_scale"] = scale
            inputs = self.sources.coded[name]
            if inputs is not None:
                self._scales[f"{module}.input_scale"] = inputs.cpu()
            return codes
        if name in self._scales:
            return self._scales.pop(name)
        if name in self.sources.cache:
            return self.sources.cache[name]
        return self.weights.read(name)


def _copy_files(folder: ModelFolder, made: Path) -> None:
    """Everything but weights, configs that are written anew, and folders that no file names."""
    named = {dense.folder for dense in folder.dense} | {*_FOLDERS, *_module_folders(folder.path)}
    for path in sorted(folder.path.iterdir()):
        inside = path.name == folder.subfolder
        if path.is_dir() and (path.name in named or inside):
            plain = shutil.ignore_patterns(".*") if not inside else _skip_weights
            shutil.copytree(path, made / path.name, ignore=plain)
        elif path.is_file() and not path.name.startswith(".") and not _WEIGHTS.fullmatch(path.name):
            shutil.copyfile(path, made / path.name)


def _skip_weights(folder: str, names: list[str]) -> set[str]:
    return {name for name in names if name.startswith(".") or _WEIGHTS.fullmatch(name)}


def _module_folders(root: Path) -> list[str]:
    path = root / "modules.json"
    modules = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return [str(module.get("path", "")).partition("/")[0] for module in modules]


def _write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

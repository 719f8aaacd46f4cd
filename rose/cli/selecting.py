"""What `rose select-backend` measures: a model's folder, a published shape with random weights, or heads alone.

Knows names, folders and shapes; measures nothing itself.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rose.attention_backends.base import AttentionSpec
from rose.bench.floors import BYTES_PER_S, FLOPS_PER_S, floor_ms
from rose.bench.llm_shapes import LLM_SHAPES
from rose.bench.shapes import SHAPES, build_checkpoint
from rose.cli.shared import reading, resolve_model
from rose.config import ModelFolder, read_model_folder
from rose.config.architecture import read_architecture
from rose.config.json_file import JsonFile
from rose.config.profile import Layout, ModelShape
from rose.engine.profiles import attention_shape, model_shape
from rose.errors import StartupError
from rose.models.base import attention_spec
from rose.select.layer_ways import LAYERS
from rose.select.measure import Options, Result, heads_result, measure_generating, measure_heads, measure_model
from rose.select.plots import Floor
from rose.server.device import pick_device, pick_dtype

_HEADS = re.compile(r"(\d+)(?:/(\d+))?x(\d+)(:causal)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is measured.

    Attributes:
        model: what its numbers are looked up by; None of heads alone.
        measure: runs all there is to measure of it.
        floor: least µs of a load, where the arithmetic is known.
        layouts: of its batches where it is served: whole sequences, or steps over pages.
    """

    name: str
    spec: AttentionSpec
    model: ModelShape | None = None
    measure: Callable[[Options], Result]
    floor: Floor | None
    layouts: tuple[Layout, ...] = ("ragged",)


def find_target(options: argparse.Namespace, made: Path) -> Target:
    """
    Args:
        made: folder for models of random weights.

    Raises:
        StartupError: a shape that is neither published nor heads, or a device that is not there.
    """
    device = pick_device(options.device)
    dtype = pick_dtype(options.dtype, device)
    if options.shape is None:
        path = resolve_model(options)
        return _of_folder(path.name if Path(options.model).is_dir() else options.model, path, options, device, dtype)
    if options.shape in SHAPES:
        return _of_folder(options.shape, build_checkpoint(options.shape, made / options.shape), options, device, dtype)
    if options.shape in LLM_SHAPES:
        return _of_language_model(options.shape, device, dtype)
    return _of_heads(options.shape, device, dtype, known=", ".join([*SHAPES, *LLM_SHAPES]))


def parse_batch(text: str) -> list[int]:
    """Lengths of "16x512" or "37+128+300".

    Raises:
        StartupError: anything else.
    """
    parts = [re.fullmatch(r"(?:(\d+)x)?(\d+)", part.strip()) for part in text.split("+")]
    lengths: list[int] = []
    for part in parts:
        count, length = (1, 0) if part is None else (int(part[1] or 1), int(part[2]))
        if not (1 <= count <= 1 << 16 and 1 <= length <= 1 << 20):
            raise StartupError(f"--explain: {text!r} is no batch: expected such as 16x512, or 37+128+300")
        lengths += [length] * count
    return lengths


def _of_folder(name: str, path: Path, options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> Target:
    folder: ModelFolder = read_model_folder(path, **reading(options))
    spec = attention_spec(folder, device, dtype)

    def measure(limits: Options) -> Result:
        return measure_model(folder, device, dtype, name, limits)

    config = json.loads((folder.backbone_path / "config.json").read_text(encoding="utf-8"))
    floor = _model_floor(config) if folder.generation is None and device.type == "cuda" else None
    shape = model_shape(folder.architecture, attention_shape(spec))
    layouts: tuple[Layout, ...] = ("ragged",) if folder.generation is None else ("paged",)
    return Target(name=name, spec=spec, model=shape, measure=measure, floor=floor, layouts=layouts)


def _of_language_model(name: str, device: torch.device, dtype: torch.dtype) -> Target:
    """Its attention and products: no weights are made."""
    architecture = read_architecture(JsonFile.of(Path(name), dict(LLM_SHAPES[name].config)))
    spec = AttentionSpec(
        num_heads=architecture.num_heads,
        num_kv_heads=architecture.num_kv_heads,
        head_dim=architecture.head_dim,
        dtype=dtype,
        device=device,
        causal=True,
        scale=architecture.head_dim**-0.5,
        max_length=architecture.max_positions,
    )

    def measure(limits: Options) -> Result:
        return measure_generating(architecture, spec, name, limits)

    shape = model_shape(architecture, attention_shape(spec))
    return Target(name=name, spec=spec, model=shape, measure=measure, floor=_heads_floor(spec), layouts=("paged",))


def _of_heads(text: str, device: torch.device, dtype: torch.dtype, known: str) -> Target:
    found = _HEADS.fullmatch(text)
    if found is None:
        raise StartupError(f"--shape {text!r}: expected heads, such as 16/8x128 or 16x64:causal, or one of {known}")
    heads, head_dim = int(found[1]), int(found[3])
    kv_heads = int(found[2] or heads)
    if not heads or not kv_heads or not head_dim or heads % kv_heads:
        raise StartupError(
            f"--shape {text!r}: {heads} query heads cannot share {kv_heads} key/value heads of {head_dim}"
        )
    spec = AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=device,
        causal=found[4] is not None,
        scale=head_dim**-0.5,
    )

    def measure(limits: Options) -> Result:
        runs = measure_heads(spec, limits, paged=spec.causal)
        return heads_result(runs, device, text, limits)

    layouts: tuple[Layout, ...] = ("ragged", "paged") if spec.causal else ("ragged",)
    return Target(name=text.replace("/", "-"), spec=spec, measure=measure, floor=_heads_floor(spec), layouts=layouts)


def _model_floor(config: dict[str, Any]) -> Floor | None:
    try:
        floor_ms(config, 128)
    except KeyError:  # a family whose arithmetic is not written down
        return None
    return lambda sequences, length: 1e3 * floor_ms(config, length, sequences)


def _heads_floor(spec: AttentionSpec) -> Floor:
    def floor(sequences: int, length: int) -> float:
        seen = 0.5 if spec.causal else 1.0
        flops = seen * 4 * spec.num_heads * spec.head_dim * sequences * length * length
        elements = sequences * length * 2 * (spec.num_heads + spec.num_kv_heads) * spec.head_dim
        return LAYERS * 1e6 * max(flops / FLOPS_PER_S, elements * spec.dtype.itemsize / BYTES_PER_S)

    return floor

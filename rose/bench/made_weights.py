"""Seeded random weights in the names and shapes that transformers gives a config, written as safetensors.

Drawn on the GPU where there is one, written in shards by a few threads. Knows parameter names; knows no engines.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

STD = 0.02
SHARD_BYTES = 2 << 30
# Shards held in memory while they are written.
_WRITERS = 3


def write_weights(
    config: Mapping[str, Any], transformers_class: str, folder: Path, seed: int, *, std: float = STD
) -> None:
    """model.safetensors, or shards and their index, in bf16.

    Args:
        config: as AutoConfig.for_model takes it.
        transformers_class: whose parameters they are.
        std: of matrices; the embedding's is STD.
    """
    from safetensors.torch import save_file

    shapes = dict(_parameters(config, transformers_class))
    shards = _shards(shapes)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    weight_map: dict[str, str] = {}
    zero_centred = "qwen3_5" in config["model_type"]
    with ThreadPoolExecutor(_WRITERS) as pool:
        written: list[Any] = []
        for number, names in enumerate(shards, start=1):
            file = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            tensors = {
                name: draw(name, shapes[name], generator, std, zero_centred=zero_centred).to(torch.bfloat16).cpu()
                for name in names
            }
            weight_map |= dict.fromkeys(names, file)
            written.append(pool.submit(save_file, tensors, folder / file, metadata={"format": "pt"}))
            del tensors
            if len(written) >= _WRITERS:
                written[-_WRITERS].result()
        for one in written:
            one.result()
    if len(shards) > 1:
        index = {"metadata": {"total_size": 2 * sum(map(_count, shapes.values()))}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def draw(
    name: str, shape: tuple[int, ...], generator: torch.Generator, std: float = STD, *, zero_centred: bool = False
) -> Tensor:
    """One parameter in fp32 on the generator's device.

    Args:
        zero_centred: the model's norms add one to their weight, except those inside of gated delta nets.
    """
    leaf = name.rpartition(".")[2]
    value = torch.randn(shape, generator=generator, device=generator.device)
    if leaf == "A_log":  # the decay of a recurrent state: from slow to fast
        return value.sigmoid() * 2.5
    if leaf == "dt_bias":
        return value
    if "conv1d" in name:
        return value * 0.3
    value *= STD if "embed" in name or "norm" in name.lower() else std
    if "norm" in name.lower() and leaf == "weight" and (not zero_centred or "linear_attn" in name):
        value += 1
    return value


def _parameters(config: Mapping[str, Any], transformers_class: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    import transformers

    made = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = getattr(transformers, transformers_class)(made)
    tied = "lm_head.weight" if config.get("tie_word_embeddings") else ""
    for name, meta in model.state_dict().items():
        if "pooler" not in name and name != tied and meta.is_floating_point():
            yield name, tuple(meta.shape)


def _shards(shapes: Mapping[str, tuple[int, ...]]) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    held = 0
    for name, shape in shapes.items():
        size = 2 * _count(shape)
        if shards[-1] and held + size > SHARD_BYTES:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += size
    return shards


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for n in shape:
        count *= n
    return count

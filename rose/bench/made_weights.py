"""Seeded random weights in the names and shapes that transformers gives a config, written as safetensors.

Drawn on the GPU where there is one, written in shards by a few threads. Knows parameter names; knows no engines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rose.bench.plain_transformers import plain_transformers

STD = 0.02
SHARD_BYTES = 2 << 30
# Shards held in memory while they are written.
_WRITERS = 3
# A language model of plain random weights continues every prompt with one token for ever: averaging over all tokens
# makes them alike from layer to layer. Keys this much longer make attention choose, and later layers add less.
KEY_SCALE = 2.0


@dataclass(frozen=True, slots=True)
class Recipe:
    """How parameters are drawn.

    Attributes:
        std: of matrices; the embedding's is STD.
        zero_centred: norms add one to their weight, except those inside of gated delta nets.
        depth: layers of a language model, whose tokens shall depend on the whole prompt; 0 for an embedder.
    """

    std: float = STD
    zero_centred: bool = False
    depth: int = 0

    @staticmethod
    def of(config: Mapping[str, Any], *, language_model: bool) -> Recipe:
        if not language_model:
            return Recipe()
        # Narrow ones need larger weights: their layers would add little to the embedding.
        std = STD * max(1.0, (1024 / config["hidden_size"]) ** 0.5)
        return Recipe(std, "qwen3_5" in config["model_type"], config["num_hidden_layers"])

    def draw(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """One parameter in fp32 on the generator's device."""
        value = torch.randn(shape, generator=generator, device=generator.device)
        leaf = name.rpartition(".")[2]
        if leaf == "A_log":  # the decay of a recurrent state: from slow to fast
            return value.sigmoid() * 2.5
        if leaf == "dt_bias":
            return value
        if "conv1d" in name:
            return value * 0.3
        if "norm" in name.lower() and leaf == "weight":
            scale = KEY_SCALE if self.depth and "k_norm" in name else 1.0
            own = not self.zero_centred or "linear_attn" in name
            return (value * STD + 1) * scale - (0 if own else 1)
        value *= STD if "embed" in name or "norm" in name.lower() else self.std
        if self.depth and re.search(r"\.(o_proj|out_proj|down_proj)\.", name) and ".layers.0." not in name:
            value *= self.depth**-0.5
        return value


def write_weights(
    config: Mapping[str, Any], transformers_class: str, folder: Path, seed: int, *, language_model: bool = False
) -> None:
    """model.safetensors, or shards and their index, in bf16.

    Args:
        config: as AutoConfig.for_model takes it.
        transformers_class: whose parameters they are.
    """
    from safetensors.torch import save_file

    shapes = dict(_parameters(config, transformers_class))
    shards = _shards(shapes)
    generator = torch.Generator("cuda" if torch.cuda.is_available() else "cpu").manual_seed(seed)
    recipe = Recipe.of(config, language_model=language_model)
    weight_map: dict[str, str] = {}
    with ThreadPoolExecutor(_WRITERS) as pool:
        written: list[Any] = []
        for number, names in enumerate(shards, start=1):
            file = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            tensors = {name: recipe.draw(name, shapes[name], generator).to(torch.bfloat16).cpu() for name in names}
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


def _parameters(config: Mapping[str, Any], transformers_class: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    transformers = plain_transformers()

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

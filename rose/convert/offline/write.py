"""The plan carried out: a folder that is whole, says what was decided, and appears under its name last.

Everything is written into a hidden folder beside the target, read again as a server would read it, and renamed. Knows
files; decides nothing.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

import rose
from rose.config import ModelFolder, read_model_folder
from rose.config.folder import ADAPTER_CONFIG
from rose.convert.offline.blocks import Slot, byte_blocks
from rose.convert.offline.decide import Plan
from rose.convert.offline.digests import digesting
from rose.convert.offline.shards import split_shards, sync, write_shards
from rose.convert.offline.source import Source
from rose.convert.offline.weights import Weights
from rose.errors import CheckpointError

_log = logging.getLogger(__name__)

RECORD = "rose.json"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf")
_TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.txt"),
    *("vocab.json", "merges.txt", "sentencepiece.bpe.model", "spiece.model", "tokenizer.model", "chat_template.jinja"),
)
_BESIDE = ("sparse_linear.*", "colbert_linear.*", "*.py", "LICENSE*", "NOTICE*")  # BGE-M3's heads, a model's own code


def convert(
    plan: Plan,
    weights: Weights,
    target: Path,
    *,
    force: bool = False,
    shard_bytes: int = 5_000_000_000,
    advance: Callable[[int], None] = lambda done: None,
) -> Path:
    """Write the folder.

    Args:
        weights: of the source, adapters merged.
        force: replace a target that is there.
        advance: is told the bytes of weights written so far.

    Raises:
        CheckpointError: a target that is there, cannot be written or is part of the source; a value that does not fit
            its dtype; or a result that does not read as decided. Nothing is left behind.
    """
    check_target(target, plan.source, force=force)
    with whole_or_nothing(target) as folder, digesting(_made_of(plan.source)) as digests:
        _copy(plan, folder)
        for name, value in plan.files.items():
            _write(folder / name, value)
        shards = split_shards(plan.slots, shard_bytes)
        write_shards(folder, shards, lambda slot: _blocks(plan, weights, slot), advance)
        weights.finish()
        _write(folder / RECORD, _record(plan, digests()))
        check_result(plan, folder)
    return target


def check_target(target: Path, source: Source, *, force: bool) -> None:
    """
    Raises:
        CheckpointError: it is there already, or writing it would touch the source.
    """
    resolved = target.resolve()
    for folder in source.folders:
        if resolved == folder.resolve() or resolved in folder.resolve().parents or folder.resolve() in resolved.parents:
            raise CheckpointError(f"{target} overlaps with {folder}, which is read; name another target")
    if target.exists() and not force:
        raise CheckpointError(f"{target} is there already; --force replaces it")


@contextmanager
def whole_or_nothing(target: Path) -> Iterator[Path]:
    """A hidden folder to write into; it gets its name when all of it is on the disk, or is gone."""
    folder = target.parent / f".{target.name}.partial-{os.getpid()}"
    try:
        folder.mkdir(parents=True)
        yield folder
        _settle(folder)
        old = target.parent / f".{target.name}.replaced-{os.getpid()}"
        if target.exists():
            target.rename(old)
        try:
            folder.rename(target)
        except OSError:
            if old.exists():
                old.rename(target)
            raise
        _let_go(old, target)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _settle(folder: Path) -> None:
    """Everything in it reaches the disk before it has its name: a power cut never leaves a name for empty files, and a
    network disk that is full says so here at the latest."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


def _let_go(old: Path, target: Path) -> None:
    """Of what the target replaced. The target is whole and has its name: nothing that fails from here on is its."""
    try:
        sync(target.parent)
    except OSError as error:
        _log.warning("%s is written; whether its name outlives a power cut is unknown: %s", target, error)
    finally:
        try:
            _remove(old)
        except OSError as error:
            _log.warning("%s is written; %s, which it replaced, cannot be removed: %s", target, old, error)


def _remove(path: Path) -> None:
    """A folder, or a file or link that stood in its place; nothing where nothing is."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _blocks(plan: Plan, weights: Weights, slot: Slot) -> Iterator[NDArray[np.uint8]]:
    if slot.name not in plan.tensors.sources:
        return byte_blocks([_score_row(plan, weights)], slot, plan.tensors.head)
    source = plan.tensors.sources[slot.name]
    return byte_blocks(weights.parts(source), slot, source)


def _score_row(plan: Plan, weights: Weights) -> Tensor:
    """Yes minus no, in fp32: the product with it is the difference of the two logits."""
    reranker, head = plan.reranker, plan.tensors.head
    assert reranker is not None
    assert reranker.yes_id is not None
    row = weights.read_row(head, reranker.yes_id).float()
    return (row if reranker.no_id is None else row - weights.read_row(head, reranker.no_id).float())[None]


def _copy(plan: Plan, folder: Path) -> None:
    """The tokenizer's files as they are, heads and code beside the weights, and Dense modules."""
    source = plan.source
    for name in _TOKENIZER:
        own = source.tokenizer / name
        if own.exists():
            shutil.copyfile(own, folder / name)
    for pattern in _BESIDE:
        for place in (source.backbone, source.root):
            for path in sorted(place.glob(pattern)):
                shutil.copyfile(path, folder / path.name)
    for name in plan.folders:
        shutil.copytree(source.root / name, folder / name)


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")


def _record(plan: Plan, digests: dict[str, str]) -> dict[str, Any]:
    return {
        "made_by": f"rose {rose.__version__}",
        "to": plan.wishes.to,
        "choices": [{"name": c.name, "value": c.value, "source": c.source} for c in plan.choices],
        "source": {
            "folder": str(plan.source.named),
            "base": str(plan.source.backbone),
            "adapters": [str(path) for path in plan.source.adapters],
            "sha256": digests,
        },
    }


def _made_of(source: Source) -> list[Path]:
    """Every file that a result is made of, once."""
    files = [
        path
        for folder in source.folders
        for path in sorted(folder.iterdir())
        if path.is_file() and (path.suffix in (*_WEIGHTS, ".json") or path.name in (*_TOKENIZER, ADAPTER_CONFIG))
    ]
    return list(dict.fromkeys(files))


def check_result(plan: Plan, folder: Path) -> ModelFolder:
    """Read the folder as a server would, and compare.

    Raises:
        CheckpointError: it says something else than was decided.
    """
    read = read_model_folder(folder)
    found: dict[str, Any] = {
        "architecture": read.architecture.architecture,
        "causal": read.architecture.causal,
        "max_tokens": read.max_tokens,
        "pooling": None if read.pooling is None else (read.pooling.modes, read.pooling.include_prompt),
        "normalize": read.normalize,
        "prompts": dict(read.prompts),
    }
    found["generates"] = read.generation is not None
    if read.generation is not None:
        found["end_ids"] = read.generation.end_ids
    if read.reranker is not None:
        found |= {"activation": read.reranker.activation, "prefix": read.reranker.prefix}
    for key, value in plan.expected.items():
        if key in found and found[key] != value:
            raise CheckpointError(f"the result reads as {key} {found[key]!r}, and {value!r} was decided")
    return read

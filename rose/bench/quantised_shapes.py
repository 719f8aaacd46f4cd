"""A made checkpoint once more, in 8 bits: every layer quantised, static scales watched over random ids, nothing judged.

Random weights have no accuracy to lose: such a folder is for timing. Knows schemes and folders; times nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from rose.bench.shapes import one_maker
from rose.config import read_model_folder
from rose.convert.calibrate import open_subject
from rose.convert.calibrate.run import quantise_all

# What `--dtype` of a load may be -> the scheme that is made of it.
SCHEME_OF = {"fp8": "fp8-tensor", "fp8-channel": "fp8-channel", "fp8-block": "fp8-block", "int8": "int8"}
# Rounding every product of random weights to 8 bits leaves that much of a vector at least; a wrong scale leaves none.
LEAST_COSINE = 0.97
_SEQUENCES, _TOKENS, _SEED = 8, 256, 11


def quantised_checkpoint(plain: Path, dtype: str, device: torch.device, *, task: str | None = None) -> Path:
    """The folder beside `plain`, made unless it is there already.

    Args:
        dtype: a key of SCHEME_OF. task: as `read_model_folder`.
    """
    target = plain.with_name(f"{plain.name}-{dtype}")
    with one_maker(target):
        if (target / "complete").exists():
            return target
        shutil.rmtree(target, ignore_errors=True)
        folder = read_model_folder(plain, task=task)  # type: ignore[arg-type]
        subject = open_subject(folder, _ids(folder.architecture.vocab_size, folder.max_tokens), device=device)
        quantise_all(subject, SCHEME_OF[dtype], target)
        (target / "complete").touch()
        return target


def _ids(vocab_size: int, most: int) -> Sequence[Sequence[int]]:
    draw = np.random.default_rng(_SEED)
    shape = (_SEQUENCES, min(_TOKENS, most))
    found: list[list[int]] = draw.integers(5, vocab_size, size=shape).tolist()
    return found

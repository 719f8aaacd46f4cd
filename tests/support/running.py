"""Run a loaded model on id lists, without an engine."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from rose.attention_backends import load_backend
from rose.batch import Batch
from rose.config import ModelFolder, read_model_folder
from rose.convert import load_model
from rose.models.embedder import Embedder

CPU = torch.device("cpu")


def load(path: Path, **arguments) -> Embedder:
    """The embedder of a folder; `pooling` and `causal` go to the reading, the rest to the loading."""
    reading = {key: arguments.pop(key) for key in ("pooling", "causal") if key in arguments}
    model = load_model(read_model_folder(path, **reading), **arguments)
    assert isinstance(model, Embedder)
    return model


def batch_of(model: Embedder, sequences: list[list[int]], dtype: torch.dtype = torch.float32) -> Batch:
    batch = Batch.pack(sequences)
    batch.attention = load_backend("torch_sdpa", model.attention_spec(CPU, dtype)).plan(batch)
    return batch


@torch.inference_mode()
def hidden_of(model: Embedder, sequences: list[list[int]]) -> list[Tensor]:
    """Hidden rows [length, D] of each sequence, all of them run in one batch."""
    batch = batch_of(model, sequences)
    return list(model.backbone(batch).split(batch.lengths))


def embed(model: Embedder, sequences: list[list[int]], output: str = "dense") -> Tensor:
    return model(batch_of(model, sequences), [output])[output]


def encode(folder: ModelFolder, texts: list[str]) -> list[list[int]]:
    """Ids as the front has them: no padding, cut at the model's limit."""
    tokenizer = Tokenizer.from_file(str(folder.backbone_path / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(folder.max_tokens)
    return [encoding.ids for encoding in tokenizer.encode_batch(texts)]


def random_sequences(lengths: list[int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Ids from 5 on, so that no special token is among them."""
    draw = random.Random(seed)
    return [[draw.randrange(5, vocab_size) for _ in range(length)] for length in lengths]

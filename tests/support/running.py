"""Run a loaded model on id lists, without an engine."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from rose.attention_backends import load_backend
from rose.batch import Batch
from rose.config import ModelFolder, read_model_folder
from rose.convert import load_model
from rose.models.base import ServedModel
from rose.models.causal_lm import CausalLM
from rose.models.embedder import Embedder
from rose.models.reranker import Reranker

CPU = torch.device("cpu")


def load(path: Path, **arguments) -> Embedder:
    """The embedder of a folder; what settles the reading goes there, the rest to the loading."""
    model = _load(path, arguments)
    assert isinstance(model, Embedder)
    return model


def load_reranker(path: Path, **arguments) -> Reranker:
    model = _load(path, arguments)
    assert isinstance(model, Reranker)
    return model


def _load(path: Path, arguments: dict[str, Any]) -> ServedModel:
    reading = {key: arguments.pop(key) for key in ("pooling", "causal", "task", "template") if key in arguments}
    return load_model(read_model_folder(path, **reading), **arguments)


def batch_of(
    model: ServedModel,
    sequences: list[list[int]],
    dtype: torch.dtype = torch.float32,
    *,
    type_ids: list[list[int]] | None = None,
    spans: list[list[tuple[int, int]]] | None = None,
) -> Batch:
    """
    Args:
        type_ids: token types beside the ids. spans: of each sequence, counted from its first token.
    """
    batch = Batch.pack(sequences)
    if type_ids is not None:
        batch.type_ids = torch.tensor([i for types in type_ids for i in types], dtype=torch.int32)
    if spans is not None:
        starts = batch.cu_seqlens.tolist()
        rows = [(at + a, at + b) for at, own in zip(starts, spans, strict=False) for a, b in own]
        batch.spans = torch.tensor(rows, dtype=torch.int32).reshape(-1, 2)
    batch.attention = load_backend("torch_sdpa", model.attention_spec(CPU, dtype)).plan(batch)
    return batch


def encode_pairs(folder: ModelFolder, pairs: list[tuple[str, str]]) -> tuple[list[list[int]], list[list[int]] | None]:
    """(ids, token types) as the front has them, in the form the folder's reranker is written in."""
    tokenizer = Tokenizer.from_file(str(folder.backbone_path / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    reranker = folder.reranker
    assert reranker is not None
    if reranker.form == "pair":
        encodings = tokenizer.encode_batch(pairs)
        types = [e.type_ids for e in encodings] if folder.architecture.type_vocab_size > 1 else None
        return [e.ids for e in encodings], types
    prefix, suffix = (tokenizer.encode(t, add_special_tokens=False).ids for t in (reranker.prefix, reranker.suffix))
    bodies = [tokenizer.encode(reranker.body(*pair), add_special_tokens=False).ids for pair in pairs]
    return [[*prefix, *body, *suffix] for body in bodies], None


def score(model: Reranker, pairs: list[tuple[str, str]], dtype: torch.dtype = torch.float32) -> Tensor:
    """Raw scores [pairs, labels]."""
    ids, types = encode_pairs(model.folder, pairs)
    return model(batch_of(model, ids, dtype, type_ids=types), ["score"])["score"]


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


@torch.inference_mode()
def logits_of(
    model: CausalLM, sequences: list[list[int]], dtype: torch.dtype = torch.float32, *, every_row: bool = False
) -> Tensor:
    """Logits after each sequence's last token, [B, V], or after every token, [T, V]; whole sequences, no cache."""
    batch = Batch.pack(sequences)
    spec = replace(model.attention_spec(CPU, dtype), layout="ragged")
    batch.attention = load_backend("torch_sdpa", spec).plan(batch)
    rows = torch.arange(batch.num_tokens, dtype=torch.int32) if every_row else batch.cu_seqlens[1:] - 1
    return model(batch, rows)

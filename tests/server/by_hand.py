"""A model run on one sequence, past engine, batching and wire; and what to compare with."""

from __future__ import annotations

import numpy as np
import torch

from rose.attention_backends.base import load_backend
from rose.batch import Batch


def by_hand(model, ids, output: str) -> np.ndarray:
    """One output of an fp32 CPU model for one sequence."""
    batch = Batch.pack([list(ids)])
    backend = load_backend("torch_sdpa", model.attention_spec(torch.device("cpu"), torch.float32))
    batch.attention = backend.plan(batch)
    with torch.inference_mode():
        return model(batch, (output,))[output][0].numpy()


def random_sequences(vocab: int, lengths, seed: int = 0):
    random = np.random.default_rng(seed)
    return [random.integers(0, vocab, size=n).astype(np.int32) for n in lengths]


def cosine(a, b) -> float:
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))

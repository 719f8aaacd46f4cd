"""A model whose answers can be worked out by hand: a deterministic function of ids, positions, types and boundaries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from rose.attention_backends.base import AttentionSpec
from rose.batch import Batch
from rose.engine.execution import DoneTicket, expected_end_after
from rose.models.base import OutputSpec

VOCAB = 1000
DIMENSION = 4


class NoAttention:
    """A backend that plans nothing and remembers what it was asked for."""

    name = "none"
    capturable = True

    def __init__(self) -> None:
        self.planned: list[tuple[object, int]] = []
        self.released: list[object] = []

    def supports(self, spec: AttentionSpec) -> str | None:
        return None

    def plan(self, batch: Batch, slot: int = 0):
        self.planned.append((batch.key, slot))
        return self

    def run(self, q, k, v, layer):
        return v

    def release(self, key) -> None:
        self.released.append(key)

    def workspace(self):
        raise NotImplementedError


class FakeModel:
    """`pooled` and `flags` have a row a sequence or span, `tokens` a row a token. An id of 666 makes the forward raise.

    Attributes:
        span_batches: spans of each batch that had any.
    """

    outputs: Mapping[str, OutputSpec] = {
        "pooled": OutputSpec(dtype="float32", dimension=DIMENSION),
        "flags": OutputSpec(dtype="int8", dimension=1),
        "tokens": OutputSpec(dtype="float32", dimension=3, per_token=True),
        "sparse": OutputSpec(dtype="float32", dimension=1, unavailable="sparse_linear.pt is missing"),
    }
    default_output = "pooled"
    vocab_size = VOCAB
    num_layers = 1

    def __init__(self) -> None:
        self.shapes: list[tuple[int, int]] = []
        self.span_batches: list[list[list[int]]] = []

    def attention_spec(self, device: torch.device, dtype: torch.dtype) -> AttentionSpec:
        return AttentionSpec(
            num_heads=1, num_kv_heads=1, head_dim=64, dtype=dtype, device=device, causal=False, scale=0.125
        )

    def __call__(self, batch: Batch, outputs: Sequence[str]) -> dict[str, torch.Tensor]:
        self.shapes.append((batch.num_tokens, batch.num_sequences))
        if (batch.ids == 666).any():
            raise ArithmeticError("666 cannot be embedded")
        types = torch.zeros_like(batch.ids) if batch.type_ids is None else batch.type_ids
        rows = torch.stack([batch.ids, batch.positions, types], dim=1).float()
        starts, ends = batch.cu_seqlens[:-1].long(), batch.cu_seqlens[1:].long()
        if batch.spans is not None:
            self.span_batches.append(batch.spans.tolist())
            starts, ends = batch.spans.long().T
        sums = torch.cat([torch.zeros(1, 3), rows.cumsum(0, dtype=torch.float64)])
        pooled = torch.cat([(sums[ends] - sums[starts]).float(), (ends - starts)[:, None].float()], dim=1)
        found = {"pooled": pooled, "flags": (ends - starts)[:, None].to(torch.int8), "tokens": rows}
        return {name: found[name] for name in outputs}


def expected_pooled(ids: np.ndarray, types: np.ndarray | None = None) -> np.ndarray:
    """What `pooled` must be for one sequence, by plain integer sums."""
    n = len(ids)
    return np.array([int(ids.sum()), n * (n - 1) // 2, 0 if types is None else int(types.sum()), n], dtype=np.float32)


def expected_tokens(ids: np.ndarray) -> np.ndarray:
    return np.stack([ids, np.arange(len(ids)), np.zeros(len(ids))], axis=1).astype(np.float32)


class ManualExecutor:
    """Runs launched functions only when told to, in order."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.waiting: list[tuple[DoneTicket, Callable]] = []
        self.expected: list[float | None] = []
        self.last: DoneTicket | None = None

    def launch(self, fn, *, expected_seconds=None):
        self.last = DoneTicket(expected_end_after(self.last, expected_seconds))
        self.waiting.append((self.last, fn))
        self.expected.append(expected_seconds)
        return self.last

    def run_one(self, seconds: float = 0.001) -> None:
        ticket, fn = self.waiting.pop(0)
        try:
            ticket.settle(fn(), seconds)
        except Exception as error:
            ticket.fail(error)

    def fileno(self):
        return None

    def acknowledge(self):
        pass

    def close(self):
        pass

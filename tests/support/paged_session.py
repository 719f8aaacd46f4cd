"""A generating model run batch by batch over pages and rows of state, without an engine: the test says which sequence
gets which tokens when."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rose.attention_backends import load_backend
from rose.attention_backends.kv_cache import KVCache
from rose.batch import Batch, PagedContext
from rose.engine.generation.states import StatePools
from rose.models.base import GenerativeModel


class PagedSession:
    """Sequences are known by small numbers.

    Each has `pages` pages of its own, scattered, and a row of state that is not its number. Every row of state begins
    as NaN, so that a sequence that starts from what a row holds gives none of its tokens.
    """

    def __init__(
        self,
        model: GenerativeModel,
        *,
        sequences: int = 8,
        pages: int = 20,
        page_size: int = 8,
        backend: str = "torch_paged",
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model, self.page_size, self.device = model, page_size, torch.device(device)
        spec = model.attention_spec(self.device, dtype)
        heads = spec.num_kv_heads, spec.head_dim
        cache = KVCache(model.kv_layers, sequences * pages + 1, page_size, *heads, dtype, self.device)
        self.backend = load_backend(backend, spec)
        self.backend.bind(cache)
        self.table = torch.randperm(sequences * pages).view(sequences, pages).to(torch.int32) + 1
        self.rows = torch.randperm(sequences).to(torch.int32) + 1
        self.states = None
        if model.recurrent is not None:
            self.states = StatePools(model.recurrent, sequences + 1, dtype, self.device)
            for layer in model.recurrent.layers:
                self.states.conv(layer).fill_(torch.nan)
                self.states.recurrent(layer).fill_(torch.nan)
        self.lengths = [0] * sequences

    def forget(self, sequence: int) -> None:
        """It ends; what comes under its number is another one, in the same pages and row."""
        self.lengths[sequence] = 0

    def batch(self, chunks: Sequence[tuple[int, list[int]]], *, bound: int | None = None) -> Batch:
        """Stage one batch; chunks of one token that stand first are decoding sequences.

        Args:
            bound: of what any sequence may have in the cache, for a batch that a graph captures; None: what it has.
        """
        batch = Batch.pack([ids for _, ids in chunks], self.device)
        known = [self.lengths[sequence] for sequence, _ in chunks]
        positions = torch.cat([torch.arange(at, at + len(ids)) for at, (_, ids) in zip(known, chunks, strict=True)])
        batch.positions = positions.to(self.device, torch.int32)
        slots = []
        for sequence, ids in chunks:
            at = torch.arange(self.lengths[sequence], self.lengths[sequence] + len(ids))
            slots.append(self.table[sequence][at // self.page_size] * self.page_size + at % self.page_size)
            self.lengths[sequence] += len(ids)
        owners = [sequence for sequence, _ in chunks]
        batch.paged = PagedContext(
            page_table=self.table[owners].to(self.device),
            kv_lengths=torch.tensor([self.lengths[s] for s in owners], dtype=torch.int32, device=self.device),
            slots=torch.cat(slots).to(self.device, torch.int32),
            page_size=self.page_size,
            max_kv_length=bound or max(self.lengths[s] for s in owners),
            decodes=next((i for i, (_, ids) in enumerate(chunks) if len(ids) > 1), len(chunks)),
            states=None if self.states is None else self.rows[owners].to(self.device),
        )
        batch.states = self.states
        batch.attention = self.backend.plan(batch)
        return batch

    def run(self, chunks: Sequence[tuple[int, list[int]]]) -> Tensor:
        """Logits [len(chunks), V] after each chunk's last token."""
        batch = self.batch(chunks)
        return self.model(batch, batch.cu_seqlens[1:] - 1)

    def every_row(self, chunks: Sequence[tuple[int, list[int]]]) -> list[Tensor]:
        """Logits after every token of each chunk."""
        batch = self.batch(chunks)
        rows = torch.arange(batch.num_tokens, dtype=torch.int32, device=self.device)
        return list(self.model(batch, rows).split(batch.lengths))

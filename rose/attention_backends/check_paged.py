"""The self-check of one paged backend: prompts, chunks behind a history, tokens, and all of them in one batch.

Four sequences in scattered pages are computed batch by batch and held against the float64 reference of the whole ones.
Every row of the cache that nobody has written yet is NaN, as a request with broken numbers leaves it behind: whatever
reads beyond a sequence's end shows. Knows backends by their surface; knows no models and no engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rose.attention_backends.base import AttentionBackend, AttentionSpec, Paged
from rose.attention_backends.kv_cache import KVCache
from rose.attention_backends.reference import TOLERANCE, reference_attention, row_error
from rose.attention_backends.rows import unpack
from rose.batch import Batch, PagedContext

# (sequence, tokens)
Chunks = Sequence[tuple[int, int]]

PAGE = 16
LONGEST = 147
# Another layer's rows stay as they are.
_LAYERS, _LAYER = (0, 1), 1
_LENGTHS = (LONGEST, 33, 23, 4)
_DECODING = (((1, 1), (2, 1), (0, 1)),) * 7
# What each batch is, and the tokens of each sequence in it. Sequence 1 goes over the end of a page as it decodes, and
# sequence 2 as it begins to.
_BATCHES: tuple[tuple[str, Chunks], ...] = (
    ("prompts", ((0, 70), (1, 16), (2, 5))),
    ("chunks behind a history", ((0, 50), (1, 9))),
    ("tokens and chunks in one batch", ((1, 1), (3, 1), (0, 20), (2, 11))),
    ("chunks behind tokens", ((3, 3),)),
    *(("decoding", chunks) for chunks in _DECODING),
)


class NotFinite(str):
    """A reason: numbers that are not finite came out."""


def check_paged(backend: AttentionBackend, spec: AttentionSpec, poison: float = math.nan) -> str | None:
    """
    Args:
        backend: not bound yet.
        poison: what rows of the cache hold that nobody has written.

    Returns:
        None if it agrees with the reference and writes where it should, else what was wrong, in words.

    Raises:
        whatever the backend raises.
    """
    if not isinstance(backend, Paged):
        return "it keeps no pages"
    served = _Served(spec, poison)
    backend.bind(served.cache)
    for number, (what, wanted) in enumerate(_BATCHES):
        chunks = served.left_of(wanted)
        if not chunks:
            continue
        # Every other step as a graph's bucket has it: with dummies behind, and a bound that no sequence reaches.
        padded = what == "decoding" and number % 2 == 0
        starts = list(served.done)
        batch, qkv = served.next_batch(chunks, dummies=2 if padded else 0)
        out = backend.plan(batch, number % 2).run(*qkv, _LAYER)
        if (reason := served.compare(out, chunks, starts, what)) is not None:
            return reason
    return served.compare_cache()


class _Served:
    """The sequences, their pages, and how far each of them is."""

    def __init__(self, spec: AttentionSpec, poison: float) -> None:
        self.spec = spec
        longest = min(spec.max_length or LONGEST, LONGEST)
        lengths = [min(length, longest) for length in _LENGTHS]
        generator = torch.Generator().manual_seed(1)
        heads = spec.num_heads + 2 * spec.num_kv_heads
        packed = [torch.randn(length, heads, spec.head_dim, generator=generator) for length in lengths]
        self.packed = [values.to(spec.device, spec.dtype) for values in packed]
        self.expected = [
            reference_attention(*self._heads(values), [len(values)], causal=True, scale=spec.scale, window=spec.window)
            for values in self.packed
        ]
        counts = [-(-length // PAGE) for length in lengths]
        spare = 3
        pages = sum(counts) + spare
        self.cache = KVCache(_LAYERS, pages + 1, PAGE, spec.num_kv_heads, spec.head_dim, spec.dtype, spec.device)
        for layer in _LAYERS:
            for part in self.cache.layer(layer):
                part[1:] = poison  # page 0 is the dummies', and what a table names beyond a sequence's pages
        self.poison = poison
        order = (1 + torch.randperm(pages, generator=generator)).tolist()
        self.tables: list[list[int]] = [[order.pop() for _ in range(count)] for count in counts]
        self.done = [0] * len(lengths)

    def left_of(self, wanted: Chunks) -> list[tuple[int, int]]:
        """As much of them as there is; sequences of one token first, as a plan has them."""
        left = [(i, min(n, len(self.packed[i]) - self.done[i])) for i, n in wanted]
        return sorted((chunk for chunk in left if chunk[1] > 0), key=lambda chunk: chunk[1] > 1)

    def next_batch(self, chunks: Chunks, dummies: int) -> tuple[Batch, tuple[Tensor, Tensor, Tensor]]:
        """(batch, (q, k, v)); `done` is behind its tokens then."""
        device, rows, kv = self.spec.device, [], []
        slots: list[int] = []
        positions: list[int] = []
        for i, count in chunks:
            own = range(self.done[i], self.done[i] + count)
            self.done[i] = own.stop
            positions += own
            slots += [self._slot(i, position) for position in own]
            rows.append(self.packed[i][own.start : own.stop])
            kv.append(own.stop)
        lengths = [count for _, count in chunks] + [1] * dummies
        rows += [torch.ones_like(self.packed[0][:1])] * dummies
        kv += [1] * dummies
        slots += [0] * dummies
        positions += [0] * dummies
        width = max(map(len, self.tables)) + 1
        table = [self.tables[i] + [0] * (width - len(self.tables[i])) for i, _ in chunks] + [[0] * width] * dummies
        batch = Batch.pack([[0] * length for length in lengths], device=device)
        tables, kv_lengths, rows_of, batch.positions = (
            torch.tensor(x, dtype=torch.int32, device=device) for x in (table, kv, slots, positions)
        )
        decodes = next((at for at, length in enumerate(lengths) if length > 1), len(lengths))
        bound = width * PAGE if dummies else max(kv)
        batch.paged = PagedContext(tables, kv_lengths, rows_of, PAGE, bound, decodes, host_kv_lengths=tuple(kv))
        return batch, self._heads(torch.cat(rows))

    def compare(self, out: Tensor, chunks: Chunks, starts: Sequence[int], what: str) -> str | None:
        at = 0
        for i, count in chunks:
            error = row_error(out[at : at + count], self.expected[i][starts[i] : starts[i] + count])
            at += count
            if error == math.inf:
                return NotFinite(f"not finite in {what} on {described(self.spec)}")
            if error > TOLERANCE[self.spec.dtype]:
                return (
                    f"wrong in {what} on {described(self.spec)}: a row is off by {error:.3g} of its length, at most "
                    f"{TOLERANCE[self.spec.dtype]:.3g} is rounding"
                )
        return None

    def compare_cache(self) -> str | None:
        """Every key and value in its row, and nothing in any other."""
        for layer in _LAYERS:
            for part, which in zip(self.cache.layer(layer), (1, 2), strict=True):
                wanted = torch.full_like(part, self.poison).flatten(0, 1)
                for i, values in enumerate(self.packed):
                    slots = [self._slot(i, position) for position in range(self.done[i])]
                    if layer == _LAYER:
                        wanted[slots] = self._heads(values)[which][: self.done[i]]
                found = part.flatten(0, 1)
                same = (found == wanted) | (found.isnan() & wanted.isnan())
                if not bool(same[PAGE:].all()):
                    return f"it stores keys or values elsewhere than it should, on {described(self.spec)}"
        return None

    def _heads(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return unpack(packed, self.spec.num_heads, self.spec.num_kv_heads)

    def _slot(self, i: int, position: int) -> int:
        return self.tables[i][position // PAGE] * PAGE + position % PAGE


def described(spec: AttentionSpec) -> str:
    """Its heads and numbers, in words."""
    return (
        f"{spec.num_heads}/{spec.num_kv_heads} heads of {spec.head_dim}, {str(spec.dtype).removeprefix('torch.')}, "
        f"{'causal' if spec.causal else 'bidirectional'}"
    )

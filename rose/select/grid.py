"""The loads that are measured, the most telling first: even and mixed ones, and steps of generating.

Every one of them fills a bucket exactly, so that nothing is padded. Knows lengths; runs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SEQUENCES = (1, 4, 16, 64, 256)
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# Lengths of one batch each, in the sizes texts come in; sums and counts are those of buckets.
MIXED: tuple[tuple[int, ...], ...] = (
    (37, 128, 1, 300, 40, 6),
    (200, 30, 90, 250, 12, 64, 100, 22),
    *((37, 128, 1, 300, 64, 512, 256, 238) * n for n in (2, 8)),
    (1500, 300, 40, 20, 12, 176),
    (4096, 1024, 512, 256, 200, 56),
)
DECODES = ((1, 128), (1, 2048), (1, 16384), (8, 512), (8, 4096), (64, 128), (64, 1024), (256, 256))


@dataclass(frozen=True, slots=True)
class GridLoad:
    """One batch shape. Of a decode step `lengths` are those of the caches."""

    lengths: tuple[int, ...]
    kind: Literal["batch", "decode"] = "batch"

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def sequences(self) -> int:
        return len(self.lengths)

    @property
    def max_length(self) -> int:
        return bound_of(max(self.lengths))

    @property
    def name(self) -> str:
        if min(self.lengths) == max(self.lengths):
            return f"{self.sequences} x {self.lengths[0]}"
        return f"{self.sequences} of {self.tokens}"


def bound_of(length: int) -> int:
    """The bound of a longest sequence, as graph keys have it: a power of two, 64 at least."""
    return max(64, 1 << (length - 1).bit_length())


def batches(longest: int, most_tokens: int) -> tuple[GridLoad, ...]:
    """Loads of whole sequences, in the order in which they are worth measuring.

    Args:
        longest: of the model, in tokens.
        most_tokens: of one batch.
    """
    even = [(n,) * count for count in SEQUENCES for n in LENGTHS]
    fitting = [lengths for lengths in (*even, *MIXED) if max(lengths) <= longest and sum(lengths) <= most_tokens]
    return tuple(GridLoad(lengths) for lengths in sorted(fitting, key=_worth))


def decodes(longest: int, most_tokens: int) -> tuple[GridLoad, ...]:
    """Steps that give each sequence one token, by the lengths of their caches."""
    fitting = [(n,) * count for count, n in DECODES if n <= longest and n * count <= most_tokens]
    return tuple(GridLoad(lengths, "decode") for lengths in fitting)


# The published loads and those on either side of a crossover come first: whoever runs out of time has these.
_FIRST = ((1, 128), (1, 512), (1, 4096), (16, 512), (64, 512), (1, 16384), (4, 512), (16, 128), (1, 256), (1, 2048))


def _worth(lengths: tuple[int, ...]) -> tuple[int, int, int]:
    shape = (len(lengths), max(lengths))
    even = min(lengths) == max(lengths)
    place = _FIRST.index(shape) if even and shape in _FIRST else len(_FIRST)
    return place, sum(lengths), len(lengths)

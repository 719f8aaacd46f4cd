"""Where a tokenizer puts its special tokens around two texts: read once off an encoded pair, then applied to ids.

    opening, first text, middle, second text, closing

Pairs are put together from the ids of their texts, so that a query is encoded once for all its documents and a document
can be cut without losing a special token. Knows ids and token types; knows neither queries nor limits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from rose.errors import CheckpointError
from rose.proto.convert import IntArray

# The two letters of the pair that is encoded to see the layout.
FIRST, SECOND = "a", "b"


@dataclass(frozen=True, slots=True)
class PairLayout:
    """Special tokens of a pair, as (ids, token types).

    Attributes:
        types: token types of the first and of the second text.
    """

    opening: tuple[IntArray, IntArray]
    middle: tuple[IntArray, IntArray]
    closing: tuple[IntArray, IntArray]
    types: tuple[int, int]

    @property
    def special_tokens(self) -> int:
        return len(self.opening[0]) + len(self.middle[0]) + len(self.closing[0])

    def ids(self, first: IntArray, second: IntArray) -> IntArray:
        """The whole sequence of a pair, from the ids of its texts without special tokens."""
        return np.concatenate((self.opening[0], first, self.middle[0], second, self.closing[0]))

    def token_types(self, first: IntArray, second: IntArray) -> IntArray:
        """Token types beside `ids(first, second)`."""
        runs = (np.full(len(ids), kind, dtype=np.int32) for ids, kind in zip((first, second), self.types, strict=True))
        return np.concatenate((self.opening[1], next(runs), self.middle[1], next(runs), self.closing[1]))


def read_pair_layout(tokenizer: Tokenizer) -> PairLayout:
    """
    Args:
        tokenizer: neither padding nor cutting.

    Raises:
        CheckpointError: the second text comes first, or special tokens stand inside a text.
    """
    encoding = tokenizer.encode(FIRST, SECOND)
    owners = encoding.sequence_ids
    ids, types = np.array(encoding.ids, dtype=np.int32), np.array(encoding.type_ids, dtype=np.int32)
    runs = [[i for i, owner in enumerate(owners) if owner == text] for text in (0, 1)]
    if not all(runs) or any(run != list(range(run[0], run[-1] + 1)) for run in runs) or runs[0][0] > runs[1][0]:
        raise CheckpointError(f"the tokenizer does not keep two texts apart and in order: {encoding.tokens}")
    first, second = runs

    def between(start: int, end: int) -> tuple[IntArray, IntArray]:
        return ids[start:end], types[start:end]

    return PairLayout(
        opening=between(0, first[0]),
        middle=between(first[-1] + 1, second[0]),
        closing=between(second[-1] + 1, len(ids)),
        types=(int(types[first[0]]), int(types[second[0]])),
    )

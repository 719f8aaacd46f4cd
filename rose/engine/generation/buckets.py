"""`GenerationKey` and the rounding that leads to it: what two batches must share to run in one captured graph.

Batches that decode only are padded: sequences to 1 2 4 8 16 24 32 ..., the longest sequence's keys to a power of four
times 1024, both with dummy sequences or empty pages. All that a graph must not know comes from the device. Batches with
chunks of prompts keep their own shape. Plain Python; knows neither devices nor graphs.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

# Keys the smallest graph is made for. Between bounds lies a factor of four: an attention kernel leaves out the keys a
# sequence does not have, so that a wide bound costs it little, while every bound is one more graph for each size.
SMALLEST_KV_BOUND = 1024
KV_STEP = 4


class Draw(NamedTuple):
    """How the tokens of a batch are drawn: what is computed behind the model.

    Attributes:
        sampled: some row draws; else all take the likeliest token.
        logprobs: alternatives stated of every row, 0 for the drawn token's probability alone; -1 for nothing.
        banned: ids some row may not draw, rounded up; 0 for none.
    """

    sampled: bool = False
    logprobs: int = -1
    banned: int = 0


GREEDY = Draw()


class GenerationKey(NamedTuple):
    """Shape and work of one batch, dummies included.

    Attributes:
        tokens, sequences: of the batch as the model sees it; a token is drawn for every sequence.
        kv_bound: most keys of one sequence.
        draw: how tokens are drawn.
        padded: rounded to a bucket of decoding sequences, so that a graph may serve it; else the batch's own shape.
    """

    tokens: int
    sequences: int
    kv_bound: int
    draw: Draw = GREEDY
    padded: bool = False


class GenerationBuckets:
    """The rounding of one engine."""

    def __init__(self, *, captures: bool, max_running: int, max_tokens: int) -> None:
        """
        Args:
            captures: graphs are to be had; else every batch keeps its own shape.
            max_running: most sequences of a decoding batch.
            max_tokens: longest sequence.
        """
        self._captures = captures
        self.sequences = _sequence_steps(max_running)
        self.bounds = _kv_bounds(max_tokens)

    def key(self, decodes: int, chunks: int, tokens: int, longest: int, draw: Draw) -> GenerationKey:
        """
        Args:
            decodes, chunks: sequences with one token each, and those with a chunk of their prompt.
            tokens: of them all.
            longest: keys of the longest sequence.
        """
        if chunks or not self._captures or decodes > self.sequences[-1]:
            return GenerationKey(tokens, decodes + chunks, longest, draw)
        size = self.sequences[bisect_left(self.sequences, decodes)]
        return self.decode_key(size, longest, draw)

    def decode_key(self, sequences: int, longest: int, draw: Draw = GREEDY) -> GenerationKey:
        """The padded key of a batch of `sequences`, which is one of `self.sequences`."""
        bound = self.bounds[bisect_left(self.bounds, longest)]
        return GenerationKey(sequences, sequences, bound, draw, padded=True)


def round_up(count: int) -> int:
    """To a power of two; 0 stays."""
    return 1 << (count - 1).bit_length() if count else 0


def _sequence_steps(at_least: int) -> list[int]:
    # Steps of 8 up to 64: a decoding step reads the weights once whatever its sequences, and what padding costs is
    # wider products only.
    steps = [1]
    while (last := steps[-1]) < at_least:
        steps.append(2 * last if last < 8 else last + (8 if last < 64 else 16 if last < 128 else 32))
    return steps


def _kv_bounds(max_tokens: int) -> list[int]:
    bounds = [SMALLEST_KV_BOUND]
    while bounds[-1] < max_tokens:
        bounds.append(KV_STEP * bounds[-1])
    return [min(bound, max_tokens) for bound in bounds]

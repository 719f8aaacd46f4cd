"""`GenerationKey` and the rounding that leads to it: what two batches must share to run in one captured graph.

Decoding sequences round up to 1 2 4 8 16 24 32 ...; beside chunks of prompts, where one more row of a product costs
next to nothing and each size is a graph, to 1 4 16 32 64 128 .... Chunks round up to a power of two, all tokens in
steps of 64 to 1024 and of 256 above, the longest sequence's keys to a power of four times 1024. What rounding adds
becomes dummy sequences. All that a graph must not know comes from the device. Plain Python; knows neither devices nor
graphs.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

# Keys the smallest graph is made for. Between bounds lies a factor of four: an attention kernel leaves out the keys a
# sequence does not have, so that a wide bound costs it little, while every bound is one more graph for each size.
SMALLEST_KV_BOUND = 1024
KV_STEP = 4
# A full budget and the dummies beside it: without these steps, a batch of it would be padded by 256 tokens.
DUMMY_ROOM = 256


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
        decodes: leading sequences of one token each; the others are chunks of prompts.
        kv_bound: most keys of one sequence.
        draw: how tokens are drawn.
        padded: rounded to a bucket, so that a graph may serve it; else the batch's own shape.
    """

    tokens: int
    sequences: int
    decodes: int
    kv_bound: int
    draw: Draw = GREEDY
    padded: bool = False


class GenerationBuckets:
    """The rounding of one engine."""

    def __init__(
        self, *, captures: bool, max_running: int, max_tokens: int, prompts: bool = False, batch_tokens: int = 2048
    ) -> None:
        """
        Args:
            captures: graphs are to be had; else every batch keeps its own shape.
            max_running: most sequences of a batch.
            max_tokens: longest sequence.
            prompts: batches with chunks of prompts may be captured too; else these keep their own shape.
            batch_tokens: most tokens of a batch.
        """
        self._captures = captures
        self._prompts = captures and prompts
        self.sequences = _sequence_steps(max_running)
        self.bounds = _kv_bounds(max_tokens)
        self._beside = _beside_steps(max_running)
        self.tokens = _token_steps(batch_tokens)

    def key(self, decodes: int, chunks: int, tokens: int, longest: int, draw: Draw) -> GenerationKey:
        """
        Args:
            decodes, chunks: sequences with one token each, and those with a chunk of their prompt.
            tokens: of them all.
            longest: keys of the longest sequence.
        """
        if chunks:
            key = self._prompt_key(decodes, chunks, tokens, longest, draw) if self._prompts else None
            return key or GenerationKey(tokens, decodes + chunks, decodes, longest, draw)
        if not self._captures or decodes > self.sequences[-1]:
            return GenerationKey(tokens, decodes, decodes, longest, draw)
        size = self.sequences[bisect_left(self.sequences, decodes)]
        return self.decode_key(size, longest, draw)

    def decode_key(self, sequences: int, longest: int, draw: Draw = GREEDY) -> GenerationKey:
        """The padded key of a batch of `sequences`, which is one of `self.sequences`."""
        bound = self.bounds[bisect_left(self.bounds, longest)]
        return GenerationKey(sequences, sequences, sequences, bound, draw, padded=True)

    def prompt_keys(self, alone: int, beside: int, draw: Draw = GREEDY) -> list[GenerationKey]:
        """The keys of batches of one prompt: alone of up to `alone` tokens, with a dummy behind it and just filling its
        bucket; beside any number of decoding sequences of up to `beside` tokens in all. None where such batches are not
        captured."""
        found: dict[GenerationKey, None] = {}
        for size in self.tokens if self._prompts else ():
            if size <= alone:
                found |= dict.fromkeys(self.key(0, 1, prompt, prompt, draw) for prompt in (size, size - 1))
            if size <= beside:
                leading = [n for n in self._beside[1:] if n < size - 1]
                found |= dict.fromkeys(self.key(n, 1, size - 1, size - 1 - n, draw) for n in leading)
        return [key for key in found if key.padded]

    def _prompt_key(self, decodes: int, chunks: int, tokens: int, longest: int, draw: Draw) -> GenerationKey | None:
        """None where the batch is larger than any bucket."""
        if decodes > self._beside[-1]:
            return None
        leading = self._beside[bisect_left(self._beside, decodes)]
        least = tokens - decodes + leading
        following = round_up(chunks)
        if following == chunks and least not in self.tokens:
            following *= 2  # tokens are missing, and a dummy must bring them
        size = bisect_left(self.tokens, least + following - chunks)
        if size == len(self.tokens):
            return None
        rounded = self.tokens[size]
        # The last dummy has most of what is missing, and its keys are bounded as those of all.
        longest = max(longest, rounded - least)
        if longest > self.bounds[-1]:
            return None
        bound = self.bounds[bisect_left(self.bounds, longest)]
        return GenerationKey(rounded, leading + following, leading, bound, draw, padded=True)


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


def _beside_steps(at_least: int) -> list[int]:
    steps = [0, 1]
    while (last := steps[-1]) < at_least:
        steps.append(4 * last if last < 16 else 2 * last if last < 64 else last + 64)
    return steps


def _token_steps(batch_tokens: int) -> list[int]:
    steps = [*range(64, min(1024, batch_tokens) + 1, 64), *range(1280, batch_tokens + 1, 256)]
    return sorted({*steps, *range(batch_tokens, batch_tokens + DUMMY_ROOM + 1, 64)})


def _kv_bounds(max_tokens: int) -> list[int]:
    bounds = [SMALLEST_KV_BOUND]
    while bounds[-1] < max_tokens:
        bounds.append(KV_STEP * bounds[-1])
    return [min(bound, max_tokens) for bound in bounds]

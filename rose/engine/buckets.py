"""`GraphKey` and the rounding that leads to it: what two batches must share to run in one captured graph.

Tokens round up in steps of 64 to 1024 (or as measured), then of 256 to the inflection point, above which the device
takes longer than the launches and no graph is needed; sequences to 1 2 3 4 6 8 12 16 24 ...; the longest sequence to a
power of two. What rounding adds becomes dummy sequences of their own. Plain Python; knows neither devices nor graphs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple, Protocol

SMALLEST_LENGTH_BOUND = 64
FINE_TOKENS, FINE_STEP, COARSE_STEP = 1024, 64, 256
# Keys of single sequences kept.
MAX_REMEMBERED = 1 << 16


class BatchKey(Hashable, Protocol):
    """What graphs and estimates need of a key, whatever batches it is of. Hashed by value.

    Attributes:
        tokens, sequences: of the batch as the model sees it.
        padded: rounded to a bucket, so that a graph may serve it.
    """

    @property
    def tokens(self) -> int: ...

    @property
    def sequences(self) -> int: ...

    @property
    def padded(self) -> bool: ...


class GraphKey(NamedTuple):
    """Shape and work of one batch, dummies included.

    Attributes:
        tokens, sequences: of the batch as the model sees it.
        max_length: bound of its longest sequence: a power of two, or the model's limit.
        outputs: what is computed.
        token_types: whether token types are given.
        padded: rounded to a bucket, so that a graph may serve it; else exactly the batch's own shape.
    """

    tokens: int
    sequences: int
    max_length: int
    outputs: tuple[str, ...]
    token_types: bool = False
    padded: bool = False


class Buckets:
    """The rounding of one engine."""

    def __init__(
        self, *, inflection_tokens: int, max_tokens: int, max_sequences: int, fine_tokens: int = FINE_TOKENS
    ) -> None:
        """
        Args:
            inflection_tokens: batches of more tokens keep their own shape; 0 keeps all.
            fine_tokens: up to here steps are of 64 tokens, above of 256.
            max_tokens: longest sequence of the model.
            max_sequences: most real sequences of a batch.
        """
        fine = range(FINE_STEP, min(fine_tokens, inflection_tokens) + 1, FINE_STEP)
        coarse = range((fine_tokens // COARSE_STEP + 1) * COARSE_STEP, inflection_tokens + 1, COARSE_STEP)
        self._tokens = [*fine, *coarse]
        self._bounds = _length_bounds(max_tokens)
        # Dummies come on top of the real sequences: two steps more than the most real ones leave room for them.
        # A batch of short texts is full of sequences, not of tokens: one step a few dummies above spares it the padding
        # that a third more sequences would have to be made of.
        self._sequences = sorted({*_sequence_steps(2 * max_sequences), max_sequences + max(1, max_sequences // 32)})
        self._singles: dict[tuple[int, tuple[str, ...], bool, bool], GraphKey] = {}

    def key(
        self, lengths: Sequence[int], outputs: tuple[str, ...], *, token_types: bool = False, spans: bool = False
    ) -> GraphKey:
        """The key of a batch of sequences of these lengths.

        Args:
            spans: rows of its outputs are spans, of which any number may come: it keeps its own shape.
        """
        if len(lengths) > 1:
            return self._key(lengths, outputs, token_types, spans)
        # Single queries come in a few hundred lengths, again and again.
        asked = (lengths[0], outputs, token_types, spans)
        key = self._singles.get(asked)
        if key is None:
            if len(self._singles) >= MAX_REMEMBERED:
                self._singles.clear()
            key = self._singles[asked] = self._key(lengths, outputs, token_types, spans)
        return key

    def _key(self, lengths: Sequence[int], outputs: tuple[str, ...], token_types: bool, spans: bool) -> GraphKey:
        tokens, sequences = sum(lengths), len(lengths)
        bound = self._bounds[bisect_left(self._bounds, max(lengths))]
        fit = None if spans else self._smallest_fit(tokens, sequences, bound)
        if fit is None:
            return GraphKey(tokens, sequences, bound, outputs, token_types)
        return GraphKey(*fit, bound, outputs, token_types, padded=True)

    def _smallest_fit(self, tokens: int, sequences: int, bound: int) -> tuple[int, int] | None:
        """The smallest bucket whose padding can be cut into dummies of 1 .. bound tokens each."""
        first_sequences = bisect_left(self._sequences, sequences)
        for bucket_tokens in self._tokens[bisect_left(self._tokens, tokens) :]:
            padding = bucket_tokens - tokens
            for bucket_sequences in self._sequences[first_sequences:]:
                dummies = bucket_sequences - sequences
                if dummies > padding:
                    break
                if padding <= dummies * bound:
                    return bucket_tokens, bucket_sequences
        return None


def dummy_lengths(key: GraphKey, tokens: int, sequences: int) -> list[int]:
    """Lengths of the dummy sequences that fill a batch of `tokens` in `sequences` up to `key`, as even as can be."""
    padding, dummies = key.tokens - tokens, key.sequences - sequences
    if dummies == 0:
        return []
    short, longer = divmod(padding, dummies)
    return [short + 1] * longer + [short] * (dummies - longer)


def _length_bounds(max_tokens: int) -> list[int]:
    bounds = [SMALLEST_LENGTH_BOUND]
    while bounds[-1] < max_tokens:
        bounds.append(2 * bounds[-1])
    return [min(bound, max_tokens) for bound in bounds]


def _sequence_steps(at_least: int) -> list[int]:
    def steps() -> Iterator[int]:
        yield from (1, 2, 3)
        power = 4
        while True:
            yield power
            yield power + power // 2
            power *= 2

    found: list[int] = []
    for step in steps():
        found.append(step)
        if step >= at_least:
            return found
    raise AssertionError("unreachable: the steps never end")

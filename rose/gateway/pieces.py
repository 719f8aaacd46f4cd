"""Inputs longer than the model takes, embedded in pieces whose vectors are averaged.

A mean of unit vectors is shorter than one, so it is normalised again where the model normalises; pieces weigh as many
tokens as they hold, as in a mean over all tokens. Knows ids and rows; knows neither texts nor replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from rose.errors import InvalidInput, RoseError, from_kind
from rose.gateway.outputs import VECTOR, kind_of, output_cards
from rose.proto import rose_pb2 as pb
from rose.proto.convert import AnyArray, IntArray

FIELD = "split_long_inputs"


class Pieces:
    """The pieces of all inputs of a request, in order.

    Attributes:
        sequences: what the model runs.
    """

    def __init__(self, inputs: Sequence[IntArray], limit: int, opening: int, suffix: IntArray) -> None:
        """
        Args:
            inputs: with their special tokens.
            limit: most tokens of a piece.
            opening: leading special tokens of every input, repeated in each of its pieces.
            suffix: closing ones, likewise, where an input ends in them.
        """
        cut = [_cut(ids, limit, opening, suffix) for ids in inputs]
        self.sequences = [piece for pieces in cut for piece in pieces]
        self._bounds = list(accumulate(map(len, cut), initial=0))

    def of_items(self, error: RoseError) -> RoseError:
        """An error that numbers pieces, with the number of the input."""
        if error.index is None:
            return error
        item = int(np.searchsorted(self._bounds, error.index, side="right")) - 1
        return from_kind(error.kind, error.message, param=error.param, index=item, retry_after_s=error.retry_after_s)

    def merge(self, rows: AnyArray, *, normalized: bool) -> AnyArray:
        """[pieces, D] to [inputs, D]; the row of an input in one piece stays as it is."""
        weights = np.array([len(piece) for piece in self.sequences], dtype=np.float64)
        merged = np.empty((len(self._bounds) - 1, rows.shape[1]), dtype=np.float32)
        for item, (start, end) in enumerate(pairwise(self._bounds)):
            if end - start == 1:
                merged[item] = rows[start]
                continue
            mean = np.average(rows[start:end].astype(np.float64), axis=0, weights=weights[start:end])
            length = float(np.linalg.norm(mean))
            merged[item] = mean / length if normalized and length else mean
        return merged


def check_mergeable(card: pb.ModelCard, names: Sequence[str]) -> None:
    """Raises InvalidInput for outputs that have no mean: codes, bits, and rows for every token."""
    for output in output_cards(card, names):
        if kind_of(output) != VECTOR or output.per_token or output.dtype != pb.FLOAT32:
            raise InvalidInput(
                f"the output {output.name!r} cannot be averaged over pieces; only float vectors of whole texts can",
                param=FIELD,
            )


def _cut(ids: IntArray, limit: int, opening: int, suffix: IntArray) -> list[IntArray]:
    """Pieces of nearly equal length, each with the special tokens of the whole."""
    if len(ids) <= limit:
        return [ids]
    closed = len(suffix) > 0 and np.array_equal(ids[-len(suffix) :], suffix)
    closing = suffix if closed else suffix[:0]
    head, content = ids[:opening], ids[opening : len(ids) - len(closing)]
    count = -(-len(content) // (limit - len(head) - len(closing)))
    return [np.concatenate((head, part, closing)) for part in np.array_split(content, count)]

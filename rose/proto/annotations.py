"""What may lie beside token ids: token types, one an id, and spans, parts of a sequence that are pooled by themselves.

To messages and back, and the checks that the link's two ends and the engine share. Knows bytes and bounds; knows
neither carriers nor models.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from rose.errors import InvalidInput
from rose.proto import rose_pb2 as pb
from rose.proto.convert import IntArray

_NO_SPANS: IntArray = np.empty((0, 2), dtype=np.int32)


def token_types_to_bytes(types: Sequence[IntArray]) -> bytes:
    """int32 arrays, one a sequence."""
    return np.concatenate(types).astype("<i4", copy=False).tobytes()


def token_types_from_bytes(data: bytes, lengths: Sequence[int]) -> list[IntArray] | None:
    """The types of each sequence, as read-only views of `data`; None for none, which means all zero.

    Raises:
        InvalidInput: another number of types than of ids.
    """
    if not data:
        return None
    if len(data) != 4 * sum(lengths):
        raise InvalidInput(
            f"token_types hold {len(data)} bytes, expected 4 for each of {sum(lengths)} ids", param="token_types"
        )
    return cut(np.frombuffer(data, dtype="<i4"), lengths)


def check_token_types(types: Sequence[IntArray], lengths: Sequence[int], type_vocab_size: int | None) -> None:
    """One type an id, each of 0 .. type_vocab_size - 1; of any size where that is None, for a model that does not say.

    Raises:
        InvalidInput: naming the item, the position and the limit.
    """
    if len(types) != len(lengths):
        raise InvalidInput(
            f"token types for {len(types)} of {len(lengths)} sequences: expected one array a sequence",
            param="token_types",
        )
    for index, (array, length) in enumerate(zip(types, lengths, strict=True)):
        if array.dtype != np.int32 or array.shape != (length,):
            raise InvalidInput(
                f"token types must have the lengths of the sequences beside them, as int32: item {index} has {length}"
                f" ids and types of {array.dtype} and shape {array.shape}",
                param="token_types",
                index=index,
            )
        # Seen as unsigned, a negative type is larger than any vocabulary.
        limit = (1 << 31) if type_vocab_size is None else max(type_vocab_size, 1)
        if length and int(array.view(np.uint32).max()) >= limit:
            position = int(np.flatnonzero(array.view(np.uint32) >= limit)[0])
            known = "negative" if type_vocab_size is None else f"outside this model's token types 0..{limit - 1}"
            raise InvalidInput(
                f"token type {int(array[position])} at position {position} is {known}", param="token_types", index=index
            )


def spans_to_proto(spans: Sequence[IntArray]) -> pb.Spans:
    """[n, 2] int32 arrays, one a sequence."""
    bounds = np.concatenate(spans).astype("<i4", copy=False) if spans else _NO_SPANS
    return pb.Spans(counts=[len(bounds) for bounds in spans], bounds=bounds.tobytes())


def spans_from_proto(spans: pb.Spans, items: int) -> list[IntArray]:
    """The spans of each sequence, [n, 2], as read-only views of the message's bytes.

    Raises:
        InvalidInput: not one count an item, or bytes that do not fill the counts.
    """
    counts = list(spans.counts)
    if len(counts) != items:
        raise InvalidInput(f"spans have counts for {len(counts)} items, the request has {items}", param="spans")
    if len(spans.bounds) != 8 * sum(counts):
        raise InvalidInput(
            f"counts add up to {sum(counts)} spans, the message holds {len(spans.bounds)} bytes, not 8 a span",
            param="spans",
        )
    return cut(np.frombuffer(spans.bounds, dtype="<i4").reshape(-1, 2), counts)


def check_spans(spans: Sequence[IntArray], lengths: Sequence[int]) -> None:
    """Bounds within their sequences, none that ends before it starts; no spans and empty spans are fine.

    Raises:
        InvalidInput: naming the item, the span and the limit.
    """
    if len(spans) != len(lengths):
        raise InvalidInput(
            f"spans for {len(spans)} of {len(lengths)} sequences: expected one array a sequence", param="spans"
        )
    for index, (bounds, length) in enumerate(zip(spans, lengths, strict=True)):
        if bounds.dtype != np.int32 or bounds.ndim != 2 or bounds.shape[1] != 2:
            raise InvalidInput(
                f"spans must be [n, 2] int32, not {bounds.dtype} of shape {bounds.shape}", param="spans", index=index
            )
        starts, ends = bounds[:, 0], bounds[:, 1]
        bad = np.flatnonzero((starts < 0) | (starts > ends) | (ends > length))
        if bad.size:
            start, end = bounds[bad[0]].tolist()
            raise InvalidInput(
                f"span {int(bad[0])} of item {index} is {start}..{end}: expected 0 <= start <= end <= {length}, the"
                " item's tokens",
                param="spans",
                index=index,
            )


def cut(flat: IntArray, lengths: Sequence[int]) -> list[IntArray]:
    """Views of `flat`, one a length."""
    if len(lengths) == 1:
        return [flat]
    return [flat[begin:end] for begin, end in pairwise(accumulate(lengths, initial=0))]

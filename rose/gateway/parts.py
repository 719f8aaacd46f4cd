"""A request cut into parts that replicas take, and the parts' answers put together in the request's order.

Knows sequences and answers; knows neither replicas nor sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from rose.client import EmbedResult, Timing
from rose.client.messages import embed_request
from rose.errors import InternalError, NonFinite, RoseError, from_kind
from rose.proto import rose_pb2 as pb
from rose.proto.convert import AnyArray, IntArray, tokens_to_proto


class Part(NamedTuple):
    """Items `start` .. `start + len(sequences)` of a request.

    Attributes:
        token_types: beside `sequences`, or None for all zero.
        spans: beside `sequences`, [n, 2] each, or None: see rose.v1.Spans.
        payload: the EmbedRequest that says all this, where the request came as one: it goes on as it is, and its answer
            keeps its bytes.
    """

    start: int
    sequences: Sequence[IntArray]
    tokens: int
    token_types: Sequence[IntArray] | None = None
    spans: Sequence[IntArray] | None = None
    payload: bytes = b""


def cut_parts(
    sequences: Sequence[IntArray],
    max_tokens: int,
    max_items: int,
    *,
    token_types: Sequence[IntArray] | None = None,
    spans: Sequence[IntArray] | None = None,
    payload: bytes = b"",
) -> list[Part]:
    """Runs of consecutive items, of at most `max_tokens` tokens (a longer item goes alone) and `max_items` items."""
    lengths = [len(sequence) for sequence in sequences]
    total = sum(lengths)
    if total <= max_tokens and len(lengths) <= max_items:
        return [Part(0, sequences, total, token_types, spans, payload)]

    def part(start: int, end: int, tokens: int) -> Part:
        types = None if token_types is None else token_types[start:end]
        return Part(start, sequences[start:end], tokens, types, None if spans is None else spans[start:end])

    parts: list[Part] = []
    start = tokens = 0
    for index, length in enumerate(lengths):
        if index > start and (tokens + length > max_tokens or index - start >= max_items):
            parts.append(part(start, index, tokens))
            start, tokens = index, 0
        tokens += length
    parts.append(part(start, len(lengths), tokens))
    return parts


def part_request(
    part: Part, outputs: Sequence[str], dimensions: int, priority: pb.Priority.ValueType
) -> pb.EmbedRequest:
    """The message for a part, whose arrays have been checked where they came in or were made."""
    if part.token_types is not None or part.spans is not None:
        return embed_request(
            part.sequences,
            outputs=outputs,
            dimensions=dimensions,
            priority=priority,
            token_types=part.token_types,
            spans=part.spans,
        )
    tokens = tokens_to_proto(part.sequences)
    return pb.EmbedRequest(tokens=tokens, outputs=outputs, dimensions=dimensions, priority=priority)


def at_item(error: RoseError, start: int) -> RoseError:
    """The error of a part, with its index counted from the request's first item."""
    if error.index is None or start == 0:
        return error
    return from_kind(
        error.kind, error.message, param=error.param, index=error.index + start, retry_after_s=error.retry_after_s
    )


def check_answer(part: Part, answer: EmbedResult) -> None:
    """One finite row (or run of rows) an item, or an error that names the item.

    Raises:
        InternalError: another number of rows than items, or than spans.
        NonFinite: NaN or infinity; base64 and protobuf would carry it without a word.
    """
    items = len(part.sequences)
    for name, values in answer.outputs.items():
        splits = answer.splits.get(name)
        if splits is None and part.spans is not None:
            raise InternalError(f"a replica answered {name} without the splits that spans call for")
        rows, expected = (len(values), items) if splits is None else (len(splits), items + 1)
        if rows != expected:
            raise InternalError(f"a replica answered {rows} rows of {name} where {expected} were due")
        if splits is not None:
            _check_splits(part, name, splits, len(values))
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            row = int(np.argwhere(~np.isfinite(values))[0][0])
            index = row if splits is None else int(np.searchsorted(splits, row, side="right")) - 1
            raise NonFinite(
                f"the model produced a non-finite number in {name} for this item", param="input", index=index
            )


def _check_splits(part: Part, name: str, splits: Sequence[int], rows: int) -> None:
    counts = [end - start for start, end in pairwise(splits)]
    if splits[0] or splits[-1] != rows or min(counts) < 0:
        raise InternalError(f"a replica answered splits of {name} that do not lead through its {rows} rows")
    if part.spans is not None and counts != [len(spans) for spans in part.spans]:
        raise InternalError(f"a replica answered another number of rows of {name} than there are spans")


def join(answers: Sequence[EmbedResult]) -> EmbedResult:
    """Answers of consecutive parts as one. Times are those of the slowest part; batches and tokens add up."""
    if len(answers) == 1:
        return answers[0]
    outputs: dict[str, AnyArray] = {}
    splits: dict[str, tuple[int, ...]] = {}
    for name in answers[0].outputs:
        outputs[name] = np.concatenate([answer.outputs[name] for answer in answers])
        if name in answers[0].splits:
            splits[name] = _join_splits([answer.splits[name] for answer in answers])
    timing = Timing(
        max(answer.timing.queue_s for answer in answers),
        max(answer.timing.compute_s for answer in answers),
        sum(answer.timing.batches for answer in answers),
    )
    return EmbedResult(outputs, splits, sum(answer.prompt_tokens for answer in answers), timing)


def _join_splits(parts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    joined = [0]
    for splits in parts:
        base = joined[-1]
        joined += [base + end for end in splits[1:]]
    return tuple(joined)

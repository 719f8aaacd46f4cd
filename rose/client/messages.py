"""Requests and answers as frames carry them; shared by the sync and the async client.

Knows messages; knows no sockets.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from google.protobuf.message import DecodeError

from rose.errors import InternalError, InvalidInput, RoseError, Unavailable
from rose.proto import rose_pb2 as pb
from rose.proto.annotations import check_spans, check_token_types, spans_to_proto, token_types_to_bytes
from rose.proto.convert import AnyArray, IntArray, error_from_proto, tokens_to_proto

# Answers are as large as the server's own limit allows; this only stops a peer that speaks something else.
MAX_ANSWER_BYTES = 1 << 30

Sequences: TypeAlias = Sequence[Sequence[int]] | Sequence[IntArray] | AnyArray
# For each sequence, the first token and the end of each of its parts: pairs, or an [n, 2] array.
Spans: TypeAlias = Sequence[Sequence[tuple[int, int]] | IntArray]

_INT32 = np.iinfo(np.int32)


def embed_request(
    sequences: Sequences,
    *,
    model: str = "",
    outputs: Sequence[str] = (),
    dimensions: int = 0,
    priority: pb.Priority.ValueType = pb.ONLINE,
    token_types: Sequences | None = None,
    spans: Spans | None = None,
) -> pb.EmbedRequest:
    """The message for token id sequences.

    Args:
        sequences: id lists or integer arrays, one an item.
        token_types: one type an id, in lists or arrays of the same lengths; None: all zero.
        spans: per item, the parts that are pooled each by itself, counted from the item's own first token; an item may
            have none. Pooled outputs then have a row a span.

    Raises:
        InvalidInput: no sequence, a text where ids are wanted, an item that is no list of int32 numbers, types or spans
            that do not fit their item.
    """
    if isinstance(sequences, (str, bytes)):
        raise InvalidInput("expected a list of token id lists, got a text: the engine takes no text", param="input")
    if isinstance(outputs, str):
        raise InvalidInput(f"outputs is a list of names, got the text {outputs!r}", param="outputs")
    if dimensions < 0:
        raise InvalidInput(f"dimensions of {dimensions}: expected 0 (all) or more", param="dimensions")
    arrays = [_numbers(sequence, index, "token id", "input") for index, sequence in enumerate(sequences)]
    if not arrays:
        raise InvalidInput("the request holds no sequence", param="input")
    request = pb.EmbedRequest(
        model=model, tokens=tokens_to_proto(arrays), outputs=outputs, dimensions=dimensions, priority=priority
    )
    if token_types is not None:
        types = [_numbers(each, index, "token type", "token_types") for index, each in enumerate(token_types)]
        check_token_types(types, [len(ids) for ids in arrays], None)
        request.token_types = token_types_to_bytes(types)
    if spans is not None:
        bounds = [_bounds(each, index) for index, each in enumerate(spans)]
        check_spans(bounds, [len(ids) for ids in arrays])
        request.spans.CopyFrom(spans_to_proto(bounds))
    return request


def one_sequence(ids: Sequence[int] | AnyArray, param: str) -> IntArray:
    """The row of int32 of a request that takes exactly one sequence.

    Raises:
        InvalidInput: a text, no token, or numbers that are no int32.
    """
    if isinstance(ids, (str, bytes)):
        raise InvalidInput("expected a list of token ids, got a text: the engine takes no text", param=param)
    try:
        return _numbers(ids, 0, "token id", param)
    except InvalidInput as error:
        error.index = None  # there is but one
        raise


def _numbers(sequence: Sequence[int] | AnyArray, index: int, what: str, param: str) -> IntArray:
    """One item's row of int32, whatever it came as."""
    if isinstance(sequence, np.ndarray):
        return _array_of_int32(sequence, index, what, param)
    try:
        if bool in set(map(type, sequence)):
            raise InvalidInput(f"{what}s are integers, got a boolean", param=param, index=index)
        if not len(sequence):
            raise InvalidInput("a sequence has no tokens", param=param, index=index)
        return np.frombuffer(array("i", sequence), dtype=np.int32)
    except TypeError:
        raise InvalidInput(f"{what}s are a list of integers", param=param, index=index) from None
    except OverflowError:
        raise InvalidInput(f"a {what} is outside the range of int32", param=param, index=index) from None


def _array_of_int32(numbers: AnyArray, index: int, what: str, param: str) -> IntArray:
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        raise InvalidInput(
            f"{what}s are one row of integers, got {numbers.dtype} of shape {numbers.shape}", param=param, index=index
        )
    narrow = numbers.astype(np.int32, copy=False)
    if narrow is not numbers and not np.array_equal(narrow, numbers):
        raise InvalidInput(f"a {what} is outside the range of int32", param=param, index=index)
    return narrow


def _bounds(pairs: Sequence[tuple[int, int]] | IntArray, index: int) -> IntArray:
    """[n, 2] int32 of one item."""
    if len(pairs) == 0:
        return np.empty((0, 2), dtype=np.int32)
    try:
        bounds = np.asarray(pairs)
    except ValueError:  # rows of different lengths
        bounds = np.empty(0)
    if bounds.ndim != 2 or bounds.shape[1] != 2 or bounds.dtype.kind not in "iu":
        raise InvalidInput("spans are pairs of integers: first token and end", param="spans", index=index)
    if bounds.min() < _INT32.min or bounds.max() > _INT32.max:
        raise InvalidInput("a span's bound is outside the range of int32", param="spans", index=index)
    return bounds.astype(np.int32, copy=False)


def count_tokens(request: pb.EmbedRequest | pb.GenerateRequest) -> int:
    """Tokens of a request that carries ids; 0 for one of texts."""
    return len(request.tokens.ids) // 4


def parse_embed(payload: bytes) -> pb.EmbedResponse:
    try:
        return pb.EmbedResponse.FromString(payload)
    except DecodeError as error:
        raise InternalError(f"the server's answer is no EmbedResponse: {error}") from None


def parse_card(payload: bytes) -> pb.ModelCard:
    try:
        return pb.ModelCard.FromString(payload)
    except DecodeError as error:
        raise InternalError(f"the server's answer is no ModelCard: {error}") from None


def parse_stats(payload: bytes) -> pb.ServerStats:
    try:
        return pb.ServerStats.FromString(payload)
    except DecodeError as error:
        raise InternalError(f"the server's answer is no ServerStats: {error}") from None


def parse_error(payload: bytes) -> RoseError:
    """The error a request was answered with."""
    try:
        return error_from_proto(pb.Error.FromString(payload))
    except DecodeError as error:
        return InternalError(f"the server's answer is no Error: {error}")


def connection_error(payload: bytes) -> RoseError:
    """What requests on a connection are told that the server closed with an error (request id 0).

    One caller's broken frame is no other caller's invalid input: all but overload become Unavailable.
    """
    error = parse_error(payload)
    if error.kind in ("overloaded", "unavailable"):
        return error
    return Unavailable(f"the server closed the connection: {error.kind}: {error.message}")

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
from rose.proto.convert import AnyArray, IntArray, error_from_proto, tokens_to_proto

# Answers are as large as the server's own limit allows; this only stops a peer that speaks something else.
MAX_ANSWER_BYTES = 1 << 30

Sequences: TypeAlias = Sequence[Sequence[int]] | Sequence[IntArray] | AnyArray


def embed_request(
    sequences: Sequences,
    *,
    model: str = "",
    outputs: Sequence[str] = (),
    dimensions: int = 0,
    priority: pb.Priority.ValueType = pb.ONLINE,
) -> pb.EmbedRequest:
    """The message for token id sequences.

    Args:
        sequences: id lists or integer arrays, one an item.

    Raises:
        InvalidInput: no sequence, a text where ids are wanted, an item that is no list of int32 numbers.
    """
    if isinstance(sequences, (str, bytes)):
        raise InvalidInput("expected a list of token id lists, got a text: the engine takes no text", param="input")
    if isinstance(outputs, str):
        raise InvalidInput(f"outputs is a list of names, got the text {outputs!r}", param="outputs")
    if dimensions < 0:
        raise InvalidInput(f"dimensions of {dimensions}: expected 0 (all) or more", param="dimensions")
    arrays = [_ids(sequence, index) for index, sequence in enumerate(sequences)]
    if not arrays:
        raise InvalidInput("the request holds no sequence", param="input")
    return pb.EmbedRequest(
        model=model, tokens=tokens_to_proto(arrays), outputs=outputs, dimensions=dimensions, priority=priority
    )


def _ids(sequence: Sequence[int] | AnyArray, index: int) -> IntArray:
    if isinstance(sequence, np.ndarray):
        return _ids_of_array(sequence, index)
    try:
        if bool in set(map(type, sequence)):
            raise InvalidInput("token ids are integers, got a boolean", param="input", index=index)
        if not len(sequence):
            raise InvalidInput("a sequence has no tokens", param="input", index=index)
        return np.frombuffer(array("i", sequence), dtype=np.int32)
    except TypeError:
        raise InvalidInput("token ids are a list of integers", param="input", index=index) from None
    except OverflowError:
        raise InvalidInput("a token id is outside the range of int32", param="input", index=index) from None


def _ids_of_array(ids: AnyArray, index: int) -> IntArray:
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InvalidInput(
            f"token ids are one row of integers, got {ids.dtype} of shape {ids.shape}", param="input", index=index
        )
    narrow = ids.astype(np.int32, copy=False)
    if narrow is not ids and not np.array_equal(narrow, ids):
        raise InvalidInput("a token id is outside the range of int32", param="input", index=index)
    return narrow


def count_tokens(request: pb.EmbedRequest) -> int:
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

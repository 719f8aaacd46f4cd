"""Messages to numpy and errors, and back; the one validator both carriers share.

Knows shapes and bytes; knows neither carriers nor models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from rose.errors import InvalidInput, RoseError, from_kind
from rose.proto import rose_pb2 as pb

IntArray = npt.NDArray[np.int32]
AnyArray = npt.NDArray[np.float32] | npt.NDArray[np.int8] | npt.NDArray[np.uint8] | npt.NDArray[np.int32]

_TO_NUMPY: dict[int, np.dtype] = {
    pb.FLOAT32: np.dtype("<f4"),
    pb.INT8: np.dtype("i1"),
    pb.UINT8: np.dtype("u1"),
    pb.INT32: np.dtype("<i4"),
}
# Made once: numpy takes as long to find a dtype by its name as to read an array.
_INT32, _UINT32 = np.dtype("<i4"), np.dtype(np.uint32)
# What array.max() calls, behind a wrapper.
_largest = np.maximum.reduce
_FROM_KIND = {"f": pb.FLOAT32, "i1": pb.INT8, "u1": pb.UINT8, "i4": pb.INT32}


def tensor_to_proto(array: AnyArray) -> pb.Tensor:
    """float32, int8, uint8 or int32 array of any shape."""
    tensor = pb.Tensor()
    fill_tensor(tensor, array)
    return tensor


def fill_tensor(tensor: pb.Tensor, array: AnyArray) -> None:
    """The same into a tensor that is part of another message already, which spares copies of the values."""
    describe_tensor(tensor, array.dtype, array.shape)
    fill_values(tensor, array)


def describe_tensor(tensor: pb.Tensor, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> None:
    """All of a tensor but its values."""
    key = np.dtype(dtype).str[1:]
    tensor.dtype = _FROM_KIND["f" if key == "f4" else key]
    tensor.shape.extend(shape)


def fill_values(tensor: pb.Tensor, array: AnyArray) -> None:
    """The values of a tensor that was described."""
    tensor.data = array.astype(_TO_NUMPY[tensor.dtype], copy=False).tobytes()


def tensor_from_proto(tensor: pb.Tensor) -> AnyArray:
    """A read-only view of the message's bytes, in the stated shape.

    Raises:
        InvalidInput: unknown dtype, or bytes that do not fill the shape.
    """
    dtype = _TO_NUMPY.get(tensor.dtype)
    if dtype is None:
        raise InvalidInput(f"tensor dtype {tensor.dtype} is not one of {sorted(_TO_NUMPY)}")
    shape = tuple(tensor.shape)
    if len(tensor.data) != math.prod(shape) * dtype.itemsize:
        raise InvalidInput(f"tensor of shape {shape} and dtype {dtype} does not hold {len(tensor.data)} bytes")
    return np.frombuffer(tensor.data, dtype=dtype).reshape(shape)


def tokens_to_proto(sequences: Sequence[IntArray]) -> pb.Tokens:
    """int32 arrays, one a sequence; an empty list gives an empty message."""
    if not sequences:
        return pb.Tokens()
    flat = sequences[0] if len(sequences) == 1 else np.concatenate(sequences)
    ids = flat.astype(_INT32, copy=False).tobytes()
    return pb.Tokens(ids=ids, lengths=[len(sequence) for sequence in sequences])


def tokens_from_proto(tokens: pb.Tokens, lengths: list[int] | None = None) -> list[IntArray]:
    """The sequences, as read-only views of the message's bytes.

    Args:
        lengths: the message's, where the caller has them as a list already.

    Raises:
        InvalidInput: no sequence, an empty sequence, or bytes that do not fill the lengths.
    """
    if lengths is None:
        lengths = list(tokens.lengths)
    data = tokens.ids
    if not lengths:
        raise InvalidInput("tokens hold no sequence", param="input")
    if 0 in lengths:
        raise InvalidInput("a sequence has no tokens", param="input", index=lengths.index(0))
    if len(data) != 4 * sum(lengths):
        raise InvalidInput(
            f"lengths add up to {sum(lengths)} ids, the message holds {len(data)} bytes, not 4 an id", param="input"
        )
    ids = np.frombuffer(data, _INT32)
    if len(lengths) == 1:
        return [ids]
    return [ids[end - length : end] for length, end in zip(lengths, accumulate(lengths), strict=True)]


def sequence_from_proto(tokens: pb.Tokens, param: str) -> IntArray:
    """The only sequence of a field that takes exactly one, as a read-only view of the message's bytes.

    Raises:
        InvalidInput: none, several, an empty one, or bytes that do not fill it.
    """
    lengths = tokens.lengths
    if len(lengths) != 1:
        raise InvalidInput(f"the {param} is exactly one sequence of token ids, got {len(lengths)}", param=param)
    if not lengths[0]:
        raise InvalidInput(f"the {param} has no tokens", param=param)
    if len(tokens.ids) != 4 * lengths[0]:
        raise InvalidInput(
            f"the {param} has {lengths[0]} ids by its length, the message holds {len(tokens.ids)} bytes, not 4 an id",
            param=param,
        )
    return np.frombuffer(tokens.ids, _INT32)


def check_token_ids(sequences: list[IntArray], vocab_size: int) -> None:
    """Raises InvalidInput naming the first id outside 0 .. vocab_size - 1, its item and its position."""
    flat = sequences[0] if len(sequences) == 1 else np.concatenate(sequences)
    # Seen as unsigned, a negative id is larger than any vocabulary: one reduction for the whole request.
    if _largest(flat.view(_UINT32)) < vocab_size:
        return
    for index, ids in enumerate(sequences):
        outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
        if outside.size:
            position = int(outside[0])
            raise InvalidInput(
                f"token id {int(ids[position])} at position {position} is outside the vocabulary 0..{vocab_size - 1}",
                param="input",
                index=index,
            )


def error_to_proto(error: RoseError) -> pb.Error:
    message = pb.Error(kind=error.kind, message=error.message, param=error.param or "")
    if error.index is not None:
        message.index = error.index
    if error.retry_after_s is not None:
        message.retry_after_ms = max(1, round(error.retry_after_s * 1000))
    return message


def error_from_proto(message: pb.Error) -> RoseError:
    return from_kind(
        message.kind,
        message.message,
        param=message.param or None,
        index=message.index if message.HasField("index") else None,
        retry_after_s=message.retry_after_ms / 1000 if message.retry_after_ms else None,
    )

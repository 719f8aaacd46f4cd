"""Frames of the light link: a fixed header, then one protobuf message of rose.proto.

Header, 20 bytes, little-endian:

    offset  size  field
    0       4     length of the payload in bytes
    4       1     version (1)
    5       1     type (FrameType)
    6       2     reserved, zero
    8       8     request id, chosen by the client, unique among its open requests on this connection, not 0
    16      4     relative deadline in milliseconds from receipt (0: none); zero in answers

A client sends EMBED, GENERATE, INFO and STATS, and CANCEL with the id of an open request (empty payload, never answered
itself: the request it names is answered by ERROR of kind `cancelled`). A server answers each request exactly once:
EMBED_RESULT, INFO_RESULT, STATS_RESULT or ERROR (payload `Error`). GENERATE is answered by any number of GENERATE_CHUNK
frames, of which the last states its finish, or by ERROR at any point. ERROR with request id 0 concerns the connection,
which is then closed. docs/light_link.md tells the whole protocol.
"""

from __future__ import annotations

import math
import struct
from enum import IntEnum
from typing import NamedTuple

from rose.errors import InvalidInput, PayloadTooLarge

VERSION = 1
HEADER = struct.Struct("<IBBHQI")
HEADER_BYTES = HEADER.size
# 512 texts of 8192 tokens are 16 MiB of ids; 2048 vectors of 4096 floats are 32 MiB.
DEFAULT_MAX_PAYLOAD = 64 << 20
MAX_DEADLINE_MS = 0xFFFFFFFF


class FrameType(IntEnum):
    EMBED = 1
    INFO = 2
    CANCEL = 3
    STATS = 4
    GENERATE = 5
    EMBED_RESULT = 129
    INFO_RESULT = 130
    STATS_RESULT = 131
    GENERATE_CHUNK = 132
    ERROR = 255


_TYPES: dict[int, FrameType] = {int(kind): kind for kind in FrameType}


class Frame(NamedTuple):
    type: FrameType
    request_id: int
    payload: bytes
    deadline_ms: int = 0


def encode_header(kind: FrameType, request_id: int, length: int, deadline_ms: int = 0) -> bytes:
    """The 20 bytes before a payload of `length` bytes."""
    return HEADER.pack(length, VERSION, kind, 0, request_id, deadline_ms)


def encode_frame(kind: FrameType, request_id: int, payload: bytes = b"", deadline_ms: int = 0) -> bytes:
    return HEADER.pack(len(payload), VERSION, kind, 0, request_id, deadline_ms) + payload


def deadline_to_ms(deadline_s: float | None) -> int:
    """Seconds from now as the header carries them: at least 1 ms, since 0 means none.

    Raises:
        InvalidInput: a deadline that is not a positive number.
    """
    if deadline_s is None:
        return 0
    if not deadline_s > 0:
        raise InvalidInput(f"deadline of {deadline_s} s: expected a positive number of seconds", param="deadline")
    # The difference of two clock readings is off by some 1e-10 s: that must not round 150 ms up to 151.
    return MAX_DEADLINE_MS if deadline_s * 1000 >= MAX_DEADLINE_MS else max(1, math.ceil(deadline_s * 1000 - 1e-3))


def decode_header(
    buffer: bytes | bytearray | memoryview, offset: int = 0, max_payload: int = DEFAULT_MAX_PAYLOAD
) -> tuple[int, FrameType, int, int]:
    """Length of the payload, type, request id and deadline in milliseconds of the header at `offset`.

    Raises:
        InvalidInput: another version, an unknown type, or reserved bits set. The stream cannot be resynchronised.
        PayloadTooLarge: the header announces more than `max_payload` bytes.
    """
    length, version, kind, reserved, request_id, deadline_ms = HEADER.unpack_from(buffer, offset)
    if version != VERSION:
        raise InvalidInput(f"frame version {version} is not supported, this side speaks version {VERSION}")
    if reserved != 0:
        raise InvalidInput("reserved header bits are set")
    frame_type = _TYPES.get(kind)
    if frame_type is None:
        raise InvalidInput(f"unknown frame type {kind}")
    if length > max_payload:
        raise PayloadTooLarge(f"frame of {length} bytes is over the limit of {max_payload} bytes")
    return length, frame_type, request_id, deadline_ms


class FrameDecoder:
    """Turns a byte stream into frames, whatever the cuts between reads.

    Args:
        max_payload: largest payload accepted, in bytes; a larger one is refused before it is buffered.

    Raises:
        InvalidInput, PayloadTooLarge: as `decode_header`; the decoder is of no use afterwards.
    """

    def __init__(self, max_payload: int = DEFAULT_MAX_PAYLOAD) -> None:
        self._buffer = bytearray()
        self._max_payload = max_payload

    @property
    def pending_bytes(self) -> int:
        """Bytes of a frame that has begun and not ended."""
        return len(self._buffer)

    def feed(self, data: bytes | bytearray | memoryview) -> list[Frame]:
        """Frames completed by `data`, in order."""
        if self._buffer:
            self._buffer += data
            frames, used = self._split(self._buffer)
            if used:
                del self._buffer[:used]
            return frames
        # Most reads hold whole frames: no copy through the buffer for them.
        frames, used = self._split(data)
        if used < len(data):
            self._buffer += memoryview(data)[used:]
        return frames

    def _split(self, data: bytes | bytearray | memoryview) -> tuple[list[Frame], int]:
        frames: list[Frame] = []
        offset, size = 0, len(data)
        while size - offset >= HEADER_BYTES:
            length, kind, request_id, deadline_ms = decode_header(data, offset, self._max_payload)
            end = offset + HEADER_BYTES + length
            if size < end:
                break
            frames.append(Frame(kind, request_id, bytes(data[offset + HEADER_BYTES : end]), deadline_ms))
            offset = end
        return frames, offset

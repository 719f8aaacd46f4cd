"""Frames of the light link: a fixed header, then one protobuf message of rose.proto.

Header, 20 bytes, little-endian:

    offset  size  field
    0       4     length of the payload in bytes
    4       1     version (1)
    5       1     type (FrameType)
    6       2     reserved, zero
    8       8     request id, chosen by the client, unique among its open requests on this connection
    16      4     relative deadline in milliseconds from receipt (0: none); zero in answers

A client sends EMBED and INFO, and CANCEL with the id of an open request (empty payload, never answered itself: the
request it names is answered by ERROR of kind `cancelled`). A server answers each request exactly once: EMBED_RESULT,
INFO_RESULT or ERROR (payload `Error`). ERROR with request id 0 concerns the connection, which is then closed.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

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
    EMBED_RESULT = 129
    INFO_RESULT = 130
    ERROR = 255


@dataclass(frozen=True, slots=True)
class Frame:
    type: FrameType
    request_id: int
    payload: bytes
    deadline_ms: int = 0


def encode_frame(kind: FrameType, request_id: int, payload: bytes = b"", deadline_ms: int = 0) -> bytes:
    return HEADER.pack(len(payload), VERSION, kind, 0, request_id, deadline_ms) + payload


class FrameDecoder:
    """Turns a byte stream into frames, whatever the cuts between reads.

    Args:
        max_payload: largest payload accepted, in bytes; a larger one is refused before it is buffered.

    Raises:
        InvalidInput: another version, an unknown type, or reserved bits set. The stream cannot be resynchronised.
        PayloadTooLarge: a header that announces more than `max_payload`.
    """

    def __init__(self, max_payload: int = DEFAULT_MAX_PAYLOAD) -> None:
        self._buffer = bytearray()
        self._max_payload = max_payload

    def feed(self, data: bytes | bytearray | memoryview) -> list[Frame]:
        self._buffer += data
        frames: list[Frame] = []
        offset = 0
        while len(self._buffer) - offset >= HEADER_BYTES:
            length, version, kind, reserved, request_id, deadline_ms = HEADER.unpack_from(self._buffer, offset)
            if version != VERSION:
                raise InvalidInput(f"frame version {version} is not supported, this side speaks version {VERSION}")
            if reserved != 0:
                raise InvalidInput("reserved header bits are set")
            try:
                frame_type = FrameType(kind)
            except ValueError:
                raise InvalidInput(f"unknown frame type {kind}") from None
            if length > self._max_payload:
                raise PayloadTooLarge(f"frame of {length} bytes is over the limit of {self._max_payload} bytes")
            end = offset + HEADER_BYTES + length
            if len(self._buffer) < end:
                break
            frames.append(Frame(frame_type, request_id, bytes(self._buffer[offset + HEADER_BYTES : end]), deadline_ms))
            offset = end
        if offset:
            del self._buffer[:offset]
        return frames

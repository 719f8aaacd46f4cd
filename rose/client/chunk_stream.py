"""One generation on a blocking connection: its chunks as they come, and an end that leaves the connection usable.

Knows frames and one socket; knows neither what was asked for nor reconnecting.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Generator

from rose.client.generation import parse_chunk
from rose.client.messages import connection_error, parse_error
from rose.errors import DeadlineExceeded, InternalError, RoseError, Unavailable
from rose.proto import rose_pb2 as pb
from rose.proto.address import Address
from rose.proto.frames import Frame, FrameDecoder, FrameType, deadline_to_ms, encode_frame

RECEIVE_BYTES = 64 << 10
# How much longer than the deadline is waited for the server's own answer to it, which spares a reconnect.
DEADLINE_GRACE_S = 0.1
# A server answers CANCEL in the next turn of its loop; one that takes longer loses the connection.
CANCEL_S = 1.0


class ChunkStream:
    """
    Attributes:
        clean: the request is over and nothing of it is on its way: the connection can be used again.
    """

    def __init__(self, connection: socket.socket, address: Address, request_id: int, max_payload: int) -> None:
        self.clean = False
        self._connection = connection
        self._address = address
        self._request_id = request_id
        self._decoder = FrameDecoder(max_payload)
        self._frames: deque[Frame] = deque()

    def run(self, payload: bytes, end: float | None) -> Generator[pb.GenerateChunk, None, None]:
        """
        Args:
            end: time.monotonic() at which the deadline is.

        Raises:
            RoseError: the server's error, DeadlineExceeded, or Unavailable for a connection that is lost.
        """
        deadline_ms = 0 if end is None else deadline_to_ms(max(end - time.monotonic(), 1e-3))
        patience = None if end is None else end + DEADLINE_GRACE_S
        try:
            self._send(encode_frame(FrameType.GENERATE, self._request_id, payload, deadline_ms), patience)
            while not self.clean:
                yield self._chunk(self._next(patience))
        except GeneratorExit:
            self._cancel()
            raise

    def _chunk(self, frame: Frame) -> pb.GenerateChunk:
        self._check(frame)
        if frame.type is FrameType.ERROR:
            self.clean = True
            raise parse_error(frame.payload)
        chunk = parse_chunk(frame.payload)
        self.clean = chunk.finish != pb.UNFINISHED
        return chunk

    def _cancel(self) -> None:
        """Tell the server, and read what was on its way until it says that it is over."""
        if self.clean:
            return
        patience = time.monotonic() + CANCEL_S
        try:
            self._send(encode_frame(FrameType.CANCEL, self._request_id), patience)
            while not self.clean:
                frame = self._next(patience)
                self._check(frame)
                self.clean = frame.type is FrameType.ERROR or parse_chunk(frame.payload).finish != pb.UNFINISHED
        except RoseError:
            return  # nobody waits for it; the connection is not used again

    def _check(self, frame: Frame) -> None:
        if frame.request_id == 0 and frame.type is FrameType.ERROR:
            raise connection_error(frame.payload)
        if frame.request_id != self._request_id or frame.type not in (FrameType.GENERATE_CHUNK, FrameType.ERROR):
            raise InternalError(f"{self._address} answered request {frame.request_id} by {frame.type.name}")

    def _send(self, data: bytes, patience: float | None) -> None:
        try:
            self._wait_until(patience)
            self._connection.sendall(data)
        except OSError as error:
            raise self._lost(error) from None

    def _next(self, patience: float | None) -> Frame:
        while not self._frames:
            try:
                self._wait_until(patience)
                data = self._connection.recv(RECEIVE_BYTES)
            except OSError as error:
                raise self._lost(error) from None
            if not data:
                raise Unavailable(f"{self._address} closed the connection")
            try:
                self._frames.extend(self._decoder.feed(data))
            except RoseError as error:
                raise Unavailable(f"{self._address} does not speak the light link: {error.message}") from None
        return self._frames.popleft()

    def _wait_until(self, patience: float | None) -> None:
        self._connection.settimeout(None if patience is None else max(patience - time.monotonic(), 1e-3))

    def _lost(self, error: OSError) -> RoseError:
        if isinstance(error, TimeoutError):
            return DeadlineExceeded(f"no answer from {self._address} before the deadline")
        return Unavailable(f"connection to {self._address} lost: {error}")

"""One client's bytes, both ways, bounded; nothing here ever blocks.

A client that does not read its answers is not read from any more: what a connection may owe its client (answers
queued here and answers its open requests will bring) has a limit, so memory does not grow with a client's patience.
Knows frames and one socket; knows neither requests' contents nor the engine.
"""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rose.errors import RoseError
from rose.proto.convert import error_to_proto
from rose.proto.frames import Frame, FrameDecoder, FrameType, encode_frame, encode_header

if TYPE_CHECKING:
    from rose.server.ledger import Entry

# A vector of 1024 floats and its header: one buffer, one call. Longer payloads are not copied behind their header.
JOIN_BYTES = 16 << 10
# Buffers of one sendmsg; IOV_MAX is 1024.
SEND_BUFFERS = 64
# Frames taken from one connection before the others get their turn.
FRAMES_A_TURN = 256
# How long a connection that was closed with an error is still read from.
LINGER_S = 2.0


class Connection:
    """A client.

    Attributes:
        open: its unanswered requests, by the id it gave them.
        owed: bytes of answers that its open requests will bring.
        dead: the socket is of no use any more; the reactor forgets the connection soon.
        mask: what the poller watches it for.
        calm: it was quiet when it was last looked after, and is watched for reading only.
        progress: when bytes last went either way while some were waiting, in the reactor's clock.
        touched: where the connection notes that it was written to, for the reactor to look after it.
    """

    __slots__ = (
        "_decoder",
        "_failed",
        "_frames",
        "_max_owed",
        "_out",
        "_out_bytes",
        "calm",
        "dead",
        "fd",
        "mask",
        "open",
        "owed",
        "progress",
        "socket",
        "touched",
    )

    def __init__(
        self,
        connected: socket.socket,
        *,
        max_payload: int,
        max_owed: int,
        now: float,
        touched: set[Connection] | None = None,
    ) -> None:
        self.socket = connected
        self.fd = connected.fileno()
        self.open: dict[int, Entry] = {}
        self.owed = 0
        self.dead = False
        self.mask = 0
        self.calm = False
        self.progress = now
        self.touched = set() if touched is None else touched
        self._decoder = FrameDecoder(max_payload)
        self._frames: deque[Frame] = deque()
        self._out: deque[memoryview] = deque()
        self._out_bytes = 0
        self._max_owed = max_owed
        self._failed = False

    @property
    def wants_read(self) -> bool:
        if self.dead or self._failed:
            return self._failed and not self.dead
        return not self._frames and self.has_room

    @property
    def wants_write(self) -> bool:
        return bool(self._out) and not self.dead

    @property
    def has_room(self) -> bool:
        """Whether another request may be taken from this client."""
        return self._out_bytes + self.owed <= self._max_owed

    @property
    def has_frames(self) -> bool:
        """Whether frames that were read wait for their turn or for room."""
        return bool(self._frames) and self.has_room and not (self.dead or self._failed)

    @property
    def quiet(self) -> bool:
        """Whether it is open and nothing waits either way: nothing but reading is left to do for it."""
        return not (self._out or self._frames or self.dead or self._failed or self._decoder.pending_bytes)

    @property
    def has_backlog(self) -> bool:
        """Whether frames that were read are not yet taken, whatever the reason."""
        return bool(self._frames) and not self.dead

    def stalled(self, now: float, patience_s: float) -> bool:
        """Whether the other end owes us a move (half a frame, bytes it does not take, its own close) for too long."""
        if self._failed:
            return now - self.progress > LINGER_S
        return bool(self._out or self._decoder.pending_bytes) and now - self.progress > patience_s

    @property
    def busy(self) -> bool:
        """Whether `stalled` has to be asked at all."""
        return self._failed or bool(self._out or self._decoder.pending_bytes)

    def read(self, buffer: memoryview, now: float) -> None:
        """Take what the socket holds, at most one buffer full; frames are then had from `frames`.

        Raises:
            RoseError: the stream is broken and cannot be resynchronised.
        """
        try:
            count = self.socket.recv_into(buffer)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.dead = True
            return
        if count == 0:
            self.dead = True
            return
        if not self._failed:
            self.progress = now
            self._frames.extend(self._decoder.feed(buffer[:count]))

    def frames(self) -> Iterator[Frame]:
        """Frames in order, as long as there is room for their answers and it is still this client's turn."""
        frames = self._frames
        for _ in range(FRAMES_A_TURN):
            if not (frames and self.has_room) or self.dead or self._failed:
                return
            yield frames.popleft()

    def send(self, kind: FrameType, request_id: int, payload: bytes, now: float) -> None:
        """Queue one frame and write as much as the socket takes now."""
        if self.dead or self._failed:
            return
        self.touched.add(self)
        header = encode_header(kind, request_id, len(payload))
        if len(payload) <= JOIN_BYTES:
            self._write(header + payload, now)
            return
        if not self._out:
            self.progress = now
        self._push(header)
        self._push(payload)
        self.flush(now)

    def send_many(self, kind: FrameType, answers: Iterable[tuple[int, bytes]], now: float) -> None:
        """Queue a frame each for (request id, payload), all small, and write them at once."""
        if self.dead or self._failed:
            return
        self.touched.add(self)
        self._write(b"".join(encode_frame(kind, request_id, payload) for request_id, payload in answers), now)

    def fail(self, error: RoseError, now: float) -> None:
        """Tell the client what is wrong with its connection, then close it.

        What it still sends is read and dropped for a moment: closing at once would reset the connection, and a client
        in the middle of sending would see the reset, not the reason.
        """
        self._frames.clear()
        self.send(FrameType.ERROR, 0, error_to_proto(error).SerializeToString(), now)
        self._failed = True
        self.progress = now
        self.flush(now)

    def flush(self, now: float) -> None:
        """Write what the socket takes."""
        out = self._out
        try:
            while out:
                if len(out) == 1:
                    sent = self.socket.send(out[0])
                else:
                    sent = self.socket.sendmsg([out[i] for i in range(min(len(out), SEND_BUFFERS))])
                self.progress = now
                self._sent(sent)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.dead = True
            return
        if self._failed:
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.dead = True
        self._out.clear()
        self._frames.clear()
        self.socket.close()

    def _write(self, data: bytes, now: float) -> None:
        """Write at once, mostly without queueing anything."""
        if self._out:
            self._push(data)
            self.flush(now)
            return
        self.progress = now
        try:
            sent = self.socket.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self.dead = True
            return
        if sent < len(data):
            self._push(data)
            self._sent(sent)

    def _push(self, data: bytes) -> None:
        self._out.append(memoryview(data))
        self._out_bytes += len(data)

    def _sent(self, count: int) -> None:
        self._out_bytes -= count
        while count:
            first = self._out[0]
            if count < len(first):
                self._out[0] = first[count:]
                return
            count -= len(first)
            self._out.popleft()

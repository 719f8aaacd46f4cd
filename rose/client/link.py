"""One asyncio connection of the light link: frames out, answers matched to the futures that wait for them.

Knows frames and futures; knows neither requests' contents nor reconnecting.
"""

from __future__ import annotations

import asyncio
import time
from typing import cast

from rose.client.messages import connection_error, parse_error
from rose.errors import DeadlineExceeded, InternalError, RoseError, Unavailable, from_kind
from rose.proto.address import Address
from rose.proto.frames import Frame, FrameDecoder, FrameType, encode_frame

WRITE_BUFFER_BYTES = 4 << 20


class Stream:
    """Answers of one request as they come. What nobody has taken yet is joined: several chunks become one, since the
    bytes of protobuf messages, one after another, are the message of all their repeated fields.

    Attributes:
        ended: nothing more will come; set by whoever can tell, or by an error.
    """

    __slots__ = ("_arrived", "_error", "_loop", "_waiter", "ended")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.ended = False
        self._loop = loop
        self._arrived: list[bytes] = []
        self._error: RoseError | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def next(self) -> bytes:
        """Payloads since the last call, joined, once there are any.

        Raises:
            RoseError: what the request was answered with, after all that came before it was taken.
        """
        while not self._arrived:
            if self._error is not None:
                raise self._error
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        arrived, self._arrived = self._arrived, []
        return arrived[0] if len(arrived) == 1 else b"".join(arrived)

    def take(self, frame: Frame) -> None:
        if frame.type is FrameType.GENERATE_CHUNK:
            self._arrived.append(frame.payload)
            self._wake()
        elif frame.type is FrameType.ERROR:
            self.fail(parse_error(frame.payload))
        else:
            self.fail(InternalError(f"a request for tokens was answered by {frame.type.name}"))

    def fail(self, error: RoseError) -> None:
        self.ended = True
        if self._error is None:
            self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Link(asyncio.Protocol):
    """Many requests in flight on one connection; works on any asyncio loop.

    Args:
        max_payload: largest answer accepted, in bytes.
        spin_s: keep the loop from sleeping for so long after a request, unless all answers come before.

    Attributes:
        closed: why no request can be sent any more, or None while the connection stands.
    """

    def __init__(self, address: Address, max_payload: int, spin_s: float = 0.0) -> None:
        self.address = address
        self.closed: RoseError | None = None
        self._decoder = FrameDecoder(max_payload)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._open: dict[int, asyncio.Future[bytes]] = {}
        self._streams: dict[int, Stream] = {}
        self._next_id = 0
        self._spin_s = spin_s
        self._spin_until = 0.0
        self._spinning = False
        self._writable = asyncio.Event()
        self._writable.set()
        self._lost = asyncio.Event()

    @property
    def open_requests(self) -> int:
        return len(self._open) + len(self._streams)

    @property
    def ready(self) -> bool:
        """Whether a request can be sent at once."""
        return self.closed is None and self._writable.is_set()

    async def writable(self) -> None:
        """Wait until the connection takes more; raises what closed it once it is gone."""
        await self._writable.wait()
        if self.closed is not None:
            raise _copy(self.closed)

    def send(self, kind: FrameType, payload: bytes, deadline_ms: int) -> tuple[int, asyncio.Future[bytes]]:
        """Queue one request. Returns its id and the future of its answer's payload."""
        if self._transport is None or self.closed is not None:
            raise _copy(self.closed or Unavailable(f"not connected to {self.address}"))
        self._next_id += 1
        future = self._loop.create_future()
        self._open[self._next_id] = future
        self._transport.write(encode_frame(kind, self._next_id, payload, deadline_ms))
        if self._spin_s:
            self._spin_until = time.monotonic() + self._spin_s
            if not self._spinning:
                self._spinning = True
                self._loop.call_soon(self._spin)
        return self._next_id, future

    def send_for_stream(self, kind: FrameType, payload: bytes, deadline_ms: int) -> tuple[int, Stream]:
        """Queue one request that is answered in several frames. Returns its id and where they arrive; `cancel` forgets
        it, also after its end.
        """
        if self._transport is None or self.closed is not None:
            raise _copy(self.closed or Unavailable(f"not connected to {self.address}"))
        self._next_id += 1
        stream = self._streams[self._next_id] = Stream(self._loop)
        self._transport.write(encode_frame(kind, self._next_id, payload, deadline_ms))
        return self._next_id, stream

    def cancel(self, request_id: int) -> None:
        """Tell the server that nobody waits for this request; its answer will be ignored."""
        stream = self._streams.pop(request_id, None)
        waiting = self._open.pop(request_id, None) is not None or (stream is not None and not stream.ended)
        if waiting and self._transport is not None and self.closed is None:
            self._transport.write(encode_frame(FrameType.CANCEL, request_id))

    def expire(self, request_id: int) -> None:
        """Fail an open request whose deadline has passed, and cancel it at the server."""
        future, stream = self._open.get(request_id), self._streams.get(request_id)
        self.cancel(request_id)
        error = DeadlineExceeded(f"no answer from {self.address} before the deadline")
        if future is not None and not future.done():
            future.set_exception(error)
        if stream is not None:
            stream.fail(error)

    async def close(self) -> None:
        self._fail(Unavailable("the client was closed"))
        if self._transport is not None:
            # Not close(), which first waits for the peer to read what is still unsent: it may never again.
            self._transport.abort()
            await self._lost.wait()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        try:
            frames = self._decoder.feed(data)
        except RoseError as error:
            self._abort(Unavailable(f"{self.address} does not speak the light link: {error.message}"))
            return
        for frame in frames:
            self._answer(frame)

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(Unavailable(f"connection to {self.address} lost" + (f": {error}" if error else "")))
        self._transport = None
        self._lost.set()

    def _spin(self) -> None:
        """A loop that has something to do asks its sockets and does not sleep."""
        if self._open and time.monotonic() < self._spin_until:
            self._loop.call_soon(self._spin)
        else:
            self._spinning = False

    def _answer(self, frame: Frame) -> None:
        if frame.request_id == 0 and frame.type is FrameType.ERROR:
            self._abort(connection_error(frame.payload))
            return
        future = self._open.pop(frame.request_id, None)
        if future is None:
            if (stream := self._streams.get(frame.request_id)) is not None:
                stream.take(frame)
            return  # else cancelled or expired here before its answer came
        if future.done():
            return
        if frame.type is FrameType.ERROR:
            future.set_exception(parse_error(frame.payload))
        else:
            future.set_result(frame.payload)

    def _abort(self, error: RoseError) -> None:
        self._fail(error)
        if self._transport is not None:
            self._transport.abort()

    def _fail(self, error: RoseError) -> None:
        if self.closed is None:
            self.closed = error
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(_copy(self.closed))
        waiting, self._open = self._open, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(_copy(self.closed))
                future.exception()  # whoever still waits gets it; whoever left leaves no warning
        self._writable.set()


def _copy(error: RoseError) -> RoseError:
    """One exception object for each who raises it: tracebacks of different callers do not mix."""
    return from_kind(error.kind, error.message, retry_after_s=error.retry_after_s)

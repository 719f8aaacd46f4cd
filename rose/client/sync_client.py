"""The blocking client of the light link.

    with Client("127.0.0.1:9000") as client:
        result = client.embed([[101, 2023, 102]])

One request at a time on one connection, behind a lock; threads that want requests side by side take a client each. A
generation is one request until its iterator has ended or was closed; other calls are refused until then.
One system call sends a request and, as a rule, one receives its answer. Knows token ids and messages; knows neither
texts nor replicas. Connections that are lost: as in the async client, nothing is sent twice, and the next call
connects anew unless `reconnect=False`.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Generator, Sequence
from types import TracebackType

from rose.client.chunk_stream import ChunkStream
from rose.client.generation import Generated, generate_request
from rose.client.messages import (
    MAX_ANSWER_BYTES,
    Sequences,
    Spans,
    connection_error,
    embed_request,
    parse_card,
    parse_embed,
    parse_error,
    parse_stats,
)
from rose.client.result import EmbedResult
from rose.errors import DeadlineExceeded, InternalError, InvalidInput, RoseError, Unavailable
from rose.proto import rose_pb2 as pb
from rose.proto.address import Address, parse_address
from rose.proto.convert import AnyArray
from rose.proto.frames import HEADER_BYTES, FrameType, deadline_to_ms, decode_header, encode_frame

# Most answers (sixteen vectors of 1024 floats) fit one read of this size.
RECEIVE_BYTES = 64 << 10
# How much longer than the deadline the socket waits: the server's own answer to it spares a reconnect.
DEADLINE_GRACE_S = 0.1


class Client:
    """A connection to one engine process, for blocking callers.

    Args:
        address: "host:port" or "unix:/path".
        connect_timeout_s: also used when a later call connects anew.
        reconnect: whether calls after a lost connection connect anew.
        max_payload: largest answer accepted, in bytes.
        spin_s: ask the socket again and again for so long before sleeping until the answer comes. A processor that went
            to sleep wakes up late and with cold caches; a caller who waits for one short answer after the other may
            rather spend a core. 0 sleeps at once.

    Raises:
        InvalidInput: malformed address.
        Unavailable: nothing listens there.
    """

    def __init__(
        self,
        address: str | Address,
        *,
        connect_timeout_s: float = 5.0,
        reconnect: bool = True,
        max_payload: int = MAX_ANSWER_BYTES,
        spin_s: float = 0.0,
    ) -> None:
        self.address = parse_address(address) if isinstance(address, str) else address
        self._connect_timeout_s = connect_timeout_s
        self._reconnect = reconnect
        self._max_payload = max_payload
        self._spin_s = spin_s
        # Taken again by the same thread where the collector ends a generation that nobody holds any more.
        self._lock = threading.RLock()
        self._buffer = bytearray(RECEIVE_BYTES)
        self._next_id = 0
        self._closed = False
        self._timeout_s: float | None = None
        self._streaming: ChunkStream | None = None
        self._socket: socket.socket | None = self._dial()

    def embed(
        self,
        sequences: Sequences,
        *,
        model: str = "",
        outputs: Sequence[str] = (),
        dimensions: int = 0,
        priority: pb.Priority.ValueType = pb.ONLINE,
        deadline_s: float | None = None,
        token_types: Sequences | None = None,
        spans: Spans | None = None,
    ) -> EmbedResult:
        """Run token id sequences; arguments and errors as AsyncClient.embed."""
        request = embed_request(
            sequences,
            model=model,
            outputs=outputs,
            dimensions=dimensions,
            priority=priority,
            token_types=token_types,
            spans=spans,
        )
        return EmbedResult.from_message(self.embed_message(request, deadline_s=deadline_s))

    def embed_message(self, request: pb.EmbedRequest, *, deadline_s: float | None = None) -> pb.EmbedResponse:
        """The same for a message that is already made."""
        return parse_embed(self._call(FrameType.EMBED, request.SerializeToString(), deadline_s))

    def generate(
        self,
        ids: Sequence[int] | AnyArray,
        *,
        model: str = "",
        max_new_tokens: int = 0,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = None,
        stop_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        min_new_tokens: int = 0,
        logprobs: int | None = None,
        priority: pb.Priority.ValueType = pb.ONLINE,
        deadline_s: float | None = None,
    ) -> Generator[Generated, None, None]:
        """Tokens that continue a prompt, as they are drawn; arguments and errors as AsyncClient.generate.

        The request is sent when the first is asked for. Closing the iterator before its end cancels it at the server; a
        `for` loop that is left early does that once nobody holds the iterator any more.
        """
        request = generate_request(
            ids,
            model=model,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            stop_ids=stop_ids,
            ignore_eos=ignore_eos,
            min_new_tokens=min_new_tokens,
            logprobs=logprobs,
            priority=priority,
        )
        return _generated(self.generate_message(request, deadline_s=deadline_s))

    def generate_message(
        self, request: pb.GenerateRequest, *, deadline_s: float | None = None
    ) -> Generator[pb.GenerateChunk, None, None]:
        """The same for a message that is already made, with the chunks as they travel; the last has `finish` set."""
        deadline_to_ms(deadline_s)
        return self._stream(request.SerializeToString(), None if deadline_s is None else time.monotonic() + deadline_s)

    def info(self, *, deadline_s: float | None = 10.0) -> pb.ModelCard:
        return parse_card(self._call(FrameType.INFO, b"", deadline_s))

    def stats(self, *, deadline_s: float | None = 10.0) -> pb.ServerStats:
        return parse_stats(self._call(FrameType.STATS, b"", deadline_s))

    def close(self) -> None:
        """Close the connection. A call in another thread ends first; a generation ends with Unavailable."""
        with self._lock:
            self._closed = True
            self._drop()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, kind: FrameType, payload: bytes, deadline_s: float | None) -> bytes:
        deadline_ms = deadline_to_ms(deadline_s)
        end = None if deadline_s is None else time.monotonic() + deadline_s + DEADLINE_GRACE_S
        with self._lock:
            connection = self._ready()
            self._next_id += 1
            try:
                self._set_timeout(connection, deadline_s)
                connection.sendall(encode_frame(kind, self._next_id, payload, deadline_ms))
                answer, body = self._receive(connection, self._next_id, end)
            except BlockingIOError:
                self._drop()
                raise DeadlineExceeded(f"no answer from {self.address} before the deadline") from None
            except OSError as error:
                self._drop()
                raise Unavailable(f"connection to {self.address} lost: {error}") from None
            except BaseException:
                # Somewhere inside a frame (an interrupt, a broken peer): this stream cannot be used again.
                self._drop()
                raise
        if answer is FrameType.ERROR:
            raise parse_error(body)
        return body

    def _stream(self, payload: bytes, end: float | None) -> Generator[pb.GenerateChunk, None, None]:
        with self._lock:
            connection = self._ready()
            self._set_timeout(connection, None)
            self._next_id += 1
            stream = self._streaming = ChunkStream(connection, self.address, self._next_id, self._max_payload)
        try:
            yield from stream.run(payload, end)
        finally:
            with self._lock:
                self._streaming = None
                if stream.clean:
                    connection.settimeout(None)
                else:
                    self._drop()

    def _receive(self, connection: socket.socket, request_id: int, end: float | None) -> tuple[FrameType, bytes]:
        view = memoryview(self._buffer)
        filled = self._spin(connection, view, end) if self._spin_s else 0
        if filled < HEADER_BYTES:
            filled = self._fill(connection, view, filled, HEADER_BYTES, end)
        try:
            length, kind, answered, _ = decode_header(view, 0, self._max_payload)
        except RoseError as error:
            raise Unavailable(f"{self.address} does not speak the light link: {error.message}") from None
        size = HEADER_BYTES + length
        if size > len(view):
            whole = memoryview(bytearray(size))
            whole[:filled] = view[:filled]
            view = whole
        if filled < size:
            self._fill(connection, view, filled, size, end)
        body = bytes(view[HEADER_BYTES:size])
        if answered == 0 and kind is FrameType.ERROR:
            raise connection_error(body)
        if answered != request_id:
            raise InternalError(f"{self.address} answered request {answered} instead of {request_id}")
        return kind, body

    def _spin(self, connection: socket.socket, view: memoryview, end: float | None) -> int:
        """Bytes that came while asking; 0 where none did in time."""
        until = time.monotonic() + self._spin_s
        until = until if end is None else min(until, end)
        while True:
            try:
                count = connection.recv_into(view, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                if time.monotonic() >= until:
                    return 0
                continue
            if count == 0:
                raise Unavailable(f"{self.address} closed the connection")
            return count

    def _fill(self, connection: socket.socket, view: memoryview, filled: int, wanted: int, end: float | None) -> int:
        while filled < wanted:
            if end is not None and filled and time.monotonic() > end:
                raise BlockingIOError
            count = connection.recv_into(view[filled:])
            if count == 0:
                raise Unavailable(f"{self.address} closed the connection")
            filled += count
        return filled

    def _set_timeout(self, connection: socket.socket, deadline_s: float | None) -> None:
        # Timeouts of the kernel's own: Python's cost one poll() more before each call.
        if deadline_s == self._timeout_s:
            return
        seconds = 0.0 if deadline_s is None else deadline_s + DEADLINE_GRACE_S
        interval = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, interval)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, interval)
        self._timeout_s = deadline_s

    def _ready(self) -> socket.socket:
        if self._closed:
            raise Unavailable("the client was closed")
        if self._streaming is not None:
            raise InvalidInput(
                "a generation is not over on this client: end or close its iterator, or take another client"
            )
        if self._socket is None:
            if not self._reconnect:
                raise Unavailable(f"connection to {self.address} lost, and this client does not reconnect")
            self._socket = self._dial()
        return self._socket

    def _dial(self) -> socket.socket:
        where = self.address
        try:
            if where.path:
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                connection.settimeout(self._connect_timeout_s)
                connection.connect(where.path)
            else:
                connection = socket.create_connection((where.host, where.port), self._connect_timeout_s)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            raise Unavailable(f"nothing listens at {where}: {error}") from None
        connection.settimeout(None)
        self._timeout_s = None
        return connection

    def _drop(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
            self._socket = None


def _generated(chunks: Generator[pb.GenerateChunk, None, None]) -> Generator[Generated, None, None]:
    with contextlib.closing(chunks):
        for chunk in chunks:
            yield Generated.from_message(chunk)

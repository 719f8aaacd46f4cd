"""One HTTP request and one answer, as thin as ASGI allows: headers, a bounded body, a watch for callers who leave.

Knows bytes and headers; knows neither JSON nor routes.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, MutableMapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rose.errors import Cancelled, InvalidInput, PayloadTooLarge
from rose.gateway.body_budget import Held
from rose.gateway.inputs import show_bytes

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]
T = TypeVar("T")

# A body that stops coming must not hold a request, and with it a drain, open for ever.
BODY_TIMEOUT_S = 60.0
LATE = "the body is late"
# A refused body is still read up to this many times the limit, so that the caller reads an answer, not a reset.
DISCARD_FACTOR = 4
# A caller who leaves is looked for after this long: most answers come sooner, and a task costs as much as their JSON.
WATCH_AFTER_S = 0.005
REQUEST_ID = re.compile(rb"[!-~]{1,128}")
# Nobody sends more than 10^18 bytes, and Python refuses to read thousands of digits.
LENGTH_DIGITS = 18
CLOSE = (b"connection", b"close")


class ClientGone(Cancelled):
    """The caller left: there is nobody to answer."""


@dataclass(slots=True)
class Reply:
    """Status, body and extra headers; content-length is added when it is sent."""

    status: int
    body: bytes
    headers: Headers = field(default_factory=list)
    content_type: bytes = b"application/json"


@dataclass(slots=True)
class StreamReply:
    """Server-sent events: status 200, the first of them, which is there, and those to come.

    Attributes:
        events: closed when the caller leaves; what they raise becomes the last one.
    """

    first: bytes
    events: AsyncGenerator[bytes, None]
    headers: Headers = field(default_factory=list)


class Call:
    """One HTTP request.

    Attributes:
        id: the caller's X-Request-Id where it is printable and at most 128 characters, else a new one.
        started: time.perf_counter() at arrival.
    """

    __slots__ = ("_named", "_receive", "headers", "id", "method", "path", "started")

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.started = time.perf_counter()
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: Headers = scope["headers"]
        self._named = dict(reversed(self.headers))  # the first of several of a name
        self._receive = receive
        given = self.header(b"x-request-id")
        self.id = given if given is not None and REQUEST_ID.fullmatch(given) else os.urandom(8).hex().encode()

    def elapsed(self) -> float:
        """Seconds since arrival."""
        return time.perf_counter() - self.started

    def header(self, name: bytes) -> bytes | None:
        """First value of a header; `name` in lower case, as ASGI servers hand them over."""
        return self._named.get(name)

    async def body(self, limit: int, held: Held) -> bytes:
        """The whole body, counted in `held` as it comes.

        Raises:
            PayloadTooLarge: more than `limit` bytes, announced or sent.
            Overloaded: the front holds too many bodies already.
            InvalidInput: a compressed body, or one that did not arrive within a minute.
            ClientGone: the caller left before the end of it.
        """
        coding = self.header(b"content-encoding")
        if coding not in (None, b"identity", b""):
            raise InvalidInput(f"Content-Encoding {show_bytes(coding)} is not supported, send the body as it is")
        announced = _content_length(self.header(b"content-length"))
        if announced > limit and self.header(b"expect") is not None:
            raise _too_large(announced, limit)  # nothing has been sent yet, so there is nothing to read away
        task = asyncio.current_task()
        assert task is not None  # ASGI applications run in tasks
        # What asyncio.timeout does, at a tenth of its price.
        alarm = asyncio.get_running_loop().call_later(BODY_TIMEOUT_S, task.cancel, LATE)
        try:
            return await self._read(limit, announced, held)
        except asyncio.CancelledError as error:
            if error.args != (LATE,) or task.uncancel():
                raise
            raise InvalidInput(f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s") from None
        finally:
            alarm.cancel()

    async def _read(self, limit: int, announced: int, held: Held) -> bytes:
        chunks: list[bytes] = []
        size, more, kept = 0, True, True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone("the client disconnected before the end of the body")
            chunk: bytes = message.get("body", b"")
            more = message.get("more_body", False)
            size += len(chunk)
            kept = kept and size <= limit and held.add(len(chunk))
            if kept:
                chunks.append(chunk)
                continue
            chunks.clear()
            held.release()
            if size > limit * DISCARD_FACTOR:
                break
        if size > limit:
            raise _too_large(max(size, announced), limit)
        if not kept:
            raise held.refusal()
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def unless_gone(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` (after the body was read); when the caller leaves, cancel it.

        Raises:
            ClientGone: the caller left.
        """
        task = asyncio.current_task()
        assert task is not None  # ASGI applications run in tasks
        gone = False

        async def watch() -> None:
            nonlocal gone
            while (await self._receive())["type"] != "http.disconnect":
                pass
            gone = True
            task.cancel()

        loop = asyncio.get_running_loop()
        watchers: list[asyncio.Task[None]] = []
        start = loop.call_later(WATCH_AFTER_S, lambda: watchers.append(loop.create_task(watch())))
        try:
            return await work
        except asyncio.CancelledError:
            if not gone:
                raise
            task.uncancel()
            raise ClientGone("the client disconnected before the answer") from None
        finally:
            start.cancel()
            for watcher in watchers:
                watcher.cancel()


def _content_length(value: bytes | None) -> int:
    """0 where there is none, or none that could be true."""
    return int(value) if value is not None and value.isdigit() and len(value) <= LENGTH_DIGITS else 0


def _too_large(size: int, limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the body has {size} bytes or more, the limit is {limit} bytes")


async def send_reply(send: Send, reply: Reply, request_id: bytes) -> None:
    headers = [
        (b"content-type", reply.content_type),
        (b"content-length", b"%d" % len(reply.body)),
        (b"x-request-id", request_id),
        *reply.headers,
    ]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})


async def send_events(
    send: Send, reply: StreamReply, request_id: bytes, failed: Callable[[Exception], tuple[int, bytes]]
) -> int:
    """Every event as it comes.

    Args:
        failed: where the events fail, the status that stands for it and what to send instead of the rest.

    Returns:
        The HTTP status that the whole would have had: 200, or the failure's.
    """
    headers = [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),  # nginx would hold events back
        (b"x-request-id", request_id),
        *reply.headers,
    ]
    status = 200
    async with aclosing(reply.events) as events:
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": reply.first, "more_body": True})
        try:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except Exception as error:  # noqa: BLE001 (the boundary decides what the caller hears of it)
            status, last = failed(error)
            await send({"type": "http.response.body", "body": last, "more_body": True})
    await send({"type": "http.response.body", "body": b""})
    return status

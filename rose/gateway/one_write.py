"""Head and body of an answer in one write: a system call and a packet less, and callers wake up once, not twice.

uvicorn writes the head of an answer before it sees the body, and uvloop writes at once. Here the head waits for what is
written next in the same turn of the loop, and no longer. Knows transports and HTTP's first line; knows no requests.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_CONTINUE = b"HTTP/1.1 100"


class OneWrite(HttpToolsProtocol):
    """uvicorn's protocol over a transport that joins."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(Joining(transport))  # type: ignore[arg-type]


class Joining:
    """A transport that keeps the head of an answer until the next write, at most for this turn of the loop.

    All else is the transport's own.
    """

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._head = b""
        self.is_closing = transport.is_closing
        self.resume_reading = transport.resume_reading

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if self._head:
            data, self._head = self._head + data, b""
        elif data.endswith(b"\r\n\r\n") and data.startswith(b"HTTP/1.1 ") and not data.startswith(_CONTINUE):
            self._head = data
            self._loop.call_soon(self._flush)  # nothing follows an answer to HEAD
            return
        self._transport.write(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._head:
            self.write(b"")

"""The HTTP API as a patient client sees it: kept connections, errors as rose.errors, and another try where one helps.

Embedding and scoring change nothing at the server, so a request whose connection broke is simply sent again. Knows JSON
over HTTP; knows no route's fields.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from rose.errors import InternalError, InvalidInput, RoseError, Unavailable, from_kind

TIMEOUT_S = 600.0
# How long a server may be full, starting or away before a request is given up.
PATIENCE_S = 120.0
# The same before it has answered anything at all: it may just be starting, but the address is more likely a wrong one.
FIRST_PATIENCE_S = 10.0
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.5, 10.0
# Other servers' errors have no names of ours.
_KINDS = {400: "invalid_input", 404: "unknown_model", 413: "payload_too_large", 422: "invalid_input"}
_KINDS |= {429: "overloaded", 501: "unsupported", 503: "unavailable", 504: "deadline_exceeded"}


class Api:
    """A server's HTTP API; used from several threads, each with a connection of its own.

    Args:
        url: "http://host:port", with or without "/v1".
        patience_s: how long to try again while the server is full or away; FIRST_PATIENCE_S at most until it has
            answered once.
        tell: takes one line, once, when the server is found away: whoever waits for it may have named a wrong one.

    Raises:
        InvalidInput: an address that is no such URL.
    """

    def __init__(self, url: str, *, patience_s: float = PATIENCE_S, tell: Callable[[str], None] | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidInput(f"{url!r} is no address of a server: expected http://HOST:PORT")
        self.url = url
        self._secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._patience_s = patience_s
        self._tell = tell
        self._telling = threading.Lock()
        self._own = threading.local()
        self._all: list[http.client.HTTPConnection] = []
        self._closed = threading.Event()
        self._answered = False

    def get(self, path: str) -> Any:
        return self._call("GET", path, None)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The answer's JSON.

        Raises:
            RoseError: what the server says; Unavailable where there is none for longer than `patience_s`.
        """
        return self._call("POST", path, json.dumps(body).encode())

    def close(self) -> None:
        """Break off whatever is under way, in any thread."""
        self._closed.set()
        for connection in list(self._all):
            if connection.sock is not None:
                with contextlib.suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def _call(self, method: str, path: str, body: bytes | None) -> Any:
        started = time.monotonic()
        pause = _FIRST_PAUSE_S
        while True:
            try:
                return self._once(method, path, body)
            except RoseError as error:
                patience_s = self._patience_s if self._answered else min(self._patience_s, FIRST_PATIENCE_S)
                late = time.monotonic() + pause > started + patience_s
                if error.http_status not in (429, 503) or self._closed.is_set() or late:
                    raise
                if error.http_status == 503:  # a full server (429) is an everyday thing
                    self._tell_once(f"{error.message}; trying again for {patience_s:.0f} s")
                self._closed.wait(min(error.retry_after_s or pause, _LAST_PAUSE_S))
                pause = min(2 * pause, _LAST_PAUSE_S)

    def _tell_once(self, line: str) -> None:
        with self._telling:
            tell, self._tell = self._tell, None
        if tell is not None:
            tell(line)

    def _once(self, method: str, path: str, body: bytes | None) -> Any:
        connection = self._connection()
        try:
            connection.request(method, f"{self._prefix}{path}", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            self._answered = True
            data = answer.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()  # the next request connects anew
            raise Unavailable(f"no answer from {self.url}: {str(error) or type(error).__name__}") from None
        if answer.status != 200:
            raise error_of(answer.status, data, answer.headers.get("Retry-After"))
        try:
            return json.loads(data)
        except ValueError:
            raise InternalError(f"{self.url}{path} did not answer with JSON") from None

    def _connection(self) -> http.client.HTTPConnection:
        if not hasattr(self._own, "connection"):
            kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
            self._own.connection = kind(self._host, self._port, timeout=TIMEOUT_S)
            self._all.append(self._own.connection)
        connection: http.client.HTTPConnection = self._own.connection
        return connection


def error_of(status: int, data: bytes, retry_after: str | None) -> RoseError:
    """The error of an answer that is none."""
    try:
        detail = json.loads(data)["error"]
        message, param, index = str(detail["message"]), detail.get("param"), detail.get("index")
        code = detail.get("code")
    except (ValueError, KeyError, TypeError, AttributeError):
        message, param, index, code = data[:200].decode(errors="replace").strip() or "no reason given", None, None, None
    kind = _KINDS.get(status, "internal_error")
    error = from_kind(code if isinstance(code, str) else kind, message, param=param, index=index)
    if error.http_status != status:  # a name that is not of our table
        error = from_kind(kind, message, param=param, index=index)
    error.retry_after_s = float(retry_after) if retry_after and retry_after.isdigit() else None
    return error

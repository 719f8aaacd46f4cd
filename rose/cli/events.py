"""Server-sent events of one request, as a blocking iterator that ends the request when it is closed.

Knows HTTP and the API's events; knows no route's fields.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Generator, Iterator
from typing import Any
from urllib.parse import urlsplit

from rose.cli.bulk.api import TIMEOUT_S, error_of
from rose.errors import InternalError, RoseError, Unavailable, from_kind

DATA = b"data:"


def events(url: str, path: str, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
    """The JSON of each event until [DONE]. Closing the iterator closes the connection, which cancels the request.

    Args:
        url: "http://host:port", with or without "/v1"; the path begins with /v1.

    Raises:
        RoseError: what the server says, at once or in the middle; Unavailable where it goes away.
    """
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
    try:
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        headers = {"Content-Type": "application/json"}
        connection.request("POST", f"{prefix}{path}", json.dumps({**body, "stream": True}).encode(), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise error_of(answer.status, answer.read(), answer.headers.get("Retry-After"))
        yield from _read(answer)
    except (OSError, http.client.HTTPException) as error:
        raise Unavailable(f"no answer from {url}: {str(error) or type(error).__name__}") from None
    finally:
        connection.close()


def _read(answer: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in answer:
        if not line.startswith(DATA):
            continue  # blank lines between events, comments
        data = line[len(DATA) :].strip()
        if data == b"[DONE]":
            return
        event = _event(data)
        if event.get("error"):
            raise _failure(event["error"])
        yield event
    raise Unavailable("the server ended the answer before it was whole")


def _event(data: bytes) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise InternalError(f"the server sent an event that is no JSON object: {data[:100]!r}")
    return event


def _failure(detail: Any) -> RoseError:
    known = detail if isinstance(detail, dict) else {"message": detail}
    code = known.get("code")
    return from_kind(code if isinstance(code, str) else InternalError.kind, str(known.get("message")))

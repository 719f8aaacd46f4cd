"""Errors as OpenAI clients expect them: {"error": {message, type, param, code, index}} with the status of the table.

Knows rose.errors and HTTP; knows no route.
"""

from __future__ import annotations

import math

import msgspec

from rose.errors import RoseError
from rose.gateway.asgi import Headers, Reply
from rose.gateway.inputs import shorten
from rose.gateway.schemas import ErrorDetail, ErrorResponse

_encode = msgspec.json.Encoder().encode
# 429 and 503 always say when to come back; what the error itself states wins.
DEFAULT_RETRY_AFTER_S = 1.0
MESSAGE_CHARS = 2000


def error_type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def reply(status: int, code: str, message: str, *, param: str | None = None, index: int | None = None) -> Reply:
    message = shorten(message, MESSAGE_CHARS)
    detail = ErrorDetail(message=message, type=error_type(status), param=param, code=code, index=index)
    return Reply(status, _encode(ErrorResponse(detail)))


def error_reply(error: RoseError) -> Reply:
    answer = reply(error.http_status, error.kind, error.message, param=error.param, index=error.index)
    answer.headers = _headers(error)
    return answer


def error_event(error: RoseError) -> bytes:
    """The same as a server-sent event, the last of a stream that has begun."""
    return b"data: %b\n\n" % error_reply(error).body


def _headers(error: RoseError) -> Headers:
    headers: Headers = []
    if error.http_status in (429, 503):
        seconds = DEFAULT_RETRY_AFTER_S if error.retry_after_s is None else error.retry_after_s
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(seconds))))
    return headers

"""How long a request may take, and where its time went, as the Server-Timing header: what browsers and proxies show.

Knows stages and milliseconds; knows no route.
"""

from __future__ import annotations

import asyncio

from rose.client import Timing
from rose.gateway.asgi import Call, Headers
from rose.gateway.json_body import TIMEOUT_HEADER, timeout_s


def deadline_of(call: Call, default_s: float) -> float:
    """loop.time() after which the caller wants no answer. Raises InvalidInput for a header that says no time."""
    return asyncio.get_running_loop().time() + timeout_s(call.header(TIMEOUT_HEADER), default_s)


def server_timing(call: Call, tokenize_s: float, timing: Timing, encode_s: float) -> Headers:
    """In milliseconds; for a request of several parts, queue and compute of the slowest one."""
    queue_s, compute_s, _ = timing
    text = b"tokenize;dur=%.3f, queue;dur=%.3f, compute;dur=%.3f, encode;dur=%.3f, total;dur=%.3f" % (
        tokenize_s * 1e3,
        queue_s * 1e3,
        compute_s * 1e3,
        encode_s * 1e3,
        call.elapsed() * 1e3,
    )
    return [(b"server-timing", text)]

"""Where a request's time went, as the Server-Timing header: what browsers and proxies already show.

Knows stages and milliseconds; knows no route.
"""

from __future__ import annotations

from rose.client import Timing
from rose.gateway.asgi import Call, Headers


def server_timing(call: Call, tokenize_s: float, timing: Timing, encode_s: float) -> Headers:
    """In milliseconds; for a request of several parts, queue and compute of the slowest one."""
    stages = (tokenize_s, timing.queue_s, timing.compute_s, encode_s, call.elapsed())
    text = b"tokenize;dur=%.3f, queue;dur=%.3f, compute;dur=%.3f, encode;dur=%.3f, total;dur=%.3f"
    return [(b"server-timing", text % tuple(seconds * 1e3 for seconds in stages))]

"""A client of /v1/completions that does as little as it can while tokens come: it notes when each event came.

HTTP/1.1 on kept connections, server-sent events in chunks; JSON is read after the end. Knows bytes; knows neither loads
nor rows.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from rose.errors import DeadlineExceeded, Unavailable

# Longest wait for all tokens of a stream; generous, since the first ones of a shape are also compiled for.
GENERATION_S = 600.0


@dataclass(slots=True)
class Answer:
    """One streamed completion.

    Attributes:
        times: when each event with a choice came, in time.perf_counter(). text: all of theirs.
        completion_tokens: as the server counts them.
    """

    times: list[float]
    text: str
    completion_tokens: int
    finish_reason: str

    def token_times(self) -> list[float]:
        """One time a token. Where events hold several tokens, they are spread evenly: the first and the last time are
        right, those between are what they are on average."""
        count, events = self.completion_tokens, len(self.times)
        if count == events or not events or count < 2:
            return self.times[:count]
        return [self.times[round(i * (events - 1) / (count - 1))] for i in range(count)]


class CompletionsClient:
    """As many connections as there are streams at a time, kept for the next ones."""

    def __init__(self, url: str, model: str, within_s: float = GENERATION_S) -> None:
        """
        Args:
            url: of the server, with the path before /completions.
            within_s: longest wait for a stream's end.
        """
        parts = urlsplit(url)
        if parts.hostname is None:
            raise ValueError(f"{url!r} names no host")
        self._host, self._port = parts.hostname, parts.port or 80
        self._path = parts.path.rstrip("/") + "/completions"
        self._model = model
        self._within_s = within_s
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def stream(self, ids: Sequence[int], new_tokens: int) -> Answer:
        """Greedy, end tokens ignored.

        Raises:
            Unavailable: an answer that is no event stream, with what it says.
            DeadlineExceeded: it did not end in time.
        """
        body = json.dumps(
            {
                "model": self._model,
                "prompt": list(ids),
                "max_tokens": new_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        reader, writer = self._free.pop() if self._free else await asyncio.open_connection(self._host, self._port)
        head = (
            f"POST {self._path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nContent-Type: application/json\r\n"
            f"Accept: text/event-stream\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        times: list[float] = []
        events: list[bytes] = []
        whole = False
        try:
            async with asyncio.timeout(self._within_s):
                async for event in _events(reader):
                    times.append(time.perf_counter())
                    events.append(event)
            whole = True
        except TimeoutError:
            at = f"{self._host}:{self._port}"
            raise DeadlineExceeded(f"{at} did not end a stream within {self._within_s:g} s") from None
        finally:
            if whole:
                self._free.append((reader, writer))
            else:
                writer.close()  # somewhere inside an answer: no other stream can begin on it
        return _answer(times, events)

    async def close(self) -> None:
        for _, writer in self._free:
            writer.close()
        self._free.clear()


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The data of each server-sent event, as soon as it is whole."""
    status = await reader.readline()
    headers = {}
    while (line := await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip().lower()
    if b" 200 " not in status:
        length = int(headers.get("content-length", 0))
        raise Unavailable(f"{status.decode().strip()}: {(await reader.readexactly(length))[:500]!r}")
    if "event-stream" not in headers.get("content-type", "") or headers.get("transfer-encoding") != "chunked":
        raise Unavailable(f"the answer is no chunked event stream: {headers}")
    held = b""
    while size := int((await reader.readline()).partition(b";")[0], 16):
        held += (await reader.readexactly(size + 2))[:size]
        while (end := held.find(b"\n\n")) >= 0:
            event, held = held[:end], held[end + 2 :]
            if event.startswith(b"data:"):
                yield event[5:].strip()
    await reader.readline()


def _answer(times: Sequence[float], events: Sequence[bytes]) -> Answer:
    seen: list[float] = []
    text, finish, tokens = "", "", 0
    for at, event in zip(times, events, strict=True):
        if event == b"[DONE]":
            continue
        found: dict[str, Any] = json.loads(event)
        if "error" in found:
            raise Unavailable(f"the stream ended with an error: {found['error']}")
        if found.get("usage"):
            tokens = found["usage"]["completion_tokens"]
        for choice in found.get("choices", ()):
            seen.append(at)
            text += choice.get("text") or ""
            finish = choice.get("finish_reason") or finish
    return Answer(seen, text, tokens, finish)

"""Client processes that load a server side by side, and what they saw within one window of time.

Knows processes and clocks; knows neither carriers nor models.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rose.bench.load_client import write_requests
from rose.errors import RoseError


class ClientFailedError(RoseError):
    """A client process ended early: the load was not what it should have been, and there is no row."""


@dataclass(frozen=True, slots=True)
class Window:
    """What happened between two times.

    Attributes:
        seconds: of each request that began within.
        requests: answered within; of those that reach over an edge, the part of their time that lies within.
        length: in seconds.
    """

    seconds: Sequence[float]
    requests: float
    length: float


def run_fleet(
    via: str,
    address: str,
    requests: Sequence[Sequence[bytes]],
    *,
    warm_up_s: float,
    seconds: float,
    meanwhile: Callable[[float, float], None] = lambda begin, end: time.sleep(max(0.0, end - time.monotonic())),
) -> Window:
    """One client process for each list of requests; each sends its own in turn, one at a time, again and again.

    Args:
        address: see load_client.connect.
        warm_up_s: until the window begins, counted from when all clients are ready and start.
        seconds: length of the window.
        meanwhile: called once they run, with the window's begin and end (time.monotonic()); to return after the end.

    Raises:
        ClientFailedError: a client ended early, with what it said.
    """
    with tempfile.TemporaryDirectory(prefix="rose-fleet-") as scratch, contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(_client(via, address, own, Path(scratch) / str(number)))
            for number, own in enumerate(requests)
        ]
        for client in clients:
            client.await_ready()
        begin = time.monotonic() + warm_up_s
        end = begin + seconds
        for client in clients:
            client.go(end)
        meanwhile(begin, end)
        spans = [span for client in clients for span in client.finish()]
    return window(spans, begin, end)


def window(spans: Sequence[tuple[float, float]], begin: float, end: float) -> Window:
    """`spans`: start and end of every request."""
    inside = sum(max(0.0, min(e, end) - max(s, begin)) / (e - s) for s, e in spans if e > s)
    return Window([e - s for s, e in spans if begin <= s < end], inside, end - begin)


class _Client:
    def __init__(self, process: subprocess.Popen[str], log: IO[str]) -> None:
        self._process = process
        self._log = log

    def await_ready(self) -> None:
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != "ready":
            raise self._failed()

    def go(self, end: float) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{end!r}\n")
        self._process.stdin.flush()

    def finish(self) -> list[tuple[float, float]]:
        """(start, end) of every request."""
        out, _ = self._process.communicate()
        if self._process.returncode != 0:
            raise self._failed()
        found = json.loads(out)
        return list(zip(found["starts"], found["ends"], strict=True))

    def _failed(self) -> ClientFailedError:
        self._process.wait()
        self._log.seek(0)
        return ClientFailedError(f"a client process failed:\n{self._log.read()[-2000:]}")


@contextlib.contextmanager
def _client(via: str, address: str, requests: Sequence[bytes], path: Path) -> Iterator[_Client]:
    write_requests(path, requests)
    command = [sys.executable, "-m", "rose.bench.load_client", via, address, str(path)]
    with path.with_suffix(".log").open("w+") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ}
        )
        try:
            yield _Client(process, log)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()

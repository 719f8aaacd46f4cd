"""Client processes that load a server side by side, and what they saw within one window of time.

Knows processes and clocks; knows neither carriers nor models.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rose.bench.carriers import REQUEST_S
from rose.bench.load_client import write_requests
from rose.config.own_python import own_python
from rose.errors import RoseError

# For a client to tell its times and end, once its last request is answered or given up.
ENDING_S = 30.0


class ClientFailedError(RoseError):
    """A client process ended early or not at all: the load was not what it should have been, and there is no row."""


class EmptyWindowError(RoseError):
    """No request ended within the window: there is nothing to tell percentiles of."""


@dataclass(frozen=True, slots=True)
class Window:
    """What happened between two times.

    Attributes:
        seconds: of each request that ended within, wherever it began. Every request ends once, so that long ones count
            no more often than they come; those that wait out a stall which began before the window are among them.
        longest: of all requests that any part of the window was in. A stall over its end, whose requests end in no
            window, shows here.
        requests: answered within; of those that reach over an edge, the part of their time that lies within.
        length: in seconds.
    """

    seconds: Sequence[float]
    longest: float
    requests: float
    length: float


def run_fleet(
    via: str,
    address: str,
    requests: Sequence[Sequence[bytes]],
    *,
    seconds: float,
    settle: Callable[[], None] = lambda: None,
    meanwhile: Callable[[float, float], None] = lambda begin, end: time.sleep(max(0.0, end - time.monotonic())),
) -> Window:
    """One client process for each list of requests; each sends its own in turn, one at a time, again and again.

    Args:
        address: see load_client.connect.
        seconds: length of the window.
        settle: called once they run; the window begins when it returns.
        meanwhile: called then, with the window's begin and end (time.monotonic()); to return after the end.

    Raises:
        ClientFailedError: a client ended early (an engine that does not answer within REQUEST_S ends it), with what it
            said, or did not end.
        EmptyWindowError: no request ended within the window.
        whatever `settle` raises.
    """
    with tempfile.TemporaryDirectory(prefix="rose-fleet-") as scratch, contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(_client(via, address, own, Path(scratch) / str(number)))
            for number, own in enumerate(requests)
        ]
        for client in clients:
            client.await_ready()
        for client in clients:
            client.tell("go")
        settle()
        begin = time.monotonic()
        end = begin + seconds
        for client in clients:
            client.tell(repr(end))
        meanwhile(begin, end)
        spans = [span for client in clients for span in client.finish()]
    return window(spans, begin, end)


def window(spans: Sequence[tuple[float, float]], begin: float, end: float) -> Window:
    """
    Args:
        spans: start and end of every request.

    Raises:
        EmptyWindowError: none ended within.
    """
    touched = [(s, e) for s, e in spans if e > begin and s < end]
    longest = max((e - s for s, e in touched), default=0.0)
    inside = sum((min(e, end) - max(s, begin)) / (e - s) for s, e in touched)
    seconds = [e - s for s, e in touched if e <= end]
    if not seconds:
        raise EmptyWindowError(
            f"no request ended within the window of {end - begin:g} s, the longest took {longest:.2f} s: give more "
            "than that to --seconds"
        )
    return Window(seconds, longest, inside, end - begin)


class _Client:
    def __init__(self, process: subprocess.Popen[str], log: IO[str]) -> None:
        self._process = process
        self._log = log

    def await_ready(self) -> None:
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != "ready":
            raise self._failed()

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failed() from None

    def finish(self) -> list[tuple[float, float]]:
        """(start, end) of every request; its last one may have begun just now."""
        try:
            out, _ = self._process.communicate(timeout=REQUEST_S + ENDING_S)
        except subprocess.TimeoutExpired:
            raise self._failed() from None
        if self._process.returncode != 0:
            raise self._failed()
        found = json.loads(out)
        return list(zip(found["starts"], found["ends"], strict=True))

    def _failed(self) -> ClientFailedError:
        what = "failed"
        try:
            self._process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            what = "did not end"
        self._log.seek(0)
        return ClientFailedError(f"a client process {what}:\n{self._log.read()[-2000:]}")


@contextlib.contextmanager
def _client(via: str, address: str, requests: Sequence[bytes], path: Path) -> Iterator[_Client]:
    write_requests(path, requests)
    command = [*own_python("rose.bench.load_client"), via, address, str(path)]
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

"""An engine process and a front process of this installation, started for a load and ended after it.

Knows command lines; knows neither loads nor models.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rose.bench.stages import stage
from rose.config.own_python import own_python
from rose.errors import StartupError

START_SECONDS = 180.0


@dataclass(frozen=True, slots=True)
class Served:
    """Addresses of what was started."""

    link: str
    http: str
    grpc: str


@contextlib.contextmanager
def served(
    folder: Path,
    name: str,
    engine_args: Sequence[str] = (),
    front_args: Sequence[str] = (),
    meanwhile: Callable[[], object] = lambda: None,
    verbose: bool = False,
) -> Iterator[Served]:
    """`python -m rose.server` and `rose gateway` on `folder`, ready to answer: every front listens, an engine is up.

    The kernel gives a connection for good to one of the fronts that listen when it is made: clients of a load that came
    before the last of them did would all be the others'.

    Args:
        meanwhile: called while both start, side by side. verbose: say how long that and the end take.

    Raises:
        StartupError: one of them ended or did not get ready in time; its output is in the message.
    """
    with tempfile.TemporaryDirectory(prefix="rose-bench-") as scratch:
        link = f"unix:{scratch}/engine.sock"
        http_port, grpc_port = _free_port(), _free_port()
        log, listening = Path(scratch) / "log", Path(scratch) / "listening"
        with log.open("wb") as sink, listening.open("wb") as told, contextlib.ExitStack() as stack:
            served_as = ("--served-name", name)
            engine = _start(
                stack, [*own_python("rose.server"), str(folder), "--address", link, *served_as, *engine_args], sink
            )
            ports = ("--http", str(http_port), "--grpc", str(grpc_port))
            gateway = (*own_python("rose.cli"), "gateway", str(folder), "--replica", link)
            front = _start(stack, [*gateway, *ports, *front_args], sink, told)
            with stage("server ready, with what is done meanwhile", verbose):
                meanwhile()
                url = f"http://127.0.0.1:{http_port}/ready"
                # `rose gateway` writes where it listens, and nothing else, once all its fronts do.
                _await(lambda: listening.stat().st_size > 0 and _ready(url), (engine, front), log)
            yield Served(link, f"http://127.0.0.1:{http_port}/v1", f"127.0.0.1:{grpc_port}")


def _start(
    stack: contextlib.ExitStack, command: Sequence[str], log: IO[bytes], output: IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(command, stdout=output or log, stderr=log, env={**os.environ})
    stack.callback(_end, process)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _await(ready: Callable[[], bool], processes: Sequence[subprocess.Popen[bytes]], log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while not ready():
        if any(process.poll() is not None for process in processes) or time.monotonic() > end:
            raise StartupError(f"a process did not get ready:\n{log.read_text(errors='replace')[-4000:]}")
        time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

"""One engine or front process as a child: started, watched, ended, and never left behind.

The kernel kills the child the moment this process is gone, however it went (PR_SET_PDEATHSIG), so that no engine keeps
a GPU's memory without a front. Knows processes; knows neither the light link nor requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence

log = logging.getLogger("rose.gateway")
READY_LINES = (b"rose-server ready", b"rose-front ready")
SERVING_LINE = b"rose-front serving"
# How an engine, its option parser and a front begin the line that says why they refuse to start.
REFUSAL = re.compile(rb"rose-server: |.*rose\.server: error: |rose-front: ")
# Lines are kept up to this length, and whoever writes without ever ending one is not waited for.
LINE_BYTES = 16 << 10
# A child's own children may hold its pipes open after its end.
READ_ON_S = 1.0
# Runs in the child before it becomes what it is for: 1 is PR_SET_PDEATHSIG. A parent that died meanwhile sends no
# signal any more, so its absence is checked afterwards.
_LAUNCH = """\
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


class ChildProcess:
    """A started child.

    Attributes:
        name: in the log.
        ready: set once the child has said that it listens.
        serving: set once a front has said that a replica is ready.
        last_words: why it refused to start, or else the last line it wrote on standard error.
    """

    def __init__(self, process: asyncio.subprocess.Process, name: str) -> None:
        self.name = name
        self.ready, self.serving = asyncio.Event(), asyncio.Event()
        self.last_words = ""
        self._refused = False
        self._process = process
        self._readers: list[asyncio.Task[None]] = []

    @classmethod
    async def start(cls, command: Sequence[str], name: str = "child") -> ChildProcess:
        """Start it in a session of its own: Ctrl-C in a terminal must reach the front alone, which drains first."""
        # Pipes of our own: asyncio's would keep the process from having ended for as long as anybody holds them.
        output, errors = os.pipe(), os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), *command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output[1],
                stderr=errors[1],
                start_new_session=True,
            )
        except BaseException:
            os.close(output[0])
            os.close(errors[0])
            raise
        finally:
            os.close(output[1])
            os.close(errors[1])
        started = cls(process, name)
        loop = asyncio.get_running_loop()
        for pipe, take in ((output[0], started._said), (errors[0], started._complained)):
            started._readers.append(loop.create_task(_lines(pipe, take)))
        return started

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Until it ends. Returns its exit status, negative for a signal."""
        status = await self._process.wait()
        await asyncio.wait(self._readers, timeout=READ_ON_S)
        for reader in self._readers:
            reader.cancel()
        return status

    async def end(self, grace_s: float) -> None:
        """SIGTERM, and SIGKILL after `grace_s` (0: at once)."""
        if grace_s > 0:
            self._send(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._process.wait()
        self._send(signal.SIGKILL)
        await self.wait()

    def _send(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def _said(self, line: bytes) -> None:
        if line.startswith(READY_LINES):
            self.ready.set()
        elif line.startswith(SERVING_LINE):
            self.serving.set()
        log.info("%s (%d): %s", self.name, self.pid, line.decode(errors="replace").rstrip())

    def _complained(self, line: bytes) -> None:
        """Passed on as it is: it is the child's log."""
        text = line.decode(errors="replace")
        sys.stderr.write(text)
        refusal = REFUSAL.match(line)
        if refusal is not None or (line.strip() and not self._refused):
            self._refused = refusal is not None
            self.last_words = line[refusal.end() if refusal else 0 :].decode(errors="replace").strip()


async def _lines(pipe: int, take: Callable[[bytes], None]) -> None:
    """Every line, to `take`, very long ones in pieces; a full pipe would stop the writer. Closes the pipe."""
    stream = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(pipe, "rb", buffering=0)
    )
    held = b""
    try:
        while data := await stream.read(LINE_BYTES):
            *lines, held = (held + data).split(b"\n")
            for line in lines:
                take(line + b"\n")
            if len(held) > LINE_BYTES:
                take(held)
                held = b""
    finally:
        transport.close()
    if held:
        take(held)

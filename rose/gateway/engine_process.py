"""One engine process as a child: started, watched, ended, and never left behind.

The kernel kills the child the moment this process is gone, however it went (PR_SET_PDEATHSIG), so that no engine keeps
a GPU's memory without a front. Knows processes; knows neither the light link nor requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence

log = logging.getLogger("rose.gateway")
READY_LINE = b"rose-server ready"
# Runs in the child before it becomes the engine: 1 is PR_SET_PDEATHSIG. A parent that died meanwhile sends no signal
# any more, so its absence is checked afterwards.
_LAUNCH = """\
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


class EngineProcess:
    """A started child.

    Attributes:
        ready: set once the child has said that it serves.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.ready = asyncio.Event()
        self._process = process
        self._reader = asyncio.get_running_loop().create_task(self._read())

    @classmethod
    async def start(cls, command: Sequence[str]) -> EngineProcess:
        """Start it in a session of its own: Ctrl-C in a terminal must reach the front alone, which drains first."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), *command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        """Until it ends. Returns its exit status, negative for a signal."""
        status = await self._process.wait()
        await self._reader
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

    async def _read(self) -> None:
        """Its standard output, to the log; a full pipe would stop it."""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            if line.startswith(READY_LINE):
                self.ready.set()
            log.info("engine %d: %s", self.pid, line.decode(errors="replace").rstrip())

"""A server for the time of one command: `rose serve` on a free port of the loopback, ended with the command.

So that a file is embedded by the very processes that serve requests: tokenising here, computing there, side by side.
Knows command lines and processes; knows neither models nor requests.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from rose.cli.bulk.api import Api
from rose.config.own_python import own_python
from rose.errors import RoseError, StartupError, Unavailable

START_S = 600.0  # a large checkpoint from a slow disk
_GRACE_S = 30.0
_POLL_S = 0.1
# Runs in the child before it becomes `rose`: 1 is PR_SET_PDEATHSIG. Should this process be killed, the child gets a
# SIGTERM and ends its engine; a parent that died meanwhile sends none any more, so its absence is checked afterwards.
_LAUNCH = """\
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, int(signal.SIGTERM))
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


@contextlib.contextmanager
def rose_server(arguments: Sequence[str]) -> Iterator[str]:
    """The base URL of `rose ARGUMENTS` (serve or gateway), ready to answer.

    Its log goes to this command's stderr, warnings and worse.

    Raises:
        StartupError: it ended before it was ready; its own output says why.
    """
    command = [*own_python("rose.cli"), *arguments, "--http", "0", "--log-level", "warning"]
    launch = [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), *command]
    # In a session of its own: Ctrl-C is this command's to handle.
    with subprocess.Popen(launch, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            yield _ready(process, arguments[0])
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _ready(process: subprocess.Popen[str], what: str) -> str:
    assert process.stdout is not None
    words = process.stdout.readline().split()
    if not words:
        raise _ended(what, process.wait())
    deadline = time.monotonic() + START_S
    api = Api(words[0], patience_s=0)
    while True:
        try:
            api.get("/ready")
        except Unavailable:
            if process.poll() is not None:
                raise _ended(what, process.returncode) from None
            if time.monotonic() > deadline:
                raise StartupError(f"rose {what} did not get ready within {START_S:.0f} s") from None
            time.sleep(_POLL_S)
        except RoseError as error:
            raise StartupError(f"rose {what} is not ready: {error.message}") from None
        else:
            return words[0]


def _ended(what: str, status: int) -> StartupError:
    return StartupError(f"rose {what} ended with status {status} before it served; its own output says why")

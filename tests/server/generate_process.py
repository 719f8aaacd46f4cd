"""An engine process that generates, as its parent starts it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from rose.client import Client

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


class Process:
    """An engine process; ended with the block."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "rose.server", str(folder), "--served-name", "tiny", *arguments]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
        )
        line = self.process.stdout.readline()
        found = re.fullmatch(r"rose-server ready (\S+)\n", line)
        assert found, line + self.process.stderr.read()
        self.address = found[1]

    def wait_for(self, **counters: int) -> None:
        end = time.monotonic() + 10
        with Client(self.address) as client:
            while {name: (seen := client.stats().engine_counters)[name] for name in counters} != counters:
                assert time.monotonic() < end, seen
                time.sleep(0.01)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.communicate()

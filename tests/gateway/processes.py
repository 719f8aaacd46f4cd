"""Fronts and fake engines as processes of their own, for tests of signals and deaths.

python -m tests.gateway.processes front|fronts|serve|engine JSON
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from rose.config.serving import GatewayConfig
from rose.errors import StartupError
from rose.gateway.fronts import run_fronts
from rose.gateway.run import run_front
from rose.gateway.supervise import engine_command, serve
from tests.gateway.conftest import card_for
from tests.gateway.fake_engine import FakeEngine

ROOT = Path(__file__).parents[2]


def command(kind, **options):
    return [sys.executable, "-m", "tests.gateway.processes", kind, json.dumps(options)]


@contextmanager
def running(kind, **options):
    """A started process; killed at the end if it is still there."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command(kind, **options), cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def ports(process):
    """The front's addresses, once it listens: (http, grpc)."""
    line = process.stdout.readline()
    assert line, process.stderr.read()
    return json.loads(line)


def says(process, words):
    """Waits until the process writes a line of its log that holds `words`."""
    read = []
    while words not in (line := process.stderr.readline()):
        assert line, "".join(read)  # it ended
        read.append(line)


def wait_for(condition, timeout_s=20.0):
    end = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
    return found


def alive(pid):
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _say(listening):
    sys.stdout.write(json.dumps([listening.http, listening.grpc]) + "\n")
    sys.stdout.flush()


async def _engine(options):
    """Answers `delay_s` after `backwards` requests wait; writes its pid to `pids`; with `lives_s` it ends by itself."""
    address = options["address"]
    with Path(options["pids"]).open("a") as pids:
        pids.write(f"{os.getpid()}\n")
    engine = FakeEngine(address.removeprefix("unix:"), card_for(Path(options["folder"])))
    engine.delay_s, engine.backwards = options.get("delay_s", 0.0), options.get("backwards", 1)
    async with engine:
        sys.stdout.write(f"rose-server ready {address}\n")
        sys.stdout.flush()
        await asyncio.sleep(options.get("lives_s", 600.0))


def main():
    kind, options = sys.argv[1], json.loads(sys.argv[2])
    logging.basicConfig(level="INFO")
    folder = Path(options["folder"])
    config = {"http_port": 0, "grpc_port": 0, **options.get("config", {})}
    if kind == "front":
        return run_front(GatewayConfig(replicas=tuple(options["replicas"]), **config), folder, on_listening=_say)
    if kind == "fronts":
        return run_fronts(GatewayConfig(replicas=tuple(options["replicas"]), **config), folder, on_listening=_say)
    if kind == "serve":
        engines = [
            engine_command(folder, one) if isinstance(one, list)  # arguments of a real engine
            else lambda address, one=one: command("engine", address=address, **one)
            for one in options["engines"]
        ]  # fmt: skip
        told = {"on_ready" if options.get("say_ready") else "on_listening": _say}
        try:
            return serve(folder, GatewayConfig(replicas=(), **config), engines, **told)
        except StartupError as error:
            sys.stderr.write(f"refused: {error.message}\n")
            return 2
    if options.get("fails"):
        sys.stderr.write("rose-server: this is why\n\n")
        return options["fails"]
    time.sleep(options.get("loads_s", 0.0))
    asyncio.run(_engine(options))
    return 4


if __name__ == "__main__":
    sys.exit(main())

"""`rose serve`: the engine processes as children and the front in this process, as one thing to start and to stop.

    engines start -> front listens (503 until they are ready) -> SIGTERM -> front drains -> engines end

An engine that dies is started again, a few times; meanwhile the front answers 503 with Retry-After. Knows processes;
knows neither requests nor the light link.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import uvloop

from rose.config.serving import GatewayConfig
from rose.errors import StartupError
from rose.gateway.engine_process import EngineProcess
from rose.gateway.facts import Reading
from rose.gateway.run import SWITCH_INTERVAL_S, OnListening, Stop, serve_front, unless

log = logging.getLogger("rose.gateway")
# Light-link address -> command line of the engine that is to listen there.
EngineCommand = Callable[[str], Sequence[str]]

MAX_RESTARTS = 5
FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.5, 10.0
# An engine that served this long before it died starts with a clean record.
STABLE_S = 60.0
# With nothing in flight any more, an engine has only its device memory to give back.
ENGINE_GRACE_S = 10.0


def engine_command(model_folder: Path, args: Sequence[str] = ()) -> EngineCommand:
    """The engine of this installation on a model folder, with further arguments of `python -m rose.server`."""
    return lambda address: (sys.executable, "-m", "rose.server", str(model_folder), "--address", address, *args)


def serve(
    model_folder: Path,
    config: GatewayConfig,
    engines: Sequence[EngineCommand],
    *,
    reading: Reading | None = None,
    on_listening: OnListening | None = None,
) -> int:
    """Run engines and front until a signal. Blocks.

    Args:
        config: the front's limits; `replicas` is filled in here.
        engines: one command an engine; see `engine_command`.
        reading: what settles the reading of the folder, as in the engines' commands; see `make_front`.
        on_listening: called once, with the front's ports, while the engines are still loading.

    Returns:
        The exit status: 0 if every request was answered, 1 if some were cut off or an engine could not be kept alive.

    Raises:
        CheckpointError, StartupError: as `run_front`.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    return uvloop.run(_serve(model_folder, config, engines, reading, on_listening))


async def _serve(
    model_folder: Path,
    config: GatewayConfig,
    engines: Sequence[EngineCommand],
    reading: Reading | None,
    on_listening: OnListening | None,
) -> int:
    with tempfile.TemporaryDirectory(prefix="rose-") as sockets:
        paths = [Path(sockets) / f"engine{i}" for i in range(len(engines))]
        keepers = [Keeper(command, path) for command, path in zip(engines, paths, strict=True)]
        config = replace(config, replicas=tuple(f"unix:{path}" for path in paths))
        stop = Stop()
        with stop.on_signals():
            loop = asyncio.get_running_loop()
            keeping = [loop.create_task(keeper.keep()) for keeper in keepers]
            front = loop.create_task(
                serve_front(config, model_folder, stop, reading=reading, on_listening=on_listening)
            )
            try:
                await asyncio.wait([front, *keeping], return_when=asyncio.FIRST_COMPLETED)
                failed = _failures(keeping)
                stop.drain.set()
                status = await front
            finally:
                for task in keeping:
                    task.cancel()
                await unless(stop.force, _end_all(keepers, ENGINE_GRACE_S))
                await _end_all(keepers, 0.0)
        for error in failed:
            log.error("%s", error)
        return 1 if failed else status


async def _end_all(keepers: Sequence[Keeper], grace_s: float) -> bool:
    await asyncio.gather(*(keeper.end(grace_s) for keeper in keepers))
    return True


def _failures(keeping: Sequence[asyncio.Task[None]]) -> list[BaseException]:
    errors = [task.exception() for task in keeping if task.done() and not task.cancelled()]
    return [error for error in errors if error is not None]


class Keeper:
    """Keeps one engine alive."""

    def __init__(self, command: EngineCommand, socket_path: Path) -> None:
        self._command = command
        self._path = socket_path
        self._engine: EngineProcess | None = None

    async def keep(self) -> None:
        """Start the engine, and start it again whenever it ends.

        Raises:
            StartupError: it ended before it ever served, or too often.
        """
        restarts = 0
        while True:
            started = time.monotonic()
            self._path.unlink(missing_ok=True)  # a killed engine leaves its socket behind
            self._engine = await EngineProcess.start(self._command(f"unix:{self._path}"))
            status = await self._engine.wait()
            served = self._engine.ready.is_set()
            if not served and restarts == 0:
                raise StartupError(f"the engine ended with status {status} before it served; its own output says why")
            if served and time.monotonic() - started > STABLE_S:
                restarts = 0
            restarts += 1
            if restarts > MAX_RESTARTS:
                raise StartupError(f"the engine ended {restarts} times in a row, the last time with status {status}")
            pause = min(FIRST_BACKOFF_S * 2 ** (restarts - 1), LAST_BACKOFF_S)
            log.warning("the engine ended with status %d; restart %d in %.1f s", status, restarts, pause)
            await asyncio.sleep(pause)

    async def end(self, grace_s: float) -> None:
        if self._engine is not None:
            await self._engine.end(grace_s)

"""`rose serve`: the engine processes as children and the front in this process, as one thing to start and to stop.

    engines start -> front listens (503 until one is ready) -> SIGTERM -> front drains -> engines end

An engine that dies is started again, a few times; meanwhile the others serve, or the front answers 503 with
Retry-After. The whole ends when no engine is left, or when one refuses to start at all, which is a fault of what was
asked for. Knows processes; knows neither requests nor the light link.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import uvloop

from rose.config.own_python import own_python
from rose.config.serving import GatewayConfig, check_gateway_config
from rose.errors import StartupError
from rose.gateway.engine_process import EngineProcess
from rose.gateway.facts import Reading
from rose.gateway.run import SWITCH_INTERVAL_S, OnListening, Stop, serve_front, unless
from rose.gateway.socket_folder import socket_folder

log = logging.getLogger("rose.gateway")
# Light-link address -> command line of the engine that is to listen there.
EngineCommand = Callable[[str], Sequence[str]]

MAX_RESTARTS = 5
FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.5, 10.0
# An engine that served this long before it died starts with a clean record.
STABLE_S = 60.0
# The exit status of an engine that refuses what it was asked for: asking again would not help.
REFUSED = 2
# With nothing in flight any more, an engine has only its device memory to give back.
ENGINE_GRACE_S = 10.0


class EngineRefused(StartupError):
    """An engine did not start, for a reason that starting it again would not remove."""


def engine_command(model_folder: Path, args: Sequence[str] = ()) -> EngineCommand:
    """The engine of this installation on a model folder, with further arguments of `python -m rose.server`."""
    return lambda address: (*own_python("rose.server"), str(model_folder), "--address", address, *args)


def serve(
    model_folder: Path,
    config: GatewayConfig,
    engines: Sequence[EngineCommand],
    *,
    reading: Reading | None = None,
    on_listening: OnListening | None = None,
    on_ready: OnListening | None = None,
) -> int:
    """Run engines and front until a signal. Blocks.

    Args:
        config: the front's limits; `replicas` is filled in here.
        engines: one command an engine; see `engine_command`.
        reading: what settles the reading of the folder, as in the engines' commands; see `make_front`.
        on_listening: called once, with the front's ports, while the engines are still loading.
        on_ready: the same, once the first engine serves.

    Returns:
        The exit status: 0 if every request was answered, 1 if some were cut off or no engine could be kept alive.

    Raises:
        CheckpointError, StartupError: as `run_front`.
        EngineRefused: an engine refused its folder or options, in its own words.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    return uvloop.run(_serve(model_folder, config, engines, reading, on_listening, on_ready))


async def _serve(
    model_folder: Path,
    config: GatewayConfig,
    engines: Sequence[EngineCommand],
    reading: Reading | None,
    on_listening: OnListening | None,
    on_ready: OnListening | None,
) -> int:
    check_gateway_config(config)
    names = [f"engine-{i}" for i in range(len(engines))]
    with socket_folder() as sockets:
        paths = [sockets / name for name in names]
        keepers = [Keeper(*each) for each in zip(engines, paths, names, strict=True)]
        config = replace(config, replicas=tuple(f"unix:{path}" for path in paths), replica_names=tuple(names))
        stop = Stop()
        with stop.on_signals():
            loop = asyncio.get_running_loop()
            keeping = [loop.create_task(keeper.keep()) for keeper in keepers]
            front = loop.create_task(
                serve_front(config, model_folder, stop, reading=reading, on_listening=on_listening, on_ready=on_ready)
            )
            try:
                refused = await _while_any_serves(front, keeping)
                given_up = all(task.done() for task in keeping)
                stop.drain.set()
                status = await front
            finally:
                for task in keeping:
                    task.cancel()
                await unless(stop.force, _end_all(keepers, ENGINE_GRACE_S))
                await _end_all(keepers, 0.0)
        if refused is not None:
            raise refused
        return 1 if given_up else status


async def _while_any_serves(front: asyncio.Task[int], keeping: Sequence[asyncio.Task[None]]) -> EngineRefused | None:
    """Until the front has ended, no engine is kept any more, or one refused to start: that refusal."""
    kept = set(keeping)
    while kept and not front.done():
        await asyncio.wait([front, *kept], return_when=asyncio.FIRST_COMPLETED)
        for task in [task for task in kept if task.done()]:
            kept.discard(task)
            error = task.exception()
            if isinstance(error, EngineRefused):
                return error
            log.error("%s; %d of %d engines are left", error, len(kept), len(keeping))
    return None


async def _end_all(keepers: Sequence[Keeper], grace_s: float) -> bool:
    await asyncio.gather(*(keeper.end(grace_s) for keeper in keepers))
    return True


class Keeper:
    """Keeps one engine alive.

    Args:
        command: starts it on an address.
        socket_path: of that address.
        name: what the log calls it.
    """

    def __init__(self, command: EngineCommand, socket_path: Path, name: str = "the engine") -> None:
        self._command = command
        self._path = socket_path
        self._name = name
        self._engine: EngineProcess | None = None

    async def keep(self) -> None:
        """Start the engine, and start it again whenever it ends.

        Raises:
            EngineRefused: it refused to start, the first time.
            StartupError: it ended before it ever served, refused later, or ended too often.
        """
        restarts = 0
        while True:
            started = time.monotonic()
            self._path.unlink(missing_ok=True)  # a killed engine leaves its socket behind
            engine = self._engine = await EngineProcess.start(self._command(f"unix:{self._path}"), self._name)
            status = await engine.wait()
            served = engine.ready.is_set()
            self._check(status, engine, restarts)
            if served and time.monotonic() - started > STABLE_S:
                restarts = 0
            restarts += 1
            if restarts > MAX_RESTARTS:
                raise StartupError(f"{self._name} ended {restarts} times in a row, the last time with status {status}")
            pause = min(FIRST_BACKOFF_S * 2 ** (restarts - 1), LAST_BACKOFF_S)
            log.warning("%s ended with status %d; restart %d in %.1f s", self._name, status, restarts, pause)
            await asyncio.sleep(pause)

    async def end(self, grace_s: float) -> None:
        if self._engine is not None:
            await self._engine.end(grace_s)

    def _check(self, status: int, engine: EngineProcess, restarts: int) -> None:
        """Raises StartupError for an end after which it is not started again."""
        if engine.ready.is_set():
            return
        words = engine.last_words or "it did not say why"
        if status == REFUSED:
            kind = StartupError if restarts else EngineRefused
            raise kind(f"{self._name} refused to start: {words}")
        if restarts == 0:
            raise StartupError(f"{self._name} ended with status {status} before it served: {words}")

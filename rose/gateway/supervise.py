"""`rose serve`: engine processes as children and a front, or several, as one thing to start and to stop.

    engines start -> front listens (503 until one is ready) -> SIGTERM -> front drains -> engines end

An engine that dies is started again, a few times; meanwhile the others serve, or the front answers 503 with
Retry-After. The whole ends when no engine is left, or when one refuses to start at all, which is a fault of what was
asked for. Knows processes; knows neither requests nor the light link.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rose.config.own_python import own_python
from rose.config.serving import GatewayConfig, check_gateway_config
from rose.gateway.facts import Reading
from rose.gateway.fronts import serve_any
from rose.gateway.keeper import Keeper, end_all, while_kept
from rose.gateway.run import OnListening, Stop, run_until_signal, unless
from rose.gateway.socket_folder import socket_folder

# Light-link address -> command line of the engine that is to listen there.
EngineCommand = Callable[[str], Sequence[str]]

# With nothing in flight any more, an engine has only its device memory to give back.
ENGINE_GRACE_S = 10.0


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
        Refused: an engine refused its folder or options, in its own words.
    """
    return run_until_signal(lambda stop: _serve(model_folder, config, engines, stop, reading, on_listening, on_ready))


async def _serve(
    model_folder: Path,
    config: GatewayConfig,
    engines: Sequence[EngineCommand],
    stop: Stop,
    reading: Reading | None,
    on_listening: OnListening | None,
    on_ready: OnListening | None,
) -> int:
    check_gateway_config(config)
    names = [f"engine-{i}" for i in range(len(engines))]
    with socket_folder() as sockets:
        paths = [sockets / name for name in names]
        keepers = [Keeper(partial(_at, *each[:2]), each[2]) for each in zip(engines, paths, names, strict=True)]
        config = replace(config, replicas=tuple(f"unix:{path}" for path in paths), replica_names=tuple(names))
        loop = asyncio.get_running_loop()
        keeping = [loop.create_task(keeper.keep()) for keeper in keepers]
        front = loop.create_task(
            serve_any(config, model_folder, stop, reading=reading, on_listening=on_listening, on_ready=on_ready)
        )
        try:
            refused = await while_kept(front, keeping)
            given_up = all(task.done() for task in keeping)
            stop.drain.set()
            status = await front
        finally:
            for task in keeping:
                task.cancel()
            await unless(stop.force, end_all(keepers, ENGINE_GRACE_S))
            await end_all(keepers, 0.0)
        if refused is not None:
            raise refused
        return 1 if given_up else status


def _at(command: EngineCommand, path: Path) -> Sequence[str]:
    """The command line of an engine on a socket; one that was killed has left its own behind."""
    path.unlink(missing_ok=True)
    return command(f"unix:{path}")

"""Several fronts as children on the same ports, for more requests than one event loop can take.

The kernel gives every new connection to one of them (SO_REUSEPORT). Each has connections of its own to the engines and
counts for itself; the page of metrics shows all of them together, through files that prometheus_client keeps. One that
dies is started again, and only its own connections break. Knows processes and ports; knows neither requests nor text.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from operator import attrgetter
from pathlib import Path

from prometheus_client.multiprocess import mark_process_dead

from rose.config.own_python import own_python
from rose.config.serving import GatewayConfig, check_gateway_config
from rose.errors import StartupError
from rose.gateway.carriers import Listening, family_of
from rose.gateway.facts import Reading
from rose.gateway.keeper import Keeper, end_all, while_kept
from rose.gateway.run import READY_LOOK_S, OnListening, Stop, run_until_signal, serve_front, unless
from rose.gateway.socket_folder import socket_folder

log = logging.getLogger("rose.gateway")
# A front leaves by itself `drain_seconds` after SIGTERM; one that is still there so much later is stuck.
GRACE_S = 5.0
# Exit statuses of fronts at the end: all answered, not started yet, or ended by a SIGTERM that it does not handle yet,
# because it does not listen yet.
_CUT_NOBODY_OFF = (0, None, -signal.SIGTERM)


def run_fronts(
    config: GatewayConfig,
    model_folder: Path,
    *,
    reading: Reading | None = None,
    on_listening: OnListening | None = None,
) -> int:
    """`serve_any` until a signal. Blocks."""
    return run_until_signal(
        lambda stop: serve_any(config, model_folder, stop, reading=reading, on_listening=on_listening)
    )


async def serve_any(
    config: GatewayConfig,
    model_folder: Path,
    stop: Stop,
    *,
    reading: Reading | None = None,
    on_listening: OnListening | None = None,
    on_ready: OnListening | None = None,
) -> int:
    """As many fronts as `config` asks for, until `stop`: one in this process, several as children.

    Args, result and errors are those of `serve_front`; of several fronts, each callback comes when all have got there
    that have not been given up.
    """
    check_gateway_config(config)
    if config.fronts == 1:
        return await serve_front(
            config, model_folder, stop, reading=reading, on_listening=on_listening, on_ready=on_ready
        )
    with _held_ports(config) as listening, socket_folder() as counts:
        command = _command(config, listening, str(counts), model_folder, reading)

        def ended(pid: int) -> None:
            """Its gauges end with it; what it counted stays."""
            mark_process_dead(pid, str(counts))  # type: ignore[no-untyped-call]

        keepers = [Keeper(lambda: command, f"front-{i}", ended) for i in range(config.fronts)]
        return await _serve(keepers, config.drain_seconds, stop, listening, on_listening, on_ready)


async def _serve(
    keepers: Sequence[Keeper],
    drain_s: float,
    stop: Stop,
    listening: Listening,
    on_listening: OnListening | None,
    on_ready: OnListening | None,
) -> int:
    loop = asyncio.get_running_loop()
    keeping = [loop.create_task(keeper.keep()) for keeper in keepers]
    kept = list(zip(keepers, keeping, strict=True))
    telling = [
        loop.create_task(_tell(kept, got_there, told, listening))
        for told, got_there in ((on_listening, attrgetter("ready")), (on_ready, attrgetter("serving")))
        if told is not None
    ]
    stopped = loop.create_task(stop.drain.wait())
    try:
        refused = await while_kept(stopped, keeping, "fronts")
        given_up = all(task.done() for task in keeping)
    finally:
        for task in (*keeping, *telling, stopped):
            task.cancel()
        await unless(stop.force, end_all(keepers, drain_s + GRACE_S))
        await end_all(keepers, 0.0)
    if refused is not None:
        raise refused
    return int(given_up or any(keeper.status not in _CUT_NOBODY_OFF for keeper in keepers))


async def _tell(
    kept: Sequence[tuple[Keeper, asyncio.Task[None]]],
    got_there: Callable[[Keeper], bool],
    told: OnListening,
    listening: Listening,
) -> None:
    """Once all that have not been given up have got there."""
    while not all(got_there(keeper) for keeper, keeping in kept if not keeping.done()):
        await asyncio.sleep(READY_LOOK_S)
    told(listening)


def _command(
    config: GatewayConfig, listening: Listening, counts: str, model_folder: Path, reading: Reading | None
) -> tuple[str, ...]:
    """The command line of one of the fronts; see `rose/gateway/__main__.py`."""
    own = replace(
        config,
        fronts=1,
        shared_ports=True,
        metrics_folder=counts,
        http_port=_port(listening.http),
        grpc_port=_port(listening.grpc),
    )
    level = logging.getLogger().getEffectiveLevel()
    given = {"config": asdict(own), "folder": str(model_folder), "reading": reading, "log_level": level}
    return (*own_python("rose.gateway"), json.dumps(given, default=str))


def _port(address: str | None) -> int | None:
    return None if address is None else int(address.rpartition(":")[2])


@contextmanager
def _held_ports(config: GatewayConfig) -> Iterator[Listening]:
    """Where the fronts are to listen.

    A socket that is bound and does not listen gets no connections, and keeps the number from everybody else for as
    long as the fronts come and go.

    Raises:
        StartupError: a port that cannot be had.
    """
    with ExitStack() as stack:
        held: list[str | None] = []
        for what, port in (("HTTP", config.http_port), ("gRPC", config.grpc_port)):
            try:
                held.append(None if port is None else stack.enter_context(_held(config.host, port)))
            except OSError as error:
                raise StartupError(f"{what} cannot listen on {config.host}:{port}: {error}") from None
        yield Listening(*held)


@contextmanager
def _held(host: str, port: int) -> Iterator[str]:
    family = family_of(host)
    with socket.socket(family) as probe:  # two servers that both share would not notice each other
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        probe.listen(1)
    with socket.socket(family) as holder:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            holder.setsockopt(socket.SOL_SOCKET, option, 1)
        holder.bind((host, port))
        yield f"{host}:{holder.getsockname()[1]}"

"""The front process: listen, serve, and at SIGTERM leave in order.

    listening -> (SIGTERM) not ready, new work refused, in-flight finished, connections closed -> exit 0

A second signal does not wait. Knows sockets and signals; knows neither requests nor text.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import uvloop

from rose.config.serving import GatewayConfig
from rose.gateway.carriers import Carriers, Listening
from rose.gateway.facts import Reading
from rose.gateway.front import Front, make_front

log = logging.getLogger("rose.gateway")
# New requests are still answered (503, Connection: close) for this long when nothing is in flight at SIGTERM.
LINGER_S = 0.2
# How often a starting front looks whether it is ready, until it is.
READY_LOOK_S = 0.05
# The tokenizer pool copies ids under the interpreter lock; at Python's 5 ms the event loop would wait that long for it.
SWITCH_INTERVAL_S = 0.0005


OnListening = Callable[[Listening], None]


class Stop:
    """The two things a signal can mean.

    Attributes:
        drain: finish what is in flight, then leave.
        force: leave now.
    """

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.force = asyncio.Event()

    def signal(self) -> None:
        (self.force if self.drain.is_set() else self.drain).set()

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        signals = (signal.SIGTERM, signal.SIGINT)
        for one in signals:
            loop.add_signal_handler(one, self.signal)
        try:
            yield
        finally:
            for one in signals:
                loop.remove_signal_handler(one)


def run_until_signal(serve: Callable[[Stop], Coroutine[Any, Any, int]]) -> int:
    """What `serve` returns, in an event loop of its own; signals tell its argument. Blocks."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)

    async def main() -> int:
        stop = Stop()
        with stop.on_signals():
            return await serve(stop)

    return uvloop.run(main())


def run_front(
    config: GatewayConfig,
    model_folder: Path,
    *,
    reading: Reading | None = None,
    on_listening: OnListening | None = None,
    on_ready: OnListening | None = None,
) -> int:
    """Run one front until a signal. Blocks; args, result and errors as `serve_front`."""
    return run_until_signal(
        lambda stop: serve_front(
            config, model_folder, stop, reading=reading, on_listening=on_listening, on_ready=on_ready
        )
    )


async def serve_front(
    config: GatewayConfig,
    model_folder: Path,
    stop: Stop,
    *,
    reading: Reading | None = None,
    on_listening: OnListening | None = None,
    on_ready: OnListening | None = None,
) -> int:
    """A front in this process, until `stop`.

    Args:
        config: its limits and the replicas' addresses.
        model_folder: holds the tokenizer.json that the replicas were built for.
        reading: what settles the reading of the folder, as the replicas were given it; see `make_front`.
        on_listening: called once, with the ports in use.
        on_ready: the same, when the first replica is ready.

    Returns:
        The exit status: 0 if every request was answered, 1 if some were cut off.

    Raises:
        CheckpointError: no usable tokenizer.
        StartupError: a port that cannot be had.
    """
    async with make_front(config, model_folder, reading=reading) as front:
        carriers = Carriers(front, config)
        idle = False
        announcing: asyncio.Task[None] | None = None
        try:
            listening = await carriers.open()
            log.info("listening: http %s, grpc %s", listening.http or "off", listening.grpc or "off")
            if on_listening is not None:
                on_listening(listening)
            announcing = asyncio.get_running_loop().create_task(_announce(front, on_ready, listening))
            await stop.drain.wait()
            front.lifecycle.drain()
            _say_draining(front.lifecycle.in_flight, config.drain_seconds)
            idle = await unless(stop.force, _idle(front, config.drain_seconds))
            if not idle:
                log.warning("%s cut off", _requests(front.lifecycle.in_flight))
        finally:
            if announcing is not None:
                announcing.cancel()
            await carriers.close(forced=not idle)
        return 0 if idle else 1


async def _announce(front: Front, on_ready: OnListening | None, listening: Listening) -> None:
    while not front.pages.readiness().ready:
        await asyncio.sleep(READY_LOOK_S)
    # What was loaded stays: the collector need not walk through it while serving.
    gc.collect()
    gc.freeze()
    if on_ready is not None:
        on_ready(listening)


def _say_draining(in_flight: int, most_s: float) -> None:
    more = f"; press Ctrl-C again to cut off what is left (at most {most_s:g} s)" if in_flight else ""
    log.info("draining: %s in flight%s", _requests(in_flight), more)


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"


async def _idle(front: Front, timeout_s: float) -> bool:
    await asyncio.sleep(min(LINGER_S, timeout_s))
    return await front.lifecycle.wait_idle(timeout_s)


async def unless(event: asyncio.Event, work: Coroutine[Any, Any, bool]) -> bool:
    """What `work` gives, or False as soon as the event is set."""
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(event.wait())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].done() and tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()

"""The loop of the engine process: sockets, requests, launches and results, all in one thread.

    wait → take frames → drop the expired → launch → answer what has finished

Knows turns and waiting; what frames and batches mean is the service's and the batches' business.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import time
from collections.abc import Callable, Mapping

from rose.config import ServerConfig
from rose.errors import Unavailable
from rose.proto import rose_pb2 as pb
from rose.server.batches import DeviceLostError
from rose.server.clients import PATIENCE_S, Clients
from rose.server.listener import Listener
from rose.server.ports import EnginePort, GenerationPort
from rose.server.validate import Limits
from rose.server.validate_generate import GenerateLimits
from rose.server.waiting import Events, Waiter
from rose.server.work import work_of

_log = logging.getLogger(__name__)

# An engine that wants to be asked at once, and that many times in a row launches nothing, is given a pause each time.
FRUITLESS_STEPS = 16
STALLED_S = 1e-3
EXIT_CLEAN, EXIT_CUT_SHORT, EXIT_DEVICE_LOST = 0, 1, 70


class Reactor:
    """Serves one engine at one address until told to stop.

    Args:
        engine, limits: of one kind: EnginePort and Limits, or GenerationPort and GenerateLimits.
        card: what is served.
        listener: bound; the reactor makes it listen, and closes it.
        device_alive: see Batches.
        engine_counters: the engine's own counters, for STATS.
        patience_s: see Clients.
    """

    def __init__(
        self,
        engine: EnginePort | GenerationPort,
        limits: Limits | GenerateLimits,
        card: pb.ModelCard,
        listener: Listener,
        config: ServerConfig,
        *,
        device_alive: Callable[[], bool] = lambda: True,
        engine_counters: Callable[[], Mapping[str, int]] = dict,
        patience_s: float = PATIENCE_S,
    ) -> None:
        clock = time.monotonic
        self._engine = engine
        self._config = config
        self._clock = clock
        self._engine_counters = engine_counters
        self._waiter = Waiter()
        poller = self._waiter.poller
        self._service, self._batches = work_of(
            engine, limits, card, config, clock=clock, fill_stats=self._fill_stats, device_alive=device_alive
        )
        self._clients = Clients(poller, listener, self._service, config, clock=clock, patience_s=patience_s)
        self._fruitless = 0
        self._stops = 0
        self._drain_until: float | None = None
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._wake_fd = self._wake_out.fileno()
        poller.register(self._wake_fd, select.EPOLLIN)
        self._executor_fd = engine.executor.fileno()
        if self._executor_fd is not None:
            poller.register(self._executor_fd, select.EPOLLIN)

    @property
    def wakeup_fd(self) -> int:
        """Writing a byte to it wakes the loop; for signal.set_wakeup_fd."""
        return self._wake_in.fileno()

    def stop(self) -> None:
        """Finish what is open, then end; called a second time, end at once. From any thread or signal handler."""
        self._stops += 1
        with contextlib.suppress(OSError):
            self._wake_in.send(b"\0")

    def listen(self) -> None:
        """Let clients connect; they are answered once `run` is called."""
        self._clients.listen()

    def run(self) -> int:
        """Serve until stopped. Returns the exit status: 0 after a clean end, 1 if requests were cut short, 70 if the
        device was lost.
        """
        try:
            while (status := self._status()) is None:
                self._turn()
            return status
        except DeviceLostError as error:
            _log.critical("%s", error.message)
            self._service.fail_all(error)
            return EXIT_DEVICE_LOST
        finally:
            self._close()

    def _turn(self) -> None:
        events = self._wait()
        if not events and not self._batches.pending:
            # Nothing is to be launched first: answers that are ready leave at once.
            self._batches.collect()
        for descriptor, mask in events:
            if descriptor == self._executor_fd:
                self._engine.executor.acknowledge()
            elif descriptor == self._wake_fd:
                self._clear_wakeup()
            else:
                self._clients.handle(descriptor, mask)
        self._clients.take_backlog()
        # Before anything is launched: clients that left cancel what they asked for.
        self._clients.look_after_all()
        self._service.expire(self._clock())
        if self._batches.pending:
            self._fruitless = 0 if self._batches.launch() else self._fruitless + 1
        self._batches.collect()
        self._clients.look_after_all()

    def _wait(self) -> Events:
        timeout = self._timeout()
        if not len(self._batches) or self._executor_fd is not None or timeout == 0:
            return self._waiter.wait(timeout)
        return self._waiter.wait_for_batch(self._batches.is_ready, self._batches.expected_end, timeout)

    def _timeout(self) -> float | None:
        """Seconds until something is to be done even if nothing happens, or None."""
        if self._clients.ready:
            return 0.0
        now = self._clock()
        wake_at = self._engine.wake_at()
        if wake_at is not None and self._fruitless > FRUITLESS_STEPS:
            wake_at = max(wake_at, now + STALLED_S)
        first = wake_at
        for moment in (self._service.requests.next_deadline, self._clients.next_time, self._drain_until):
            if moment is not None and (first is None or moment < first):
                first = moment
        return None if first is None else max(first - now, 0.0)

    def _status(self) -> int | None:
        """The exit status once it is time to end."""
        if not self._stops:
            return None
        if self._drain_until is None:
            self._begin_drain()
        if not len(self._service.requests) and not self._clients.writing:
            return EXIT_CLEAN
        if self._stops == 1 and self._drain_until is not None and self._clock() < self._drain_until:
            return None
        _log.warning("ending with %d requests unanswered", len(self._service.requests))
        self._service.fail_all(Unavailable("this engine process is shutting down"))
        return EXIT_CUT_SHORT

    def _begin_drain(self) -> None:
        self._drain_until = self._clock() + self._config.drain_seconds
        self._service.draining = True
        self._clients.stop_accepting()
        _log.info(
            "draining: %d requests are open, at most %.0f s", len(self._service.requests), self._config.drain_seconds
        )

    def _clear_wakeup(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_out.recv(4096)

    def _fill_stats(self, stats: pb.ServerStats) -> None:
        stats.batches_in_flight = len(self._batches)
        stats.connections = len(self._clients)
        stats.engine_counters.update(self._engine_counters())

    def _close(self) -> None:
        self._clients.close()
        self._waiter.close()
        self._wake_in.close()
        self._wake_out.close()

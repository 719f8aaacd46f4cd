"""All connections: accepted, watched by the poller, given their turns, dropped.

Knows descriptors and connections; hands frames to the service and knows nothing of what they mean.
"""

from __future__ import annotations

import logging
import select
from collections.abc import Callable
from typing import Any

from rose.config import ServerConfig
from rose.errors import InternalError, InvalidInput, Overloaded, PayloadTooLarge, RoseError
from rose.server.connection import Connection
from rose.server.listener import Listener
from rose.server.service import Service

_log = logging.getLogger(__name__)

READ_BYTES = 256 << 10
MAX_CONNECTIONS = 1024
# A client that leaves half a frame or unread answers lying for this long is gone or broken.
PATIENCE_S = 60.0
SWEEP_S = 1.0
# How soon to accept again after the process ran out of descriptors.
ACCEPT_PAUSE_S = 0.5

_READ, _WRITE = select.EPOLLIN, select.EPOLLOUT
_GONE = select.EPOLLHUP | select.EPOLLERR | select.EPOLLRDHUP


class Clients:
    """Every open connection and the listener they come from.

    Args:
        listener: bound; closed by `stop_accepting`.
        patience_s: see PATIENCE_S.
    """

    def __init__(
        self,
        poller: select.epoll,
        listener: Listener,
        service: Service[Any],
        config: ServerConfig,
        *,
        clock: Callable[[], float],
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._poller = poller
        self._listener: Listener | None = listener
        self._service = service
        self._config = config
        self._clock = clock
        self._patience_s = patience_s
        self._connections: dict[int, Connection] = {}
        self._touched: set[Connection] = set()
        self._backlog: set[Connection] = set()  # frames read and not yet taken: their turn was over, or no room
        self._watched: set[Connection] = set()  # half a frame in, or bytes not taken
        self._next_sweep = 0.0
        self._accept_again: float | None = None
        self._buffer = memoryview(bytearray(READ_BYTES))

    def __len__(self) -> int:
        return len(self._connections)

    @property
    def writing(self) -> bool:
        """Whether answers wait for their clients to take them."""
        return any(connection.wants_write for connection in self._watched)

    @property
    def ready(self) -> bool:
        """Whether there are frames to take without reading anything."""
        return any(connection.has_frames for connection in self._backlog)

    @property
    def next_time(self) -> float | None:
        """When `look_after_all` has to be called next, whatever else happens."""
        if self._accept_again is None:
            return self._next_sweep if self._watched else None
        return min(self._accept_again, self._next_sweep) if self._watched else self._accept_again

    def listen(self) -> None:
        if self._listener is not None:
            self._listener.listen()
            self._poller.register(self._listener.fileno(), _READ)

    def stop_accepting(self) -> None:
        if self._listener is not None:
            if self._accept_again is None:
                self._poller.unregister(self._listener.fileno())
            self._accept_again = None
            self._listener.close()
            self._listener = None

    def handle(self, descriptor: int, mask: int) -> None:
        """One event of the poller; descriptors that are no client's are ignored."""
        connection = self._connections.get(descriptor)
        if connection is None:
            if self._listener is not None and descriptor == self._listener.fileno():
                self._accept(self._listener)
            return
        if mask & _READ:
            self._read(connection)
        elif mask & _GONE:
            connection.dead = True
        if mask & _WRITE and not connection.dead:
            connection.flush(self._clock())
        self._touched.add(connection)

    def take_backlog(self) -> None:
        """Give connections whose last turn ended early another."""
        if self._backlog:
            for connection in [c for c in self._backlog if c.has_frames]:
                self._take_frames(connection)

    def look_after_all(self) -> None:
        """Bring the poller's view of every connection up to date that something happened to; drop the dead."""
        while self._touched:
            connection = self._touched.pop()
            if not (connection.calm and connection.quiet and connection.has_room):
                self._look_after(connection)
        if self._watched and (now := self._clock()) >= self._next_sweep:
            self._sweep(now)
        if self._accept_again is not None and self._clock() >= self._accept_again and self._listener is not None:
            self._accept_again = None
            self._poller.register(self._listener.fileno(), _READ)

    def close(self) -> None:
        self.stop_accepting()
        for connection in list(self._connections.values()):
            self._drop(connection)

    def _read(self, connection: Connection) -> None:
        try:
            connection.read(self._buffer, self._clock())
        except RoseError as error:
            self._fail(connection, error)
            return
        self._take_frames(connection)

    def _take_frames(self, connection: Connection) -> None:
        try:
            for frame in connection.frames():
                self._service.receive(connection, frame)
        except (InvalidInput, PayloadTooLarge) as error:
            self._fail(connection, error)
        except Exception as error:  # noqa: BLE001  one client's frame must not end the others
            _log.exception("a frame could not be handled")
            self._fail(connection, InternalError(f"the frame could not be handled: {error}"))
        self._touched.add(connection)

    def _fail(self, connection: Connection, error: RoseError) -> None:
        _log.warning("a connection is closed: %s", error.message)
        self._service.forget(connection)
        connection.fail(error, self._clock())
        self._touched.add(connection)

    def _accept(self, listener: Listener) -> None:
        taken, exhausted = listener.accept()
        now = self._clock()
        limit = self._config.max_payload
        for connected in taken:
            connection = Connection(connected, max_payload=limit, max_owed=2 * limit, now=now, touched=self._touched)
            if len(self._connections) >= MAX_CONNECTIONS:
                connection.fail(Overloaded(f"{MAX_CONNECTIONS} connections are open already", retry_after_s=1.0), now)
                self._touched.discard(connection)
                connection.close()
                continue
            connection.mask = _READ | select.EPOLLRDHUP
            self._connections[connection.fd] = connection
            self._poller.register(connection.fd, connection.mask)
        if exhausted:
            _log.error("out of file descriptors: no connection is accepted for %.1f s", ACCEPT_PAUSE_S)
            self._poller.unregister(listener.fileno())
            self._accept_again = now + ACCEPT_PAUSE_S

    def _look_after(self, connection: Connection) -> None:
        if self._connections.get(connection.fd) is not connection:
            return
        if connection.dead:
            self._drop(connection)
            return
        mask = select.EPOLLRDHUP
        if connection.wants_read:
            mask |= _READ
        if connection.wants_write:
            mask |= _WRITE
        if mask != connection.mask:
            self._poller.modify(connection.fd, mask)
            connection.mask = mask
        busy = connection.busy
        if busy and not self._watched:
            self._next_sweep = self._clock() + SWEEP_S
        _keep(self._watched, connection, busy)
        _keep(self._backlog, connection, connection.has_backlog)
        connection.calm = connection.quiet and connection.wants_read

    def _sweep(self, now: float) -> None:
        self._next_sweep = now + SWEEP_S
        for connection in [c for c in self._watched if c.stalled(now, self._patience_s)]:
            _log.warning("a client neither reads nor writes: its connection is closed")
            self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        self._service.forget(connection)
        del self._connections[connection.fd]
        self._backlog.discard(connection)
        self._watched.discard(connection)
        self._poller.unregister(connection.fd)
        connection.close()


def _keep(group: set[Connection], connection: Connection, member: bool) -> None:
    if member:
        group.add(connection)
    else:
        group.discard(connection)

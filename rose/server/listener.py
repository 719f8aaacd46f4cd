"""Where connections come from: a bound and later listening socket, TCP or unix.

Knows sockets and paths; knows neither frames nor the reactor.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import stat
from pathlib import Path

from rose.errors import StartupError
from rose.proto.address import Address

BACKLOG = 1024
# Connections taken in one turn.
ACCEPTS_A_TURN = 64
# What a process or a machine that is out of descriptors or memory answers; the connection stays in the backlog.
OUT_OF_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Listener:
    """Bound at once, so that a taken address is known before a model is loaded; connectable after `listen`.

    Attributes:
        address: where it is, with the port the system chose.

    Raises:
        StartupError: the address cannot be had.
    """

    def __init__(self, address: Address) -> None:
        try:
            self.socket = _bind_unix(address.path) if address.path else _bind_tcp(address.host, address.port)
        except OSError as error:
            raise StartupError(f"cannot listen at {address}: {error}") from None
        self.address = address
        if not address.path:
            host, port = self.socket.getsockname()[:2]
            self.address = Address(host=host, port=port)
        self.socket.setblocking(False)

    def fileno(self) -> int:
        return self.socket.fileno()

    def listen(self) -> None:
        self.socket.listen(BACKLOG)

    def accept(self) -> tuple[list[socket.socket], bool]:
        """Connections that wait, non-blocking; and whether the process has run out of descriptors for more."""
        taken: list[socket.socket] = []
        for _ in range(ACCEPTS_A_TURN):
            try:
                connected, _peer = self.socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break
            except OSError as error:
                return taken, error.errno in OUT_OF_RESOURCES
            connected.setblocking(False)
            if not self.address.path:
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            taken.append(connected)
        return taken, False

    def close(self) -> None:
        """Close and remove the socket file; a second time does nothing, the path may be another process's by then."""
        if self.socket.fileno() < 0:
            return
        self.socket.close()
        if self.address.path:
            with contextlib.suppress(OSError):
                Path(self.address.path).unlink()


def _bind_tcp(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
        0
    ]
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(where)
    except OSError:
        bound.close()
        raise
    return bound


def _bind_unix(path: str) -> socket.socket:
    _remove_stale(path)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bound.bind(path)
    except OSError:
        bound.close()
        raise
    return bound


def _remove_stale(path: str) -> None:
    """A socket file nobody listens at is left over from a process that was killed."""
    try:
        mode = Path(path).stat().st_mode
    except OSError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(f"{path} exists and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink()
            return
    raise OSError("another process listens there")

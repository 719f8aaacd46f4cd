"""Addresses of the light link: "host:port" and "unix:/path".

Knows how an address is spelled; opens nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from rose.errors import InvalidInput

# sun_path is 108 bytes on Linux, the closing zero included.
MAX_UNIX_PATH = 107


@dataclass(frozen=True, slots=True)
class Address:
    """Where a light link listens.

    Attributes:
        host, port: a TCP endpoint; port 0 asks the system for a free one. Empty and 0 for a unix socket.
        path: path of a unix socket, or empty.
    """

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """ "127.0.0.1:9000", "[::1]:9000" or "unix:/run/rose.sock".

    Raises:
        InvalidInput: anything else.
    """
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if not path or len(path.encode()) > MAX_UNIX_PATH:
            raise InvalidInput(f"{text!r}: a unix socket path has 1 to {MAX_UNIX_PATH} bytes", param="address")
        return Address(path=path)
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") and host.endswith("]") else host
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise InvalidInput(f"{text!r} is not an address: expected host:port or unix:/path", param="address")
    return Address(host=host, port=int(port))

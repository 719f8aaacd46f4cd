"""Addresses of the light link: "host:port" and "unix:/path".

Knows how an address is spelled; opens nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from rose.errors import InvalidInput

# sun_path is 108 bytes on Linux, the closing zero included.
MAX_UNIX_PATH = 107
# A name in the domain name system, and each of its parts (RFC 1035, 2.3.4).
MAX_HOST, MAX_LABEL = 253, 63
MAX_PORT = 65535


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
        if not path or "\0" in path or len(path.encode(errors="surrogateescape")) > MAX_UNIX_PATH:
            raise InvalidInput(
                f"{_short(text)}: a unix socket path has 1 to {MAX_UNIX_PATH} bytes, none of them zero", param="address"
            )
        return Address(path=path)
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") and host.endswith("]") else host
    if not colon or not host or not _is_port(port):
        raise InvalidInput(f"{_short(text)} is not an address: expected host:port or unix:/path", param="address")
    problem = _host_problem(host)
    if problem:
        raise InvalidInput(f"{_short(text)} is not an address: {problem}", param="address")
    return Address(host=host, port=int(port))


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= len(str(MAX_PORT)) and int(text) <= MAX_PORT


def _host_problem(host: str) -> str:
    """Why no name server could be asked for a host; empty for one that may exist, and for a numeric address."""
    if ":" in host:
        return ""
    if len(host) > MAX_HOST:
        return f"the host has {len(host)} characters, a name has at most {MAX_HOST}"
    for label in host.removesuffix(".").split("."):
        if not 0 < len(label) <= MAX_LABEL:
            return f"each part of a host name between its dots has 1 to {MAX_LABEL} characters, not {len(label)}"
    try:
        host.encode("idna")
    except UnicodeError as error:
        return f"the host is no name: {error}"
    return ""


def _short(text: str) -> str:
    return repr(text) if len(text) <= 300 else f"{text[:100]!r} and {len(text) - 100} more characters"

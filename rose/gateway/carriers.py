"""HTTP and gRPC listeners around one front: open them together, close them together.

Knows sockets; knows neither signals nor requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import uvicorn

from rose.config.serving import GatewayConfig
from rose.errors import StartupError
from rose.gateway.front import Front
from rose.gateway.grpc_front import GrpcFront
from rose.gateway.one_write import OneWrite

BACKLOG = 2048
# Load balancers keep idle connections for a minute or so; closing first would race with their next request.
KEEP_ALIVE_S = 75
# For connections that are not idle although nothing is in flight: half-sent requests and slow readers of pages.
CLOSE_S = 1


@dataclass(frozen=True, slots=True)
class Listening:
    """Where the front can be reached: "host:port", or None for a carrier that is left out."""

    http: str | None
    grpc: str | None


class Carriers:
    """The listeners of one front: `open`, then `close`."""

    def __init__(self, front: Front, config: GatewayConfig) -> None:
        self._front = front
        self._config = config
        self._http: _Http | None = None
        self._serving: asyncio.Task[None] | None = None
        self._grpc: GrpcFront | None = None

    async def open(self) -> Listening:
        """Raises StartupError for a port that cannot be had."""
        host = self._config.host
        http = grpc = None
        if self._config.http_port is not None:
            http = await self._open_http(host, self._config.http_port)
        if self._config.grpc_port is not None:
            try:
                self._grpc = GrpcFront(self._front, host, self._config.grpc_port)
            except RuntimeError as error:
                raise StartupError(f"gRPC cannot listen on {host}:{self._config.grpc_port}: {error}") from None
            await self._grpc.start()
            grpc = f"{host}:{self._grpc.port}"
        return Listening(http, grpc)

    async def close(self, *, forced: bool = False) -> None:
        """Close idle connections, and the others after a moment, or at once if `forced`."""
        if self._grpc is not None:
            await self._grpc.stop(0.0) if forced else await self._grpc.stop()
        if self._http is not None and self._serving is not None:
            self._http.force_exit = forced
            self._http.should_exit = True
            await self._serving

    async def _open_http(self, host: str, port: int) -> str:
        try:
            listener = socket.create_server(
                (host, port), family=family_of(host), backlog=BACKLOG, reuse_port=self._config.shared_ports
            )
        except OSError as error:
            raise StartupError(f"HTTP cannot listen on {host}:{port}: {error}") from None
        self._http = _Http(
            uvicorn.Config(
                self._front.http,
                http=OneWrite,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,  # nobody asks where a caller comes from
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=CLOSE_S,
                backlog=BACKLOG,
            )
        )
        self._serving = asyncio.get_running_loop().create_task(self._http.serve(sockets=[listener]))
        while not self._http.started:
            if self._serving.done():
                self._serving.result()
            await asyncio.sleep(0.005)
        return f"{host}:{listener.getsockname()[1]}"


def family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


class _Http(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the process, which drains both carriers before either closes."""
        yield

"""The HTTP front as one ASGI application: the hot route straight away, the rest through Starlette's router.

Every answer carries X-Request-Id; every failure becomes the JSON of the error table here, and nowhere else.
Knows routes and the boundary; knows neither text nor replicas.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rose.errors import InternalError, RoseError
from rose.gateway import http_errors
from rose.gateway.asgi import (
    CLOSE,
    Call,
    ClientGone,
    Message,
    Receive,
    Reply,
    Scope,
    Send,
    StreamReply,
    send_events,
    send_reply,
)
from rose.gateway.body_budget import BodyBudget, Held
from rose.gateway.lifecycle import Lifecycle
from rose.gateway.metrics import Metrics

log = logging.getLogger("rose.gateway")
Handler = Callable[[Call, bytes], Awaitable[Reply | StreamReply]]
Endpoint = Callable[[Request], Awaitable[Response]]
OTHER = "other"


class HttpFront:
    """The application.

    Args:
        work: path -> handler of POST requests that cost model time; refused while draining.
        pages: path -> endpoint of GET requests; answered until the end.
        max_body_bytes: largest body.
        look: awaited before a handler; see `ReplicaPool.look`.
        bodies: room for all bodies together.
    """

    def __init__(
        self,
        work: dict[str, Handler],
        pages: dict[str, Endpoint],
        look: Callable[[], Awaitable[None]],
        *,
        max_body_bytes: int,
        bodies: BodyBudget,
        lifecycle: Lifecycle,
        metrics: Metrics,
    ) -> None:
        self._work = work
        self._look = look
        self._max_body = max_body_bytes
        self._bodies = bodies
        self._lifecycle = lifecycle
        self._metrics = metrics
        self._labels: dict[object, str] = {}
        for path, endpoint in pages.items():
            self._labels.setdefault(endpoint, path)
        routes = [Route(path, endpoint, methods=["GET"]) for path, endpoint in pages.items()]
        # Only reached with another method: gives the 405 its Allow header.
        routes += [Route(path, _unreachable, methods=["POST"]) for path in work]
        self._pages = Starlette(routes=routes, exception_handlers={HTTPException: _not_found, Exception: _failed})
        self._pages.router.redirect_slashes = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"this server speaks HTTP, not {scope['type']}")
        call = Call(scope, receive)
        handler = self._work.get(call.path)
        if handler is not None and call.method == "POST":
            await self._answer(call, handler, send)
        else:
            await self._page(call, scope, receive, send)

    async def _answer(self, call: Call, handler: Handler, send: Send) -> None:
        status = "499"
        taken = False
        held = Held(self._bodies)
        try:
            self._lifecycle.check()
            body = await call.body(self._max_body, held)
            self._lifecycle.begin()  # not earlier: a body that never comes must not hold up a drain
            taken = True
            await self._look()
            reply = await self._reply(call, handler, body)
            if self._lifecycle.draining and CLOSE not in reply.headers:
                reply.headers.append(CLOSE)
            if isinstance(reply, StreamReply):
                body = b""
                held.release()  # what is sent from here on may take minutes, and needs no body
                status = str(await call.unless_gone(self._send_events(call, reply, send)))
            else:
                status = str(reply.status)
                await send_reply(send, reply, call.id)
        except ClientGone:
            self._metrics.cancelled.inc()
        except RoseError as error:  # refused before it was taken
            reply = http_errors.error_reply(error)
            reply.headers.append(CLOSE)  # its body may still be on its way
            status = str(reply.status)
            await send_reply(send, reply, call.id)
        finally:
            held.release()
            if taken:
                self._lifecycle.end()
            self._metrics.finished("http", call.path, status, call.elapsed())

    async def _send_events(self, call: Call, reply: StreamReply, send: Send) -> int:
        def failed(error: Exception) -> tuple[int, bytes]:
            told = _told(call, error)
            return told.http_status, http_errors.error_event(told)

        return await send_events(send, reply, call.id, failed)

    async def _reply(self, call: Call, handler: Handler, body: bytes) -> Reply | StreamReply:
        try:
            return await handler(call, body)
        except ClientGone:
            raise  # nobody is there to be told
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 (the boundary)
            return http_errors.error_reply(_told(call, error))

    async def _page(self, call: Call, scope: Scope, receive: Receive, send: Send) -> None:
        status = 500

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", call.id)]
                if self._lifecycle.draining:
                    message["headers"].append(CLOSE)
            await send(message)

        try:
            await self._pages(scope, receive, tagged)
        finally:
            # The router leaves the endpoint it found in the scope; paths themselves would be labels without end.
            route = self._labels.get(scope.get("endpoint"), OTHER)
            self._metrics.finished("http", route, str(status), call.elapsed())


def _told(call: Call, error: Exception) -> RoseError:
    """What the caller hears of a failure, whose cause is in the log."""
    if not isinstance(error, RoseError):
        log.error("request %s failed", call.id.decode(), exc_info=error)
        return InternalError("an internal error; the server's log has its cause")
    if error.http_status == 500:
        log.warning("request %s failed: %s", call.id.decode(), error.message)
    return error


async def _unreachable(request: Request) -> Response:
    raise RuntimeError(f"{request.url.path} is answered before the router")


async def _failed(request: Request, error: Exception) -> Response:
    """The router logs the error itself."""
    reply = http_errors.error_reply(
        error if isinstance(error, RoseError) else InternalError("an internal error; the server's log has its cause")
    )
    return Response(reply.body, reply.status, media_type="application/json")


async def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        reply = http_errors.reply(405, "method_not_allowed", f"{request.method} is not a method of {request.url.path}")
    else:
        told = f"there is no {request.url.path} here; GET /docs shows what there is"
        reply = http_errors.reply(error.status_code, "unknown_route", told)
    headers = dict(error.headers or {})
    return Response(reply.body, reply.status, headers, media_type="application/json")

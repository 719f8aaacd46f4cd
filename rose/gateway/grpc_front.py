"""The gRPC front: rose.v1.Rose over the same service, in the same event loop, with health and reflection.

Messages come in as bytes and are parsed here, so that a broken one is the caller's error (INVALID_ARGUMENT) and not an
internal one. Knows gRPC; knows neither what the calls mean nor replicas.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from types import TracebackType
from typing import Self, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from rose.errors import DeadlineExceeded, InternalError, InvalidInput, PayloadTooLarge, RoseError, from_kind
from rose.gateway import grpc_calls, grpc_generate
from rose.gateway.body_budget import Held
from rose.gateway.front import Front
from rose.gateway.grpc_calls import Answered
from rose.gateway.inputs import shorten
from rose.proto import rose_pb2 as pb
from rose.proto.convert import error_to_proto

log = logging.getLogger("rose.gateway")
SERVICE = pb.DESCRIPTOR.services_by_name["Rose"].full_name
ERROR_KEY = "rose-error-bin"
# Both copies of a message have to fit into the 8 KiB of metadata that clients accept, at up to 12 bytes a character.
MESSAGE_CHARS = 500
# How often readiness is looked at for the health service; draining is told at once.
HEALTH_S = 0.2
# What a call may still need to get its bytes out once nothing is in flight.
STOP_GRACE_S = 0.5
M = TypeVar("M", bound=Message)
Method = Callable[[bytes, grpc.aio.ServicerContext], Awaitable[bytes]]
StreamMethod = Callable[[bytes, grpc.aio.ServicerContext], AsyncGenerator[bytes, None]]


class GrpcFront:
    """The server: `start`, then `stop`."""

    def __init__(self, front: Front, host: str, port: int) -> None:
        self._front = front
        limit = front.service.config.max_body_bytes
        self._server = grpc.aio.server(
            options=(
                # gRPC's own 4 MiB is less than one batch of answers. Twice our limit, so that a message just over it
                # is refused here, with the limit in words.
                ("grpc.max_receive_message_length", 2 * limit),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", int(front.service.config.shared_ports)),
            )
        )
        methods = {
            "Embed": self._handler("Embed", self._work(pb.EmbedRequest, grpc_calls.embed)),
            "Rerank": self._handler("Rerank", self._work(pb.RerankRequest, grpc_calls.rerank)),
            "Score": self._handler("Score", self._work(pb.ScoreRequest, grpc_calls.score)),
            "Generate": self._stream_handler("Generate", self._generate),
            "Info": self._handler("Info", self._info),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        self.port = self._server.add_insecure_port(f"{_bracketed(host)}:{port}")
        self._follower: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._tell(serving=False)
        await self._server.start()
        self._follower = asyncio.get_running_loop().create_task(self._follow())

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Refuse new calls, give the open ones `grace_s`, close."""
        if self._follower is not None:
            self._follower.cancel()
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)

    async def _info(self, raw: bytes, context: grpc.aio.ServicerContext) -> bytes:
        card = pb.ModelCard()
        card.CopyFrom(self._front.pool.card)
        card.max_request_items = self._front.service.config.max_items
        return card.SerializeToString()

    def _work(self, kind: type[M], run: Callable[[Front, M, float], Awaitable[Answered]]) -> Method:
        """A call that costs model time: parse, run before the deadline, name the prompts."""

        async def method(raw: bytes, context: grpc.aio.ServicerContext) -> bytes:
            front = self._front
            request = _parse(raw, kind, front.service.config.max_body_bytes)
            done = await run(front, request, _deadline(context, front.service.config.default_timeout_s))
            if done.prompts:
                context.set_trailing_metadata(tuple(done.prompts.items()))
            return done.payload

        return method

    async def _generate(self, raw: bytes, context: grpc.aio.ServicerContext) -> AsyncGenerator[bytes, None]:
        config = self._front.service.config
        request = _parse(raw, pb.GenerateRequest, config.max_body_bytes)
        deadline = _deadline(context, config.default_timeout_s)
        async with aclosing(grpc_generate.generate(self._front, request, deadline)) as chunks:
            async for chunk in chunks:
                yield chunk.SerializeToString()

    def _handler(self, name: str, method: Method) -> grpc.RpcMethodHandler:
        async def guarded(raw: bytes, context: grpc.aio.ServicerContext) -> bytes:
            async with _Boundary(self._front, name, context) as boundary:
                boundary.take(raw)
                await self._front.pool.look()
                return await method(raw, context)

        return grpc.unary_unary_rpc_method_handler(guarded)

    def _stream_handler(self, name: str, method: StreamMethod) -> grpc.RpcMethodHandler:
        async def guarded(raw: bytes, context: grpc.aio.ServicerContext) -> AsyncGenerator[bytes, None]:
            async with _Boundary(self._front, name, context) as boundary:
                boundary.take(raw)
                await self._front.pool.look()
                async with aclosing(method(raw, context)) as answers:
                    async for answer in answers:
                        yield answer

        return grpc.unary_stream_rpc_method_handler(guarded)

    async def _follow(self) -> None:
        """Keep the health service true: SERVING only while the next request would be taken."""
        told = False
        while not self._front.lifecycle.draining:
            serving = self._front.pages.readiness().ready
            if serving != told:
                await self._tell(serving=serving)
                told = serving
            try:
                async with asyncio.timeout(HEALTH_S):
                    await self._front.lifecycle.wait_drain()
            except TimeoutError:
                continue
        await self._health.enter_graceful_shutdown()

    async def _tell(self, *, serving: bool) -> None:
        states = health_pb2.HealthCheckResponse
        for name in ("", SERVICE):
            await self._health.set(name, states.SERVING if serving else states.NOT_SERVING)


class _Boundary:
    """Counts a call, and turns every failure into the status of the error table with the Error beside it."""

    __slots__ = ("_context", "_front", "_held", "_name", "_started", "_taken")

    def __init__(self, front: Front, name: str, context: grpc.aio.ServicerContext) -> None:
        self._front, self._name, self._context = front, name, context
        self._started = time.perf_counter()
        self._held = Held(front.bodies)
        self._taken = False

    def take(self, raw: bytes) -> None:
        """Raises Unavailable while draining, Overloaded where there is no room for the message."""
        self._front.lifecycle.begin()
        self._taken = True
        if not self._held.add(len(raw)):
            raise self._held.refusal()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        status, told = "OK", None
        if isinstance(error, RoseError):
            told = error
        elif isinstance(error, Exception):
            log.error("%s failed", self._name, exc_info=error)
            told = InternalError("an internal error; the server's log has its cause")
        elif error is not None:
            status = "CANCELLED"
            self._front.metrics.cancelled.inc()
        try:
            if told is not None:
                status = told.grpc_status
                await _abort(self._context, told)
        finally:
            self._end(status)

    def _end(self, status: str) -> None:
        front, seconds = self._front, time.perf_counter() - self._started
        self._held.release()
        if self._taken:
            front.lifecycle.end()
        # After the answer, which leaves when this returns.
        asyncio.get_running_loop().call_soon(front.metrics.finished, "grpc", self._name, status, seconds)


def _parse(raw: bytes, kind: type[M], limit: int) -> M:
    if len(raw) > limit:
        raise PayloadTooLarge(f"the message has {len(raw)} bytes, the limit is {limit} bytes")
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        name = kind.DESCRIPTOR.name
        raise InvalidInput(f"the message is no {name} (texts must be valid UTF-8): {error}") from None


def _deadline(context: grpc.aio.ServicerContext, default_s: float) -> float:
    left = context.time_remaining()
    if left is not None and left <= 0:
        raise DeadlineExceeded("the deadline passed before the request was read")
    # gRPC tells calls without a deadline that a very long time remains.
    return asyncio.get_running_loop().time() + (default_s if left is None else min(left, 10 * 365 * 86400.0))


async def _abort(context: grpc.aio.ServicerContext, error: RoseError) -> None:
    message = shorten(error.message, MESSAGE_CHARS)
    whole = from_kind(error.kind, message, param=error.param, index=error.index, retry_after_s=error.retry_after_s)
    await context.abort(
        getattr(grpc.StatusCode, error.grpc_status),
        message,
        ((ERROR_KEY, error_to_proto(whole).SerializeToString()),),
    )


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host

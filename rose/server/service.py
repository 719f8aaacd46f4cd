"""Frames to requests, answers to frames: every request is answered exactly once.

Knows messages, limits and the engine's surface; knows neither sockets nor how anybody waits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from google.protobuf.message import DecodeError

from rose.config import ServerConfig
from rose.errors import Cancelled, DeadlineExceeded, InternalError, InvalidInput, Overloaded, RoseError, Unavailable
from rose.proto import rose_pb2 as pb
from rose.proto.convert import error_to_proto
from rose.proto.frames import Frame, FrameType
from rose.server.answers import Answer
from rose.server.connection import Connection
from rose.server.pacing import TokenRate
from rose.server.ports import EnginePort
from rose.server.requests import OpenRequest, OpenRequests
from rose.server.stats import Stats
from rose.server.validate import Limits, validate

_log = logging.getLogger(__name__)
_REQUESTS = (FrameType.EMBED, FrameType.INFO, FrameType.STATS)


class Service:
    """The requests of all clients.

    Args:
        card: the model card, as INFO answers it.
        clock: time.monotonic, which the engine's deadlines go by.
        fill_stats: adds what only the process knows (connections, batches in flight) to an answer to STATS.
        running_for: seconds the oldest batch in flight has been running, 0 if there is none.

    Attributes:
        draining: new requests are refused; set when the process is to end.
    """

    def __init__(
        self,
        engine: EnginePort,
        limits: Limits,
        card: pb.ModelCard,
        config: ServerConfig,
        *,
        clock: Callable[[], float],
        fill_stats: Callable[[pb.ServerStats], None] = lambda stats: None,
        running_for: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.requests = OpenRequests(engine)
        self.stats = Stats()
        self.rate = TokenRate()
        self.draining = False
        self._engine = engine
        self._limits = limits
        self._card = card.SerializeToString()
        self._config = config
        self._clock = clock
        self._fill_stats = fill_stats
        self._running_for = running_for
        self._started = clock()

    def receive(self, peer: Connection, frame: Frame) -> None:
        """Handle one frame of a client.

        Raises:
            InvalidInput: the client broke the protocol so that answers would be ambiguous; close its connection.
        """
        if frame.type is FrameType.CANCEL:
            self._cancel(peer, frame.request_id)
            return
        if frame.type not in _REQUESTS:
            raise InvalidInput(f"frame type {frame.type.name} is for servers to send")
        if frame.request_id == 0:
            raise InvalidInput("request id 0 is reserved")
        if frame.request_id in peer.open:
            raise InvalidInput(f"request id {frame.request_id} is open already")
        try:
            if frame.type is FrameType.EMBED:
                self._embed(peer, frame)
            elif frame.type is FrameType.INFO:
                self._info(peer, frame)
            else:
                self._tell_stats(peer, frame)
        except RoseError as error:
            self._refuse(peer, frame, error)
        except Exception as error:  # noqa: BLE001  one request's fault is no other's
            _log.exception("a request could not be handled")
            self._refuse(peer, frame, InternalError(f"the request could not be handled: {error}"))

    def forget(self, peer: Connection) -> None:
        """A client has gone: cancel whatever it still waits for."""
        for request in list(peer.open.values()):
            self.stats.errors[Cancelled.kind] += 1
            self.requests.close(request)

    def expire(self, now: float) -> None:
        """Answer requests whose deadline has passed, whether they wait or run."""
        for request in self.requests.expired(now):
            waited = round((now - request.arrived) * 1000)
            where = "in the queue" if request.launched is None else "in part"
            self.fail(request, DeadlineExceeded(f"the deadline passed after {waited} ms, {where}"))

    def answer(self, request: OpenRequest, now: float) -> None:
        """Send a complete answer, or the error that keeps it from being sent."""
        launched = request.arrived if request.launched is None else request.launched
        message = pb.EmbedResponse(prompt_tokens=request.work.tokens)
        timing = message.timing
        timing.queue_us = _microseconds(launched - request.arrived)
        timing.compute_us = _microseconds(now - launched)
        timing.batches = request.batches
        try:
            request.answer.fill(message)
        except RoseError as error:
            self.fail(request, error)
            return
        self.stats.answered += 1
        self.requests.close(request)
        request.peer.send(FrameType.EMBED_RESULT, request.wire_id, message.SerializeToString(), now)

    def fail(self, request: OpenRequest, error: RoseError) -> None:
        """Answer an open request with an error; what the engine still owes of it is cancelled."""
        self.stats.errors[error.kind] += 1
        self.requests.close(request)
        self._send_error(request.peer, request.wire_id, error)

    def fail_all(self, error: RoseError) -> None:
        for request in self.requests.all():
            self.fail(request, error)

    def _embed(self, peer: Connection, frame: Frame) -> None:
        self._check_available()
        try:
            message = pb.EmbedRequest.FromString(frame.payload)
        except DecodeError:
            raise InvalidInput("the payload is no EmbedRequest") from None
        work = validate(message, self._limits)
        self._check_room(work.tokens)
        now = self._clock()
        deadline = now + frame.deadline_ms / 1000 if frame.deadline_ms else None
        self.requests.open(OpenRequest(peer, frame.request_id, now, deadline, work, Answer(work)))
        self.stats.requests += 1

    def _check_available(self) -> None:
        """Raises Unavailable while draining and while the device is stuck; a card asked for then is refused as well, so
        that fronts see it without sending work.
        """
        if self.draining:
            raise Unavailable("this engine process is shutting down")
        running = self._running_for()
        if running > self._config.stuck_seconds:
            raise Unavailable(f"the device has been at one batch for {running:.0f} s and seems stuck")

    def _check_room(self, tokens: int) -> None:
        """Raises Overloaded, with the time the queue needs at the rate it was seen to move."""
        queued, limit = self._engine.queued_tokens, self._config.max_queued_tokens
        if queued + tokens > limit:
            raise Overloaded(
                f"{queued} tokens wait, {tokens} more are over the limit of {limit}",
                retry_after_s=self.rate.seconds_for(queued + tokens - limit),
            )
        waiting, limit = self._engine.queued_requests, self._config.max_queued_requests
        if waiting >= limit:
            raise Overloaded(
                f"{waiting} requests wait, which is the limit", retry_after_s=self.rate.seconds_for(queued // waiting)
            )

    def _cancel(self, peer: Connection, wire_id: int) -> None:
        request = peer.open.get(wire_id)
        if request is not None:  # else its answer is on the way already
            self.fail(request, Cancelled("cancelled by the client"))

    def _info(self, peer: Connection, frame: Frame) -> None:
        self._check_available()
        peer.send(FrameType.INFO_RESULT, frame.request_id, self._card, self._clock())

    def _tell_stats(self, peer: Connection, frame: Frame) -> None:
        stats, now = self.stats, self._clock()
        message = pb.ServerStats(
            queued_tokens=self._engine.queued_tokens,
            queued_requests=self._engine.queued_requests,
            open_requests=len(self.requests),
            draining=self.draining,
            requests_total=stats.requests,
            answered_total=stats.answered,
            errors_total=stats.errors,
            batches_total=stats.batches,
            tokens_total=stats.tokens,
            items_total=stats.items,
            retried_items_total=stats.retried_items,
            failed_batches_total=stats.failed_batches,
            tokens_per_second=self.rate.per_second,
            uptime_s=now - self._started,
        )
        self._fill_stats(message)
        peer.send(FrameType.STATS_RESULT, frame.request_id, message.SerializeToString(), now)

    def _refuse(self, peer: Connection, frame: Frame, error: RoseError) -> None:
        if frame.type is FrameType.EMBED:
            self.stats.requests += 1
            self.stats.errors[error.kind] += 1
        self._send_error(peer, frame.request_id, error)

    def _send_error(self, peer: Connection, wire_id: int, error: RoseError) -> None:
        peer.send(FrameType.ERROR, wire_id, error_to_proto(error).SerializeToString(), self._clock())


def _microseconds(seconds: float) -> int:
    return min(max(round(seconds * 1e6), 0), 0xFFFFFFFF)

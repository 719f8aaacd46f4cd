"""Frames to requests, errors to frames: every request is answered exactly once.

What is common to every kind of request; EmbedService and GenerateService say what is opened and how it is answered.
Knows messages and clients; knows neither sockets nor how anybody waits.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Generic, Protocol

from rose.config import ServerConfig
from rose.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidInput,
    Overloaded,
    RoseError,
    Unavailable,
    Unsupported,
)
from rose.proto import rose_pb2 as pb
from rose.proto.convert import error_to_proto
from rose.proto.frames import Frame, FrameType
from rose.server.connection import Connection
from rose.server.ledger import E, Ledger
from rose.server.pacing import TokenRate
from rose.server.stats import Stats

_log = logging.getLogger(__name__)
_WORK = (FrameType.EMBED, FrameType.GENERATE)
_REQUESTS = (*_WORK, FrameType.INFO, FrameType.STATS)


class QueuePort(Protocol):
    """What of an engine says how much waits."""

    @property
    def queued_tokens(self) -> int: ...

    @property
    def queued_requests(self) -> int: ...


class Service(ABC, Generic[E]):
    """The requests of all clients.

    Args:
        card: the model card, as INFO answers it.
        clock: time.monotonic, which the engine's deadlines go by.
        fill_stats: adds what only the process knows (connections, batches in flight) to an answer to STATS.
        running_for: seconds the oldest batch in flight has been running, 0 if there is none.

    Attributes:
        requests: the open ones.
        takes: the frame type that asks for work here.
        otherwise: why the other ones are refused.
        draining: new requests are refused; set when the process is to end.
    """

    takes: ClassVar[FrameType]
    otherwise: ClassVar[str]

    def __init__(
        self,
        engine: QueuePort,
        requests: Ledger[E],
        card: pb.ModelCard,
        config: ServerConfig,
        *,
        clock: Callable[[], float],
        fill_stats: Callable[[pb.ServerStats], None] = lambda stats: None,
        running_for: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.stats = Stats()
        self.rate = TokenRate()
        self.draining = False
        self.requests = requests
        self._queue = engine
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
        kind, request_id = frame.type, frame.request_id
        if kind is FrameType.CANCEL:
            self._cancel(peer, request_id)
            return
        if kind not in _REQUESTS:
            raise InvalidInput(f"frame type {kind.name} is for servers to send")
        if request_id == 0:
            raise InvalidInput("request id 0 is reserved")
        if request_id in peer.open:
            raise InvalidInput(f"request id {request_id} is open already")
        try:
            if kind is self.takes:
                self._check_available()
                now = self._clock()
                deadline = now + frame.deadline_ms / 1000 if frame.deadline_ms else None
                self._open(peer, frame, now, deadline)
                self.stats.requests += 1
            elif kind is FrameType.INFO:
                self._info(peer, frame)
            elif kind is FrameType.STATS:
                self._tell_stats(peer, frame)
            else:
                raise Unsupported(self.otherwise)
        except RoseError as error:
            self._refuse(peer, frame, error)
        except Exception as error:  # noqa: BLE001  one request's fault is no other's
            _log.exception("a request could not be handled")
            self._refuse(peer, frame, InternalError(f"the request could not be handled: {error}"))

    def forget(self, peer: Connection) -> None:
        """A client has gone: cancel whatever it still waits for."""
        for request in self.requests.of(peer):
            self.stats.errors[Cancelled.kind] += 1
            self.requests.close(request)

    def expire(self, now: float) -> None:
        """Answer requests whose deadline has passed, whether they wait or run."""
        for request in self.requests.expired(now):
            waited = round((now - request.arrived) * 1000)
            where = "in the queue" if request.launched is None else "in part"
            self.fail(request, DeadlineExceeded(f"the deadline passed after {waited} ms, {where}"))

    def fail(self, request: E, error: RoseError) -> None:
        """Answer an open request with an error; what the engine still owes of it is cancelled."""
        self.stats.errors[error.kind] += 1
        self.requests.close(request)
        self._send_error(request.peer, request.wire_id, error)

    def fail_all(self, error: RoseError) -> None:
        for request in self.requests.all():
            self.fail(request, error)

    @abstractmethod
    def _open(self, peer: Connection, frame: Frame, now: float, deadline: float | None) -> None:
        """Validate the request of a frame and hand it to the engine; raises what it is refused with."""

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
        queued, limit = self._queue.queued_tokens, self._config.max_queued_tokens
        if queued + tokens > limit:
            raise Overloaded(
                f"{queued} tokens wait, {tokens} more are over the limit of {limit}",
                retry_after_s=self._seconds_for(queued + tokens - limit),
            )
        waiting, limit = self._queue.queued_requests, self._config.max_queued_requests
        if waiting >= limit:
            raise Overloaded(
                f"{waiting} requests wait, which is the limit", retry_after_s=self._seconds_for(queued // waiting)
            )

    def _seconds_for(self, queued_tokens: int) -> float:
        """How long so many tokens of the queue take to leave it."""
        return self.rate.seconds_for(queued_tokens)

    def _cancel(self, peer: Connection, wire_id: int) -> None:
        request = self.requests.find(peer, wire_id)
        if request is not None:  # else its answer is on the way already
            self.fail(request, Cancelled("cancelled by the client"))

    def _info(self, peer: Connection, frame: Frame) -> None:
        self._check_available()
        peer.send(FrameType.INFO_RESULT, frame.request_id, self._card, self._clock())

    def _tell_stats(self, peer: Connection, frame: Frame) -> None:
        stats, now = self.stats, self._clock()
        message = pb.ServerStats(
            queued_tokens=self._queue.queued_tokens,
            queued_requests=self._queue.queued_requests,
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
        if frame.type in _WORK:
            self.stats.requests += 1
            self.stats.errors[error.kind] += 1
        self._send_error(peer, frame.request_id, error)

    def _send_error(self, peer: Connection, wire_id: int, error: RoseError) -> None:
        peer.send(FrameType.ERROR, wire_id, error_to_proto(error).SerializeToString(), self._clock())


def microseconds(seconds: float) -> int:
    """As Timing carries them."""
    return min(max(round(seconds * 1e6), 0), 0xFFFFFFFF)

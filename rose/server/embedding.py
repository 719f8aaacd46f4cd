"""Embed requests: validated, handed to the engine, and answered once all their rows are there.

Knows messages and answers; knows neither sockets nor batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from google.protobuf.message import DecodeError

from rose.config import ServerConfig
from rose.errors import InvalidInput, RoseError
from rose.proto import rose_pb2 as pb
from rose.proto.frames import Frame, FrameType
from rose.server.answers import Answer
from rose.server.connection import Connection
from rose.server.ports import EnginePort
from rose.server.requests import OpenRequest, OpenRequests
from rose.server.service import Service, microseconds
from rose.server.validate import Limits, validate


class EmbedService(Service[OpenRequest]):
    """Serves EMBED; arguments as Service."""

    takes: ClassVar[FrameType] = FrameType.EMBED
    otherwise: ClassVar[str] = "the model served here embeds or scores, it does not generate: EMBED is what it takes"
    requests: OpenRequests

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
        super().__init__(
            engine, OpenRequests(engine), card, config, clock=clock, fill_stats=fill_stats, running_for=running_for
        )
        self._limits = limits

    def launched(self, request: OpenRequest, now: float) -> None:
        """One more batch holds items of it. While the first one runs there is time to begin the answer."""
        request.batches += 1
        if request.launched is None:
            request.launched = now
            request.answer = Answer(request.work)
            request.answer.message.timing.queue_us = microseconds(now - request.arrived)

    def answer(self, request: OpenRequest, answer: Answer, now: float) -> bool:
        """Send a complete answer, or the error that keeps it from being sent. Returns whether it was the answer: the
        request is to be closed then.
        """
        launched = request.arrived if request.launched is None else request.launched
        timing = answer.message.timing
        timing.compute_us = microseconds(now - launched)
        timing.batches = request.batches
        try:
            answer.fill()
        except RoseError as error:
            self.fail(request, error)
            return False
        request.peer.send(FrameType.EMBED_RESULT, request.wire_id, answer.message.SerializeToString(), now)
        return True

    def _open(self, peer: Connection, frame: Frame, now: float, deadline: float | None) -> None:
        try:
            message = pb.EmbedRequest.FromString(frame.payload)
        except DecodeError:
            raise InvalidInput("the payload is no EmbedRequest") from None
        work = validate(message, self._limits)
        self._check_room(work.tokens)
        self.requests.open(OpenRequest(peer, frame.request_id, now, deadline, work))

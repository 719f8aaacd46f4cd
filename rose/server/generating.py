"""Generate requests: validated, handed to the engine, and answered token by token.

Each token becomes a chunk's bytes at once. Chunks of one request that its client has not room for yet are joined, which
makes one chunk of them: a slow client costs bytes, not frames. Knows messages and tokens; knows neither sockets nor
batches.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from google.protobuf.message import DecodeError

from rose.config import ServerConfig
from rose.engine.generation.request import Finish, GenerateRequest, NewToken
from rose.errors import Cancelled, InvalidInput, RoseError
from rose.proto import rose_pb2 as pb
from rose.proto.frames import Frame, FrameType
from rose.server.connection import Connection
from rose.server.ledger import Ledger
from rose.server.pacing import TokenRate
from rose.server.ports import GenerationPort
from rose.server.service import Service, microseconds
from rose.server.validate_generate import GenerateLimits, GenerateWork, validate_generate

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class OpenGeneration:
    """One request whose last chunk has not been sent.

    Attributes:
        serial: also the id under which the engine knows it.
        launched: when the engine launched its first tokens, or None.
        tokens: drawn and here.
        cached_tokens: of the prompt, found in the engine's cache.
        pending: chunks, joined, that wait for the client to take what was sent before.
        finished: its last token is here, and its last chunk among the pending ones.
    """

    peer: Connection
    wire_id: int
    arrived: float
    deadline: float | None
    work: GenerateWork
    serial: int = 0
    launched: float | None = None
    tokens: int = 0
    cached_tokens: int = 0
    pending: bytearray = field(default_factory=bytearray)
    finished: bool = False


class OpenGenerations(Ledger[OpenGeneration]):
    """All of them, whoever sent them."""

    def __init__(self, engine: GenerationPort) -> None:
        super().__init__()
        self._engine = engine
        self._last_id = 0

    def open(self, generation: OpenGeneration) -> None:
        """Hand a request to the engine; raises what the engine refuses it with, and then nothing is open."""
        self._last_id += 1
        work = generation.work
        self._engine.add(
            GenerateRequest(self._last_id, work.ids, work.sampling, generation.deadline, priority=work.priority)
        )
        self._enter(generation, self._last_id)

    def running(self, engine_id: int) -> OpenGeneration | None:
        """The one the engine knows by this id, or None if it was answered meanwhile."""
        return self._by_serial.get(engine_id)

    def take(self, generation: OpenGeneration) -> bytes:
        """What is pending, for sending."""
        payload = bytes(generation.pending)
        generation.pending.clear()
        generation.peer.owed -= len(payload)
        return payload

    def close(self, entry: OpenGeneration) -> None:
        if self._leave(entry):
            entry.peer.owed -= len(entry.pending)
            entry.pending.clear()
            if not entry.finished:
                self._engine.abort(entry.serial)


class GenerateService(Service[OpenGeneration]):
    """Serves GENERATE; arguments as Service."""

    takes: ClassVar[FrameType] = FrameType.GENERATE
    otherwise: ClassVar[str] = "the model served here generates, it does not embed or score: GENERATE is what it takes"
    requests: OpenGenerations

    def __init__(
        self,
        engine: GenerationPort,
        limits: GenerateLimits,
        card: pb.ModelCard,
        config: ServerConfig,
        *,
        clock: Callable[[], float],
        fill_stats: Callable[[pb.ServerStats], None] = lambda stats: None,
        running_for: Callable[[], float] = lambda: 0.0,
    ) -> None:
        super().__init__(
            engine, OpenGenerations(engine), card, config, clock=clock, fill_stats=fill_stats, running_for=running_for
        )
        self._limits = limits
        self._unsent: dict[Connection, list[OpenGeneration]] = {}
        self._ends = TokenRate()  # of requests, not of tokens
        self._last_end = 0.0

    def started(self, engine_id: int, now: float) -> None:
        """The engine has launched the first tokens of a request."""
        generation = self.requests.running(engine_id)
        if generation is not None and generation.launched is None:
            generation.launched = now

    def take(self, token: NewToken, now: float) -> None:
        """One token of a request; `send` sends it."""
        generation = self.requests.running(token.request_id)
        if generation is None:
            return  # answered meanwhile: cancelled or expired
        generation.tokens += 1
        generation.cached_tokens = generation.cached_tokens or token.cached_tokens
        # Told at once: a client that stops at a string of its own never sees the last chunk.
        chunk = pb.GenerateChunk(tokens=(token.token,), cached_tokens=token.cached_tokens)
        if token.logprob is not None:
            logprobs = chunk.logprobs.add(logprob=token.logprob)
            for alternative, logprob in token.top:
                logprobs.top.add(token=alternative, logprob=logprob)
        if token.finish is not Finish.NONE:
            generation.finished = True
            self._conclude(generation, chunk, token.finish, now)
        payload = chunk.SerializeToString()
        if not generation.pending:
            self._unsent.setdefault(generation.peer, []).append(generation)
        generation.pending += payload
        generation.peer.owed += len(payload)

    def send(self, now: float) -> None:
        """Send what is pending to every client that has taken what was sent before."""
        for peer in list(self._unsent):
            if peer.wants_write:
                self._hold(peer)
                continue
            pending = [generation for generation in self._unsent.pop(peer) if generation.pending]
            answers = [(generation.wire_id, self.requests.take(generation)) for generation in pending]
            for generation in pending:
                if generation.finished:
                    self._answered(generation)
            if answers:
                peer.send_many(FrameType.GENERATE_CHUNK, answers, now)

    def fail(self, request: OpenGeneration, error: RoseError) -> None:
        """Answer with an error, after the tokens that are here; with these alone where the last is among them."""
        if request.pending and (request.finished or not isinstance(error, Cancelled)):
            payload = self.requests.take(request)
            request.peer.send(FrameType.GENERATE_CHUNK, request.wire_id, payload, self._clock())
        if request.finished:
            self._answered(request)
        else:
            super().fail(request, error)

    def _open(self, peer: Connection, frame: Frame, now: float, deadline: float | None) -> None:
        try:
            message = pb.GenerateRequest.FromString(frame.payload)
        except DecodeError:
            raise InvalidInput("the payload is no GenerateRequest") from None
        work = validate_generate(message, self._limits)
        self._check_room(len(work.ids))
        self.requests.open(OpenGeneration(peer, frame.request_id, now, deadline, work))

    def _conclude(self, generation: OpenGeneration, chunk: pb.GenerateChunk, finish: Finish, now: float) -> None:
        launched = generation.arrived if generation.launched is None else generation.launched
        chunk.finish = pb.STOP if finish is Finish.STOP else pb.LENGTH
        chunk.prompt_tokens = len(generation.work.ids)
        chunk.completion_tokens = generation.tokens
        chunk.cached_tokens = generation.cached_tokens
        chunk.timing.queue_us = microseconds(launched - generation.arrived)
        chunk.timing.compute_us = microseconds(now - launched)
        self._ends.measured(1, now - max(self._last_end, launched))
        self._last_end = now

    def _answered(self, generation: OpenGeneration) -> None:
        self.stats.answered += 1
        self.stats.items += 1
        self.requests.close(generation)

    def _seconds_for(self, queued_tokens: int) -> float:
        """Waiting prompts start as running sequences end, so the queue moves by requests."""
        queued, waiting = self._queue.queued_tokens, self._queue.queued_requests
        return self._ends.seconds_for(math.ceil(queued_tokens * waiting / queued) if queued else 1)

    def _hold(self, peer: Connection) -> None:
        """What a connection may owe its client has a limit, and the engine cannot be told to wait."""
        if not peer.has_room and not peer.dead:
            _log.warning("a client does not read the tokens it asked for: its connection is closed")
            peer.dead = True
            peer.touched.add(peer)

"""Open embed requests: who waits for what, and under which ids the engine knows it.

Knows the engine's surface; knows neither frames nor results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rose.engine.request import Request
from rose.proto.convert import IntArray
from rose.server.answers import Answer
from rose.server.ledger import Ledger
from rose.server.ports import EnginePort
from rose.server.validate import Work

if TYPE_CHECKING:
    from rose.server.connection import Connection


@dataclass(slots=True, eq=False)
class OpenRequest:
    """One request that is not answered yet.

    Attributes:
        wire_id: the id its client gave it.
        arrived: when its frame was read, time.monotonic().
        deadline: when its client stops waiting, or None.
        parts: ids under which the engine still owes items of it.
        answer: what it is given, from its first launch on.
        launched: when the first batch with an item of it was launched, or None.
        batches: batches that hold or held an item of it.
    """

    peer: Connection
    wire_id: int
    arrived: float
    deadline: float | None
    work: Work
    answer: Answer | None = None
    serial: int = 0
    parts: set[int] = field(default_factory=set)
    launched: float | None = None
    batches: int = 0


@dataclass(slots=True, eq=False)
class Part:
    """Items of one request under one id of the engine.

    Attributes:
        indices: index in the client's request, by index in the engine's.
        left: items the engine still owes.
    """

    owner: OpenRequest
    indices: Sequence[int]
    left: int


class OpenRequests(Ledger[OpenRequest]):
    """All of them, whoever sent them.

    Attributes:
        parts: engine id -> the items behind it.
    """

    def __init__(self, engine: EnginePort) -> None:
        super().__init__()
        self.parts: dict[int, Part] = {}
        self._engine = engine
        self._last_id = 0

    def open(self, request: OpenRequest) -> None:
        """Hand a request to the engine; raises what the engine refuses it with, and then nothing is open."""
        self.submit(request, range(len(request.work.sequences)), alone=False)
        self._enter(request, self._last_id)
        request.peer.owed += request.work.answer_bytes

    def submit(self, request: OpenRequest, indices: Sequence[int], *, alone: bool) -> None:
        """Queue items of a request at the engine, under an id of their own: all of them, or `alone` those listed."""
        self._last_id += 1
        work = request.work
        chosen = indices if alone else None
        self._engine.add(
            Request(
                id=self._last_id,
                sequences=_chosen(work.sequences, chosen),
                outputs=tuple(work.specs),
                deadline=request.deadline,
                priority=work.priority,
                alone=alone,
                token_types=None if work.token_types is None else _chosen(work.token_types, chosen),
                spans=None if work.spans is None else _chosen(work.spans, chosen),
                checked=True,
            )
        )
        self.parts[self._last_id] = Part(request, indices, len(indices))
        request.parts.add(self._last_id)

    def settle(self, engine_id: int, items: int) -> None:
        """The engine owes `items` fewer under this id."""
        part = self.parts[engine_id]
        part.left -= items
        if part.left == 0:
            del self.parts[engine_id]
            part.owner.parts.discard(engine_id)

    def close(self, entry: OpenRequest) -> None:
        for engine_id in entry.parts:
            del self.parts[engine_id]
            self._engine.abort(engine_id)
        entry.parts.clear()
        if self._leave(entry):
            entry.peer.owed -= entry.work.answer_bytes


def _chosen(arrays: list[IntArray], indices: Sequence[int] | None) -> list[IntArray]:
    return arrays if indices is None else [arrays[i] for i in indices]

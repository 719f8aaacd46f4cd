"""Open requests: who waits for what, until when, and under which ids the engine knows it.

Knows the engine's surface and deadlines; knows neither frames nor results.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rose.engine.request import Request
from rose.proto.convert import IntArray
from rose.server.answers import Answer
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
        launched: when the first batch with an item of it was launched, or None.
        batches: batches that hold or held an item of it.
    """

    peer: Connection
    wire_id: int
    arrived: float
    deadline: float | None
    work: Work
    answer: Answer
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


class OpenRequests:
    """All of them, whoever sent them.

    Attributes:
        parts: engine id -> the items behind it.
    """

    def __init__(self, engine: EnginePort) -> None:
        self.parts: dict[int, Part] = {}
        self._engine = engine
        self._by_serial: dict[int, OpenRequest] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._by_serial)

    def all(self) -> list[OpenRequest]:
        return list(self._by_serial.values())

    def open(self, request: OpenRequest) -> None:
        """Hand a request to the engine; raises what the engine refuses it with, and then nothing is open."""
        self.submit(request, range(len(request.work.sequences)), alone=False)
        request.serial = self._last_id
        self._by_serial[request.serial] = request
        request.peer.open[request.wire_id] = request
        request.peer.owed += request.work.answer_bytes
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, request.serial))

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

    def close(self, request: OpenRequest) -> None:
        """Forget a request; whatever the engine still owes of it is cancelled."""
        for engine_id in request.parts:
            del self.parts[engine_id]
            self._engine.abort(engine_id)
        request.parts.clear()
        if self._by_serial.pop(request.serial, None) is not None:
            del request.peer.open[request.wire_id]
            request.peer.owed -= request.work.answer_bytes
            if not self._by_serial:
                self._deadlines.clear()

    @property
    def next_deadline(self) -> float | None:
        return self._deadlines[0][0] if self._deadlines else None

    def expired(self, now: float) -> list[OpenRequest]:
        """Open requests whose deadline has passed; each is told of once."""
        late: list[OpenRequest] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            request = self._by_serial.get(heapq.heappop(self._deadlines)[1])
            if request is not None:
                late.append(request)
        # Answered requests leave their entry behind: with deadlines of minutes these would add up.
        if len(self._deadlines) > 1024 + 2 * len(self._by_serial):
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._by_serial]
            heapq.heapify(self._deadlines)
        return late


def _chosen(arrays: list[IntArray], indices: Sequence[int] | None) -> list[IntArray]:
    return arrays if indices is None else [arrays[i] for i in indices]

"""An engine of the server's port whose answers can be worked out by hand, and whose batches finish when a test says so.

Ids with a meaning: POISON makes the forward of its batch raise, NAN gives a row that is not finite, SPOILS makes every
other row of its batch NaN while its own is fine.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Mapping

import numpy as np

from rose.engine.request import Item, Request, StepResult
from rose.models.base import OutputSpec

POISON, NAN, SPOILS = 666, 667, 668
VOCAB = 1000
DIMENSION = 8

OUTPUTS: Mapping[str, OutputSpec] = {
    "plain": OutputSpec(dtype="float32", dimension=DIMENSION),
    "unit": OutputSpec(dtype="float32", dimension=DIMENSION, normalized=True),
    "tokens": OutputSpec(dtype="float32", dimension=3, per_token=True),
    "int8": OutputSpec(dtype="int8", dimension=4),
    "score": OutputSpec(dtype="float32", dimension=2, kind="score", labels=("no", "yes")),
    "weights": OutputSpec(dtype="float32", dimension=1, per_token=True, kind="weights"),
    "late": OutputSpec(dtype="float32", dimension=2, per_token=True, normalized=True, skip_tokens=1),
    "sparse": OutputSpec(dtype="float32", dimension=1, unavailable="sparse_linear.pt is missing"),
}


def plain_row(ids) -> np.ndarray:
    """What `plain` must be for one sequence: nothing in it depends on company."""
    ids = np.asarray(ids, dtype=np.int64)
    weights = np.arange(1, len(ids) + 1)
    numbers = [ids.sum(), len(ids), ids[0], ids[-1], (ids * weights).sum() % 9973, ids.max(), ids.min(), 1]
    return np.array(numbers, dtype=np.float32)


def unit_row(ids) -> np.ndarray:
    row = plain_row(ids)
    return row / np.linalg.norm(row)


def token_rows(ids) -> np.ndarray:
    ids = np.asarray(ids)
    return np.stack([ids, np.arange(len(ids)), np.full(len(ids), len(ids))], axis=1).astype(np.float32)


def int8_row(ids) -> np.ndarray:
    return np.array([len(ids) % 100, ids[0] % 100, -(ids[-1] % 100), 1], dtype=np.int8)


def score_row(ids, types=None) -> np.ndarray:
    """Depends on the token types, as a pair's score does."""
    return np.array([-len(ids), 0 if types is None else np.asarray(types).sum()], dtype=np.float32)


def weight_rows(ids) -> np.ndarray:
    return (np.asarray(ids, dtype=np.float32) / 8)[:, None]


def late_rows(ids) -> np.ndarray:
    """All zeros for the first token, which has no direction: nobody is to see it."""
    angle = np.arange(len(ids)) + 1.0
    rows = np.stack([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)
    rows[0] = 0
    return rows


class FakeTicket:
    """The results of one batch, ready when the engine finishes it."""

    def __init__(self, compute, expected_end: float | None) -> None:
        self.compute = compute
        self.expected_end = expected_end
        self.finished_at: float | None = None
        self.done = threading.Event()

    def output(self, name: str) -> FakeOutput:
        return FakeOutput(self, name)


class FakeOutput:
    def __init__(self, ticket: FakeTicket, name: str) -> None:
        self.ticket = ticket
        self.name = name

    @property
    def expected_end(self) -> float | None:
        return self.ticket.expected_end

    def ready(self) -> bool:
        return self.ticket.done.is_set()

    def result(self):
        assert self.ticket.done.is_set(), "nobody may look at a result that is still on its way"
        return self.ticket.compute()[self.name]


class FakeExecutor:
    """With a descriptor, as the CPU's, or without, as CUDA's."""

    def __init__(self, *, watched: bool) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK) if watched else None

    def fileno(self) -> int | None:
        return self._fd

    def acknowledge(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def notify(self) -> None:
        if self._fd is not None:
            os.eventfd_write(self._fd, 1)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class FakeEngine:
    """First come, first served, `batch_tokens` a batch.

    Args:
        batch_tokens: most tokens of a batch; a longer sequence gets a batch of its own.
        held: batches finish when `finish` is called, not at once.
        batch_seconds: each batch takes this long on a thread of its own.
        watched: whether the executor has a descriptor.
        timed: whether batches of `batch_seconds` say when they should end.
        shuffle: batches take waiting items in a random, not their own, order.
        outputs: the outputs, if not OUTPUTS; rows of others are random but the same for the same ids.
    """

    def __init__(
        self,
        *,
        batch_tokens: int = 64,
        held: bool = False,
        batch_seconds: float | None = None,
        watched: bool = True,
        shuffle: int | None = None,
        timed: bool = True,
        outputs: Mapping[str, OutputSpec] = OUTPUTS,
    ) -> None:
        self.executor = FakeExecutor(watched=watched)
        self.outputs = outputs
        self.batches: list[tuple[Item, ...]] = []
        self.added: list[Request] = []
        self.aborted: list[int] = []
        self.step_error: Exception | None = None
        self.last_ticket: FakeTicket | None = None
        self._timed = timed
        self._batch_tokens = batch_tokens
        self._held = held
        self._batch_seconds = batch_seconds
        self._random = None if shuffle is None else np.random.default_rng(shuffle)
        self._waiting: dict[int, tuple[Request, list[int]]] = {}
        self._in_flight: deque[FakeTicket] = deque()

    @property
    def queued_tokens(self) -> int:
        return sum(len(request.sequences[i]) for request, left in self._waiting.values() for i in left)

    @property
    def queued_requests(self) -> int:
        return len(self._waiting)

    def wake_at(self) -> float | None:
        self._retire()
        return time.monotonic() if self._waiting and len(self._in_flight) < 2 else None

    def add(self, request: Request) -> None:
        assert request.id not in self._waiting
        assert all(ids.dtype == np.int32 and len(ids) for ids in request.sequences)
        self.added.append(request)
        order = list(range(len(request.sequences)))
        if self._random is not None:
            self._random.shuffle(order)
        self._waiting[request.id] = (request, order)

    def abort(self, request_id: int) -> bool:
        self.aborted.append(request_id)
        return self._waiting.pop(request_id, None) is not None

    def step(self) -> list[StepResult]:
        if self.step_error is not None:
            error, self.step_error = self.step_error, None
            raise error
        self._retire()
        if not self._waiting or len(self._in_flight) >= 2:
            return []
        taken = self._take()
        items = tuple(Item(request.id, index) for request, index in taken)
        sequences = [request.sequences[index] for request, index in taken]
        types = [None if request.token_types is None else request.token_types[index] for request, index in taken]
        spans = None if taken[0][0].spans is None else [request.spans[index] for request, index in taken]
        names = {name for request, _ in taken for name in request.outputs}
        known = self._batch_seconds is not None and self._timed
        expected = time.monotonic() + self._batch_seconds if known else None
        ticket = FakeTicket(lambda: self._forward(sequences, names, types, spans), expected)
        self.batches.append(items)
        self._in_flight.append(ticket)
        self.last_ticket = ticket
        if self._batch_seconds is not None:
            threading.Timer(self._batch_seconds, self._end, [ticket]).start()
        elif not self._held:
            self._end(ticket)
        lengths = [len(ids) for ids in sequences]
        splits = (0, *np.cumsum(lengths).tolist())
        span_splits = () if spans is None else (0, *np.cumsum([len(bounds) for bounds in spans]).tolist())
        outputs = {name: ticket.output(name) for name in names}
        return [StepResult(items, outputs, splits, span_splits, tokens=sum(lengths))]

    def finish(self, count: int = 1) -> None:
        """Let the oldest batches in flight finish; from any thread."""
        for _ in range(count):
            ticket = next(ticket for ticket in list(self._in_flight) if not ticket.done.is_set())
            self._end(ticket)

    def release(self) -> None:
        """Hold no batch back any more."""
        self._held = False
        for ticket in list(self._in_flight):
            self._end(ticket)

    def wait_for_batches(self, count: int, timeout_s: float = 5.0) -> None:
        end = time.monotonic() + timeout_s
        while len(self.batches) < count:
            assert time.monotonic() < end, f"{len(self.batches)} batches were launched, not {count}"
            time.sleep(0.002)

    def _end(self, ticket: FakeTicket) -> None:
        ticket.finished_at = time.monotonic()
        ticket.done.set()
        self.executor.notify()

    def _retire(self) -> None:
        while self._in_flight and self._in_flight[0].done.is_set():
            self._in_flight.popleft()

    def _take(self) -> list[tuple[Request, int]]:
        taken: list[tuple[Request, int]] = []
        room = self._batch_tokens
        for request, left in list(self._waiting.values()):
            while left and (len(request.sequences[left[0]]) <= room or not taken):
                if taken and (request.alone or taken[0][0].alone or request.outputs != taken[0][0].outputs):
                    return taken
                if taken and (request.spans is None) != (taken[0][0].spans is None):
                    return taken
                index = left.pop(0)
                room -= len(request.sequences[index])
                taken.append((request, index))
            if left:
                return taken
            del self._waiting[request.id]
        return taken

    def _forward(self, sequences, names, types, spans) -> dict[str, np.ndarray]:
        if any((ids == POISON).any() for ids in sequences):
            raise ArithmeticError("this batch holds poison")
        if spans is None:
            results = {name: self._output(name, sequences, types) for name in names}
        else:
            results = {name: self._span_output(name, sequences, types, spans) for name in names}
        spoiler = next((i for i, ids in enumerate(sequences) if (ids == SPOILS).any()), None)
        for name, values in results.items():
            if values.dtype != np.float32 or (spans is not None and not self.outputs[name].per_token):
                continue
            ends = np.cumsum([len(ids) if self.outputs[name].per_token else 1 for ids in sequences])
            for index, ids in enumerate(sequences):
                if (ids == NAN).any() or (spoiler is not None and index != spoiler):
                    values[ends[index] - 1] = np.nan
        return results

    def _output(self, name: str, sequences, types=None) -> np.ndarray:
        rows = {"plain": plain_row, "unit": unit_row, "int8": int8_row}
        token_outputs = {"tokens": token_rows, "weights": weight_rows, "late": late_rows}
        if name in token_outputs and self.outputs is OUTPUTS:
            return np.concatenate([token_outputs[name](ids) for ids in sequences])
        if name == "score":
            return np.stack([score_row(ids, types and types[i]) for i, ids in enumerate(sequences)])
        if name not in rows or self.outputs is not OUTPUTS:
            return np.stack([big_row(ids, self.outputs[name].dimension) for ids in sequences])
        return np.stack([rows[name](ids) for ids in sequences])

    def _span_output(self, name: str, sequences, types, spans) -> np.ndarray:
        """What each span's ids alone would give; zeros for an empty span, NaN for one that holds NAN."""
        spec = self.outputs[name]
        if spec.per_token:
            return self._output(name, sequences, types)
        rows = [np.zeros((0, spec.dimension), spec.dtype)]
        for ids, bounds in zip(sequences, spans, strict=True):
            for start, end in bounds.tolist():
                row = self._output(name, [ids[start:end]]) if end > start else np.zeros((1, spec.dimension), spec.dtype)
                rows.append(np.full_like(row, np.nan) if (ids[start:end] == NAN).any() else row)
        return np.concatenate(rows)


def big_row(ids, dimension: int) -> np.ndarray:
    """A row of any width, a function of the first id."""
    return (np.arange(dimension, dtype=np.float32) + float(ids[0])) / 7

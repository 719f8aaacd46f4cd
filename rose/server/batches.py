"""Launched batches: their rows to the answers they belong to, their faults to the items at fault.

A batch whose forward raised, and a batch with a row that is not finite, are run again, each item alone; what fails
alone is at fault itself and gets the error, everybody else is answered as if nothing had happened.
Knows step results and open requests; knows neither frames nor sockets.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Container, Mapping
from typing import NamedTuple

from rose.engine.request import Item, StepResult
from rose.errors import InternalError, NonFinite, RoseError, Unavailable
from rose.models.base import OutputSpec
from rose.proto.convert import AnyArray
from rose.server.answers import faulty_rows
from rose.server.embedding import EmbedService
from rose.server.ports import EnginePort
from rose.server.requests import OpenRequest

_log = logging.getLogger(__name__)


class DeviceLostError(Unavailable):
    """The device answers no more; nothing in this process can bring it back."""


class _Flight(NamedTuple):
    """A launched batch, and its neighbours of one request as `runs` gives them."""

    result: StepResult
    runs: list[tuple[int, int, int, int]]
    launched: float

    @property
    def ready(self) -> bool:
        for output in self.result.outputs.values():  # noqa: SIM110  asked in a tight loop: a generator costs as much again
            if not output.ready():
                return False
        return True


class Batches:
    """The batches in flight, oldest first; they finish in that order.

    Args:
        specs: the model's outputs.
        device_alive: asked after a forward failed; False ends the process, since every later batch would fail too.
    """

    def __init__(
        self,
        engine: EnginePort,
        service: EmbedService,
        specs: Mapping[str, OutputSpec],
        *,
        clock: Callable[[], float],
        device_alive: Callable[[], bool] = lambda: True,
    ) -> None:
        self._engine = engine
        self._service = service
        self._specs = specs
        self._clock = clock
        self._device_alive = device_alive
        self._flights: deque[_Flight] = deque()
        self._last_end = 0.0

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def pending(self) -> bool:
        """Whether `launch` may have something to do."""
        return self._engine.queued_requests > 0

    @property
    def running_for(self) -> float:
        """Seconds the oldest batch has been running; 0 if there is none."""
        if not self._flights:
            return 0.0
        return self._clock() - max(self._flights[0].launched, self._last_end)

    @property
    def expected_end(self) -> float | None:
        """time.monotonic() at which the oldest batch should end, or None where nothing like it was timed yet."""
        return next((output.expected_end for output in self._flights[0].result.outputs.values()), None)

    def is_ready(self) -> bool:
        """Whether the oldest batch has finished."""
        return bool(self._flights) and self._flights[0].ready

    def launch(self) -> bool:
        """Let the engine launch what it can. Returns whether it did anything."""
        try:
            results = self._engine.step()
        except Exception as error:  # noqa: BLE001  whatever it was, the process goes on serving
            # Nobody knows what the engine took from its queue: every open request is answered, none is left hanging.
            _log.exception("the engine's step failed")
            self._service.fail_all(InternalError(f"the engine failed: {error}"))
            self._check_device()
            return True
        now = self._clock()
        for result in results:
            for engine_id, reason in result.dropped.items():
                part = self._service.requests.parts.get(engine_id)
                if part is not None:
                    self._service.fail(part.owner, reason)
            if result.items:
                flight = _Flight(result, runs(result.items), now)
                self._flights.append(flight)
                for owner in self._owners(flight):
                    self._service.launched(owner, now)
        return bool(results)

    def collect(self) -> int:
        """Deal with every batch that has finished. Returns how many there were."""
        count = 0
        while self.is_ready():
            flight = self._flights.popleft()
            count += 1
            try:
                self._finish(flight)
            except DeviceLostError:
                raise
            except Exception as error:  # noqa: BLE001  one batch's fault is no other's
                _log.exception("a finished batch could not be answered")
                for owner in self._owners(flight):
                    self._service.fail(owner, InternalError(f"the answer could not be made: {error}"))
        return count

    def _finish(self, flight: _Flight) -> None:
        """Answers first: they are what somebody waits for."""
        result, now = flight.result, self._clock()
        try:
            self._answer(flight, now)
        finally:
            self._service.stats.batches += 1
            self._service.rate.measured(result.tokens, now - max(flight.launched, self._last_end))
            self._last_end = now

    def _answer(self, flight: _Flight, now: float) -> None:
        result, stats = flight.result, self._service.stats
        try:
            outputs = {name: output.result() for name, output in result.outputs.items()}
            faults = self._faults(result, outputs)
        except Exception as error:  # noqa: BLE001  a forward may raise anything
            _log.error("a batch of %d items failed: %s", len(result.items), error, exc_info=error)
            stats.failed_batches += 1
            self._settle_failed(result.items, error)
            self._check_device()
            return
        if faults:
            self._settle_faulty(result.items, faults)
        else:
            self._give(flight, outputs, now)
        stats.tokens += result.tokens
        stats.items += len(result.items)

    def _give(self, flight: _Flight, outputs: Mapping[str, AnyArray], now: float) -> None:
        requests, result = self._service.requests, flight.result
        for engine_id, first, start, end in flight.runs:
            part = requests.parts.get(engine_id)
            if part is None:
                continue  # answered meanwhile: cancelled, expired, or another of its items failed
            owner = part.owner
            answer = owner.answer
            assert answer is not None, "it was launched"
            answer.put(part.indices[first], outputs, start, end, result.splits, result.span_splits)
            complete = answer.complete
            if complete and not self._service.answer(owner, answer, now):
                continue  # it was failed, and is closed
            requests.settle(engine_id, end - start)
            if complete:
                self._service.stats.answered += 1
                requests.close(owner)

    def _faults(self, result: StepResult, outputs: Mapping[str, AnyArray]) -> dict[int, str]:
        """Item of the batch -> output of it that must not travel, for rows somebody asked for.

        Raises:
            InternalError: an output of another shape than the batch has rows.
        """
        faults: dict[int, str] = {}
        for name, values in outputs.items():
            spec = self._specs[name]
            splits = result.splits if spec.per_token else result.span_splits
            shape = (splits[-1] if splits else len(result.items), spec.dimension)
            if values.shape != shape:
                raise InternalError(f"output {name!r} has shape {values.shape}, expected {shape}")
            if not len(faulty := faulty_rows(values, spec)):
                continue
            for row in faulty.tolist():
                item = bisect_right(splits, row) - 1 if splits else row
                part = self._service.requests.parts.get(result.items[item].request_id)
                if part is None or name not in part.owner.work.specs:
                    continue
                at = row - splits[item] if splits else 0
                spans = part.owner.work.spans
                if spec.per_token:
                    excused = at < spec.skip_tokens
                else:
                    # Nothing was pooled: its row is all zeros, and that is its answer.
                    bounds = None if spans is None else spans[part.indices[result.items[item].index]][at]
                    excused = bounds is not None and bounds[0] == bounds[1] and not values[row].any()
                if not excused:
                    faults.setdefault(item, name)
        return faults

    def _settle_faulty(self, items: tuple[Item, ...], faults: Mapping[int, str]) -> None:
        if len(items) > 1:
            _log.warning("%d of %d items of a batch are not finite: all are run again alone", len(faults), len(items))
            self._run_alone(items, suspects=faults)
            return
        self._fail_item(
            items[0], lambda index: NonFinite(f"output {faults[0]!r} of item {index} is not finite", index=index)
        )

    def _settle_failed(self, items: tuple[Item, ...], error: Exception) -> None:
        if len(items) > 1:
            self._run_alone(items)
            return
        self._fail_item(items[0], lambda index: _as_rose_error(error, index))

    def _fail_item(self, item: Item, make: Callable[[int], RoseError]) -> None:
        part = self._service.requests.parts.get(item.request_id)
        if part is not None:
            self._service.fail(part.owner, make(part.indices[item.index]))

    def _run_alone(self, items: tuple[Item, ...], suspects: Container[int] = ()) -> None:
        """Queue every item again, in a batch of its own; the suspects of a request first, since the first that fails
        ends it.
        """
        requests = self._service.requests
        again: dict[OpenRequest, list[int]] = {}
        order = sorted(range(len(items)), key=lambda row: row not in suspects)
        for row in order:
            part = requests.parts.get(items[row].request_id)
            if part is not None:
                again.setdefault(part.owner, []).append(part.indices[items[row].index])
                requests.settle(items[row].request_id, 1)
        for owner, indices in again.items():
            self._service.stats.retried_items += len(indices)
            try:
                requests.submit(owner, indices, alone=True)
            except Exception as error:  # noqa: BLE001  its items are in no batch any more: nobody else would answer it
                asked = error if isinstance(error, RoseError) else InternalError(f"it could not be run again: {error}")
                self._service.fail(owner, asked)

    def _owners(self, flight: _Flight) -> list[OpenRequest]:
        """Each once, whatever parts of it the batch holds."""
        parts = self._service.requests.parts
        owners = [parts[engine_id].owner for engine_id, *_ in flight.runs if engine_id in parts]
        return owners if len(owners) < 2 else list(dict.fromkeys(owners))

    def _check_device(self) -> None:
        if not self._device_alive():
            raise DeviceLostError("the device is lost: this engine process ends and has to be started again")


def runs(items: tuple[Item, ...]) -> list[tuple[int, int, int, int]]:
    """Neighbours of one request: its id, the first index in it, and rows start .. end of the batch."""
    found: list[tuple[int, int, int, int]] = []
    start, count = 0, len(items)
    while start < count:
        request_id, first = items[start].request_id, items[start].index
        end = start + 1
        while end < count and items[end].request_id == request_id and items[end].index == first + end - start:
            end += 1
        found.append((request_id, first, start, end))
        start = end
    return found


def _as_rose_error(error: Exception, index: int) -> RoseError:
    if isinstance(error, RoseError):
        return type(error)(error.message, param=error.param, index=index, retry_after_s=error.retry_after_s)
    return InternalError(f"the forward failed for item {index}: {type(error).__name__}: {error}", index=index)

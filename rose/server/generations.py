"""Steps of a generating engine: their tokens and failures to the requests they belong to.

What Batches is to an embedder. Knows steps; knows neither frames nor sockets.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from rose.engine.generation.request import GenerationStep
from rose.errors import InternalError
from rose.server.batches import DeviceLostError
from rose.server.generating import GenerateService
from rose.server.ports import GenerationPort

_log = logging.getLogger(__name__)


class Generations:
    """The batches of a generating engine in flight.

    Args:
        device_alive: asked after a forward failed; False ends the process, since every later batch would fail too.
    """

    def __init__(
        self,
        engine: GenerationPort,
        service: GenerateService,
        *,
        clock: Callable[[], float],
        device_alive: Callable[[], bool] = lambda: True,
    ) -> None:
        self._engine = engine
        self._service = service
        self._clock = clock
        self._device_alive = device_alive
        self._measured_until = 0.0

    def __len__(self) -> int:
        return self._engine.in_flight

    @property
    def pending(self) -> bool:
        """Whether `launch` may have something to do."""
        return not self._engine.idle

    @property
    def running_for(self) -> float:
        """Seconds the oldest batch has been running; 0 if there is none."""
        return self._engine.in_flight_seconds

    @property
    def expected_end(self) -> float | None:
        """time.monotonic() at which the oldest batch should end, or None where nothing like it was timed yet."""
        return self._engine.expected_end

    def is_ready(self) -> bool:
        """Whether the oldest batch has finished."""
        return self._engine.ready()

    def launch(self) -> bool:
        """Take what has arrived, and let the engine launch what it can. Returns whether anything happened."""
        if not self._engine.in_flight:
            self._measured_until = self._clock()
        try:
            step = self._engine.step()
        except Exception as error:  # noqa: BLE001  whatever it was, the process goes on serving
            # Nobody knows what the engine took from its queue: every open request is answered, none is left hanging.
            _log.exception("the engine's step failed")
            self._service.stats.failed_batches += 1
            self._service.fail_all(InternalError(f"the engine failed: {error}"))
            self._check_device()
            return True
        now = self._clock()
        for engine_id in step.started:
            self._service.started(engine_id, now)
        for token in step.tokens:
            self._service.take(token, now)
        self._count(step, now)
        self._fail(step)
        return step.launched or bool(step.tokens or step.failed or step.failed_batches)

    def collect(self) -> None:
        """Send the tokens. After `launch`, so that the device is at work meanwhile."""
        self._service.send(self._clock())

    def _count(self, step: GenerationStep, now: float) -> None:
        stats = self._service.stats
        stats.batches += step.launched
        stats.failed_batches += step.failed_batches
        stats.retried_items += step.retried
        if step.tokens:
            stats.tokens += len(step.tokens)
            self._service.rate.measured(len(step.tokens), now - self._measured_until)
            self._measured_until = now

    def _fail(self, step: GenerationStep) -> None:
        for engine_id, error in step.failed.items():
            generation = self._service.requests.running(engine_id)
            if generation is not None:
                self._service.fail(generation, error)
        if step.failed_batches:
            self._check_device()

    def _check_device(self) -> None:
        if not self._device_alive():
            raise DeviceLostError("the device is lost: this engine process ends and has to be started again")

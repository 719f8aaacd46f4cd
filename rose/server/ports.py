"""What the server asks of an engine, so that it can be tested with a small fake.

rose.engine.Engine and rose.engine.generation.engine.GenerationEngine are the real ones. Knows requests and step
results; knows neither models nor devices.
"""

from __future__ import annotations

from typing import Protocol

from rose.engine.generation.request import GenerateRequest, GenerationStep
from rose.engine.request import Request, StepResult


class ExecutorPort(Protocol):
    def fileno(self) -> int | None:
        """A descriptor that becomes readable whenever a batch has finished, or None: results must be polled then."""
        ...

    def acknowledge(self) -> None:
        """Make `fileno()` unreadable again; called before results are looked at."""
        ...


class EnginePort(Protocol):
    """The engine's surface: never waits for the device, and is used from one thread only."""

    @property
    def executor(self) -> ExecutorPort: ...

    @property
    def queued_tokens(self) -> int:
        """Tokens that are in no batch yet."""
        ...

    @property
    def queued_requests(self) -> int:
        """Requests with at least one item that is in no batch yet."""
        ...

    def add(self, request: Request) -> None: ...

    def abort(self, request_id: int) -> bool:
        """Forget a request; its items in no batch yet are never run. Unknown ids are ignored."""
        ...

    def step(self) -> list[StepResult]:
        """Launch at most one batch of what can be launched now."""
        ...

    def wake_at(self) -> float | None:
        """time.monotonic() from which on `step` has something to do although nothing new happened, or None."""
        ...


class GenerationPort(Protocol):
    """A generating engine's surface: never waits for the device, and is used from one thread only."""

    @property
    def executor(self) -> ExecutorPort: ...

    @property
    def queued_tokens(self) -> int:
        """Tokens of prompts that have not started."""
        ...

    @property
    def queued_requests(self) -> int:
        """Requests that have not started."""
        ...

    @property
    def in_flight(self) -> int:
        """Batches launched whose tokens `step` has not brought yet."""
        ...

    @property
    def in_flight_seconds(self) -> float:
        """Age of the oldest of them; 0 if there is none."""
        ...

    @property
    def expected_end(self) -> float | None:
        """time.monotonic() at which it should finish, or None if nobody knows."""
        ...

    @property
    def idle(self) -> bool:
        """Nothing waits, nothing runs, and nothing is in flight."""
        ...

    def add(self, request: GenerateRequest) -> None: ...

    def abort(self, request_id: int) -> bool:
        """Forget a request and free its pages; tokens of it that are on their way are never reported. Unknown ids are
        ignored.
        """
        ...

    def ready(self) -> bool:
        """Whether the oldest batch in flight has finished, so that `step` has tokens to bring. Asked in a tight loop
        where the executor has no descriptor.
        """
        ...

    def step(self) -> GenerationStep:
        """Bring the tokens that have arrived, and launch at most one batch of what can be launched now."""
        ...

    def wake_at(self) -> float | None:
        """time.monotonic() from which on `step` has something to do although nothing new happened, or None."""
        ...

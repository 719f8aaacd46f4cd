"""What the server asks of the engine, so that it can be tested with a small fake.

rose.engine.Engine is the real one. Knows requests and step results; knows neither models nor devices.
"""

from __future__ import annotations

from typing import Protocol

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

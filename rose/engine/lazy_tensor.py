"""`LazyTensor`: a host array that a launched batch is still filling.

Ready means both "the forward has finished" and "its rows are on the host": on CUDA the copy into page-locked memory is
queued behind the forward on the same stream, before the event the ticket waits for. Nobody reads the array before.
Knows tickets; knows neither devices nor requests.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator, Mapping
from typing import Any

import numpy.typing as npt

from rose.engine.execution import Ticket

HostArray = npt.NDArray[Any]


class LazyTensor:
    """One named output of one launched batch.

    `ready()` never waits, `result()` blocks, `await` lets an event loop go on meanwhile.
    """

    __slots__ = ("_name", "_ticket")

    def __init__(self, ticket: Ticket[Mapping[str, HostArray]], name: str) -> None:
        self._ticket = ticket
        self._name = name

    @property
    def expected_end(self) -> float | None:
        """time.monotonic() at which it should be ready, or None where nothing like it was timed yet."""
        return self._ticket.expected_end

    def ready(self) -> bool:
        return self._ticket.ready()

    def result(self) -> HostArray:
        """The rows, [items, dimension] or [tokens, dimension], in its dtype. Raises what the forward raised."""
        return self._ticket.result()[self._name]

    def __await__(self) -> Generator[Any, None, HostArray]:
        if not self._ticket.ready():
            loop = asyncio.get_running_loop()
            done: asyncio.Future[None] = loop.create_future()

            def settle() -> None:
                if not done.done():
                    done.set_result(None)

            def wake() -> None:
                # The loop may have been closed while the batch ran; then nobody waits any more.
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(settle)

            self._ticket.on_done(wake)
            yield from done.__await__()
        return self.result()

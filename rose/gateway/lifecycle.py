"""Whether the front takes requests, and how many it is still answering.

Knows two facts and who waits for them; knows neither signals nor carriers.
"""

from __future__ import annotations

import asyncio

from rose.errors import Unavailable


class Lifecycle:
    """Shared by all carriers of one front.

    Attributes:
        draining: set once, at the first SIGTERM; new work is refused from then on.
        in_flight: requests for work taken and not yet answered, on any carrier.
    """

    def __init__(self) -> None:
        self.draining = False
        self.in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._drained = asyncio.Event()

    def check(self) -> None:
        """Raises Unavailable while draining."""
        if self.draining:
            raise Unavailable("the server is shutting down and takes no new requests", retry_after_s=1.0)

    def begin(self) -> None:
        """Take one request, to be followed by `end`. Raises Unavailable while draining."""
        self.check()
        self.in_flight += 1
        self._idle.clear()

    def end(self) -> None:
        self.in_flight -= 1
        if not self.in_flight:
            self._idle.set()

    def drain(self) -> None:
        self.draining = True
        self._drained.set()

    async def wait_drain(self) -> None:
        """Until draining begins."""
        await self._drained.wait()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Until nothing is in flight. False if that took longer."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

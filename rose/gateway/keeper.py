"""A child process that is kept: started, and started again when it dies, a few times.

Knows processes and when to give up; knows neither engines nor fronts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from rose.errors import StartupError
from rose.gateway.child_process import ChildProcess

log = logging.getLogger("rose.gateway")

MAX_RESTARTS = 5
FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.5, 10.0
# A child that served this long before it died starts with a clean record.
STABLE_S = 60.0
# The exit status of a child that refuses what it was asked for: asking again would not help.
REFUSED = 2


class Refused(StartupError):
    """A child did not start, for a reason that starting it again would not remove."""


class Keeper:
    """Keeps one child alive.

    Args:
        command: its command line, asked for before every start.
        name: what the log calls it.
        ended: told the process id of every child that has ended.
    """

    def __init__(
        self,
        command: Callable[[], Sequence[str]],
        name: str,
        ended: Callable[[int], None] = lambda pid: None,
    ) -> None:
        self._command = command
        self._name = name
        self._ended = ended
        self._child: ChildProcess | None = None

    @property
    def ready(self) -> bool:
        """Whether it runs and has said that it listens."""
        return self._child is not None and self._child.status is None and self._child.ready.is_set()

    @property
    def serving(self) -> bool:
        """Whether it runs and has said, of a front, that requests would be answered."""
        return self._child is not None and self._child.status is None and self._child.serving.is_set()

    @property
    def status(self) -> int | None:
        """The exit status of the last child; None while it runs, or if none was ever started."""
        return None if self._child is None else self._child.status

    async def keep(self) -> None:
        """Start it, and start it again whenever it ends.

        Raises:
            Refused: it refused to start, the first time.
            StartupError: it ended before it ever served, refused later, or ended too often.
        """
        restarts = 0
        while True:
            started = time.monotonic()
            child = self._child = await ChildProcess.start(self._command(), self._name)
            status = await child.wait()
            self._ended(child.pid)
            served = child.ready.is_set()
            self._check(status, child, restarts)
            if served and time.monotonic() - started > STABLE_S:
                restarts = 0
            restarts += 1
            if restarts > MAX_RESTARTS:
                raise StartupError(f"{self._name} ended {restarts} times in a row, the last time with status {status}")
            pause = min(FIRST_BACKOFF_S * 2 ** (restarts - 1), LAST_BACKOFF_S)
            log.warning("%s ended with status %d; restart %d in %.1f s", self._name, status, restarts, pause)
            await asyncio.sleep(pause)

    async def end(self, grace_s: float) -> None:
        """SIGTERM, and SIGKILL after `grace_s` (0: at once)."""
        if self._child is not None:
            await self._child.end(grace_s)

    def _check(self, status: int, child: ChildProcess, restarts: int) -> None:
        """Raises StartupError for an end after which it is not started again."""
        if child.ready.is_set():
            return
        words = child.last_words or "it did not say why"
        if status == REFUSED:
            kind = StartupError if restarts else Refused
            raise kind(f"{self._name} refused to start: {words}")
        if restarts == 0:
            raise StartupError(f"{self._name} ended with status {status} before it served: {words}")


async def end_all(keepers: Sequence[Keeper], grace_s: float) -> bool:
    await asyncio.gather(*(keeper.end(grace_s) for keeper in keepers))
    return True


async def while_kept(
    until: asyncio.Future[Any], keeping: Sequence[asyncio.Task[None]], kind: str = "engines"
) -> Refused | None:
    """Until `until` is done, no child is kept any more, or one refused to start: that refusal."""
    kept = set(keeping)
    while kept and not until.done():
        await asyncio.wait([until, *kept], return_when=asyncio.FIRST_COMPLETED)
        for task in [task for task in kept if task.done()]:
            kept.discard(task)
            error = task.exception()
            if isinstance(error, Refused):
                return error
            log.error("%s; %d of %d %s are left", error, len(kept), len(keeping), kind)
    return None

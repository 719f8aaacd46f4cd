"""One engine process as the front sees it: connected or not, accepted or refused, and how busy.

A background task connects, checks the model card and connects again after a loss. Busy is healthy: only a connection
that breaks, a drain, or a minute without any sign of life takes a replica out. Knows one light link; knows no other
replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

from rose.client import AsyncClient, EmbedResult
from rose.errors import DeadlineExceeded, RoseError, Unavailable
from rose.gateway.parts import Part
from rose.proto import rose_pb2 as pb

CheckCard = Callable[[pb.ModelCard, str], None]
log = logging.getLogger("rose.gateway")

FIRST_RETRY_S, LAST_RETRY_S = 0.05, 1.0
# A refused replica may be replaced behind the same address, so it is asked again, but seldom.
REFUSED_RETRY_S = 5.0
WATCH_S = 0.5
# A CPU engine may compute a long batch for tens of seconds without looking at its sockets, and is healthy.
SILENCE_S = 60.0


class Replica:
    """Start it, then use it while `ready`.

    Args:
        check_card: raises RoseError where this front must not use the replica.

    Attributes:
        reason: why it is not ready; empty while it is.
        limits: its model card, once accepted.
        outstanding_tokens: tokens of parts sent and not yet answered.
        stats: what the engine last said of itself, or None.
    """

    def __init__(self, address: str, check_card: CheckCard) -> None:
        self.address = address
        self.outstanding_tokens = 0
        self.outstanding_parts = 0
        self.stats: pb.ServerStats | None = None
        self._card: pb.ModelCard | None = None
        self._check_card = check_card
        self._client: AsyncClient | None = None
        self._why = "connecting"
        self._watcher: asyncio.Task[None] | None = None

    @property
    def ready(self) -> bool:
        return not self._why and self._client is not None and self._client.connected

    @property
    def reason(self) -> str:
        return self._why or ("" if self.ready else "connection lost")

    @property
    def limits(self) -> pb.ModelCard:
        if self._card is None:
            raise Unavailable(f"{self.address}: {self._why}")
        return self._card

    def start(self) -> None:
        self._watcher = asyncio.get_running_loop().create_task(self._live())

    async def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait([self._watcher])
        await self._drop("closed")

    async def embed(
        self,
        part: Part,
        *,
        outputs: Sequence[str],
        dimensions: int,
        priority: pb.Priority.ValueType,
        deadline_s: float,
    ) -> EmbedResult:
        """Raises RoseError as AsyncClient.embed does."""
        if self._client is None:
            raise Unavailable(f"{self.address}: {self.reason}")
        self.outstanding_tokens += part.tokens
        self.outstanding_parts += 1
        try:
            return await self._client.embed(
                part.sequences,
                outputs=outputs,
                dimensions=dimensions,
                priority=priority,
                token_types=part.token_types,
                spans=part.spans,
                deadline_s=deadline_s,
            )
        finally:
            self.outstanding_tokens -= part.tokens
            self.outstanding_parts -= 1

    async def refresh_stats(self, timeout_s: float) -> None:
        """Ask for the engine's counters; keeps the last ones where it is too busy to say."""
        if self._client is not None:
            with contextlib.suppress(RoseError):
                self.stats = await self._client.stats(deadline_s=timeout_s)

    async def _live(self) -> None:
        retry_s = FIRST_RETRY_S
        while True:
            pause = retry_s
            retry_s = min(2 * retry_s, LAST_RETRY_S)
            try:
                await self._connect()
                retry_s = pause = FIRST_RETRY_S
                await self._watch()
            except (Unavailable, DeadlineExceeded) as error:
                await self._drop(error.message)
            except RoseError as error:
                log.warning("replica %s refused: %s", self.address, error.message)
                await self._drop(f"refused: {error.message}")
                pause = REFUSED_RETRY_S
            await asyncio.sleep(pause)

    async def _connect(self) -> None:
        try:
            self._client = await AsyncClient.connect(self.address, reconnect=False)
        except Unavailable:
            raise Unavailable("nothing listens there: it is loading, or gone") from None
        self._why = "connected, no model card yet: it is loading"
        card = await self._client.info(deadline_s=SILENCE_S)
        self._check_card(card, self.address)
        self._card, self._why = card, ""
        log.info("replica %s ready: %s on %s", self.address, card.model, card.device)

    async def _watch(self) -> None:
        """Return once the connection is gone; meanwhile follow what the engine says of itself."""
        client = self._client
        while client is not None and client.connected:
            try:
                self.stats = await client.stats(deadline_s=SILENCE_S)
            except DeadlineExceeded:
                self._why = f"no sign of life for {SILENCE_S:.0f} s"
                continue
            self._why = "draining" if self.stats.draining else ""
            await asyncio.sleep(WATCH_S)
        log.warning("replica %s: connection lost", self.address)
        raise Unavailable("connection lost")

    async def _drop(self, why: str) -> None:
        self._why = why
        client, self._client = self._client, None
        self.stats = None
        if client is not None:
            await client.close()

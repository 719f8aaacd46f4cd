"""One engine process as the front sees it: connected or not, accepted or refused, and how busy.

A background task connects, checks the model card and connects again after a loss, at once where somebody asks for it
(`look`); every change is logged with its reason. Busy is healthy: only a connection that breaks, a drain, or a minute
without any sign of life takes a replica out. Knows one light link; knows no other replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Sequence

from rose.client import AsyncClient, EmbedResult
from rose.client.messages import count_tokens, parse_embed
from rose.errors import DeadlineExceeded, RoseError, Unavailable, from_kind
from rose.gateway.parts import Part, part_request
from rose.proto import rose_pb2 as pb

CheckCard = Callable[[pb.ModelCard, str], None]
log = logging.getLogger("rose.gateway")

FIRST_RETRY_S, LAST_RETRY_S = 0.05, 1.0
# A refused replica may be replaced behind the same address, so it is asked again, but seldom.
REFUSED_RETRY_S = 5.0
WATCH_S = 0.5
# A CPU engine may compute a long batch for tens of seconds without looking at its sockets, and is healthy.
SILENCE_S = 60.0
_LOADING = "it is loading"


class ConnectionLost(Unavailable):
    """The connection went while the engine had the request: the engine may have died of it."""


class Replica:
    """Start it, then use it while `ready`.

    Args:
        check_card: raises RoseError where this front must not use the replica.
        name: what the public hears of it, where it was started with this front; its address if empty.
        silence_s: after so long without an answer the connection is given up, and its parts go elsewhere.
        spin_s: see `AsyncClient.connect`.

    Attributes:
        limits: its model card, once accepted.
        outstanding_tokens: tokens of parts sent and not yet answered.
        stats: what the engine last said of itself, or None.
    """

    def __init__(
        self,
        address: str,
        check_card: CheckCard,
        *,
        name: str = "",
        silence_s: float = SILENCE_S,
        spin_s: float = 0.0,
    ) -> None:
        self.address = address
        self.name = name or address
        self.outstanding_tokens = 0
        self.outstanding_parts = 0
        self.stats: pb.ServerStats | None = None
        self._card: pb.ModelCard | None = None
        self._check_card = check_card
        self._silence_s = silence_s
        self._spin_s = spin_s
        self._client: AsyncClient | None = None
        self._why = "connecting"
        self._was_ready = False
        self._closed = False
        self._refused = False
        self._watched = False
        self._looks: list[asyncio.Future[None]] = []
        self._hurry = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None

    @property
    def ready(self) -> bool:
        return not self._why and self._client is not None and self._client.connected

    @property
    def reason(self) -> str:
        """Why it is not ready; empty while it is."""
        return self._why or ("" if self.ready else "connection lost")

    @property
    def limits(self) -> pb.ModelCard:
        if self._card is None:
            raise Unavailable(f"{self.name}: {self._why}")
        return self._card

    def start(self) -> None:
        self._watcher = asyncio.get_running_loop().create_task(self._live())

    async def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait([self._watcher])
        self._closed = True
        self._why = "closed"
        self._seen(self._looks)
        await self._drop()

    def look(self) -> asyncio.Future[None]:
        """Try to reach it now, not when its turn comes. Done once a try that began after this call has ended.

        At once for one that is connected, whatever its state, and for one that was refused, which is asked but seldom.
        """
        done = asyncio.get_running_loop().create_future()
        connected = self._watched and self._client is not None and self._client.connected
        if connected or self._refused or self._closed:
            done.set_result(None)
        else:
            self._looks.append(done)
            self._hurry.set()
        return done

    async def embed(
        self,
        part: Part,
        *,
        outputs: Sequence[str],
        dimensions: int,
        priority: pb.Priority.ValueType,
        deadline_s: float,
    ) -> EmbedResult:
        """Raises RoseError as AsyncClient.embed does; ConnectionLost where the connection broke meanwhile."""
        client = self._client
        if client is None:
            raise self._away()
        self.outstanding_tokens += part.tokens
        self.outstanding_parts += 1
        try:
            if part.payload:
                answer = await client.embed_payload(part.payload, part.tokens, deadline_s=deadline_s)
                return EmbedResult.from_message(parse_embed(answer), answer)
            request = part_request(part, outputs, dimensions, priority)
            return EmbedResult.from_message(await client.embed_message(request, deadline_s=deadline_s))
        except Unavailable as error:
            if not client.connected:
                raise self._lost() from None
            raise self._public(error) from None
        except RoseError as error:
            raise self._public(error) from None
        finally:
            self.outstanding_tokens -= part.tokens
            self.outstanding_parts -= 1

    async def generate(
        self, request: pb.GenerateRequest, expected_tokens: int, *, deadline_s: float
    ) -> AsyncGenerator[pb.GenerateChunk, None]:
        """Chunks as they come; closing it cancels the request at the engine.

        Args:
            expected_tokens: that will be drawn, as far as anybody can tell; they count as outstanding, as the prompt
                does until the first one is there.

        Raises:
            RoseError as AsyncClient.generate_message does; ConnectionLost where the connection broke meanwhile.
        """
        client = self._client
        if client is None:
            raise self._away()
        counted = count_tokens(request) + expected_tokens
        self.outstanding_tokens += counted
        self.outstanding_parts += 1
        try:
            async with contextlib.aclosing(client.generate_message(request, deadline_s=deadline_s)) as chunks:
                async for chunk in chunks:
                    expected_tokens = max(1, expected_tokens - len(chunk.tokens))
                    self.outstanding_tokens += expected_tokens - counted
                    counted = expected_tokens
                    yield chunk
        except Unavailable as error:
            if not client.connected:
                raise self._lost() from None
            raise self._public(error) from None
        except RoseError as error:
            raise self._public(error) from None
        finally:
            self.outstanding_tokens -= counted
            self.outstanding_parts -= 1

    async def refresh_stats(self, timeout_s: float) -> None:
        """Ask for the engine's counters; keeps the last ones where it is too busy to say."""
        if self._client is not None:
            with contextlib.suppress(RoseError):
                self.stats = await self._client.stats(deadline_s=timeout_s)

    def _away(self) -> Unavailable:
        if self._closed:
            return Unavailable("the server shut down before this was answered", retry_after_s=1.0)
        return Unavailable(f"{self.name}: {self.reason}")

    def _lost(self) -> Unavailable:
        """What a request is told whose connection has gone. That of a front that ends was not lost: it was let go."""
        return self._away() if self._closed else ConnectionLost(f"{self.name}: {self.reason}")

    def _public(self, error: RoseError) -> RoseError:
        """The error with the replica's name for its address."""
        if self.address == self.name or self.address not in error.message:
            return error
        message = error.message.replace(self.address, self.name)
        return from_kind(error.kind, message, param=error.param, index=error.index, retry_after_s=error.retry_after_s)

    async def _live(self) -> None:
        retry_s = FIRST_RETRY_S
        while True:
            pause = retry_s
            retry_s = min(2 * retry_s, LAST_RETRY_S)
            self._refused = self._watched = False
            looks, self._looks = self._looks, []
            try:
                await self._connect()
                self._watched = True
                self._seen(looks + self._looks)
                self._looks = []
                retry_s = pause = FIRST_RETRY_S
                await self._watch()
            except Unavailable as error:
                self._say(self._public(error).message)
            except RoseError as error:
                self._say(f"refused: {self._public(error).message}")
                self._refused = True
                looks += self._looks
                self._looks = []
                pause = REFUSED_RETRY_S
            except Exception as error:
                # Whatever it was, a replica that nobody watches would be lost for good.
                log.exception("replica %s: an internal error; trying again", self.name)
                self._say(f"an internal error of the front: {type(error).__name__}")
            self._seen(looks)
            await self._drop()
            await self._nap(pause)

    def _seen(self, looks: Sequence[asyncio.Future[None]]) -> None:
        for look in looks:
            if not look.done():
                look.set_result(None)

    async def _nap(self, seconds: float) -> None:
        """Until so long has passed, or somebody looks."""
        if self._looks:
            return
        self._hurry.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._hurry.wait()

    async def _connect(self) -> None:
        try:
            self._client = await AsyncClient.connect(self.address, reconnect=False, spin_s=self._spin_s)
        except Unavailable as error:
            own = self.name != self.address and not self._was_ready
            raise Unavailable(_why_not(error, starting=own)) from None
        self._say(f"connected, no model card yet: {_LOADING}")
        try:
            card = await self._client.info(deadline_s=self._silence_s)
        except DeadlineExceeded:
            raise Unavailable(f"connected, no model card within {self._silence_s:g} s") from None
        self._check_card(card, self.name)
        self._card = card
        self._say("")
        log.info("replica %s serves %s on %s", self.name, card.model, card.device)

    async def _watch(self) -> None:
        """Until the connection is gone, or nothing is heard any more; meanwhile follow what the engine says of itself.

        Raises:
            Unavailable: which of the two it was.
        """
        client = self._client
        while client is not None and client.connected:
            try:
                self.stats = await client.stats(deadline_s=self._silence_s)
            except DeadlineExceeded:
                raise Unavailable(f"no sign of life for {self._silence_s:g} s") from None
            self._say("draining" if self.stats.draining else "")
            await self._nap(WATCH_S)
        raise Unavailable("connection lost")

    def _say(self, why: str) -> None:
        """Note why it is not ready, or with "" that it is, and log what is new."""
        if why == self._why:
            return
        before, self._why = self._why, why
        # That it loads before it was ever ready is nothing to warn of.
        starting = not self._was_ready and "loading" in why
        if starting and why.endswith(_LOADING):
            if not before.endswith(_LOADING):
                log.info("replica %s is loading", self.name)
        elif why:
            log.log(logging.INFO if starting else logging.WARNING, "replica %s is not ready: %s", self.name, why)
        else:
            self._was_ready = True
            log.info("replica %s is ready", self.name)

    async def _drop(self) -> None:
        client, self._client = self._client, None
        self.stats = None
        if client is not None:
            await client.close()


def _why_not(error: Unavailable, *, starting: bool) -> str:
    """Why a connection could not be made, without the address, which the reader of it has.

    Args:
        starting: it was started with this front: its socket is there once it has loaded, and its end is noticed by
            whoever started it.
    """
    cause = error.__context__
    if starting and isinstance(cause, FileNotFoundError):
        return _LOADING
    if isinstance(cause, FileNotFoundError | ConnectionRefusedError):
        return f"nothing listens there, it is loading or gone ({cause.strerror or cause})"
    return f"cannot connect: {cause}" if isinstance(cause, OSError) and str(cause) else "cannot connect in time"

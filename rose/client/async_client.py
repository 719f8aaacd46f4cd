"""The asyncio client of the light link.

    client = await AsyncClient.connect("unix:/run/rose.sock")
    result = await client.embed([[101, 2023, 102]], deadline_s=1.0)

Many requests share one connection. Knows token ids and messages; knows neither texts nor replicas.

What happens when a connection is lost: every open request fails with Unavailable and is never sent again by itself
(embedding twice is harmless, so callers may). The next call connects anew, once, unless the client was made with
`reconnect=False`, and raises Unavailable if that fails.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType

from rose.client.generation import Generated, generate_request, parse_chunk
from rose.client.link import Link
from rose.client.messages import (
    MAX_ANSWER_BYTES,
    Sequences,
    Spans,
    count_tokens,
    embed_request,
    parse_card,
    parse_embed,
    parse_stats,
)
from rose.client.result import EmbedResult
from rose.errors import DeadlineExceeded, Unavailable
from rose.proto import rose_pb2 as pb
from rose.proto.address import Address, parse_address
from rose.proto.convert import AnyArray
from rose.proto.frames import FrameType, deadline_to_ms


class AsyncClient:
    """One connection to one engine process. Make it with `connect`; use it from one event loop.

    Attributes:
        address: where the server listens.
        outstanding_tokens: tokens of this client's unanswered embed calls.
        outstanding_requests: those calls.
    """

    def __init__(
        self, address: Address, *, connect_timeout_s: float, reconnect: bool, max_payload: int, spin_s: float
    ) -> None:
        self.address = address
        self.outstanding_tokens = 0
        self.outstanding_requests = 0
        self._connect_timeout_s = connect_timeout_s
        self._reconnect = reconnect
        self._max_payload = max_payload
        self._spin_s = spin_s
        self._link: Link | None = None
        self._connecting = asyncio.Lock()
        self._closed = False

    @classmethod
    async def connect(
        cls,
        address: str | Address,
        *,
        connect_timeout_s: float = 5.0,
        reconnect: bool = True,
        max_payload: int = MAX_ANSWER_BYTES,
        spin_s: float = 0.0,
    ) -> AsyncClient:
        """Open the connection.

        Args:
            address: "host:port" or "unix:/path".
            connect_timeout_s: also used when a later call connects anew.
            reconnect: whether calls after a lost connection connect anew.
            max_payload: largest answer accepted, in bytes.
            spin_s: keep the event loop from sleeping for so long after an embed call, unless its answer comes before;
                see `Client`. 0 lets it sleep at once.

        Raises:
            InvalidInput: malformed address.
            Unavailable: nothing listens there.
        """
        where = parse_address(address) if isinstance(address, str) else address
        client = cls(
            where, connect_timeout_s=connect_timeout_s, reconnect=reconnect, max_payload=max_payload, spin_s=spin_s
        )
        client._link = await client._dial()
        return client

    @property
    def connected(self) -> bool:
        return self._link is not None and self._link.closed is None

    async def embed(
        self,
        sequences: Sequences,
        *,
        model: str = "",
        outputs: Sequence[str] = (),
        dimensions: int = 0,
        priority: pb.Priority.ValueType = pb.ONLINE,
        deadline_s: float | None = None,
        token_types: Sequences | None = None,
        spans: Spans | None = None,
    ) -> EmbedResult:
        """Run token id sequences.

        Args:
            sequences: one id list or integer array an item.
            model: the served name, or empty for whatever is served.
            outputs: names from the model card; empty for its default.
            dimensions: cut float vectors to this many numbers; 0 for all.
            priority: pb.ONLINE or pb.BULK.
            deadline_s: seconds after which the answer is of no use; the server drops the request then.
            token_types: one type an id (BERT pairs), in rows as long as the sequences'; None: all zero.
            spans: per item, first token and end of each part that is pooled by itself (late chunking), counted from the
                item's own first token; an item may have none. Pooled outputs then have a row a span.

        Raises:
            RoseError: the server's error, DeadlineExceeded, or Unavailable when the connection is lost.
        """
        request = embed_request(
            sequences,
            model=model,
            outputs=outputs,
            dimensions=dimensions,
            priority=priority,
            token_types=token_types,
            spans=spans,
        )
        return EmbedResult.from_message(await self.embed_message(request, deadline_s=deadline_s))

    async def embed_message(self, request: pb.EmbedRequest, *, deadline_s: float | None = None) -> pb.EmbedResponse:
        """The same for a message that is already made. Cancelling the task cancels the request at the server."""
        payload, tokens = request.SerializeToString(), count_tokens(request)
        return parse_embed(await self.embed_payload(payload, tokens, deadline_s=deadline_s))

    async def embed_payload(self, payload: bytes, tokens: int, *, deadline_s: float | None = None) -> bytes:
        """The same for the bytes of such a message; gives back those of an EmbedResponse, and looks into neither.

        Args:
            tokens: what it counts for among the outstanding ones.
        """
        self.outstanding_tokens += tokens
        self.outstanding_requests += 1
        try:
            return await self._call(FrameType.EMBED, payload, deadline_s)
        finally:
            self.outstanding_tokens -= tokens
            self.outstanding_requests -= 1

    def generate(
        self,
        ids: Sequence[int] | AnyArray,
        *,
        model: str = "",
        max_new_tokens: int = 0,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = None,
        stop_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        min_new_tokens: int = 0,
        logprobs: int | None = None,
        priority: pb.Priority.ValueType = pb.ONLINE,
        deadline_s: float | None = None,
    ) -> AsyncGenerator[Generated, None]:
        """Tokens that continue a prompt, as they are drawn.

            async with contextlib.aclosing(client.generate(ids, max_new_tokens=64)) as tokens:
                async for some in tokens:
                    print(some.tokens)

        The request is sent when the first is asked for. An iterator that is closed, or whose task is cancelled, before
        its end cancels the request at the server. Whoever is slow gets several tokens at once.

        Args:
            ids: token ids of the prompt.
            model: the served name, or empty for whatever is served.
            max_new_tokens: most tokens to draw; 0 for as many as the model's limit leaves.
            temperature: 0 is greedy.
            top_k: draw among the k most likely; 0 for all.
            top_p: draw among the fewest tokens whose probability adds up to it; 1 for all.
            min_p: leave out tokens less likely than min_p times the most likely one; 0 for none.
            seed: the same seed draws the same tokens; None draws others each time.
            stop_ids: tokens that end it, beside the model's own end tokens.
            ignore_eos: the model's own end tokens do not end it.
            min_new_tokens: before so many tokens no end token is drawn.
            logprobs: log probabilities of each token and of so many alternatives; None for none.
            priority: pb.ONLINE or pb.BULK.
            deadline_s: seconds from this call after which it ends with DeadlineExceeded.

        Raises:
            InvalidInput: at once, for what no message can carry.
            RoseError: while iterating, the server's error, DeadlineExceeded, or Unavailable when the connection is
                lost; tokens that came before have been handed out by then.
        """
        request = generate_request(
            ids,
            model=model,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            stop_ids=stop_ids,
            ignore_eos=ignore_eos,
            min_new_tokens=min_new_tokens,
            logprobs=logprobs,
            priority=priority,
        )
        return _generated(self.generate_message(request, deadline_s=deadline_s))

    def generate_message(
        self, request: pb.GenerateRequest, *, deadline_s: float | None = None
    ) -> AsyncGenerator[pb.GenerateChunk, None]:
        """The same for a message that is already made, with the chunks as they travel. The last one has `finish` set.

        Raises:
            as generate.
        """
        deadline_to_ms(deadline_s)
        end = None if deadline_s is None else asyncio.get_running_loop().time() + deadline_s
        return self._stream(request, end)

    async def info(self, *, deadline_s: float | None = 10.0) -> pb.ModelCard:
        return parse_card(await self._call(FrameType.INFO, b"", deadline_s))

    async def stats(self, *, deadline_s: float | None = 10.0) -> pb.ServerStats:
        return parse_stats(await self._call(FrameType.STATS, b"", deadline_s))

    async def close(self) -> None:
        """Close the connection; open requests fail with Unavailable."""
        self._closed = True
        if self._link is not None:
            await self._link.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _call(self, kind: FrameType, payload: bytes, deadline_s: float | None) -> bytes:
        deadline_ms = deadline_to_ms(deadline_s)
        loop = asyncio.get_running_loop()
        # The clock starts now: connecting and waiting for room in the socket count as well.
        end = None if deadline_s is None else loop.time() + deadline_s
        link = self._link
        if link is None or not link.ready:
            link = await self._ready_before(end)
            deadline_ms = 0 if end is None else deadline_to_ms(max(end - loop.time(), 1e-3))
        request_id, future = link.send(kind, payload, deadline_ms)
        alarm = None if end is None else loop.call_at(end, link.expire, request_id)
        try:
            return await future
        except asyncio.CancelledError:
            link.cancel(request_id)
            raise
        finally:
            if alarm is not None:
                alarm.cancel()

    async def _stream(self, request: pb.GenerateRequest, end: float | None) -> AsyncGenerator[pb.GenerateChunk, None]:
        tokens = count_tokens(request)
        self.outstanding_tokens += tokens
        self.outstanding_requests += 1
        loop = asyncio.get_running_loop()
        try:
            link = await self._ready_before(end)
            deadline_ms = 0 if end is None else deadline_to_ms(max(end - loop.time(), 1e-3))
            request_id, stream = link.send_for_stream(FrameType.GENERATE, request.SerializeToString(), deadline_ms)
            alarm = None if end is None else loop.call_at(end, link.expire, request_id)
            try:
                last = False
                while not last:
                    chunk = parse_chunk(await stream.next())
                    last = chunk.finish != pb.UNFINISHED
                    if last:
                        stream.ended = True
                    yield chunk
            finally:
                if alarm is not None:
                    alarm.cancel()
                link.cancel(request_id)
        finally:
            self.outstanding_tokens -= tokens
            self.outstanding_requests -= 1

    async def _ready_before(self, end: float | None) -> Link:
        try:
            async with asyncio.timeout_at(end):
                link = await self._ready()
                await link.writable()
                return link
        except TimeoutError:
            raise DeadlineExceeded(f"{self.address} took no request before the deadline") from None

    async def _ready(self) -> Link:
        async with self._connecting:
            if self._closed:
                raise Unavailable("the client was closed")
            if self._link is not None and self._link.closed is None:
                return self._link
            if self._link is not None and not self._reconnect:
                raise Unavailable(f"connection to {self.address} lost, and this client does not reconnect")
            self._link = await self._dial()
            return self._link

    async def _dial(self) -> Link:
        loop = asyncio.get_running_loop()
        where = self.address
        make = lambda: Link(where, self._max_payload, self._spin_s)  # noqa: E731
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                if where.path:
                    _, link = await loop.create_unix_connection(make, where.path)
                else:
                    _, link = await loop.create_connection(make, where.host, where.port)
        except TimeoutError:
            raise Unavailable(f"no connection to {where} within {self._connect_timeout_s:.3g} s") from None
        except OSError as error:
            raise Unavailable(f"nothing listens at {where}: {error}") from None
        return link


async def _generated(chunks: AsyncGenerator[pb.GenerateChunk, None]) -> AsyncGenerator[Generated, None]:
    async with contextlib.aclosing(chunks):
        async for chunk in chunks:
            yield Generated.from_message(chunk)

"""One prompt, continued by one of the replicas, on another one if that is lost before it has drawn a token.

    request -> least outstanding tokens -> chunks

Once a token has come, a failure is the caller's to know: another replica would draw another answer. Also several such
streams as one. Knows replicas and messages; knows neither text nor the carriers in front.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

from rose.errors import DeadlineExceeded, InternalError, Overloaded, RoseError, Unavailable
from rose.gateway.metrics import Metrics
from rose.gateway.replica import ConnectionLost, Replica
from rose.gateway.replicas import MAX_LOSSES, ReplicaPool
from rose.proto import rose_pb2 as pb

# What an answer of unknown length counts when replicas are compared: their own limit would drown every prompt.
EXPECTED_TOKENS = 256
T = TypeVar("T")


async def continued(
    pool: ReplicaPool,
    metrics: Metrics,
    request: pb.GenerateRequest,
    *,
    deadline: float,
    home: list[Replica] | None = None,
) -> AsyncGenerator[pb.GenerateChunk, None]:
    """Chunks of one answer, the last one with its finish. Closing it cancels the request at the engine.

    Args:
        deadline: loop.time() after which nobody wants more.
        home: shared by requests for the same prompt: the replica that the first of them went to, whose cache has it.

    Raises:
        RoseError: at any point.
    """
    tried: list[Replica] = []
    failed: RoseError | None = None
    losses = 0
    while True:
        replica = _choose(pool, tried, home)
        if replica is None:
            raise failed or pool.none_ready()
        left_s = deadline - asyncio.get_running_loop().time()
        if left_s <= 0:
            raise failed or DeadlineExceeded("the deadline passed before the request could be sent to a replica")
        if failed is not None:
            metrics.retries.inc()
        tried.append(replica)
        begun = ended = False
        expected = min(request.sampling.max_new_tokens, EXPECTED_TOKENS)
        try:
            async with contextlib.aclosing(replica.generate(request, expected, deadline_s=left_s)) as chunks:
                async for chunk in chunks:
                    begun, ended = True, bool(chunk.finish)
                    yield chunk
            if not ended:
                raise InternalError(f"{replica.name} ended an answer without saying why")
            return
        except ConnectionLost as error:
            losses += 1
            if begun or losses >= MAX_LOSSES:
                raise Unavailable(f"the replica was lost while it had this request: {error.message}") from None
            failed = error
        except (Unavailable, Overloaded) as error:
            if begun:
                raise
            failed = error


def _choose(pool: ReplicaPool, tried: Sequence[Replica], home: list[Replica] | None) -> Replica | None:
    if home and not tried and home[0].ready:
        return home[0]
    replica = pool.choose(tried)
    if home is not None and not home and replica is not None:
        home.append(replica)
    return replica


async def side_by_side(
    streams: Sequence[AsyncGenerator[T, None]], *, leaders: Sequence[int] | None = None
) -> AsyncGenerator[tuple[int, T], None]:
    """(number of the stream, item) of several streams, as they come. Closing it closes them all.

    Args:
        leaders: beside the streams, the one whose first item each waits for before it begins; its own number if none.

    Raises:
        RoseError: of the first stream that fails, with its number as `choice`.
    """
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]) as only:
            async for each in only:
                yield 0, each
        return
    # Bounded: behind a caller who reads slowly, tokens wait as joined bytes at the link, not as objects here.
    arrived: asyncio.Queue[tuple[int, T | None, BaseException | None]] = asyncio.Queue(len(streams))
    begun = [asyncio.Event() for _ in streams]

    async def run(number: int) -> None:
        failure: BaseException | None = None
        try:
            if leaders is not None and leaders[number] != number:
                await begun[leaders[number]].wait()
            async with contextlib.aclosing(streams[number]) as own:
                async for item in own:
                    begun[number].set()
                    await arrived.put((number, item, None))
        except Exception as error:  # noqa: BLE001 (raised again, by whoever takes it from the queue)
            failure = error
        begun[number].set()
        await arrived.put((number, None, failure))

    tasks = [asyncio.get_running_loop().create_task(run(number)) for number in range(len(streams))]
    try:
        running = len(tasks)
        while running:
            number, item, failure = await arrived.get()
            if failure is not None:
                raise failure
            if item is None:
                running -= 1
            else:
                yield number, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

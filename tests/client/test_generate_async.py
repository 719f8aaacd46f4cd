"""The asyncio client generating: iterators that end, are closed, expire, fall behind, lose their connection."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import time
from collections.abc import Awaitable, Callable

import pytest
import uvloop

from rose.client import AsyncClient
from rose.client.generation import generate_request
from rose.errors import DeadlineExceeded, InternalError, InvalidInput, Overloaded, Unavailable
from rose.proto import rose_pb2 as pb
from rose.proto.convert import error_to_proto, tokens_from_proto
from rose.proto.frames import FrameType, encode_frame
from tests.client.scripted_server import ScriptedServer, echo, silent
from tests.support.fake_generation import FakeGenerationEngine, drawn
from tests.support.running_generation import serving_generation


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request) -> Callable[[Awaitable[None]], None]:
    """Run a coroutine on either kind of loop."""
    factory = asyncio.new_event_loop if request.param == "asyncio" else uvloop.new_event_loop

    def runner(coroutine):
        with asyncio.Runner(loop_factory=factory) as loop:
            return loop.run(asyncio.wait_for(coroutine, 20))

    return runner


async def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.002)


def chunk(request_id: int, **fields) -> bytes:
    return encode_frame(FrameType.GENERATE_CHUNK, request_id, pb.GenerateChunk(**fields).SerializeToString())


def error(request_id: int, what) -> bytes:
    return encode_frame(FrameType.ERROR, request_id, error_to_proto(what).SerializeToString())


def test_every_argument_travels():
    request = generate_request(
        [3, 4],
        model="m",
        max_new_tokens=5,
        temperature=0.0,
        top_k=7,
        top_p=0.5,
        min_p=0.25,
        seed=0,
        stop_ids=(1, 2),
        ignore_eos=True,
        min_new_tokens=3,
        logprobs=0,
        priority=pb.BULK,
    )
    s = request.sampling
    assert [ids.tolist() for ids in tokens_from_proto(request.tokens)] == [[3, 4]]
    assert (request.model, request.priority) == ("m", pb.BULK)
    assert (s.max_new_tokens, s.temperature, s.top_k, s.top_p, s.min_p) == (5, 0.0, 7, 0.5, 0.25)
    assert (s.HasField("seed"), s.seed, list(s.stop_ids), s.ignore_eos, s.min_new_tokens) == (True, 0, [1, 2], True, 3)
    assert (s.HasField("logprobs"), s.logprobs) == (True, 0)
    plain = generate_request([3]).sampling
    assert not plain.HasField("seed")
    assert not plain.HasField("logprobs")


@pytest.mark.parametrize(
    ("ids", "fields", "param"),
    [
        ("hello", {}, "prompt"),
        ([], {}, "prompt"),
        ([1.5], {}, "prompt"),
        ([2**31], {}, "prompt"),
        ([[1]], {}, "prompt"),
        ([1], {"max_new_tokens": -1}, "max_new_tokens"),
        ([1], {"top_k": 2**32}, "top_k"),
        ([1], {"seed": -1}, "seed"),
        ([1], {"temperature": "hot"}, "temperature"),
        ([1], {"stop_ids": [-1]}, "stop_ids"),
        ([1], {"stop_ids": 7}, "stop_ids"),
        ([1], {"logprobs": -1}, "logprobs"),
    ],
)
def test_what_no_message_can_carry_is_named_at_once(ids, fields, param):
    with pytest.raises(InvalidInput) as caught:
        generate_request(ids, **fields)
    assert caught.value.param == param
    assert caught.value.index is None


def test_tokens_logprobs_and_usage(run):
    async def main():
        with serving_generation(FakeGenerationEngine(batch_seconds=0.001)) as server:
            async with await AsyncClient.connect(server.address) as client:
                got = [some async for some in client.generate([4, 5], max_new_tokens=12, logprobs=1)]
                assert client.outstanding_requests == client.outstanding_tokens == 0
                assert client._link.open_requests == 0
        assert [token for some in got for token in some.tokens] == drawn([4, 5], 12)
        assert [each.logprob for some in got for each in some.logprobs] == [-0.25 * n for n in range(1, 13)]
        assert [some.finish for some in got[:-1]] == [None] * (len(got) - 1)
        assert (got[-1].finish, got[-1].usage.prompt_tokens, got[-1].usage.completion_tokens) == ("length", 2, 12)
        assert got[-1].usage.timing.compute_s > 0

    run(main())


def test_two_clients_and_many_iterators_side_by_side(run):
    async def one(client: AsyncClient, prompt: list[int], count: int) -> None:
        got = [token async for some in client.generate(prompt, max_new_tokens=count) for token in some.tokens]
        assert got == drawn(prompt, count)

    async def main():
        with serving_generation(FakeGenerationEngine(batch_seconds=0.001)) as server:
            clients = [await AsyncClient.connect(server.address) for _ in range(2)]
            await asyncio.gather(*[one(clients[i % 2], [i, 7], 5 + i % 11) for i in range(3, 60)])
            for client in clients:
                assert client.outstanding_requests == 0
                await client.close()

    run(main())


@pytest.mark.parametrize("how", ["aclose", "break", "cancel", "collect"])
def test_an_iterator_that_is_left_cancels_at_the_server(run, how):
    """Report C149 (vllm#10806): a caller that has gone must not leave its work behind."""
    engine = FakeGenerationEngine(batch_seconds=0.002)

    async def read_three(client):
        async for some in client.generate([4], max_new_tokens=250):
            seen.append(some)
            if how == "break" and len(seen) == 3:
                break

    async def main():
        with serving_generation(engine) as server:
            async with await AsyncClient.connect(server.address) as client:
                if how == "aclose":
                    async with contextlib.aclosing(client.generate([4], max_new_tokens=250)) as tokens:
                        seen.append(await anext(tokens))
                    assert client.outstanding_requests == 0
                elif how == "collect":
                    tokens = client.generate([4], max_new_tokens=250)
                    seen.append(await anext(tokens))
                    del tokens
                    gc.collect()
                else:
                    task = asyncio.ensure_future(read_three(client))
                    await until(lambda: len(seen) >= 3)
                    if how == "cancel":
                        task.cancel()
                        with pytest.raises(asyncio.CancelledError):
                            await task
                    await until(task.done)
                await until(lambda: engine.aborted == [1] and engine.running == 0)
                await until(lambda: client.outstanding_requests == 0)
                again = [token async for some in client.generate([9], max_new_tokens=4) for token in some.tokens]
                assert again == drawn([9], 4)

    seen: list = []
    run(main())


def test_an_iterator_that_ended_cancels_nothing(run):
    async def main():
        async with await AsyncClient.connect(server.address) as client:
            assert [some.tokens async for some in client.generate([4])] == [(1,)]
            async for some in client.generate([4]):
                assert some.finish == "stop"
                break
            await client.info()
        assert [frame.type for frame in server.frames] == [FrameType.GENERATE, FrameType.GENERATE, FrameType.INFO]

    def at_once(connection, frame):
        if frame.type is FrameType.GENERATE:
            connection.sendall(chunk(frame.request_id, tokens=[1], finish=pb.STOP))
        else:
            echo(connection, frame)

    with ScriptedServer(at_once) as server:
        run(main())


def test_an_iterator_nobody_asks_sends_nothing(run):
    async def main():
        async with await AsyncClient.connect(server.address) as client:
            tokens = client.generate([4], deadline_s=1.0)
            await client.info()
            await tokens.aclose()
            assert client.outstanding_requests == 0
        assert [frame.type for frame in server.frames] == [FrameType.INFO]

    with ScriptedServer(echo) as server:
        run(main())


def test_whoever_is_slow_gets_several_tokens_at_once(run):
    async def main():
        with serving_generation(FakeGenerationEngine(batch_seconds=0.001)) as server:
            async with await AsyncClient.connect(server.address) as client:
                got = []
                async for some in client.generate([4], max_new_tokens=100, logprobs=1):
                    assert len(some.logprobs) == len(some.tokens)
                    got.append(some.tokens)
                    await asyncio.sleep(0.03)
        assert [token for tokens in got for token in tokens] == drawn([4], 100)
        assert len(got) < 50

    run(main())


def test_an_error_comes_after_the_tokens_before_it(run):
    def breaks(connection, frame):
        connection.sendall(
            chunk(frame.request_id, tokens=[1, 2])
            + chunk(frame.request_id, tokens=[3])
            + error(frame.request_id, Overloaded("too much", retry_after_s=0.5))
        )

    async def read_slowly(client, got):
        async for some in client.generate([4]):
            got += some.tokens
            await asyncio.sleep(0.05)

    async def main():
        async with await AsyncClient.connect(server.address) as client:
            got = []
            with pytest.raises(Overloaded, match="too much") as caught:
                await read_slowly(client, got)
            assert got == [1, 2, 3]
            assert caught.value.retry_after_s == 0.5
            assert client._link.open_requests == 0
            await client.close()
        assert [frame.type for frame in server.frames] == [FrameType.GENERATE]

    with ScriptedServer(breaks) as server:
        run(main())


def test_the_deadline_counts_from_the_call_and_cancels(run):
    def trickle(connection, frame):
        if frame.type is FrameType.GENERATE:
            connection.sendall(chunk(frame.request_id, tokens=[1]))

    async def main():
        async with await AsyncClient.connect(server.address) as client:
            started = time.monotonic()
            tokens = client.generate([4], deadline_s=0.15)
            await asyncio.sleep(0.05)
            assert (await anext(tokens)).tokens == (1,)
            with pytest.raises(DeadlineExceeded):
                await anext(tokens)
            assert 0.14 < time.monotonic() - started < 1.0
            await until(lambda: len(server.frames) == 2)
            assert 1 <= server.frames[0].deadline_ms <= 101
            assert server.frames[1].type is FrameType.CANCEL
            with pytest.raises(InvalidInput, match="positive"):
                client.generate([4], deadline_s=-1)
            with pytest.raises(InvalidInput, match="positive"):
                client.generate([4], deadline_s=math.nan)

    with ScriptedServer(trickle) as server:
        run(main())


def test_a_lost_connection_ends_all_iterators_and_the_next_connects_anew(run):
    def one_token(connection, frame):
        connection.sendall(chunk(frame.request_id, tokens=[frame.request_id]))

    async def main():
        async with await AsyncClient.connect(server.address) as client:
            iterators = [client.generate([n]) for n in range(1, 6)]
            assert [(await anext(each)).tokens for each in iterators] == [(n,) for n in range(1, 6)]
            server.drop_connections()
            errors = await asyncio.gather(*[anext(each) for each in iterators], return_exceptions=True)
            assert [type(each) for each in errors] == [Unavailable] * 5
            assert client.outstanding_requests == 0
            assert (await anext(client.generate([9]))).tokens == (1,)
            assert server.connections == 2

    with ScriptedServer(one_token) as server:
        run(main())


def test_closing_the_client_ends_iterators(run):
    async def main():
        client = await AsyncClient.connect(server.address)
        waiting = asyncio.ensure_future(anext(client.generate([1])))
        await until(lambda: len(server.frames) == 1)
        await client.close()
        with pytest.raises(Unavailable, match="was closed"):
            await waiting
        with pytest.raises(Unavailable, match="was closed"):
            await anext(client.generate([1]))

    with ScriptedServer(silent) as server:
        run(main())


@pytest.mark.parametrize(
    "answer",
    [
        lambda i: encode_frame(FrameType.EMBED_RESULT, i, b""),
        lambda i: encode_frame(FrameType.GENERATE_CHUNK, i, b"\xff\xff"),
    ],
)
def test_a_server_that_answers_something_else(run, answer):
    async def main():
        async with await AsyncClient.connect(server.address) as client:
            with pytest.raises(InternalError):
                await anext(client.generate([4]))
            assert client.outstanding_requests == 0

    with ScriptedServer(lambda connection, frame: connection.sendall(answer(frame.request_id))) as server:
        run(main())


def test_messages_as_they_travel(run):
    async def main():
        with serving_generation(FakeGenerationEngine(batch_seconds=0.001)) as server:
            async with await AsyncClient.connect(server.address) as client:
                request = generate_request([4, 5], max_new_tokens=6)
                chunks = [each async for each in client.generate_message(request, deadline_s=5.0)]
        assert [token for each in chunks for token in each.tokens] == drawn([4, 5], 6)
        assert [each.finish for each in chunks[:-1]] == [pb.UNFINISHED] * (len(chunks) - 1)
        assert (chunks[-1].finish, chunks[-1].completion_tokens) == (pb.LENGTH, 6)

    run(main())

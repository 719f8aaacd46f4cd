"""The asyncio client: many requests at once, cancellation, deadlines, back-pressure, lost connections."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
import uvloop

from rose.client import AsyncClient
from rose.errors import DeadlineExceeded, InvalidInput, Overloaded, Unavailable
from rose.proto.convert import error_to_proto
from rose.proto.frames import FrameType, encode_frame
from tests.client.scripted_server import ScriptedServer, echo, echo_payload, silent


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


def test_many_requests_on_one_connection_answered_in_any_order(run, tmp_path):
    held = []
    let_go = threading.Event()

    def backwards(connection, frame):
        held.append(frame)
        if len(held) == 100 and let_go.wait(5):
            for waiting in reversed(held):
                connection.sendall(encode_frame(FrameType.EMBED_RESULT, waiting.request_id, echo_payload(waiting)))

    async def main():
        async with await AsyncClient.connect(server.address) as client:
            calls = [asyncio.ensure_future(client.embed([[n] * n])) for n in range(1, 101)]
            await until(lambda: client.outstanding_requests == 100)
            assert client.outstanding_tokens == 5050
            let_go.set()
            results = await asyncio.gather(*calls)
            assert client.outstanding_tokens == client.outstanding_requests == 0
        for n, result in enumerate(results, 1):
            assert result.vectors.tolist() == [[n, n * n]]

    with ScriptedServer(backwards, str(tmp_path / "s")) as server:
        run(main())
        assert server.connections == 1


def test_a_spinning_client_does_not_let_its_loop_sleep_until_the_answer(run):
    turns = {0.0: 0, 5.0: 0}

    async def main():
        for spin_s in turns:
            async with await AsyncClient.connect(server.address, spin_s=spin_s) as client:
                link = client._link
                spin = link._spin

                def counted(spin=spin, spin_s=spin_s):
                    turns[spin_s] += 1
                    spin()

                link._spin = counted
                assert (await client.embed([[1]])).vectors.tolist() == [[1, 1]]
                await asyncio.sleep(0.01)
                assert not link._spinning, "nothing is awaited any more"

    def late(connection, frame):
        time.sleep(0.2)
        echo(connection, frame)

    with ScriptedServer(late) as server:
        run(main())
    assert turns[0.0] == 0
    assert turns[5.0] > 100


def test_a_spinning_client_goes_to_sleep_after_its_time(run):
    async def main():
        async with await AsyncClient.connect(server.address, spin_s=0.02) as client:
            call = asyncio.ensure_future(client.embed([[1]]))
            await until(lambda: len(server.frames) == 1)
            assert client._link._spinning
            await until(lambda: not client._link._spinning)
            assert not call.done()
            call.cancel()

    with ScriptedServer(silent) as server:
        run(main())


def test_cancelling_a_task_cancels_its_request(run):
    """Report C149 (vllm#10806): a caller that has gone must not leave its work behind."""

    async def main():
        async with await AsyncClient.connect(server.address) as client:
            call = asyncio.ensure_future(client.embed([[1]]))
            await until(lambda: len(server.frames) == 1)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await until(lambda: len(server.frames) == 2)
            assert (server.frames[1].type, server.frames[1].request_id) == (
                FrameType.CANCEL,
                server.frames[0].request_id,
            )
            assert client.outstanding_requests == 0
            server.handler = echo
            assert (await client.embed([[2]])).vectors.tolist() == [[1, 2]]

    with ScriptedServer(silent) as server:
        run(main())


def test_wait_for_cancels_too_and_a_late_answer_is_ignored(run):
    def late(connection, frame):
        if frame.type is FrameType.EMBED:
            threading.Timer(0.1, echo, [connection, frame]).start()

    async def main():
        async with await AsyncClient.connect(server.address) as client:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.embed([[1]]), 0.03)
            await asyncio.sleep(0.15)
            server.handler = echo
            assert (await client.embed([[2]])).vectors.tolist() == [[1, 2]]
            assert [frame.type for frame in server.frames] == [FrameType.EMBED, FrameType.CANCEL, FrameType.EMBED]

    with ScriptedServer(late) as server:
        run(main())


def test_the_deadline_travels_ends_the_wait_and_cancels(run):
    async def main():
        async with await AsyncClient.connect(server.address) as client:
            started = time.monotonic()
            with pytest.raises(DeadlineExceeded):
                await client.embed([[1]], deadline_s=0.05)
            assert 0.04 < time.monotonic() - started < 1.0
            await until(lambda: len(server.frames) == 2)
            assert server.frames[0].deadline_ms == 50
            assert server.frames[1].type is FrameType.CANCEL
            with pytest.raises(InvalidInput, match="positive"):
                await client.embed([[1]], deadline_s=0)

    with ScriptedServer(silent) as server:
        run(main())


def test_a_lost_connection_fails_all_open_calls_and_the_next_connects_anew(run):
    async def main():
        async with await AsyncClient.connect(server.address) as client:
            calls = [asyncio.ensure_future(client.embed([[n]])) for n in range(5)]
            await until(lambda: len(server.frames) == 5)
            server.drop_connections()
            errors = await asyncio.gather(*calls, return_exceptions=True)
            assert [type(error) for error in errors] == [Unavailable] * 5
            assert not client.connected
            server.handler = echo
            results = await asyncio.gather(*[client.embed([[n]]) for n in range(5)])
            assert [result.vectors[0, 1] for result in results] == [0, 1, 2, 3, 4]
            assert server.connections == 2, "five calls, one new connection"
            assert len(server.frames) == 10, "nothing was sent twice"

    with ScriptedServer(silent) as server:
        run(main())


def test_without_reconnecting_a_lost_connection_stays_lost(run):
    async def main():
        async with await AsyncClient.connect(server.address, reconnect=False) as client:
            await client.embed([[1]])
            server.drop_connections()
            await until(lambda: not client.connected)
            with pytest.raises(Unavailable, match="does not reconnect"):
                await client.embed([[1]])

    with ScriptedServer(echo) as server:
        run(main())


def test_nobody_there(run):
    async def main():
        with ScriptedServer(silent) as server:
            client = await AsyncClient.connect(server.address)
        await until(lambda: not client.connected)
        for _ in range(2):
            with pytest.raises(Unavailable, match="nothing listens"):
                await client.embed([[1]], deadline_s=1.0)
        with pytest.raises(Unavailable, match="nothing listens"):
            await AsyncClient.connect("unix:/nonexistent/link.sock")
        await client.close()

    run(main())


def test_closing_fails_what_is_open_and_what_comes_later(run):
    async def main():
        client = await AsyncClient.connect(server.address)
        call = asyncio.ensure_future(client.embed([[1]]))
        await until(lambda: len(server.frames) == 1)
        await client.close()
        await client.close()
        with pytest.raises(Unavailable, match="was closed"):
            await call
        with pytest.raises(Unavailable, match="was closed"):
            await client.embed([[1]])

    with ScriptedServer(silent) as server:
        run(main())


def test_errors_reach_the_call_they_belong_to(run):
    def odd_ones_fail(connection, frame):
        if frame.request_id % 2:
            error = Overloaded(f"request {frame.request_id}", retry_after_s=0.25)
            connection.sendall(
                encode_frame(FrameType.ERROR, frame.request_id, error_to_proto(error).SerializeToString())
            )
        else:
            echo(connection, frame)

    async def main():
        async with await AsyncClient.connect(server.address) as client:
            answers = await asyncio.gather(*[client.embed([[n]]) for n in range(10)], return_exceptions=True)
        assert [type(answer) is Overloaded for answer in answers] == [True, False] * 5
        assert answers[2].retry_after_s == 0.25

    with ScriptedServer(odd_ones_fail) as server:
        run(main())


@pytest.mark.parametrize("garbage", [b"SSH-2.0-OpenSSH_9.6\r\n" + bytes(20), encode_frame(FrameType.ERROR, 0, b"")])
def test_a_peer_that_speaks_something_else(run, garbage):
    async def main():
        async with await AsyncClient.connect(server.address) as client:
            with pytest.raises(Unavailable):
                await client.embed([[1]])

    with ScriptedServer(lambda connection, frame: connection.sendall(garbage)) as server:
        run(main())


def test_a_server_that_reads_nothing_holds_callers_back_and_not_memory(run):
    read_on = threading.Event()

    def stuck(connection, frame):
        read_on.wait(20)
        server.handler = echo
        echo(connection, frame)

    async def main():
        async with await AsyncClient.connect(server.address) as client:
            big = [np.ones(100_000, dtype=np.int32)] * 10
            calls = [asyncio.ensure_future(client.embed(big)) for _ in range(20)]
            await asyncio.sleep(0.1)
            assert client._link._transport.get_write_buffer_size() < 16 << 20, "of 80 MB in all"
            with pytest.raises(DeadlineExceeded, match="took no request"):
                await client.embed([[1]], deadline_s=0.02)
            read_on.set()
            for result in await asyncio.gather(*calls):
                assert result.vectors.tolist() == [[100_000, 100_000]] * 10

    with ScriptedServer(stuck) as server:
        run(main())


def test_info(run):
    async def main():
        async with await AsyncClient.connect(server.address) as client:
            assert (await client.info()).model == "echo"

    with ScriptedServer(echo) as server:
        run(main())

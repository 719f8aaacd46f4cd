"""The blocking client generating: iterators that end, are closed, expire, and leave the connection usable."""

from __future__ import annotations

import threading
import time

import pytest

from rose.client import Client
from rose.errors import DeadlineExceeded, InternalError, InvalidInput, NonFinite, Unavailable
from rose.proto import rose_pb2 as pb
from rose.proto.frames import FrameType, encode_frame
from tests.client.scripted_server import ScriptedServer, echo
from tests.support.fake_generation import NAN, FakeGenerationEngine, drawn
from tests.support.running_generation import serving_generation


@pytest.fixture
def server(tmp_path):
    engine = FakeGenerationEngine(batch_seconds=0.001)
    with serving_generation(engine, f"unix:{tmp_path}/s", max_tokens=4096) as server:
        yield server


def tokens(chunks) -> list[int]:
    return [token for chunk in chunks for token in chunk.tokens]


def read(chunks, into: list[int]) -> None:
    for some in chunks:
        into += some.tokens


def chunk(request_id: int, **fields) -> bytes:
    return encode_frame(FrameType.GENERATE_CHUNK, request_id, pb.GenerateChunk(**fields).SerializeToString())


def test_one_after_the_other_on_one_connection(server):
    with Client(server.address) as client:
        for n in range(1, 20):
            assert tokens(client.generate([n, 5], max_new_tokens=n)) == drawn([n, 5], n)
        assert client.stats().connections == 1


@pytest.mark.parametrize("how", ["close", "break", "del"])
def test_an_iterator_that_is_left_cancels_and_the_connection_goes_on(server, how):
    """Report C149 (vllm#10806): a caller that has gone must not leave its work behind."""
    with Client(server.address) as client:
        if how == "break":
            for _ in client.generate([4], max_new_tokens=4000):
                break
        else:
            chunks = client.generate([4], max_new_tokens=4000)
            next(chunks)
            if how == "close":
                chunks.close()
            del chunks
        assert client.stats().connections == 1
        server.engine.wait_until(lambda: server.engine.running == 0)
        assert server.engine.aborted == [1]
        assert tokens(client.generate([6], max_new_tokens=5)) == drawn([6], 5)
        assert client.stats().connections == 1


def test_closing_after_several_chunks_of_one_read():
    """Chunks that were read and not handed out yet are no reason to wait for more of them."""

    def burst(connection, frame):
        if frame.type is FrameType.GENERATE:
            i = frame.request_id
            connection.sendall(chunk(i, tokens=[1]) + chunk(i, tokens=[2]) + chunk(i, tokens=[3], finish=pb.STOP))
        else:
            echo(connection, frame)

    with ScriptedServer(burst) as server, Client(server.address) as client:
        chunks = client.generate([4])
        assert next(chunks).tokens == (1,)
        time.sleep(0.05)
        started = time.monotonic()
        chunks.close()
        assert time.monotonic() - started < 0.5
        assert client.info().model == "echo"
        assert server.connections == 1


def test_other_calls_are_refused_until_it_is_over(server):
    with Client(server.address) as client:
        chunks = client.generate([4], max_new_tokens=50)
        first = next(chunks)
        for call in (client.info, lambda: next(client.generate([5])), lambda: client.embed([[1]])):
            with pytest.raises(InvalidInput, match="a generation is not over on this client"):
                call()
        assert list(first.tokens) + tokens(chunks) == drawn([4], 50)
        assert client.info().generates


def test_errors_and_the_next_request(server):
    with Client(server.address) as client:
        with pytest.raises(InvalidInput, match="max_new_tokens 5000"):
            next(client.generate([4], max_new_tokens=5000))
        with pytest.raises(NonFinite):
            next(client.generate([4, NAN], max_new_tokens=5))
        assert tokens(client.generate([6], max_new_tokens=5)) == drawn([6], 5)
        assert client.stats().connections == 1
        with pytest.raises(InvalidInput, match="positive"):
            client.generate([4], deadline_s=0)


def test_the_deadline_is_the_servers_to_tell(server):
    with Client(server.address) as client:
        started = time.monotonic()
        got = []
        with pytest.raises(DeadlineExceeded, match="in part"):
            read(client.generate([4], max_new_tokens=4000, deadline_s=0.1), got)
        assert 0.09 < time.monotonic() - started < 1.0
        assert got == drawn([4], len(got))
        # Neither its deadline nor its way of waiting is left behind.
        assert tokens(client.generate([6], max_new_tokens=300)) == drawn([6], 300)
        assert client.info(deadline_s=5.0).generates
        assert tokens(client.generate([6], max_new_tokens=300)) == drawn([6], 300)
        assert client.stats().connections == 1


def test_a_silent_server_costs_the_deadline_and_the_connection():
    def one(connection, frame):
        if frame.type is FrameType.GENERATE:
            connection.sendall(chunk(frame.request_id, tokens=[1]))
        elif frame.type is FrameType.INFO:
            echo(connection, frame)

    with ScriptedServer(one) as server, Client(server.address) as client:
        chunks = client.generate([4], deadline_s=0.1)
        assert next(chunks).tokens == (1,)
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            next(chunks)
        assert time.monotonic() - started < 1.0
        assert client.info().model == "echo"
        assert server.connections == 2


def test_a_timeout_of_an_earlier_call_does_not_cut_a_generation(tmp_path):
    engine = FakeGenerationEngine(batch_seconds=0.3)
    with serving_generation(engine, f"unix:{tmp_path}/s") as server, Client(server.address) as client:
        client.info(deadline_s=0.05)
        assert tokens(client.generate([6], max_new_tokens=2)) == drawn([6], 2)


def test_a_lost_connection_and_a_peer_that_speaks_something_else():
    def drop(connection, frame):
        connection.sendall(chunk(frame.request_id, tokens=[1]))
        server.drop_connections()

    with ScriptedServer(drop) as server, Client(server.address) as client:
        chunks = client.generate([4])
        next(chunks)
        with pytest.raises(Unavailable):
            next(chunks)
        for answer, kind in (
            (lambda i: b"SSH-2.0-OpenSSH_9.6\r\n" + bytes(20), Unavailable),
            (lambda i: encode_frame(FrameType.EMBED_RESULT, i, b""), InternalError),
            (lambda i: chunk(i + 1, tokens=[1]), InternalError),
            (lambda i: encode_frame(FrameType.GENERATE_CHUNK, i, b"\xff\xff"), InternalError),
        ):
            server.handler = lambda connection, frame, answer=answer: connection.sendall(answer(frame.request_id))
            with pytest.raises(kind):
                next(client.generate([4]))
        server.handler = echo
        assert client.info().model == "echo"


def test_closing_the_client_from_another_thread(server):
    client = Client(server.address)
    chunks = client.generate([4], max_new_tokens=4000)
    next(chunks)
    threading.Timer(0.05, client.close).start()
    with pytest.raises(Unavailable):
        for _ in chunks:
            pass
    server.engine.wait_until(lambda: server.engine.running == 0)

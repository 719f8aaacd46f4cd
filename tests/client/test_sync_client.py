"""The blocking client: answers, errors, deadlines, lost connections, and what it costs."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from itertools import pairwise

import numpy as np
import pytest

from rose.client import Client
from rose.errors import DeadlineExceeded, InternalError, InvalidInput, PayloadTooLarge, Unavailable
from rose.proto.convert import error_to_proto
from rose.proto.frames import FrameType, encode_frame
from tests.client.scripted_server import ScriptedServer, echo, echo_payload, silent


@pytest.fixture(params=["tcp", "unix"])
def path(request, tmp_path):
    return "" if request.param == "tcp" else str(tmp_path / "link.sock")


@pytest.mark.parametrize("spin_s", [0.0, 0.05])
def test_answers_on_one_connection(path, spin_s):
    with ScriptedServer(echo, path) as server, Client(server.address, spin_s=spin_s) as client:
        for n in range(1, 50):
            np.testing.assert_array_equal(client.embed([[2] * n, [7]]).vectors, [[n, 2 * n], [1, 7]])
        assert client.info().model == "echo"
        assert server.connections == 1
        assert [frame.request_id for frame in server.frames] == list(range(1, 51))


@pytest.mark.parametrize("spin_s", [0.0, 0.05])
def test_answers_larger_than_one_read_and_in_any_pieces(spin_s):
    def trickle(connection, frame):
        data = encode_frame(FrameType.EMBED_RESULT, frame.request_id, echo_payload(frame))
        cuts = [0, 1, 19, 21, 1000, 70_000, len(data)]
        for start, end in pairwise(cuts):
            connection.sendall(data[start:end])
            time.sleep(0.002)

    sequences = [[i] for i in range(20_000)]
    with ScriptedServer(trickle) as server, Client(server.address, spin_s=spin_s) as client:
        assert client.embed(sequences).vectors[:, 1].tolist() == list(range(20_000))
        assert client.embed([[5]]).vectors.tolist() == [[1, 5]]


def test_errors_are_rebuilt_and_the_connection_goes_on():
    def refuse(connection, frame):
        error = InvalidInput("item 3 is wrong", param="input", index=3)
        connection.sendall(encode_frame(FrameType.ERROR, frame.request_id, error_to_proto(error).SerializeToString()))

    with ScriptedServer(refuse) as server, Client(server.address) as client:
        for _ in range(2):
            with pytest.raises(InvalidInput, match="item 3 is wrong") as caught:
                client.embed([[1]])
            assert (caught.value.param, caught.value.index) == ("input", 3)
        assert server.connections == 1


@pytest.mark.parametrize("spin_s", [0.0, 0.01, 10.0])
def test_the_deadline_travels_and_also_ends_the_wait(spin_s):
    with ScriptedServer(silent) as server, Client(server.address, spin_s=spin_s) as client:
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="before the deadline"):
            client.embed([[1]], deadline_s=0.05)
        assert 0.05 <= time.monotonic() - started < 1.0
        assert server.frames[0].deadline_ms == 50
        server.handler = echo
        assert client.embed([[1]]).vectors.shape == (1, 2)
        assert server.frames[-1].deadline_ms == 0
        assert server.connections == 2, "an answer that came late must not be taken for the next one's"


def test_a_trickling_answer_ends_with_the_deadline_too():
    def trickle(connection, frame):
        data = encode_frame(FrameType.EMBED_RESULT, frame.request_id, echo_payload(frame))
        for i in range(len(data)):
            connection.sendall(data[i : i + 1])
            time.sleep(0.05)

    with ScriptedServer(trickle) as server, Client(server.address) as client:
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            client.embed([[1]], deadline_s=0.1)
        assert time.monotonic() - started < 1.0


def test_a_lost_connection_fails_the_call_and_the_next_connects_anew():
    def hang_up(connection, frame):
        server.drop_connections()

    with ScriptedServer(hang_up) as server, Client(server.address) as client:
        with pytest.raises(Unavailable, match=r"closed the connection|lost"):
            client.embed([[1]])
        assert len(server.frames) == 1, "nothing is sent twice"
        server.handler = echo
        assert client.embed([[1]]).vectors.shape == (1, 2)


def test_without_reconnecting_a_lost_connection_stays_lost():
    with ScriptedServer(silent) as server, Client(server.address, reconnect=False) as client:
        server.handler = lambda connection, frame: server.drop_connections()
        with pytest.raises(Unavailable):
            client.embed([[1]])
        with pytest.raises(Unavailable, match="does not reconnect"):
            client.embed([[1]])
        assert server.connections == 1


def test_nobody_there():
    with ScriptedServer(silent) as server:
        address = server.address
    with pytest.raises(Unavailable, match="nothing listens"):
        Client(address)
    with pytest.raises(Unavailable, match="nothing listens"):
        Client("unix:/nonexistent/link.sock")
    with pytest.raises(InvalidInput, match="not an address"):
        Client("nowhere")


def test_a_closed_client():
    with ScriptedServer(echo) as server:
        client = Client(server.address)
        client.close()
        client.close()
        with pytest.raises(Unavailable, match="was closed"):
            client.embed([[1]])


@pytest.mark.parametrize(
    "garbage", [b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(40), encode_frame(FrameType.ERROR, 0, b"\xff")]
)
def test_a_peer_that_speaks_something_else(garbage):
    server = ScriptedServer(lambda connection, frame: connection.sendall(garbage))
    with server, Client(server.address) as client, pytest.raises(Unavailable):
        client.embed([[1]])


def test_an_answer_to_another_request_is_not_taken():
    def mix_up(connection, frame):
        connection.sendall(encode_frame(FrameType.EMBED_RESULT, frame.request_id + 1, echo_payload(frame)))

    wrong = pytest.raises(InternalError, match="answered request 2 instead of 1")
    with ScriptedServer(mix_up) as server, Client(server.address) as client, wrong:
        client.embed([[1]])


def test_an_answer_larger_than_asked_for():
    with ScriptedServer(echo) as server, Client(server.address, max_payload=1000) as client:
        assert client.embed([[1]]).vectors.shape == (1, 2)
        with pytest.raises(Unavailable, match="over the limit of 1000"):
            client.embed([[1]] * 500)


def test_threads_share_a_client_one_call_after_the_other():
    with ScriptedServer(echo) as server, Client(server.address) as client:
        wrong = []

        def use(number: int) -> None:
            wrong.extend(n for n in range(40) if client.embed([[number]]).vectors.tolist() != [[1, number]])

        threads = [threading.Thread(target=use, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert server.connections == 1


def test_an_error_about_the_connection_ends_it():
    def refuse(connection, frame):
        error = PayloadTooLarge("frame of 9 bytes is over the limit of 8 bytes")
        connection.sendall(encode_frame(FrameType.ERROR, 0, error_to_proto(error).SerializeToString()))

    with ScriptedServer(refuse) as server, Client(server.address) as client:
        with pytest.raises(Unavailable, match="over the limit of 8 bytes"):
            client.embed([[1]])
        server.handler = echo
        assert client.embed([[1]]).vectors.shape == (1, 2)
        assert server.connections == 2


def test_the_client_loads_no_torch():
    code = "import sys, rose.client; print(*sorted(m.partition('.')[0] for m in sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "numpy" in out
    assert not {"torch", "transformers", "tokenizers", "grpc", "starlette"} & set(out)

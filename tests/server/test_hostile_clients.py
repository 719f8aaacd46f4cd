"""Clients that break the protocol, send garbage, or never read: told why, shut out, and nobody else notices."""

from __future__ import annotations

import random
import socket
import struct
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rose.client import Client
from rose.errors import InvalidInput, Overloaded, PayloadTooLarge
from rose.models.base import OutputSpec
from rose.proto import rose_pb2 as pb
from rose.proto.frames import FrameType, encode_frame
from rose.server import clients
from tests.server.fake_engine import FakeEngine, plain_row
from tests.server.running_server import RawPeer, RunningServer, embed_payload, serving


def served_as_ever(server: RunningServer) -> None:
    with Client(server.address) as client:
        np.testing.assert_array_equal(client.embed([[1, 2, 3]]).vectors, [plain_row([1, 2, 3])])


GOOD = embed_payload([[1, 2]])


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        (struct.pack("<IBBHQI", len(GOOD), 2, 1, 0, 1, 0) + GOOD, InvalidInput, "version 2"),
        (struct.pack("<IBBHQI", len(GOOD), 1, 77, 0, 1, 0) + GOOD, InvalidInput, "unknown frame type 77"),
        (struct.pack("<IBBHQI", len(GOOD), 1, 1, 4, 1, 0) + GOOD, InvalidInput, "reserved"),
        (
            struct.pack("<IBBHQI", 1 << 30, 1, 1, 0, 1, 0),
            PayloadTooLarge,
            f"{1 << 30} bytes is over the limit of {64 << 20}",
        ),
        (encode_frame(FrameType.EMBED_RESULT, 1, GOOD), InvalidInput, "EMBED_RESULT is for servers"),
        (encode_frame(FrameType.ERROR, 1), InvalidInput, "ERROR is for servers"),
        (encode_frame(FrameType.EMBED, 0, GOOD), InvalidInput, "request id 0 is reserved"),
        (b"GET / HTTP/1.1\r\nHost: rose\r\n\r\n", InvalidInput, "version"),
    ],
)
def test_a_stream_that_cannot_go_on_is_ended_with_the_reason(data, error, words):
    with serving() as server, RawPeer(server.address) as other, RawPeer(server.address) as peer:
        peer.send(data)
        request_id, told = peer.error()
        assert (request_id, type(told)) == (0, error)
        assert words in told.message
        assert peer.at_end()
        other.request(1, [[1]])
        assert other.frame().type is FrameType.EMBED_RESULT
        served_as_ever(server)


def test_an_id_that_is_open_already_ends_the_connection():
    with serving(FakeEngine(held=True)) as server, RawPeer(server.address) as peer:
        peer.request(5, [[1]])
        server.engine.wait_for_batches(1)
        peer.request(5, [[2]])
        request_id, told = peer.error()
        assert (request_id, told.message) == (0, "request id 5 is open already")
        assert peer.at_end()
        server.engine.release()
        served_as_ever(server)


def test_an_id_may_be_used_again_once_answered():
    with serving() as server, RawPeer(server.address) as peer:
        for _ in range(3):
            peer.request(2**64 - 1, [[1]])
            assert peer.frame().request_id == 2**64 - 1


@pytest.mark.parametrize("payload", [b"\xff", b"\x0a\xff\xff", b"\x12\x05hello", b"garbage" * 10])
def test_a_payload_that_is_no_message_fails_its_request_only(payload):
    with serving() as server, RawPeer(server.address) as peer:
        peer.send(encode_frame(FrameType.EMBED, 1, payload))
        peer.request(2, [[7]])
        request_id, told = peer.error()
        assert (request_id, type(told)) == (1, InvalidInput)
        assert peer.frame().type is FrameType.EMBED_RESULT


def test_a_reason_reaches_a_client_in_the_middle_of_sending():
    """Report C152 (tei#50): over the limit, clients saw a bare reset and not the limit."""
    with serving(max_payload=1 << 20) as server, RawPeer(server.address) as peer:
        peer.send(encode_frame(FrameType.EMBED, 1, bytes(16 << 20)))
        request_id, told = peer.error()
        assert (request_id, type(told)) == (0, PayloadTooLarge)
        assert peer.at_end()
        served_as_ever(server)


def test_a_client_that_does_not_read_is_not_read_from(tmp_path):
    outputs = {"dense": OutputSpec(dtype="float32", dimension=4096)}
    limit = 1 << 20
    engine = FakeEngine(batch_tokens=64, outputs=outputs)
    with serving(engine, f"unix:{tmp_path}/link.sock", max_payload=limit) as server:
        greedy = RawPeer(server.address, timeout_s=0.5)
        with greedy:
            sent = 0
            try:
                for request_id in range(1, 20_000):
                    greedy.request(request_id, [[5]])
                    sent += 1
            except TimeoutError:
                pass
            else:
                pytest.fail("twenty thousand requests were taken from a client that reads nothing")
            with Client(server.address) as client:
                stats = client.stats()
                held = stats.answered_total * 4096 * 4
                # What the sockets hold (less than a MB) and what the server may owe: twice the largest payload.
                assert held < 2 * limit + (2 << 20), f"{held >> 20} MiB of answers were made for nobody"
                assert client.embed([[1]]).vectors.shape == (1, 4096)
            greedy.socket.settimeout(10)
            got = [greedy.frame().request_id for _ in range(sent)]
            assert sorted(got) == list(range(1, sent + 1))


def test_errors_nobody_reads_do_not_pile_up():
    with serving(max_payload=1 << 20) as server, RawPeer(server.address, timeout_s=0.5) as peer:
        frame = b"".join(encode_frame(FrameType.EMBED, i, b"\xff") for i in range(1, 1000))
        with pytest.raises(TimeoutError):
            peer.send(frame * 10_000)
        served_as_ever(server)


def test_half_a_frame_is_waited_for_and_then_not():
    with serving(patience_s=0.2) as server, RawPeer(server.address) as slow, RawPeer(server.address) as idle:
        whole = encode_frame(FrameType.EMBED, 1, GOOD)
        slow.send(whole[:25])
        time.sleep(0.05)
        slow.send(whole[25:])
        assert slow.frame().type is FrameType.EMBED_RESULT
        slow.send(whole[:25])
        assert slow.at_end(), "a client that never ends its frame is dropped"
        idle.request(1, [[1]])
        assert idle.frame().type is FrameType.EMBED_RESULT, "one that is just quiet is not"


def test_a_frame_of_single_bytes():
    with serving() as server, RawPeer(server.address) as peer:
        peer.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in encode_frame(FrameType.EMBED, 1, GOOD):
            peer.send(bytes([byte]))
        assert peer.frame().type is FrameType.EMBED_RESULT


def test_more_connections_than_allowed(monkeypatch):
    monkeypatch.setattr(clients, "MAX_CONNECTIONS", 2)
    with serving() as server, RawPeer(server.address) as first, RawPeer(server.address):
        first.request(1, [[1]])
        first.frame()
        with RawPeer(server.address) as third:
            request_id, told = third.error()
            assert (request_id, type(told)) == (0, Overloaded)
            assert third.at_end()
        first.request(2, [[1]])
        assert first.frame().type is FrameType.EMBED_RESULT


def test_running_out_of_descriptors_pauses_accepting_and_nothing_else(monkeypatch):
    monkeypatch.setattr(clients, "ACCEPT_PAUSE_S", 0.2)
    with serving() as server, RawPeer(server.address) as old:
        old.request(1, [[1]])
        old.frame()
        listener = server.reactor._clients._listener
        accept, asked = listener.accept, []

        def exhausted():
            asked.append(time.monotonic())
            return ([], True) if len(asked) == 1 else accept()

        monkeypatch.setattr(listener, "accept", exhausted)
        with RawPeer(server.address) as late:
            late.request(1, [[2]])
            old.request(2, [[3]])
            assert old.frame().request_id == 2
            assert late.frame().request_id == 1
        assert len(asked) == 2
        assert asked[1] - asked[0] >= 0.2, "the loop must not spin on a connection it cannot take"


@pytest.fixture(scope="module")
def shared():
    with RunningServer(FakeEngine(batch_tokens=1000), max_payload=1 << 20) as server:
        yield server


frames = st.one_of(
    st.binary(max_size=60),
    st.builds(
        encode_frame,
        st.sampled_from(FrameType),
        st.integers(0, 5),
        st.one_of(st.just(GOOD), st.just(b""), st.binary(max_size=40)),
        st.sampled_from([0, 1, 1000]),
    ),
    st.just(
        encode_frame(FrameType.EMBED, 3, pb.EmbedRequest(tokens=pb.Tokens(lengths=[2**32 - 1] * 3)).SerializeToString())
    ),
)


@given(data=st.lists(frames, min_size=1, max_size=8), seed=st.integers(0, 1000), flips=st.integers(0, 3))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_bytes_hurt_the_server_or_another_client(shared, data, seed, flips):
    stream = bytearray(b"".join(data))
    dice = random.Random(seed)
    for _ in range(flips if stream else 0):
        stream[dice.randrange(len(stream))] = dice.randrange(256)
    with RawPeer(shared.address) as other, RawPeer(shared.address, timeout_s=0.005) as peer:
        other.request(1, [[4, 5]])
        try:
            while stream:
                cut = dice.randint(1, len(stream))
                peer.send(bytes(stream[:cut]))
                del stream[:cut]
            while True:
                peer.frame()
        except (EOFError, TimeoutError, ConnectionError):
            pass
        other.request(2, [[6]])
        answers = [other.frame() for _ in range(2)]
    assert [frame.type for frame in answers] == [FrameType.EMBED_RESULT] * 2
    assert shared.status is None

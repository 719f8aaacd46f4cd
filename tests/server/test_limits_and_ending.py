"""What a server refuses and when it comes back, over a real socket; and how it ends."""

from __future__ import annotations

import time

import numpy as np
import pytest

from rose.client import Client
from rose.errors import (
    InvalidInput,
    Overloaded,
    PayloadTooLarge,
    Unavailable,
)
from rose.models.base import OutputSpec
from rose.proto import rose_pb2 as pb
from rose.proto.frames import FrameType, encode_frame
from tests.server.fake_engine import (
    FakeEngine,
    big_row,
    plain_row,
)
from tests.server.running_server import RawPeer, embed_payload, serving


def test_a_full_queue_says_when_to_come_back():
    with (
        serving(FakeEngine(batch_tokens=10, held=True), max_queued_tokens=100) as server,
        RawPeer(server.address) as peer,
        Client(server.address) as client,
    ):
        peer.request(1, [[1] * 10] * 10)
        server.engine.wait_for_batches(2)
        peer.request(2, [[1] * 10] * 2)
        while client.stats().queued_tokens < 100:
            time.sleep(0.002)
        with pytest.raises(Overloaded, match="100 tokens wait, 5 more are over the limit of 100") as caught:
            client.embed([[1] * 5])
        assert 0.05 <= caught.value.retry_after_s <= 60
        server.engine.release()
        assert {peer.frame().request_id for _ in range(2)} == {1, 2}
        client.embed([[1] * 5])


def test_too_many_requests_wait():
    with (
        serving(FakeEngine(batch_tokens=1, held=True), max_queued_requests=3) as server,
        RawPeer(server.address) as peer,
        Client(server.address) as client,
    ):
        for request_id in range(1, 6):
            peer.request(request_id, [[request_id]])
            server.engine.wait_for_batches(min(request_id, 2))
        while client.stats().queued_requests < 3:
            time.sleep(0.002)
        with pytest.raises(Overloaded, match="3 requests wait"):
            client.embed([[9]])
        server.engine.release()
        assert {peer.frame().request_id for _ in range(5)} == {1, 2, 3, 4, 5}


def test_the_queue_gauge_is_the_queue():
    """Report C150 (tei#880): the gauge stayed flat under load."""
    with (
        serving(FakeEngine(batch_tokens=3, held=True)) as server,
        RawPeer(server.address) as peer,
        Client(server.address) as client,
    ):
        for request_id in range(1, 103):
            peer.request(request_id, [[request_id] * 3])
        while client.stats().open_requests < 102:
            time.sleep(0.002)
        stats = client.stats()
        assert (stats.queued_requests, stats.queued_tokens, stats.batches_in_flight) == (100, 300, 2)
        server.engine.release()
        for _ in range(102):
            peer.frame()
        stats = client.stats()
        assert (stats.queued_requests, stats.queued_tokens, stats.open_requests) == (0, 0, 0)
        assert (stats.answered_total, stats.tokens_total, stats.items_total) == (102, 306, 102)
        assert stats.tokens_per_second > 0


def test_a_sequence_too_long_for_any_batch_does_not_hold_up_the_next():
    """Report C42 (tei#723): one request that never fits made the queue spin for ever."""
    with serving(FakeEngine(batch_tokens=16)) as server, Client(server.address) as client:
        with pytest.raises(InvalidInput, match="257 tokens, over the model's limit of 256"):
            client.embed([[1] * 257])
        longest = np.ones(256, dtype=np.int32)
        np.testing.assert_array_equal(client.embed([longest, [5]]).vectors, [plain_row(longest), plain_row([5])])


@pytest.mark.parametrize("bad", [-1, 1000, 2**31 - 1])
def test_ids_outside_the_vocabulary_are_refused_and_the_next_request_is_served(bad):
    """Report C60 (vllm#11375, langchain#21318): another tokenizer's ids killed the process."""
    with serving() as server, Client(server.address) as client:
        with pytest.raises(InvalidInput, match=f"token id {bad} at position 1") as caught:
            client.embed([[1], [0, bad]])
        assert (caught.value.param, caught.value.index) == ("input", 1)
        assert client.embed([[999]]).vectors.shape == (1, 8)


def test_answers_of_many_megabytes():
    """Report C153 (ai-gateway#1209, MLServer#290): 2,048 vectors of 1,024 floats died at a default of 4 MB."""
    outputs = {"dense": OutputSpec(dtype="float32", dimension=1024)}
    sequences = [[i % 500] for i in range(2048)]
    with serving(FakeEngine(batch_tokens=256, outputs=outputs)) as server, Client(server.address) as client:
        vectors = client.embed(sequences).vectors
        assert vectors.nbytes == 8 << 20
        np.testing.assert_array_equal(vectors, [big_row(ids, 1024) for ids in sequences])


@pytest.mark.parametrize("difference", [-1, 0, 1])
def test_requests_around_a_frame_limit(difference):
    """Report C153 (ai-gateway#1209): around the limit, either an answer or an error that names it."""
    limit = 1 << 20
    payload = embed_payload([[1] * 200] * 1300)
    padded = payload + pb.EmbedRequest(model="").SerializeToString()
    filler = limit + difference - len(padded)
    padded += (
        b"\x7a"
        + bytes([0x80 | (filler - 4) & 0x7F, 0x80 | (filler - 4) >> 7 & 0x7F, (filler - 4) >> 14])
        + bytes(filler - 4)
    )
    assert len(padded) == limit + difference
    with serving(FakeEngine(batch_tokens=10_000), max_payload=limit) as server, RawPeer(server.address) as peer:
        peer.send(encode_frame(FrameType.EMBED, 1, padded))
        if difference <= 0:
            assert peer.frame().type is FrameType.EMBED_RESULT
        else:
            request_id, error = peer.error()
            assert (request_id, type(error)) == (0, PayloadTooLarge)
            assert str(limit) in error.message
            assert peer.at_end()


def test_info_is_the_model_card():
    with serving() as server, Client(server.address) as client:
        card = client.info()
        assert (card.model, card.default_output, card.vocab_size) == ("fake", "plain", 1000)
        assert [(o.name, o.dimension, o.per_token, o.normalized) for o in card.outputs][:2] == [
            ("plain", 8, False, False),
            ("unit", 8, False, True),
        ]
        cards = {output.name: output for output in card.outputs}
        assert cards["sparse"].unavailable == "sparse_linear.pt is missing"
        kinds = [(cards[name].kind, cards[name].skip_tokens) for name in ("plain", "weights", "score", "late")]
        assert kinds == [("vector", 0), ("weights", 0), ("score", 0), ("vector", 1)]


# Ending


def test_stopping_finishes_what_is_open_and_refuses_what_is_new():
    """Report C157 (kserve#3360): fifty slow requests were dropped at SIGTERM while the service still looked ready."""
    with (
        serving(FakeEngine(batch_tokens=4, held=True)) as server,
        RawPeer(server.address) as peer,
        RawPeer(server.address) as idle,
        RawPeer(server.address) as late,
    ):
        for request_id in range(1, 51):
            peer.request(request_id, [[request_id] * 4])
        with Client(server.address) as client:
            while client.stats().open_requests < 50:
                time.sleep(0.002)
        server.stop()
        time.sleep(0.05)
        with pytest.raises(Unavailable):
            Client(server.address)
        late.request(1, [[1]])
        assert type(late.error()[1]) is Unavailable
        late.send(encode_frame(FrameType.INFO, 2))
        assert type(late.error()[1]) is Unavailable
        late.send(encode_frame(FrameType.STATS, 3))
        assert pb.ServerStats.FromString(late.frame().payload).draining
        server.engine.release()
        answered = [peer.frame() for _ in range(50)]
        assert all(frame.type is FrameType.EMBED_RESULT for frame in answered)
        assert server.join(5) == 0
        assert idle.at_end()


def test_a_second_stop_does_not_wait():
    with serving(FakeEngine(held=True)) as server, RawPeer(server.address) as peer:
        peer.request(1, [[1]])
        server.engine.wait_for_batches(1)
        server.stop()
        time.sleep(0.02)
        assert server.status is None
        server.stop()
        assert server.join(5) == 1
        assert type(peer.error()[1]) is Unavailable


def test_draining_ends_when_its_time_is_up():
    with serving(FakeEngine(held=True), drain_seconds=0.1) as server, RawPeer(server.address) as peer:
        peer.request(1, [[1]])
        server.engine.wait_for_batches(1)
        server.stop()
        assert server.join(5) == 1
        assert "shutting down" in peer.error()[1].message


def test_an_idle_server_stops_at_once_whoever_is_connected():
    with serving() as server, RawPeer(server.address), RawPeer(server.address):
        server.stop()
        assert server.join(2) == 0

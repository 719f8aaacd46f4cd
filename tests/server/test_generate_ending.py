"""Generations: what a full queue answers, the card and the counters, and how serving ends."""

from __future__ import annotations

import time

import numpy as np
import pytest

from rose.client import Client
from rose.errors import Cancelled, Overloaded, PayloadTooLarge, Unavailable
from rose.proto import rose_pb2 as pb
from rose.proto.frames import FrameType, encode_frame
from tests.server.generate_frames import answer, ask
from tests.server.running_server import RawPeer
from tests.support.fake_generation import FakeGenerationEngine, drawn
from tests.support.running_generation import serving_generation


def test_a_full_queue_says_when_to_come_back():
    engine = FakeGenerationEngine(max_running=1, held=True)
    with (
        serving_generation(engine, max_queued_tokens=100) as server,
        RawPeer(server.address) as peer,
        Client(server.address) as client,
    ):
        ask(peer, 1, [5] * 10, max_new_tokens=3)
        engine.wait_until(lambda: engine.running == 1)
        ask(peer, 2, [5] * 95, max_new_tokens=3)
        engine.wait_until(lambda: engine.queued_tokens == 95)
        with pytest.raises(Overloaded, match="95 tokens wait, 6 more are over the limit of 100") as caught:
            list(client.generate([5] * 6, max_new_tokens=2))
        assert 0.05 <= caught.value.retry_after_s <= 60
        with pytest.raises(PayloadTooLarge, match="101 tokens, over the queue's limit of 100"):
            list(client.generate([5] * 101, max_new_tokens=2))
        engine.release()
        answers: dict = {}
        answer(peer, answers, 2)
        assert len(list(client.generate([5] * 6, max_new_tokens=2))) > 0


def test_too_many_requests_wait():
    engine = FakeGenerationEngine(max_running=1, held=True)
    with (
        serving_generation(engine, max_queued_requests=3) as server,
        RawPeer(server.address) as peer,
        Client(server.address) as client,
    ):
        ask(peer, 1, [5], max_new_tokens=2)
        engine.wait_until(lambda: engine.running == 1)
        for request_id in range(2, 5):
            ask(peer, request_id, [request_id], max_new_tokens=2)
        engine.wait_until(lambda: engine.queued_requests == 3)
        with pytest.raises(Overloaded, match="3 requests wait"):
            list(client.generate([9], max_new_tokens=2))
        engine.release()
        answers: dict = {}
        answer(peer, answers, 4)
        assert [answers[i][0] for i in range(1, 5)] == [drawn([5 if i == 1 else i], 2) for i in range(1, 5)]


def test_when_to_come_back_follows_from_how_often_one_ends():
    engine = FakeGenerationEngine(max_running=1, batch_seconds=0.005)
    with serving_generation(engine, max_queued_requests=1) as server, Client(server.address) as client:
        for _ in range(5):  # about 20 batches each: a tenth of a second
            list(client.generate([5], max_new_tokens=20))
        with RawPeer(server.address) as peer:
            ask(peer, 1, [5], max_new_tokens=20)
            engine.wait_until(lambda: engine.running == 1)
            ask(peer, 2, [6], max_new_tokens=20)
            ask(peer, 3, [7], max_new_tokens=20)
            answers: dict = {}
            answer(peer, answers, 3)
    refused = answers[3][1]
    assert type(refused) is Overloaded
    assert 0.05 <= refused.retry_after_s <= 2.0


def test_the_card_says_that_it_generates():
    with serving_generation() as server, Client(server.address) as client:
        card = client.info()
    assert (card.generates, list(card.end_ids), card.max_running, card.max_tokens) == (True, [2], 8, 256)
    assert not card.outputs


def test_counters_while_it_runs_and_after():
    engine = FakeGenerationEngine(max_running=2, held=True)
    with serving_generation(engine) as server, RawPeer(server.address) as peer, Client(server.address) as client:
        for request_id in range(1, 6):
            ask(peer, request_id, [request_id] * 20, max_new_tokens=10)
        engine.wait_until(lambda: engine.running == 2 and engine.queued_requests == 3)
        stats = client.stats()
        assert (stats.open_requests, stats.queued_requests, stats.queued_tokens) == (5, 3, 60)
        assert 1 <= stats.batches_in_flight <= 2
        assert stats.engine_counters["running"] == 2
        assert stats.engine_counters["pages_used"] == 4
        engine.release()
        answers: dict = {}
        answer(peer, answers, 5)
        stats = client.stats()
        assert (stats.open_requests, stats.queued_requests, stats.batches_in_flight) == (0, 0, 0)
        assert (stats.requests_total, stats.answered_total, stats.items_total, stats.tokens_total) == (5, 5, 5, 50)
        assert stats.tokens_per_second > 0
        assert stats.engine_counters["generated_tokens"] == 50


# Ending


def test_stopping_finishes_what_runs_and_refuses_what_is_new():
    """Report C157 (kserve#3360): slow requests were dropped at SIGTERM."""
    engine = FakeGenerationEngine(max_running=4, held=True)
    with (
        serving_generation(engine) as server,
        RawPeer(server.address) as peer,
        RawPeer(server.address) as late,
    ):
        for request_id in range(1, 13):
            ask(peer, request_id, [request_id], max_new_tokens=8)
        engine.wait_until(lambda: len(engine.added) == 12)
        server.stop()
        time.sleep(0.05)
        with pytest.raises(Unavailable):
            Client(server.address)
        ask(late, 1, [1], max_new_tokens=2)
        assert type(late.error()[1]) is Unavailable
        late.send(encode_frame(FrameType.INFO, 2))
        assert type(late.error()[1]) is Unavailable
        engine.release()
        answers: dict = {}
        answer(peer, answers, 12)
        assert all(answers[i][0] == drawn([i], 8) for i in range(1, 13))
        assert server.join(5) == 0


@pytest.mark.parametrize("how", ["time is up", "second stop"])
def test_what_does_not_finish_in_time_is_told(how):
    engine = FakeGenerationEngine(max_running=1, batch_seconds=0.01)
    drain = 0.15 if how == "time is up" else 30.0
    with serving_generation(engine, drain_seconds=drain) as server, RawPeer(server.address) as peer:
        ask(peer, 1, [4], max_new_tokens=200)
        ask(peer, 2, [5], max_new_tokens=200)
        first = peer.frame()
        server.stop()
        if how == "second stop":
            time.sleep(0.05)
            assert server.status is None
            server.stop()
        answers = {1: (list(pb.GenerateChunk.FromString(first.payload).tokens), None)}
        answer(peer, answers, 2)
        assert server.join(5) == 1
        assert {type(end) for _, end in answers.values()} == {Unavailable}
        assert answers[1][0] == drawn([4], len(answers[1][0]))
        assert engine.running == engine.queued_requests == 0


def test_an_idle_server_stops_at_once():
    with serving_generation() as server, RawPeer(server.address) as peer:
        ask(peer, 1, [4], max_new_tokens=5)
        answer(peer, {}, 1)
        server.stop()
        assert server.join(2) == 0


@pytest.mark.parametrize("watched", [True, False])
def test_two_hundred_requests_with_random_cancels_are_each_answered_once(watched):
    """Whatever crosses on the wire, a request has one end: its last chunk or one error."""
    random = np.random.default_rng(5)
    engine = FakeGenerationEngine(max_running=16, pages=64, batch_seconds=0.0005, watched=watched)
    prompts = {i: random.integers(3, 600, size=random.integers(1, 60)).tolist() for i in range(1, 201)}
    lengths = {i: int(random.integers(1, 40)) for i in prompts}
    answers: dict = {}
    cancelled = set()
    with serving_generation(engine) as server, RawPeer(server.address) as one, RawPeer(server.address) as two:
        for i, ids in prompts.items():
            ask(one if i % 2 else two, i, ids, max_new_tokens=lengths[i])
            if random.random() < 0.3:
                target = int(random.integers(1, i + 1))
                cancelled.add(target)
                (one if target % 2 else two).send(encode_frame(FrameType.CANCEL, target))
        for peer, odd in ((one, 1), (two, 0)):
            mine: dict = {}
            answer(peer, mine, 100)
            assert {i % 2 for i in mine} == {odd}
            answers |= mine
        assert set(answers) == set(prompts)
        for i, (tokens, end) in answers.items():
            if isinstance(end, Cancelled):
                assert i in cancelled
            else:
                assert end.completion_tokens == len(tokens) == lengths[i]
            assert tokens == drawn(prompts[i], len(tokens))
        assert sum(isinstance(end, Cancelled) for _, end in answers.values()) > 10
        engine.wait_until(lambda: engine.idle)
        assert engine.pages_used == 0
        with Client(server.address) as client:
            stats = client.stats()
            assert stats.answered_total + sum(stats.errors_total.values()) == stats.requests_total == 200

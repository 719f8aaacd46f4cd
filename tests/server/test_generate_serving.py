"""Generations over a real socket, to a fake engine: chunks, company, faults, cancels, deadlines, slow clients."""

from __future__ import annotations

import socket
import time
from collections import Counter

import pytest

from rose.client import Client
from rose.client.generation import generate_request
from rose.errors import Cancelled, DeadlineExceeded, InternalError, InvalidInput, NonFinite, RoseError, Unsupported
from rose.proto import rose_pb2 as pb
from rose.proto.frames import FrameType, encode_frame
from tests.server.fake_engine import FakeEngine
from tests.server.generate_frames import answer, ask, payload
from tests.server.running_server import RawPeer, embed_payload, serving
from tests.support.fake_generation import END, NAN, POISON, FakeGenerationEngine, drawn, scripted
from tests.support.running_generation import serving_generation


@pytest.fixture(params=["watched", "polled", "untimed"])
def engine(request):
    """Executors as on the CPU, as on CUDA, and as on CUDA before anything was timed."""
    watched = request.param == "watched"
    return FakeGenerationEngine(batch_seconds=0.002, watched=watched, timed=request.param == "polled")


def test_tokens_arrive_in_order_with_their_end(engine, tmp_path):
    with serving_generation(engine, f"unix:{tmp_path}/s") as server, Client(server.address) as client:
        chunks = list(client.generate([5, 6, 7], max_new_tokens=30, logprobs=2))
    assert [token for chunk in chunks for token in chunk.tokens] == drawn([5, 6, 7], 30)
    assert all(chunk.finish is None and chunk.usage is None for chunk in chunks[:-1])
    last = chunks[-1]
    assert last.finish == "length"
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.cached_tokens) == (3, 30, 0)
    logprobs = [each for chunk in chunks for each in chunk.logprobs]
    assert [each.logprob for each in logprobs] == [-0.25 * count for count in range(1, 31)]
    first = drawn([5, 6, 7], 1)[0]
    assert logprobs[0].top == ((first, -0.25), (first + 1, -1.25))


def test_they_arrive_while_it_runs():
    engine = FakeGenerationEngine(held=True)
    with serving_generation(engine) as server, RawPeer(server.address) as peer:
        ask(peer, 1, [3], max_new_tokens=4)
        for expected in drawn([3], 4):
            engine.finish()
            assert pb.GenerateChunk.FromString(peer.frame().payload).tokens == [expected]


def test_an_end_token_is_told_and_counted():
    engine = FakeGenerationEngine(rule=scripted([50, 51, 52], prompt_length=2))
    with serving_generation(engine) as server, Client(server.address) as client:
        *_, last = chunks = list(client.generate([1, 1], max_new_tokens=100))
        assert [token for chunk in chunks for token in chunk.tokens] == [50, 51, 52, END]
        assert (last.finish, last.usage.completion_tokens) == ("stop", 4)
        chunks = list(client.generate([1, 1], max_new_tokens=100, stop_ids=[51]))
        assert [token for chunk in chunks for token in chunk.tokens] == [50, 51]
        assert chunks[-1].finish == "stop"


def test_cached_tokens_are_told():
    with serving_generation() as server, Client(server.address) as client:
        prompt = list(range(3, 43))
        seen = [list(client.generate(prompt, max_new_tokens=3))[-1].usage.cached_tokens for _ in range(2)]
        first = next(client.generate_message(generate_request(prompt, max_new_tokens=9)))
    assert seen == [0, 32]
    assert first.cached_tokens == 32, "who stops before the last chunk would never hear of it"


def test_timing_tells_waiting_and_computing_apart():
    engine = FakeGenerationEngine(max_running=1, batch_seconds=0.01)
    with serving_generation(engine) as server, RawPeer(server.address) as peer:
        ask(peer, 1, [5], max_new_tokens=8)
        ask(peer, 2, [6], max_new_tokens=8)
        answers: dict = {}
        answer(peer, answers, 2)
    first, second = answers[1][1].timing, answers[2][1].timing
    assert first.queue_us < 20_000 < first.compute_us
    assert second.queue_us > 30_000
    assert second.compute_us > 20_000


def test_many_requests_on_one_connection_each_get_their_own(engine):
    prompts = {i: [i, i * 3 % 600, 7] for i in range(1, 61)}
    with serving_generation(engine) as server, RawPeer(server.address) as peer:
        for request_id, ids in prompts.items():
            ask(peer, request_id, ids, max_new_tokens=1 + request_id % 20)
        answers: dict = {}
        answer(peer, answers, len(prompts))
    for request_id, ids in prompts.items():
        tokens, last = answers[request_id]
        assert tokens == drawn(ids, 1 + request_id % 20)
        assert last.completion_tokens == len(tokens)


# Faults


@pytest.mark.parametrize(("bad", "kind"), [(NAN, NonFinite), (POISON, InternalError)])
def test_a_fault_is_an_error_of_its_request_only(bad, kind):
    """Report C26 (vllm#19661): one request's NaN broke the others'."""
    engine = FakeGenerationEngine(batch_seconds=0.001)
    with serving_generation(engine) as server, RawPeer(server.address) as peer:
        ask(peer, 1, [4, 5], max_new_tokens=20)
        ask(peer, 2, [4, bad], max_new_tokens=20)
        ask(peer, 3, [9], max_new_tokens=20)
        answers: dict = {}
        answer(peer, answers, 3)
        assert type(answers[2][1]) is kind
        assert answers[1][0] == drawn([4, 5], 20)
        assert answers[3][0] == drawn([9], 20)
        with Client(server.address) as client:
            stats = client.stats()
    assert (stats.requests_total, stats.answered_total, dict(stats.errors_total)) == (3, 2, {kind.kind: 1})
    assert stats.failed_batches_total == (kind is InternalError)


def test_an_engine_that_fails_ends_what_is_open_and_serves_the_next():
    engine = FakeGenerationEngine(held=True)
    with serving_generation(engine) as server, RawPeer(server.address) as peer:
        ask(peer, 1, [4], max_new_tokens=20)
        engine.wait_until(lambda: engine.batches >= 1)
        ask(peer, 2, [5], max_new_tokens=20)
        engine.wait_until(lambda: engine.running + engine.queued_requests == 2)
        engine.step_error = ArithmeticError("no way")
        # Something to step for, should nothing else come up: in time to share the fate of the others, or not.
        ask(peer, 3, [5], max_new_tokens=1)
        answers: dict = {}
        answer(peer, answers, 2)
        engine.release()
        answer(peer, answers, 3)
        assert all("no way" in answers[n][1].message for n in (1, 2))
        ask(peer, 4, [6], max_new_tokens=5)
        answer(peer, answers, 4)
        assert answers[4][0] == drawn([6], 5)
        engine.wait_until(lambda: engine.running == 0)


def test_a_lost_device_ends_the_process():
    engine = FakeGenerationEngine(batch_seconds=0.001)
    with (
        serving_generation(engine, device_alive=lambda: False) as server,
        RawPeer(server.address) as peer,
    ):
        ask(peer, 1, [POISON], max_new_tokens=20)
        assert server.join(5) == 70
        assert peer.error()[0] == 1


BROKEN = [
    (FrameType.GENERATE, b"\xff\xff", InvalidInput, "no GenerateRequest"),
    (FrameType.GENERATE, pb.GenerateRequest().SerializeToString(), InvalidInput, "no prompt"),
    (FrameType.GENERATE, payload([5000]), InvalidInput, "outside the vocabulary"),
    (FrameType.GENERATE, payload([1], temperature=-1.0), InvalidInput, "temperature"),
    (FrameType.GENERATE, payload([1], stop=["x"]), Unsupported, "gateway"),
    (FrameType.GENERATE, pb.GenerateRequest(text="hi").SerializeToString(), Unsupported, "gateway"),
    (FrameType.EMBED, embed_payload([[1, 2]]), Unsupported, "generates"),
]


@pytest.mark.parametrize(("kind", "body", "error", "words"), BROKEN)
def test_bad_requests_lose_nothing(kind, body, error, words):
    engine = FakeGenerationEngine(batch_seconds=0.002)
    with serving_generation(engine) as server, RawPeer(server.address) as peer:
        ask(peer, 1, [4, 5], max_new_tokens=20)
        peer.send(encode_frame(kind, 2, body))
        ask(peer, 3, [6], max_new_tokens=3)
        answers: dict = {}
        answer(peer, answers, 3)
    assert type(answers[2][1]) is error
    assert words in answers[2][1].message
    assert answers[1][0] == drawn([4, 5], 20)
    assert answers[3][0] == drawn([6], 3)


def test_an_engine_that_refuses_is_an_answer():
    engine = FakeGenerationEngine()
    with serving_generation(engine) as server, Client(server.address) as client:
        engine.add_error = InvalidInput("not today", param="prompt")
        with pytest.raises(InvalidInput, match="not today"):
            list(client.generate([1], max_new_tokens=2))
        engine.add_error = ZeroDivisionError("oh")
        with pytest.raises(InternalError, match="oh"):
            list(client.generate([1], max_new_tokens=2))
        assert client.stats().open_requests == 0
        assert len(list(client.generate([1], max_new_tokens=2))) > 0


def test_an_embedder_says_that_it_does_not_generate():
    with serving(FakeEngine()) as server, Client(server.address) as client:
        with pytest.raises(Unsupported, match="does not generate"):
            list(client.generate([1], max_new_tokens=2))
        assert client.embed([[1]]).vectors.shape == (1, 8)
        assert client.stats().errors_total["unsupported"] == 1


# Cancelling, leaving, deadlines


def test_cancel_frees_pages_and_is_answered_once():
    """Report C149 (vllm#10806): a caller that has gone must not leave its work behind."""
    engine = FakeGenerationEngine(batch_seconds=0.002)
    with serving_generation(engine) as server, RawPeer(server.address) as peer:
        ask(peer, 1, [4, 5], max_new_tokens=200)
        ask(peer, 2, [6], max_new_tokens=30)
        answers: dict = {}
        while len(answers.get(1, ([], None))[0]) < 3:
            frame = peer.frame()
            chunk = pb.GenerateChunk.FromString(frame.payload)
            answers.setdefault(frame.request_id, ([], None))[0].extend(chunk.tokens)
        before = engine.pages_used
        peer.send(encode_frame(FrameType.CANCEL, 1))
        answer(peer, answers, 2)
        assert type(answers[1][1]) is Cancelled
        assert answers[1][0] == drawn([4, 5], len(answers[1][0]))
        assert answers[2][0] == drawn([6], 30)
        assert before > engine.pages_used == 0
        peer.send(encode_frame(FrameType.CANCEL, 1))  # of nothing: ignored
        ask(peer, 1, [8], max_new_tokens=2)  # the id is free again
        del answers[1]
        answer(peer, answers, 2)
        assert answers[1][0] == drawn([8], 2)


def test_cancel_of_a_request_that_waits():
    engine = FakeGenerationEngine(max_running=1, held=True)
    with serving_generation(engine) as server, RawPeer(server.address) as peer:
        ask(peer, 1, [4], max_new_tokens=3)
        engine.wait_until(lambda: engine.running == 1)
        ask(peer, 2, [5], max_new_tokens=3)
        peer.send(encode_frame(FrameType.CANCEL, 2))
        request_id, error = peer.error()
        assert (request_id, type(error)) == (2, Cancelled)
        engine.release()
        answers: dict = {}
        answer(peer, answers, 1)
        assert engine.queued_requests == 0


@pytest.mark.parametrize("how", ["close", "half", "reset"])
def test_a_client_that_leaves_ends_its_generations(how):
    engine = FakeGenerationEngine(batch_seconds=0.002)
    with serving_generation(engine) as server, Client(server.address) as stayed:
        peer = RawPeer(server.address)
        for request_id in range(1, 4):
            ask(peer, request_id, [request_id], max_new_tokens=200)
        peer.frame()
        assert engine.running > 0
        if how == "half":
            peer.socket.shutdown(socket.SHUT_WR)
        elif how == "reset":
            peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        if how != "half":
            peer.close()
        engine.wait_until(lambda: engine.running == 0 and engine.queued_requests == 0)
        assert engine.pages_used == 0
        chunks = list(stayed.generate([9], max_new_tokens=5))
        assert [token for chunk in chunks for token in chunk.tokens] == drawn([9], 5)
        assert stayed.stats().errors_total["cancelled"] == 3
        peer.close()


def test_a_deadline_ends_it_after_the_tokens_that_came():
    engine = FakeGenerationEngine(max_running=1, batch_seconds=0.01)
    with serving_generation(engine) as server, RawPeer(server.address) as peer:
        start = time.monotonic()
        ask(peer, 1, [4], max_new_tokens=200, deadline_ms=150)
        ask(peer, 2, [5], max_new_tokens=200, deadline_ms=100)  # never starts
        answers: dict = {}
        answer(peer, answers, 2)
        assert 0.14 < time.monotonic() - start < 1.0
        assert "in the queue" in answers[2][1].message
        assert (type(answers[1][1]), type(answers[2][1])) == (DeadlineExceeded, DeadlineExceeded)
        assert 1 <= len(answers[1][0]) < 200
        assert answers[1][0] == drawn([4], len(answers[1][0]))
        assert engine.running == engine.queued_requests == 0


# Slow clients


def test_tokens_for_a_client_that_does_not_read_are_joined(tmp_path):
    """What is drawn meanwhile costs bytes, not frames, and arrives whole once the client reads."""
    engine = FakeGenerationEngine(max_running=64, pages=4096, batch_seconds=0.0005)
    with serving_generation(engine, f"unix:{tmp_path}/s", max_tokens=4096) as server:
        peer = RawPeer(server.address)
        peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for request_id in range(1, 41):
            ask(peer, request_id, [request_id], max_new_tokens=400, logprobs=20)
        with Client(server.address) as client:
            engine.wait_until(lambda: engine.generated == 40 * 400, timeout_s=30)
            assert client.stats().open_requests > 0, "some of it cannot have been sent"
        chunks, answers = Counter(), {}
        while sum(end is not None for _, end in answers.values()) < 40:
            frame = peer.frame()
            chunk = pb.GenerateChunk.FromString(frame.payload)
            assert len(chunk.logprobs) == len(chunk.tokens)
            chunks[frame.request_id] += 1
            tokens, _ = answers.get(frame.request_id, ([], None))
            answers[frame.request_id] = (tokens + list(chunk.tokens), chunk if chunk.finish else None)
        assert all(answers[i][0] == drawn([i], 400) for i in range(1, 41))
        assert max(chunks.values()) < 300
        with Client(server.address) as client:
            stats = client.stats()
            assert (stats.open_requests, stats.answered_total) == (0, 40)
        peer.close()


def test_a_client_that_never_reads_costs_no_more_than_its_limit(tmp_path):
    engine = FakeGenerationEngine(max_running=64, pages=1 << 20, batch_seconds=0.0005)
    limit = 1 << 20
    with serving_generation(engine, f"unix:{tmp_path}/s", max_tokens=100_000, max_payload=limit) as server:
        peer = RawPeer(server.address)
        for request_id in range(1, 41):
            ask(peer, request_id, [request_id], max_new_tokens=90_000, logprobs=20)
        end = time.monotonic() + 60
        with Client(server.address) as client:
            while engine.running or not engine.added:
                assert time.monotonic() < end
                time.sleep(0.05)
            # About 300 bytes a token and its alternatives; two frames' worth may be owed, beside what the socket holds.
            assert engine.generated * 300 < 4 * limit + (2 << 20)
            assert client.stats().connections == 1
            assert len(list(client.generate([5], max_new_tokens=5))) > 0
        peer.close()


def test_an_impatient_server_drops_a_client_that_does_not_read(tmp_path):
    engine = FakeGenerationEngine(max_running=64, pages=1 << 16, batch_seconds=0.0005)
    with serving_generation(engine, f"unix:{tmp_path}/s", max_tokens=20_000, patience_s=0.3) as server:
        peer = RawPeer(server.address)
        for request_id in range(1, 41):
            ask(peer, request_id, [request_id], max_new_tokens=15_000, logprobs=20)
        engine.wait_until(lambda: engine.running > 0)
        engine.wait_until(lambda: engine.running == engine.queued_requests == 0, timeout_s=20)
        with Client(server.address) as client:
            assert client.stats().connections == 1
        peer.close()


def test_errors_told_in_the_middle_follow_the_tokens():
    """A front that streams must be able to hand out what came before."""
    engine = FakeGenerationEngine(held=True)
    with serving_generation(engine) as server, RawPeer(server.address) as peer:
        ask(peer, 1, [4], max_new_tokens=20)
        for _ in range(3):
            engine.finish()
        tokens: list[int] = []
        while len(tokens) < 3:
            tokens += pb.GenerateChunk.FromString(peer.frame().payload).tokens
        engine.step_error = RoseError("it broke")
        ask(peer, 2, [5], max_new_tokens=2)
        assert {peer.error()[0] for _ in range(2)} == {1, 2}
        assert tokens == drawn([4], 3)

"""What goes wrong with a completion, before its first token and after it: engines, callers, deadlines, shutdowns."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

import pytest

from rose.errors import InternalError, InvalidInput, NonFinite, Overloaded, Unavailable
from rose.gateway.streams import side_by_side
from tests.gateway.generating import ANSWER, error_of, events, generating_front, make_folder, wait_for, whole_events


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("failures") / "tiny")


@pytest.fixture(scope="module")
def shared(folder):
    with generating_front(folder) as chat:
        yield chat


@pytest.fixture
def tiny(shared):
    shared.reset()
    return shared


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failure", "status", "code", "param"),
    [
        (Overloaded("the queue is full", retry_after_s=2.5), 429, "overloaded", None),
        (InvalidInput("too long", param="max_new_tokens"), 400, "invalid_input", "max_tokens"),
        (NonFinite("logits are not finite"), 500, "non_finite", None),
    ],
)
def test_failures_before_the_first_token_have_their_status(tiny, failure, status, code, param, stream):
    tiny.engine.fails(failure)
    response = tiny.complete(stream=stream)
    assert response.status_code == status
    error = error_of(response)
    assert (error["code"], error["param"]) == (code, param)
    if status == 429:
        assert response.headers["retry-after"] == "3"


def test_a_failure_after_that_is_the_last_event(tiny):
    tiny.engine.fails(NonFinite("logits are not finite"), after=3)
    response = tiny.complete(stream=True)
    assert response.status_code == 200
    *chunks, last = whole_events(response.text)
    assert len(chunks) == 3
    assert last["error"]["code"] == "non_finite"
    assert tiny.complete().status_code == 500
    metric = 'rose_requests_total{carrier="http",route="/v1/completions",status="500"}'
    wait_for(lambda: tiny.live.metric(metric) >= 2)


def test_an_engine_that_ends_in_the_middle(folder):
    with generating_front(folder, replica_silence_seconds=5) as tiny:
        tiny.engine.drop_after = 2
        *chunks, last = whole_events(tiny.complete(stream=True).text)
        assert len(chunks) == 2
        assert last["error"]["code"] == "unavailable"
        assert "was lost" in last["error"]["message"]
        wait_for(lambda: tiny.live.metric("rose_requests_in_flight") == 0)


@pytest.mark.parametrize("failure", [Overloaded("full"), Unavailable("draining"), None])
def test_another_replica_takes_over_before_the_first_token(folder, failure):
    with generating_front(folder, engines=2) as tiny:
        one, other = tiny.engines
        if failure is None:
            one.drop_after = other.drop_after = 0
        else:
            one.fails(failure)
        for _ in range(4):
            if failure is None:
                response = tiny.complete()
                assert response.status_code == 503
                assert "replica was lost" in error_of(response)["message"]
                break
            assert tiny.complete().json()["choices"][0]["text"] == ANSWER
        assert len(one.generated) >= 1
        assert len(other.generated) >= (1 if failure is None else 4)
        assert tiny.live.metric("rose_part_retries_total") >= 1


def test_after_the_first_token_no_other_replica_is_asked(folder):
    with generating_front(folder, engines=2) as tiny:
        for engine in tiny.engines:
            engine.fails(Unavailable("going away"), after=1)
        *_, last = whole_events(tiny.complete(stream=True).text)
        assert last["error"]["code"] == "unavailable"
        assert sum(len(engine.generated) for engine in tiny.engines) == 1


def test_the_least_busy_replica_is_chosen(folder):
    with generating_front(folder, engines=2) as tiny:
        tiny.engines[0].hang_after = tiny.engines[1].hang_after = 0
        connections = [tiny.open("/v1/completions", {"prompt": [5] * 100, "max_tokens": 20}) for _ in range(4)]
        wait_for(lambda: sum(len(engine.generated) for engine in tiny.engines) == 4)
        assert [len(engine.generated) for engine in tiny.engines] == [2, 2]
        name = f'rose_replica_outstanding_tokens{{replica="unix:{tiny.engine.path}"}}'
        assert tiny.live.metric(name) == 240
        for connection in connections:
            connection.close()
        wait_for(lambda: all(len(engine.cancelled) == 2 for engine in tiny.engines))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [0, 2])
def test_a_caller_who_leaves_ends_it_at_the_engine(tiny, stream, after):
    """Report C149 (vllm#10806): streams and plain requests alike."""
    gone = tiny.live.metric("rose_cancelled_total")
    tiny.engine.hang_after = after
    connection = tiny.open("/v1/completions", {"prompt": "hello", "max_tokens": 9, "n": 3, "stream": stream})
    wait_for(lambda: len(tiny.engine.generated) == 3)
    if stream and after:
        assert b"200 OK" in connection.recv(64)
    connection.close()
    wait_for(lambda: len(tiny.engine.cancelled) == 3)
    wait_for(lambda: tiny.live.metric("rose_cancelled_total") == gone + 1)
    wait_for(lambda: tiny.live.metric("rose_requests_in_flight") == 0)
    assert tiny.live.front.bodies.used == 0


@pytest.mark.parametrize("stream", [False, True])
def test_deadlines(tiny, stream):
    """Report C148 (infinity#546): before the first token a 504, after it the last event."""
    tiny.engine.hang_after = 0
    body = {"prompt": "hello", "max_tokens": 9, "stream": stream}
    response = tiny.client.post("/v1/completions", json=body, headers={"X-Request-Timeout-Ms": "150"})
    assert response.status_code == 504
    assert tiny.engine.deadlines[-1] <= 150
    wait_for(lambda: len(tiny.engine.cancelled) == 1)
    tiny.engine.hang_after = 2
    response = tiny.client.post("/v1/completions", json=body, headers={"X-Request-Timeout-Ms": "150"})
    if stream:
        assert whole_events(response.text)[-1]["error"]["code"] == "deadline_exceeded"
    else:
        assert response.status_code == 504
    wait_for(lambda: len(tiny.engine.cancelled) == 2)


def test_open_streams_are_finished_while_draining(folder):
    """Report C157: a stream that is under way ends whole; new requests are refused."""
    with generating_front(folder) as tiny:
        tiny.engine.pause_s = 0.05
        got = []
        reader = threading.Thread(target=lambda: got.append(tiny.complete(stream=True)))
        reader.start()
        wait_for(lambda: len(tiny.engine.generated) == 1)
        tiny.live.loop.call_soon_threadsafe(tiny.live.front.lifecycle.drain)
        wait_for(lambda: tiny.live.front.lifecycle.draining)
        refused = tiny.client.post("/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503
        assert refused.headers["connection"] == "close"
        reader.join(20)
        assert events(got[0].text)[-1]["choices"][0]["finish_reason"] == "stop"


def test_a_stream_that_is_cut_off_by_the_end_of_the_server_says_so(folder):
    with generating_front(folder) as tiny:
        tiny.engine.hang_after = 2
        got = []
        reader = threading.Thread(target=lambda: got.append(tiny.complete(stream=True)))
        reader.start()
        wait_for(lambda: len(tiny.engine.generated) == 1)
        time.sleep(0.1)  # two chunks are out
        asyncio.run_coroutine_threadsafe(tiny.live.front.pool.__aexit__(None, None, None), tiny.live.loop).result(10)
        reader.join(20)
        assert whole_events(got[0].text)[-1]["error"]["message"] == "the server shut down before this was answered"


def test_a_slow_reader_holds_up_nobody(tiny):
    tiny.says("the sea " * 60)
    connections = [tiny.open("/v1/completions", {"prompt": "x", "max_tokens": 400, "stream": True}) for _ in range(3)]
    try:
        assert tiny.complete(max_tokens=400).json()["choices"][0]["text"] == "the sea " * 60
    finally:
        for connection in connections:
            connection.close()


def test_log_probabilities_of_an_answer_that_is_no_stream_have_a_limit(tiny, monkeypatch):
    """21 numbers a token, of as many tokens as a request may ask for, would be gigabytes."""
    monkeypatch.setattr("rose.gateway.generate_reply.MAX_LOGPROBS_HELD", 1000)
    told = tiny.complete(max_tokens=100, n=2, logprobs=4)
    assert told.status_code == 200
    refused = tiny.complete(max_tokens=101, n=2, logprobs=4)
    assert refused.status_code == 413
    assert error_of(refused)["param"] == "logprobs"
    assert "202 tokens at most, each with 5 log probabilities, make 1010" in error_of(refused)["message"]
    chat = tiny.chat(logprobs=True, top_logprobs=20)
    assert (chat.status_code, error_of(chat)["param"]) == (413, "top_logprobs")
    assert tiny.complete(max_tokens=101, n=2, logprobs=4, stream=True).status_code == 200
    assert len(tiny.engine.generated) == 4


def test_tokens_of_several_answers_wait_as_bytes_behind_a_slow_reader():
    """The streams are not read ahead of whoever takes their items."""
    made = [0, 0]

    async def stream(number):
        while made[number] < 100:
            made[number] += 1
            yield made[number]

    async def read():
        taken = []
        async with contextlib.aclosing(side_by_side([stream(0), stream(1)])) as items:
            async for number, item in items:
                taken.append((number, item))
                for _ in range(20):
                    await asyncio.sleep(0)  # slower than what it reads
                assert sum(made) <= len(taken) + 4
        return taken

    taken = asyncio.run(read())
    for number in (0, 1):
        assert [item for of, item in taken if of == number] == list(range(1, 101))


def test_an_internal_fault_is_told_without_its_cause(tiny, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("secret")

    monkeypatch.setattr("rose.gateway.answer.Answer.take", broken)
    for stream in (False, True):
        response = tiny.complete(stream=stream)
        assert response.status_code == 500
        assert "secret" not in response.text
    assert InternalError.kind == error_of(response)["code"]

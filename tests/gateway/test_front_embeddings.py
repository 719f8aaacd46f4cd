"""POST /v1/embeddings on a live front: the shapes clients send, the answers they read."""

from __future__ import annotations

import base64
import re
import socket
import time

import numpy as np
import pytest

from rose.gateway.tokenizer import TextTokenizer
from rose.proto.convert import tokens_from_proto
from tests.gateway.conftest import DIMENSION, MAX_TOKENS, card_for, live_front
from tests.gateway.expected import vector_of

TEXTS = ["The river meets the sea.", "  leading blanks", "salt\n", "猫 👩‍👩‍👧‍👦"]


@pytest.fixture(scope="module")
def tokenizer(text_folder):
    return TextTokenizer(text_folder)


def vectors(response):
    assert response.status_code == 200, response.text
    data = response.json()["data"]
    assert [item["index"] for item in data] == list(range(len(data)))
    assert {item["object"] for item in data} == {"embedding"}
    return np.array([item["embedding"] for item in data], dtype=np.float32)


def expected(sequences, dimensions=DIMENSION):
    return np.stack([vector_of(ids, DIMENSION)[:dimensions] for ids in sequences])


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embeddings"])
def test_the_whole_answer(shared, tokenizer, path):
    """Report C160 (infinity#298): the route is there with and without /v1."""
    response = shared.client.post(path, json={"input": TEXTS[0], "model": "tiny/embedder"})
    (ids,) = tokenizer.encode([TEXTS[0]])
    assert response.headers["content-type"] == "application/json"
    assert response.json() == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": response.json()["data"][0]["embedding"]}],
        "model": "tiny/embedder",
        "usage": {"prompt_tokens": len(ids), "total_tokens": len(ids)},
    }
    assert np.array_equal(vectors(response), expected([ids]))


def test_texts_reach_the_model_unchanged(shared, tokenizer):
    """Report C34 (infinity): blanks and line ends are part of a text; ids are those of the text as it was sent."""
    assert np.array_equal(vectors(shared.embed(TEXTS)), expected(tokenizer.encode(TEXTS)))
    assert np.array_equal(vectors(shared.embed(["x", "  x "])), expected(tokenizer.encode(["x", "  x "])))


def test_token_ids_reach_the_model_unchanged(shared):
    assert np.array_equal(vectors(shared.embed([2, 17, 399, 3])), expected([[2, 17, 399, 3]]))
    assert np.array_equal(vectors(shared.embed([[5], [399, 0]])), expected([[5], [399, 0]]))


def test_a_valid_surrogate_pair_is_the_character(shared, tokenizer):
    """Report C28 (tiktoken#82): the pair is one character."""
    response = shared.client.post("/v1/embeddings", content=b'{"input": "\\ud83d\\ude00 salt"}')
    assert np.array_equal(vectors(response), expected(tokenizer.encode(["😀 salt"])))


@pytest.mark.parametrize("encoding", [None, "float"])
def test_null_and_float_are_lists_of_numbers(shared, tokenizer, encoding):
    """Report C65: an explicit null is the default."""
    response = shared.embed(TEXTS, encoding_format=encoding)
    assert np.array_equal(vectors(response), expected(tokenizer.encode(TEXTS)))


def test_base64_holds_the_same_numbers(shared, tokenizer):
    """Report C65 (vllm#5734) and C68."""
    data = shared.embed(TEXTS, encoding_format="base64").json()["data"]
    rows = np.stack([np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in data])
    assert np.array_equal(rows, expected(tokenizer.encode(TEXTS)))


@pytest.mark.parametrize("dimensions", [1, 17, DIMENSION, None])
def test_dimensions(shared, tokenizer, dimensions):
    """Report C69 (vllm#15465): any 1..hidden; equal to hidden is always fine."""
    response = shared.embed(TEXTS[0], dimensions=dimensions)
    assert np.array_equal(vectors(response), expected(tokenizer.encode([TEXTS[0]]), dimensions))
    assert shared.engines[0].seen[-1].dimensions == (dimensions or 0)


def test_unknown_fields_and_users_are_ignored(shared):
    """Report C75 (generic clients): documented, and never a 500."""
    response = shared.embed("salt", user="me", input_type="query", extra={"nested": [1]}, normalize=True)
    assert response.status_code == 200


@pytest.mark.parametrize("model", [None, "", "tiny/embedder", "embedder"])
def test_names_of_the_served_model(shared, model):
    response = shared.embed("salt", model=model)
    assert response.status_code == 200
    assert response.json()["model"] == "tiny/embedder"


def test_a_prompt_is_put_before_the_text_verbatim_and_named_in_the_answer(shared, tokenizer):
    response = shared.embed("salt", prompt_name="query")
    assert response.json()["prompt_name"] == "query"
    assert np.array_equal(vectors(response), expected(tokenizer.encode(["query: salt"])))
    assert response.json()["usage"]["prompt_tokens"] == len(tokenizer.encode(["query: salt"])[0])
    assert "prompt_name" not in shared.embed("salt").json()


def test_the_models_default_prompt_applies_unless_it_is_refused(text_folder, tokenizer):
    with live_front(text_folder, card_for(text_folder, default_prompt_name="passage")) as live:
        by_default, without = live.embed("salt"), live.embed("salt", prompt_name="")
        assert by_default.json()["prompt_name"] == "passage"
        assert np.array_equal(vectors(by_default), expected(tokenizer.encode(["passage: salt"])))
        assert "prompt_name" not in without.json()
        assert np.array_equal(vectors(without), expected(tokenizer.encode(["salt"])))
        assert "prompt_name" not in live.embed([5, 6]).json()  # ids are used as they are


LONG = "salt " * (MAX_TOKENS + 30)


def test_an_over_long_text_is_cut_on_request_with_its_special_tokens(shared, tokenizer):
    """Reports C44 and C49 (vmlx#255): only on request, to the limit, the closing token kept."""
    response = shared.embed(["salt", LONG], truncate=True)
    short, long = tokenizer.encode(["salt", LONG])
    cut = [*long[: MAX_TOKENS - 1].tolist(), long[-1]]
    assert np.array_equal(vectors(response), expected([short, cut]))
    assert response.json()["usage"]["prompt_tokens"] == len(short) + MAX_TOKENS


@pytest.mark.parametrize("keep", [3, 4, MAX_TOKENS - 1, MAX_TOKENS, -1])
def test_texts_can_be_cut_to_a_number_of_tokens(shared, keep):
    """Report C44 (vllm#22635): every allowed number gives that many tokens."""
    count = MAX_TOKENS if keep == -1 else keep
    response = shared.embed(LONG, truncate_prompt_tokens=keep)
    assert response.json()["usage"]["prompt_tokens"] == count
    (ids,) = tokens_from_proto(shared.engines[0].seen[-1].tokens)
    assert (ids[0], ids[-1]) == (2, 3)


def test_ids_are_cut_on_request_too(shared):
    ids = list(range(10, 10 + MAX_TOKENS + 5))
    assert np.array_equal(vectors(shared.embed(ids, truncate=True)), expected([ids[:MAX_TOKENS]]))


def test_control_tokens_of_strangers_can_be_spelled_out(shared, tokenizer):
    """Report C33: by default as the reference does, on request as ordinary text."""
    plain, split = shared.embed("a [SEP] b"), shared.embed("a [SEP] b", split_special_tokens=True)
    assert np.array_equal(vectors(plain), expected(tokenizer.encode(["a [SEP] b"])))
    assert np.array_equal(vectors(split), expected(tokenizer.encode(["a [SEP] b"], split_special_tokens=True)))
    assert not np.array_equal(vectors(plain), vectors(split))


def test_priority_is_passed_on(shared):
    for name, number in (("bulk", 1), ("online", 0), (None, 0)):
        assert shared.embed("salt", priority=name).status_code == 200
        assert shared.engines[0].seen[-1].priority == number


def test_request_ids_are_honoured_or_made(shared):
    given = shared.client.post("/v1/embeddings", json={"input": "salt"}, headers={"X-Request-Id": "abc-1"})
    assert given.headers["x-request-id"] == "abc-1"
    made = {shared.embed("salt").headers["x-request-id"] for _ in range(3)}
    assert len(made) == 3
    for bad in ("with blank", "x" * 129):
        answer = shared.client.post("/v1/embeddings", json={"input": "salt"}, headers={"X-Request-Id": bad})
        assert re.fullmatch("[0-9a-f]{16}", answer.headers["x-request-id"])


def test_stages_are_timed(shared):
    header = shared.embed("salt").headers["server-timing"]
    times = {name: float(value) for name, value in re.findall(r"(\w+);dur=([\d.]+)", header)}
    assert set(times) == {"tokenize", "queue", "compute", "encode", "total"}
    assert times["queue"] == pytest.approx(0.1)
    assert times["compute"] == pytest.approx(0.6)
    assert 0 < times["tokenize"] < times["total"]


def test_two_thousand_texts_in_one_request_keep_their_order(shared, tokenizer):
    """Report C12 (ollama#6187) over HTTP: long and short texts mixed, many parts."""
    texts = [f"salt {i} " + "flour " * (i * 7 % 50) for i in range(2048)]
    response = shared.embed(texts, encoding_format="base64")
    rows = np.stack([np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in response.json()["data"]])
    assert np.array_equal(rows, expected(tokenizer.encode(texts)))


def test_a_timeout_travels_to_the_engine(shared):
    response = shared.client.post("/v1/embeddings", json={"input": "salt"}, headers={"X-Request-Timeout-Ms": "60000"})
    assert response.status_code == 200
    # Rounded up to a whole millisecond, after a sum of floating-point seconds.
    assert 30_000 < shared.engines[0].deadlines[-1] <= 60_001


def test_a_request_that_takes_too_long_is_told_so_and_cancelled(text_folder):
    with live_front(text_folder, card_for(text_folder)) as live:
        live.engines[0].backwards = 1000
        started = time.monotonic()
        response = live.client.post("/v1/embeddings", json={"input": "a"}, headers={"X-Request-Timeout-Ms": "100"})
        assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert time.monotonic() - started < 5
        wait_for(lambda: len(live.engines[0].cancelled) == 1)


def test_a_client_that_leaves_cancels_its_request(text_folder):
    """Report C149 (vllm#10806): no more parts than were on their way, and a count of it."""
    card = card_for(text_folder, max_batch_tokens=MAX_TOKENS)
    with live_front(text_folder, card) as live:
        (engine,) = live.engines
        engine.backwards = 1000
        body = b'{"input": [' + b",".join(b'"salt flour ferry %d"' % i for i in range(2000)) + b"]}"
        host, port = live.listening.http.split(":")
        with socket.create_connection((host, int(port))) as client:
            client.sendall(b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            wait_for(lambda: len(engine.seen) == 3)
        wait_for(lambda: len(engine.cancelled) == 3)
        wait_for(lambda: live.metric("rose_cancelled_total") == 1)
        assert live.metric("rose_requests_in_flight") == 0
        assert len(engine.seen) == 3
        engine.backwards = 1
        engine.release()
        assert live.embed("salt").status_code == 200


def wait_for(condition, timeout_s=10.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)

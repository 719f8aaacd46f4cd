"""Bad requests: a named 4xx in the OpenAI shape, and the next request is served as if nothing had happened."""

from __future__ import annotations

import json
import socket

import numpy as np
import pytest

from rose.errors import (
    WIRE_ERRORS,
    Cancelled,
    InternalError,
    InvalidInput,
    NonFinite,
    Overloaded,
    Unavailable,
    Unsupported,
)
from tests.gateway.conftest import DIMENSION, MAX_TOKENS, card_for, live_front
from tests.gateway.expected import answer_for

TYPES = {429: "rate_limit_error"}
LONG = "salt " * (MAX_TOKENS + 30)


def error_of(response, status, code):
    """The error object, after checking everything that all errors have in common."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    error = response.json()["error"]
    assert set(response.json()) == {"error"}
    assert set(error) == {"message", "type", "param", "code", "index"}
    assert error["code"] == code
    assert error["message"]
    assert error["type"] == (
        "rate_limit_error" if status == 429 else f"{'invalid_request' if status < 500 else 'server'}_error"
    )
    return error


def raw(live, body, **headers):
    return live.client.post("/v1/embeddings", content=body, headers=headers)


def still_served(live):
    response = live.embed("salt")
    assert response.status_code == 200
    assert len(response.json()["data"][0]["embedding"]) == DIMENSION


@pytest.mark.parametrize(
    ("fields", "param", "index", "words"),
    [
        ({"input": ""}, "input", 0, "the text is empty"),
        ({"input": []}, "input", None, "the list is empty"),
        ({"input": [[]]}, "input", 0, "token ids is empty"),
        ({"input": [""]}, "input", 0, "the text is empty"),
        ({"input": ["a", ""]}, "input", 1, "the text is empty"),
        ({"input": None}, "input", None, "null"),
        ({"input": 3}, "input", None, "the number 3"),
        ({"input": ["a", 3]}, "input", 1, "the number 3"),
        ({"input": {"a": 1}}, "input", None, "an object"),
        ({}, "input", None, "missing"),
        ({"input": [-1]}, "input", 0, "token id -1"),
        ({"input": [400]}, "input", 0, "outside the vocabulary 0..399"),
        ({"input": [[1], [100257]]}, "input", 1, "token id 100257"),
        ({"input": [2**31]}, "input", 0, str(2**31)),
        ({"input": [2**63]}, "input", 0, str(2**63)),
        ({"input": [1.0]}, "input", 0, "the number 1.0"),
        ({"input": [True]}, "input", 0, "the boolean true"),
        ({"input": [[1], "a"]}, "input", 1, "a text"),
        ({"input": LONG}, "input", 0, f"has {MAX_TOKENS + 32} tokens, the limit of the model is {MAX_TOKENS}"),
        ({"input": ["a", LONG]}, "input", 1, f"has {MAX_TOKENS + 32} tokens"),
        ({"input": [5] * (MAX_TOKENS + 1)}, "input", 0, f"has {MAX_TOKENS + 1} tokens"),
        ({"input": LONG, "truncate": False}, "input", 0, "truncate=true"),
        ({"input": LONG, "truncate": "yes"}, "truncate", None, "expected true, false or null"),
        ({"input": "a", "dimensions": 0}, "dimensions", None, "dimensions of 0"),
        ({"input": "a", "dimensions": -1}, "dimensions", None, "dimensions of -1"),
        ({"input": "a", "dimensions": DIMENSION + 1}, "dimensions", None, f"1..{DIMENSION} for dense"),
        ({"input": "a", "dimensions": 10000}, "dimensions", None, "dimensions of 10000"),
        ({"input": "a", "dimensions": 10**4000}, "dimensions", None, "13288 bits"),
        ({"input": "a", "dimensions": 2**200}, "dimensions", None, "an integer of 201 bits"),
        ({"input": "a", "dimensions": "x"}, "dimensions", None, "the text 'x'"),
        ({"input": "a", "dimensions": "64"}, "dimensions", None, "the text '64'"),
        ({"input": "a", "dimensions": 1.5}, "dimensions", None, "expected a whole number"),
        ({"input": "a", "dimensions": True}, "dimensions", None, "the boolean true"),
        ({"input": "a", "dimensions": [8]}, "dimensions", None, "is a list"),
        ({"input": "a", "encoding_format": "bytes"}, "encoding_format", None, "expected one of float, base64"),
        ({"input": "a", "encoding_format": "base64_int8"}, "encoding_format", None, "cannot be had here"),
        ({"input": "a", "encoding_format": 1}, "encoding_format", None, "the number 1"),
        ({"input": "a", "prompt_name": "nope"}, "prompt_name", None, "it has: passage, query"),
        ({"input": [5], "prompt_name": "query"}, "prompt_name", None, "token ids"),
        ({"input": "a", "priority": "high"}, "priority", None, "'high': expected 'bulk', 'online' or null"),
        (
            {"input": "a", "truncate_prompt_tokens": -2},
            "truncate_prompt_tokens",
            None,
            f"expected -1 or 3..{MAX_TOKENS}",
        ),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", None, "cannot cut to 0"),
        ({"input": "a", "truncate_prompt_tokens": 2}, "truncate_prompt_tokens", None, "2 of them are special tokens"),
        ({"input": "a", "truncate_prompt_tokens": MAX_TOKENS + 1}, "truncate_prompt_tokens", None, "cannot cut"),
        ({"input": "a", "truncate_prompt_tokens": 2**31}, "truncate_prompt_tokens", None, "cannot cut"),
        ({"input": "a", "truncate_prompt_tokens": 1.5}, "truncate_prompt_tokens", None, "a whole number"),
        ({"input": "a", "truncate_prompt_tokens": "10"}, "truncate_prompt_tokens", None, "the text '10'"),
        ({"input": "a", "model": 5}, "model", None, "expected a text or null"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/embeddings", "/embeddings"])
def test_bad_fields(shared, path, fields, param, index, words):
    """Reports C20, C22, C41, C43, C44, C60, C63, C65, C69, C75: one rule on every route, never a 500."""
    response = shared.client.post(path, json=fields)
    error = error_of(response, 400, "invalid_input")
    assert (error["param"], error["index"]) == (param, index)
    assert words in error["message"]
    still_served(shared)


@pytest.mark.parametrize(
    ("body", "index"),
    [
        (b'{"input": "\\ud83d"}', 0),
        (b'{"input": "a \\ud83d b"}', 0),
        (b'{"input": ["a", "\\ude00"]}', 1),
        (b'{"input": ["a", "b", "\\ude00\\ud83d"]}', 2),
        (b'{"input": "\\uDBFF"}', 0),
    ],
)
def test_lone_surrogates(shared, body, index):
    """Report C28 (tiktoken#82): high, low and swapped halves of a pair are no text."""
    error = error_of(raw(shared, body), 400, "invalid_input")
    assert (error["param"], error["index"]) == ("input", index)
    assert "lone surrogate" in error["message"]
    still_served(shared)


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b'{"input": "a"', b'{"input": "a"} x', b"input=a", b"\xef\xbb\xbf{}", b'{"input": NaN}', b"\x00"),
        *(b'{"input": "\xff"}', b'{"input": "\xed\xa0\x80"}', b'{"input": "a\x00b"}', b'{"input": [1e400]}'),
        *(b'{"input": ' + b"[" * 100_000, b'{"input": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        *(b"[]", b'"a"', b"null", b"7", b'{"x": "\\ud83d"}', b'{"input": {"a": "\\ud83d"}}'),
    ],
)
def test_malformed_json(shared, body):
    error_of(raw(shared, body), 400, "invalid_input")
    still_served(shared)


def test_compressed_bodies_are_refused_by_name(shared):
    error = error_of(raw(shared, b"\x1f\x8b...", **{"content-encoding": "gzip"}), 400, "invalid_input")
    assert "gzip" in error["message"]
    still_served(shared)


@pytest.mark.parametrize("value", ["0", "-5", "1.5", "soon", "", str(2**40)])
def test_bad_timeouts(shared, value):
    error = error_of(raw(shared, b'{"input": "a"}', **{"x-request-timeout-ms": value}), 400, "invalid_input")
    assert error["param"] == "X-Request-Timeout-Ms"


@pytest.mark.parametrize("model", ["text-embedding-3-small", "tiny", "tiny/embedder/"])
def test_unknown_models(shared, model):
    """Report C159 (tei): an unknown model is a 404, not a log line."""
    error = error_of(shared.embed("a", model=model), 404, "unknown_model")
    assert error["param"] == "model"
    assert model in error["message"]
    still_served(shared)


def test_routes_and_methods_that_do_not_exist(shared):
    error_of(shared.client.get("/nowhere"), 404, "unknown_route")
    root = error_of(shared.client.get("/"), 404, "unknown_route")
    assert root["message"] == "there is no / here; GET /docs shows what there is"
    error_of(shared.client.post("/v1/nowhere", json={}), 404, "unknown_route")
    routes = ("embeddings", "rerank", "score", "tokenize", "detokenize")
    for path in (f"{before}/{name}" for name in routes for before in ("", "/v1")):
        response = shared.client.get(path)
        error_of(response, 405, "method_not_allowed")
        assert response.headers["allow"] == "POST"
    response = shared.client.post("/health")
    error_of(response, 405, "method_not_allowed")
    assert set(response.headers["allow"].split(", ")) == {"GET", "HEAD"}


@pytest.fixture(scope="module")
def tight(text_folder):
    """A front with small limits."""
    with live_front(
        text_folder, card_for(text_folder), max_body_bytes=20_000, max_items=8, strict_dimensions=True
    ) as live:
        yield live


@pytest.mark.parametrize("size", [20_001, 70_000, 79_000, 300_000])
def test_too_large_a_body_is_answered_with_the_limit(tight, size):
    """Report C152 (tei#50): the caller reads JSON with the limit, not a reset, also when it sends far too much."""
    body = b'{"input": "' + b"a" * (size - 13) + b'"}'
    error = error_of(raw(tight, body), 413, "payload_too_large")
    assert "the limit is 20000 bytes" in error["message"]
    still_served(tight)


def test_a_body_of_exactly_the_limit_is_read(tight):
    body = b'{"input": "' + b"a" * (20_000 - 13) + b'"}'
    assert len(body) == 20_000
    assert raw(tight, body).status_code == 200


def test_a_chunked_body_is_counted_too(tight):
    def chunks():
        yield b'{"input": "'
        for _ in range(30):
            yield b"a" * 1000
        yield b'"}'

    error_of(tight.client.post("/v1/embeddings", content=chunks()), 413, "payload_too_large")
    still_served(tight)


def test_a_caller_who_asks_first_is_refused_before_sending(tight):
    """Expect: 100-continue with an announced length over the limit: the answer comes at once."""
    host, port = tight.listening.http.split(":")
    with socket.create_connection((host, int(port)), timeout=10) as client:
        client.sendall(
            b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 50000\r\n\r\n"
        )
        answer = client.recv(65536)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in answer.lower()


def test_a_body_that_stops_coming_is_given_up(tight, monkeypatch):
    monkeypatch.setattr("rose.gateway.asgi.BODY_TIMEOUT_S", 0.2)
    host, port = tight.listening.http.split(":")
    with socket.create_connection((host, int(port)), timeout=10) as client:
        client.sendall(b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n{")
        answer = client.recv(65536)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"did not arrive" in answer
    still_served(tight)


def test_too_many_items(tight):
    """Reports C73 and C152: a count over the limit is named with it."""
    for value in (["a"] * 9, [[5]] * 9):
        error = error_of(tight.embed(value), 413, "payload_too_large")
        assert "9 items in one request, the limit is 8" in error["message"]
    assert tight.embed(["a"] * 8).status_code == 200


def test_strict_dimensions_only_allow_what_was_trained_for(text_folder, tight):
    """Report C69 (vllm#15465): the full length is always accepted."""
    assert tight.embed("a", dimensions=DIMENSION).status_code == 200
    error = error_of(tight.embed("a", dimensions=32), 400, "invalid_input")
    assert "[64]" in error["message"]
    card = card_for(text_folder, matryoshka_dimensions=[16, 32])
    with live_front(text_folder, card, strict_dimensions=True) as live:
        assert live.embed("a", dimensions=32).status_code == 200
        assert "[16, 32, 64]" in error_of(live.embed("a", dimensions=33), 400, "invalid_input")["message"]


def test_a_text_longer_than_a_batch_is_refused_and_blocks_nobody(text_folder):
    """Report C42 (tei#723): what no batch could ever hold must not wait for one."""
    card = card_for(text_folder, max_tokens=128, max_batch_tokens=50)
    with live_front(text_folder, card) as live:
        error = error_of(live.embed("salt " * 60), 400, "invalid_input")
        assert "has 62 tokens, the limit of the model is 50" in error["message"]
        still_served(live)


@pytest.fixture(scope="module")
def faulty(text_folder):
    with live_front(text_folder, card_for(text_folder)) as live:
        yield live


@pytest.mark.parametrize(
    "error",
    [
        InvalidInput("bad", param="input", index=1),
        Overloaded("the queue is full", retry_after_s=2.2),
        Unavailable("draining"),
        NonFinite("nan", param="input", index=0),
        Unsupported("not that"),
        InternalError("broken"),
        Cancelled("gone"),
    ],
)
def test_errors_of_the_engine_keep_their_status(faulty, error):
    def fault(request):
        raise error

    faulty.engines[0].fault = fault
    response = faulty.embed(["a", "b"])
    faulty.engines[0].fault = lambda request: None
    body = error_of(response, error.http_status, error.kind)
    assert (body["param"], body["index"]) == (error.param, error.index)
    retry_after = {429: "3", 503: "1"}.get(error.http_status)
    assert response.headers.get("retry-after") == retry_after
    still_served(faulty)


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_nan_never_leaves_as_data(faulty, encoding):
    """Report C26 (vllm#19661): on both encodings, with the item named."""

    def poisoned(card, request):
        answer = answer_for(card, request)
        rows = np.frombuffer(answer.outputs[0].values.data, "<f4").reshape(-1, DIMENSION).copy()
        rows[1, 5] = np.nan
        answer.outputs[0].values.data = rows.tobytes()
        return answer

    faulty.engines[0].answer = poisoned
    error = error_of(faulty.embed(["a", "b", "c"], encoding_format=encoding), 500, "non_finite")
    faulty.engines[0].answer = answer_for
    assert error["index"] == 1
    assert "non-finite" in error["message"]
    still_served(faulty)


def test_a_fault_of_the_front_itself_is_json_and_tells_nothing(faulty, monkeypatch):
    monkeypatch.setattr(faulty.front.service, "card_for", lambda model: 1 / 0)
    error = error_of(faulty.embed("a"), 500, "internal_error")
    assert "division" not in json.dumps(error)
    monkeypatch.undo()
    still_served(faulty)


def test_while_no_replica_is_up_requests_get_503_with_retry_after(text_folder):
    with live_front(text_folder, card_for(text_folder)) as live:
        live.run(live.engines[0].__aexit__)
        response = live.embed("a")
        assert "no replica is ready" in error_of(response, 503, "unavailable")["message"]
        assert response.headers["retry-after"] == "1"


def test_the_openapi_document_states_the_error_table(shared):
    """Report C159 (tei: the document says 413, the code 422): document and code use the same table."""
    responses = shared.client.get("/openapi.json").json()["paths"]["/v1/embeddings"]["post"]["responses"]
    expected = {}
    for error in WIRE_ERRORS:
        if error is not Cancelled:
            expected.setdefault(str(error.http_status), set()).add(error.kind)
    documented = {
        status: set(response["description"].removeprefix("code: ").split(" or "))
        for status, response in responses.items()
        if status != "200"
    }
    assert documented == expected

"""Whatever is sent to the generating routes, the answer is a whole one or a named 4xx; never a 5xx, never silence."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rose.gateway import schemas
from rose.gateway.schemas_generate import ChatChunk, ChatResponse, CompletionResponse
from tests.gateway.generating import events, generating_front, make_folder
from tests.gateway.test_front_fuzz import ANYTHING

COMMON = {
    "model": st.sampled_from(["tiny/chat", "", None]) | ANYTHING,
    "max_tokens": st.integers(-1, 600) | ANYTHING,
    "temperature": st.floats(-1, 3) | ANYTHING,
    "top_p": st.floats(-0.1, 1.1) | ANYTHING,
    "top_k": st.integers(-2, 50) | ANYTHING,
    "min_p": st.floats(-0.1, 1.1) | ANYTHING,
    "seed": st.integers() | ANYTHING,
    "stop": st.text(max_size=4) | st.lists(st.text(max_size=4), max_size=18) | ANYTHING,
    "stop_token_ids": st.lists(st.integers(-1, 470), max_size=4) | ANYTHING,
    "ignore_eos": st.booleans() | ANYTHING,
    "min_tokens": st.integers(-1, 5) | ANYTHING,
    "n": st.integers(-1, 3) | ANYTHING,
    "stream": st.booleans() | ANYTHING,
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": st.booleans()}) | ANYTHING,
    "logit_bias": st.just({}) | ANYTHING,
    "response_format": st.just({"type": "text"}) | ANYTHING,
}
COMPLETION = st.fixed_dictionaries(
    {},
    optional={
        **COMMON,
        "prompt": st.text(max_size=20) | st.lists(st.text(max_size=9), max_size=3)
        | st.lists(st.integers(-1, 470), max_size=5) | ANYTHING,
        "logprobs": st.integers(-1, 21) | ANYTHING,
        "echo": st.booleans() | ANYTHING,
        "split_special_tokens": st.booleans() | ANYTHING,
    },
)  # fmt: skip
PART = st.fixed_dictionaries({"type": st.sampled_from(["text", "image_url"]), "text": st.text(max_size=5)})
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system", "developer", "tool", "x"]),
        "content": st.text(max_size=20) | st.sampled_from(["<|im_end|>", "{{ x }}", "\ufdd0<|im_end|>"])
        | st.lists(PART, max_size=3) | ANYTHING,
    },
    optional={"name": st.text(max_size=4) | ANYTHING, "tool_calls": ANYTHING},
)  # fmt: skip
CHAT = st.fixed_dictionaries(
    {},
    optional={
        **COMMON,
        "messages": st.lists(MESSAGE, max_size=4) | ANYTHING,
        "max_completion_tokens": st.integers(-1, 600) | ANYTHING,
        "logprobs": st.booleans() | ANYTHING,
        "top_logprobs": st.integers(-1, 21) | ANYTHING,
        "chat_template_kwargs": st.dictionaries(st.text(max_size=9), ANYTHING, max_size=2) | ANYTHING,
        "tools": st.just([]) | ANYTHING,
    },
)
SETTINGS = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    with generating_front(make_folder(tmp_path_factory.mktemp("fuzz") / "tiny")) as chat:
        yield chat


def check(tiny, path, fields, whole, chunk):
    response = tiny.client.post(path, content=json.dumps(fields))
    assert response.status_code in (200, 400, 404, 413), response.text
    if response.status_code != 200:
        error = msgspec.json.decode(response.content, type=schemas.ErrorResponse).error
        assert error.code in ("invalid_input", "unknown_model", "payload_too_large")
        return
    if response.headers["content-type"].startswith("text/event-stream"):
        for event in events(response.text):
            msgspec.convert(event, type=chunk)
    else:
        msgspec.json.decode(response.content, type=whole)


@given(COMPLETION)
@SETTINGS
def test_completions(tiny, fields):
    check(tiny, "/v1/completions", fields, CompletionResponse, CompletionResponse)


@given(CHAT)
@SETTINGS
def test_chats(tiny, fields):
    check(tiny, "/v1/chat/completions", fields, ChatResponse, ChatChunk)


@given(st.lists(MESSAGE, min_size=1, max_size=3))
@SETTINGS
def test_chats_with_nothing_but_messages(tiny, messages):
    check(tiny, "/v1/chat/completions", {"messages": messages, "max_tokens": 3}, ChatResponse, ChatChunk)

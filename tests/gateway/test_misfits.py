"""Bodies that do not fit their type: the field, what came, and what may stand there, in words of this API."""

from __future__ import annotations

import json
import re

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.errors import InvalidInput
from rose.gateway.json_body import decode_body
from rose.gateway.schemas import EmbeddingRequest
from rose.gateway.schemas_context import ContextualRequest
from rose.gateway.schemas_generate import ChatRequest, CompletionRequest
from rose.gateway.schemas_rank import RerankRequest, ScoreRequest

KINDS = (EmbeddingRequest, RerankRequest, ScoreRequest, ContextualRequest, CompletionRequest, ChatRequest)
ROLES = "'system', 'developer', 'user', 'assistant' or 'tool'"
INPUTS = "a text, a list of texts, a list of token ids, or a list of token id lists"
RANKED = '{"query": "a", "documents": ["b"], '


def refused(kind: type, body: str | bytes) -> InvalidInput:
    with pytest.raises(InvalidInput) as found:
        decode_body(msgspec.json.Decoder(kind), body if isinstance(body, bytes) else body.encode())
    return found.value


@pytest.mark.parametrize(
    ("kind", "body", "param", "message"),
    [
        (EmbeddingRequest, '{"input": "a", "priority": "high"}', "priority",
         "priority is the text 'high': expected 'bulk', 'online' or null"),
        (EmbeddingRequest, '{"input": "a", "dimensions": "64"}', "dimensions",
         "dimensions is the text '64': expected a whole number or null"),
        (EmbeddingRequest, '{"input": "a", "dimensions": 3.0}', "dimensions",
         "dimensions is the number 3.0: expected a whole number or null"),
        (EmbeddingRequest, '{"input": "a", "dimensions": true}', "dimensions",
         "dimensions is the boolean true: expected a whole number or null"),
        (EmbeddingRequest, '{"input": "a", "truncate": 1}', "truncate",
         "truncate is the number 1: expected true, false or null"),
        (EmbeddingRequest, '{"input": "a", "outputs": ["dense", null]}', "outputs",
         "item 1 of outputs is null: expected a text"),
        (EmbeddingRequest, '{"input": "a", "encoding_format": 5}', "encoding_format",
         "encoding_format is the number 5: expected 'float', 'base64', 'base64_int8', 'base64_binary' or null"),
        (EmbeddingRequest, '{"truncate": true}', "input", f"input is missing: expected {INPUTS}"),
        (EmbeddingRequest, '["a"]', None, "the body is a list: expected an object"),
        (EmbeddingRequest, '{"input": "a", "dimensions": 1e999}', "dimensions",
         "dimensions holds a number that is too large to be read: expected a whole number or null"),
        (EmbeddingRequest, '{"input": "a", "user": 1e999}', "user",
         "user holds a number that is too large to be read"),
        (EmbeddingRequest, '{"input": "a", "priority": "high", "priority": "bulk"}', "priority",
         "priority is sent twice, once with a value that it does not take: expected 'bulk', 'online' or null"),
        (RerankRequest, RANKED + '"weights": {"dense": []}}', "weights",
         "dense of weights is a list: expected a number"),
        (RerankRequest, RANKED + '"weights": 3}', "weights",
         "weights is the number 3: expected an object of numbers or null"),
        (RerankRequest, RANKED + '"label": {}}', "label",
         "label is an object: expected a text, a whole number or null"),
        (CompletionRequest, '{"prompt": "a", "stop": 5}', "stop",
         "stop is the number 5: expected a text, a list of texts or null"),
        (CompletionRequest, '{"prompt": "a", "temperature": "hot"}', "temperature",
         "temperature is the text 'hot': expected a number or null"),
        (CompletionRequest, '{"prompt": "a", "stream_options": {"include_usage": 3}}', "stream_options",
         "include_usage of stream_options is the number 3: expected true, false or null"),
        (ChatRequest, '{"messages": "hi"}', "messages", "messages is the text 'hi': expected a list of objects"),
        (ChatRequest, '{"messages": [{"role": "user"}, {"content": "x"}]}', "messages",
         f"role of item 1 of messages is missing: expected {ROLES}"),
        (ChatRequest, '{"messages": [], "chat_template_kwargs": [1]}', "chat_template_kwargs",
         "chat_template_kwargs is a list: expected an object or null"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said_in_words(kind, body, param, message):
    error = refused(kind, body)
    assert (error.param, error.message) == (param, message)


def test_what_came_is_shown_as_far_as_it_can_be_read():
    assert len(refused(EmbeddingRequest, json.dumps({"input": "a", "priority": "x" * 10**6})).message) < 150
    assert len(refused(RerankRequest, json.dumps({"weights": {"x" * 10**6: "y"}})).message) < 150


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is no valid JSON: input data was truncated"),
        (b'{"input": a}', "the body is no valid JSON: invalid character (byte 10)"),
        (b'{"input": "a", "priority": "high", "user":', "the body is no valid JSON: input data was truncated"),
        (b'{"priority": "high", "user": ' + b"[" * 100_000, "the JSON is nested too deeply"),
    ],
)
def test_what_is_no_json_is_not_blamed_on_a_field(body, message):
    error = refused(EmbeddingRequest, body)
    assert (error.param, error.message) == (None, message)


FIELDS = sorted({name for kind in KINDS for name in kind.__struct_fields__} | {"role", "content", "include_usage"})
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4),
    max_leaves=8,
)


@settings(deadline=None, max_examples=400)
@given(st.sampled_from(KINDS), VALUES | st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=8))
def test_every_refusal_is_found_where_msgspec_found_it(kind, value):
    """Its path is the independent witness of which field it was; none of its syntax reaches the caller."""
    body = json.dumps(value).encode()
    try:
        msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        at = re.search(r"`\$\.?(\w+)", str(error)) or re.search(r"required field `(\w+)`", str(error))
        found = refused(kind, body)
        assert found.param == (at.group(1) if at else None)
        assert not re.search(r"[`$]", re.sub(r"the text .*: expected", "", found.message))
        assert ": expected " in found.message
        assert "sent twice" not in found.message

"""Whatever is sent, the answer is a 200 or a named 4xx in the documented shape; never a 5xx, never silence."""

from __future__ import annotations

import json

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rose.gateway import schemas

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inside: st.lists(inside, max_size=4) | st.dictionaries(st.text(max_size=5), inside, max_size=3),
    max_leaves=8,
)
PLAUSIBLE = (
    st.text(max_size=30)
    | st.lists(st.text(max_size=10), max_size=5)
    | st.lists(st.integers(-2, 402), max_size=6)
    | st.lists(st.lists(st.integers(-2, 402), max_size=4), max_size=4)
)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "input": PLAUSIBLE | ANYTHING,
        "model": st.sampled_from(["tiny/embedder", "", None]) | ANYTHING,
        "encoding_format": st.sampled_from(["float", "base64", None]) | ANYTHING,
        "dimensions": st.integers(-1, 66) | ANYTHING,
        "prompt_name": st.sampled_from(["query", "", None]) | ANYTHING,
        "truncate": st.booleans() | ANYTHING,
        "truncate_prompt_tokens": st.integers(-3, 130) | ANYTHING,
        "split_special_tokens": st.booleans() | ANYTHING,
        "priority": st.sampled_from(["bulk", "online", None]) | ANYTHING,
        "user": ANYTHING,
        "other": ANYTHING,
    },
)
SETTINGS = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def check(response):
    assert response.status_code in (200, 400, 404, 413), response.text
    if response.status_code == 200:
        assert msgspec.json.decode(response.content, type=schemas.EmbeddingResponse).data
    else:
        assert msgspec.json.decode(response.content, type=schemas.ErrorResponse).error.message


@SETTINGS
@given(fields=FIELDS)
def test_any_fields(shared, fields):
    """Report C75: clients send what they like."""
    check(shared.client.post("/v1/embeddings", content=json.dumps(fields).encode()))


@SETTINGS
@given(body=st.binary(max_size=40) | st.text(max_size=40).map(lambda text: text.encode(errors="surrogatepass")))
def test_any_bytes(shared, body):
    check(shared.client.post("/v1/embeddings", content=body))
    check(shared.client.post("/v1/embeddings", content=b'{"input": "' + body + b'"}'))

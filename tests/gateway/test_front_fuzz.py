"""Whatever is sent, the answer is a 200 or a named 4xx in the documented shape; never a 5xx, never silence."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rose.gateway import schemas
from rose.gateway.schemas_rank import RerankResponse, ScoreResponse
from rose.gateway.schemas_tokenize import DetokenizeResponse, TokenizeResponse
from tests.gateway.cards import m3_card, reranker_card
from tests.gateway.conftest import live_front
from tests.gateway.generating import generating_front, make_folder
from tests.support.tiny_families import tiny_cross_encoder_bert

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
        "split_long_inputs": st.booleans() | ANYTHING,
        "outputs": st.lists(st.sampled_from(["dense", "sparse", "colbert", "x"]), max_size=3) | ANYTHING,
        "output_dtype": st.sampled_from(["float", "int8", "ubinary", None]) | ANYTHING,
        "sparse_format": st.sampled_from(["ids", "tokens", None]) | ANYTHING,
        "prompt": st.text(max_size=5) | ANYTHING,
        "priority": st.sampled_from(["bulk", "online", None]) | ANYTHING,
        "user": ANYTHING,
        "other": ANYTHING,
    },
)
SETTINGS = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
PAIRS = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(
            ("query", "text_1", "queries"), st.text(max_size=20) | st.lists(st.text(max_size=9)) | ANYTHING
        ),
        **dict.fromkeys(("documents", "text_2"), st.lists(st.text(max_size=20), max_size=4) | ANYTHING),
        "input": st.lists(st.lists(st.text(max_size=5), max_size=3), max_size=3) | ANYTHING,
        "top_n": st.integers(-1, 5) | ANYTHING,
        "method": st.sampled_from(["cross", "dense", "sparse", "colbert", "combined", None]) | ANYTHING,
        "weights": st.dictionaries(st.sampled_from(["dense", "sparse", "x"]), st.floats()) | ANYTHING,
        "label": st.integers(-1, 2) | st.text(max_size=3) | ANYTHING,
        "raw_scores": st.booleans() | ANYTHING,
        "max_tokens_per_doc": st.integers(-1, 5) | ANYTHING,
        "encoding_format": st.sampled_from(["float", "base64_int8"]) | ANYTHING,
        "truncate": st.booleans() | ANYTHING,
    },
)


MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "x"]), "content": st.text(max_size=9)}), max_size=3
)
TOKENS = st.fixed_dictionaries(
    {},
    optional={
        "prompt": PLAUSIBLE | ANYTHING,
        "tokens": PLAUSIBLE | ANYTHING,
        "messages": MESSAGES | ANYTHING,
        "chat_template_kwargs": st.dictionaries(st.text(max_size=5), ANYTHING, max_size=2) | ANYTHING,
        "prompt_name": st.sampled_from(["query", "", None]) | ANYTHING,
        **dict.fromkeys(
            ("add_special_tokens", "split_special_tokens", "add_generation_prompt", "return_token_strs"),
            st.booleans() | ANYTHING,
        ),
        "skip_special_tokens": st.booleans() | ANYTHING,
    },
)


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    with generating_front(make_folder(tmp_path_factory.mktemp("fuzz") / "chat")) as chat:
        yield chat


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """A cross-encoder and an embedder with all of BGE-M3's outputs."""
    folder = tiny_cross_encoder_bert(tmp_path_factory.mktemp("fuzz") / "m")
    with live_front(folder, reranker_card(folder)) as cross, live_front(folder, m3_card(folder)) as m3:
        yield cross, m3


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
@given(fields=PAIRS)
def test_any_pairs(both, fields):
    """Report C75: on the routes for pairs and chunks as well."""
    body = json.dumps(fields).encode()
    for live in both:
        for route, kind in (("/v1/rerank", RerankResponse), ("/v1/score", ScoreResponse)):
            response = live.client.post(route, content=body)
            assert response.status_code in (200, 400, 404, 413), response.text
            msgspec.json.decode(response.content, type=kind if response.status_code == 200 else schemas.ErrorResponse)
        assert live.client.post("/v1/contextualizedembeddings", content=body).status_code == 400


@SETTINGS
@given(fields=TOKENS)
def test_any_text_or_ids(shared, chat, fields):
    body = json.dumps(fields).encode()
    for live in (shared, chat):
        for route, kind in (("/v1/tokenize", TokenizeResponse), ("/v1/detokenize", DetokenizeResponse)):
            response = live.client.post(route, content=body)
            assert response.status_code in (200, 400, 404, 413), response.text
            msgspec.json.decode(response.content, type=kind if response.status_code == 200 else schemas.ErrorResponse)


@SETTINGS
@given(body=st.binary(max_size=40) | st.text(max_size=40).map(lambda text: text.encode(errors="surrogatepass")))
def test_any_bytes(shared, body):
    check(shared.client.post("/v1/embeddings", content=body))
    check(shared.client.post("/v1/embeddings", content=b'{"input": "' + body + b'"}'))

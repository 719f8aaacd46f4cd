"""Liveness, readiness, models, metrics, the OpenAPI document and its page."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

import rose
from rose.errors import WIRE_ERRORS, Cancelled
from rose.gateway import schemas
from rose.gateway.schemas_context import ContextualRequest
from rose.gateway.schemas_generate import ChatRequest, CompletionRequest
from rose.gateway.schemas_rank import RerankRequest, ScoreRequest
from rose.gateway.schemas_tokenize import DetokenizeRequest, TokenizeRequest
from rose.proto import rose_pb2 as pb
from tests.gateway.conftest import DIMENSION, MAX_TOKENS, card_for, live_front


def wait_for(condition, timeout_s=10.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_alive(shared):
    assert shared.client.get("/health").json() == {"status": "alive", "version": rose.__version__}
    assert shared.client.head("/health").status_code == 200


def test_ready_says_so_and_flips_with_its_reason_when_the_last_replica_goes(text_folder):
    with live_front(text_folder, card_for(text_folder)) as live:
        ready = msgspec.json.decode(live.client.get("/ready").content, type=schemas.Readiness)
        assert (ready.ready, ready.reasons) == (True, [])
        assert ready.replicas[0].ready
        live.run(live.engines[0].__aexit__)
        wait_for(lambda: live.client.get("/ready").status_code == 503)
        response = live.client.get("/ready")
        assert response.headers["retry-after"] == "1"
        answer = response.json()
        assert not answer["ready"]
        assert live.engines[0].path in answer["reasons"][0]
        assert live.client.get("/health").status_code == 200  # alive all the same


def test_busy_is_ready(text_folder):
    """Report C147 (sglang#22511): work that takes long takes no replica out."""
    with live_front(text_folder, card_for(text_folder)) as live:
        live.engines[0].backwards = 1000
        with pytest.raises(httpx.ReadTimeout):
            live.client.post("/v1/embeddings", json={"input": "a"}, timeout=0.7)
        assert live.client.get("/ready").status_code == 200


def test_a_replica_with_another_tokenizer_is_refused(text_folder):
    card = card_for(text_folder, tokenizer_sha256=b"\x01" * 32)
    with live_front(text_folder, card, wait_ready=False) as live:
        wait_for(lambda: "refused" in live.client.get("/ready").text)
        answer = live.client.get("/ready")
        assert answer.status_code == 503
        assert "is not this front's" in answer.json()["reasons"][0]
        assert live.embed("a").status_code == 503
        assert live.client.get("/v1/models").json() == {"object": "list", "data": []}


@pytest.mark.parametrize("path", ["/v1/models", "/models"])
def test_models(shared, path):
    """Report C43 (tei#107): the limits can be read before they are met."""
    listed = msgspec.json.decode(shared.client.get(path).content, type=schemas.ModelList)
    (model,) = listed.data
    assert (model.id, model.max_model_len, model.dimension) == ("tiny/embedder", MAX_TOKENS, DIMENSION)
    assert model.prompts == {"query": "query: ", "passage": "passage: "}
    assert [(one.name, one.dtype, one.normalized) for one in model.outputs] == [("dense", "float32", True)]
    assert shared.client.get("/v1/models/tiny/embedder").json() == shared.client.get(path).json()["data"][0]
    missing = shared.client.get("/v1/models/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "unknown_model")


def families(live):
    return {family.name: family for family in text_string_to_metric_families(live.client.get("/metrics").text)}


def test_metrics_count_what_happened(text_folder):
    with live_front(text_folder, card_for(text_folder)) as live:
        for _ in range(3):
            assert live.embed(["a", "b"]).status_code == 200
        live.embed("")
        live.client.get("/nowhere")
        live.client.get("/somewhere/else")
        ok = 'rose_requests_total{carrier="http",route="/v1/embeddings",status="200"}'
        assert live.metric(ok) == 3
        assert live.metric(ok.replace("200", "400")) == 1
        assert live.metric('rose_requests_total{carrier="http",route="other",status="404"}') == 2
        assert live.metric("rose_items_total") == 6
        assert live.metric("rose_tokens_total") == 18
        for stage in ("tokenize", "queue", "compute", "encode"):
            assert live.metric(f'rose_stage_seconds_count{{stage="{stage}"}}') == 3
        assert live.metric('rose_stage_seconds_sum{stage="compute"}') == pytest.approx(3 * 600e-6)
        assert live.metric('rose_request_seconds_count{carrier="http",route="/v1/embeddings"}') == 4
        assert live.metric("rose_ready") == 1
        assert all(len(family.samples) < 200 for family in families(live).values())


def test_gauges_are_what_they_say_under_load_and_afterwards(text_folder):
    """Report C150 (tei#880): the gauge rises with what waits and falls back to zero."""
    with live_front(text_folder, card_for(text_folder)) as live:
        (engine,) = live.engines
        engine.backwards = 10_000
        replica = f'replica="unix:{engine.path}"'
        with httpx.Client(base_url=live.url) as other:

            def ask():
                live.client.post("/v1/embeddings", json={"input": [5, 6, 7]})

            threads = [threading.Thread(target=ask) for _ in range(40)]
            for thread in threads:
                thread.start()
            wait_for(lambda: len(engine.seen) == 40)
            text = other.get("/metrics").text
            assert "rose_requests_in_flight 40.0" in text
            assert f"rose_replica_outstanding_tokens{{{replica}}} 120.0" in text
            assert f"rose_replica_outstanding_parts{{{replica}}} 40.0" in text
            live.loop.call_soon_threadsafe(engine.release)
            for thread in threads:
                thread.join()
        assert live.metric("rose_requests_in_flight") == 0
        assert live.metric(f"rose_replica_outstanding_tokens{{{replica}}}") == 0
        assert live.metric("rose_tokenizer_pool_depth") == 0


def test_the_engines_own_counters_are_passed_on(text_folder):
    with live_front(text_folder, card_for(text_folder), card_for(text_folder)) as live:
        live.engines[0].stats = pb.ServerStats(
            queued_tokens=7, batches_total=5, errors_total={"overloaded": 2}, engine_counters={"graph_hits": 9}
        )
        replica = f'replica="unix:{live.engines[0].path}"'
        assert live.metric(f"rose_engine_queued_tokens{{{replica}}}") == 7
        assert live.metric(f"rose_engine_batches_total{{{replica}}}") == 5
        assert live.metric(f'rose_engine_errors_total{{kind="overloaded",{replica}}}') == 2
        found = families(live)
        assert found["rose_engine_queued_tokens"].type == "gauge"
        assert found["rose_engine_batches"].type == "counter"
        assert [sample.value for sample in found["rose_engine_counters"].samples] == [9]
        assert len(found["rose_replica_ready"].samples) == 2


def test_the_openapi_document_is_whole(shared):
    document = shared.client.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    names = set(document["components"]["schemas"])
    references = set(re.findall(r"#/components/schemas/(\w+)", str(document)))
    assert references <= names
    fields = document["components"]["schemas"]["EmbeddingRequest"]
    assert set(fields["properties"]) == set(schemas.EmbeddingRequest.__struct_fields__)
    assert fields["required"] == ["input"]
    for path, methods in document["paths"].items():
        for method in methods:
            url = path.replace("{model}", "tiny/embedder")
            body = methods[method].get("requestBody", {}).get("content", {}).get("application/json", {}).get("example")
            response = shared.client.request(method, url, json=body)
            if path == "/v1/contextualizedembeddings" or "completions" in path:  # this model is none of that kind
                assert response.status_code == 400
                continue
            assert response.status_code == 200, path
            declared = methods[method]["responses"]["200"]["content"]
            assert response.headers["content-type"].split(";")[0] in declared


def test_answers_match_the_types_of_the_document(shared):
    decoded = msgspec.json.decode(shared.embed(["a", "b"]).content, type=schemas.EmbeddingResponse)
    assert [item.index for item in decoded.data] == [0, 1]
    assert msgspec.json.decode(shared.embed("").content, type=schemas.ErrorResponse).error.code == "invalid_input"


def test_the_docs_page_needs_nothing_from_elsewhere(shared):
    response = shared.client.get("/docs")
    assert response.headers["content-type"].startswith("text/html")
    page = response.text
    assert not re.search(r"""(src|href|action)\s*=\s*["'](https?:)?//""", page)
    assert not re.search(r"https?://", page)
    assert 'fetch("openapi.json")' in page
    assert "innerHTML" not in page  # texts of the document are never markup


def test_the_written_page_names_every_field_route_code_and_metric(shared):
    """docs/http_api.md cannot fall behind the code."""
    page = (Path(__file__).parents[2] / "docs" / "http_api.md").read_text()
    document = shared.client.get("/openapi.json").json()
    bodies = (schemas.EmbeddingRequest, RerankRequest, ScoreRequest, ContextualRequest, CompletionRequest, ChatRequest)
    bodies += (TokenizeRequest, DetokenizeRequest)
    names = {*document["paths"], *(name for body in bodies for name in body.__struct_fields__)}
    names |= {error.kind for error in WIRE_ERRORS if error is not Cancelled}
    names |= {
        name if family.type != "counter" else f"{name}_total"
        for name, family in families(shared).items()
        if not name.startswith("rose_engine_") and not name.endswith("_created")
    }
    assert not {name for name in names if name not in page}

"""POST /v1/score on a live front: one text with one, one with many, many with as many."""

from __future__ import annotations

import pytest

from tests.gateway.cards import reranker_card
from tests.gateway.conftest import live_front
from tests.gateway.expected import logits_of
from tests.gateway.test_front_rerank import bare, refused, rerank, results, sigmoid
from tests.support.tiny_families import tiny_cross_encoder_bert


@pytest.fixture(scope="module")
def bert_folder(tmp_path_factory):
    return tiny_cross_encoder_bert(tmp_path_factory.mktemp("score") / "bert")


@pytest.fixture(scope="module")
def live(bert_folder):
    with live_front(bert_folder, reranker_card(bert_folder)) as live:
        yield live


def score_of(live, **fields):
    response = live.client.post("/v1/score", json=fields)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert [one["index"] for one in answer["data"]] == list(range(len(answer["data"])))
    assert {one["object"] for one in answer["data"]} == {"score"}
    return [one["score"] for one in answer["data"]], answer


def test_scores_of_one_to_one_one_to_many_and_many_to_many(live, bert_folder):
    def expected(*pairs):
        encoded = bare(bert_folder).encode_batch(list(pairs))
        return pytest.approx([sigmoid(logits_of(one.ids, one.type_ids, 1)[0]) for one in encoded], abs=1e-6)

    scores, answer = score_of(live, text_1="a", text_2="salt")
    assert scores == expected(("a", "salt"))
    tokens = len(bare(bert_folder).encode("a", "salt").ids)
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert (answer["object"], answer["model"], answer["method"]) == ("list", "tiny/embedder", "cross")
    assert score_of(live, text_1="a", text_2=["salt", "b"])[0] == expected(("a", "salt"), ("a", "b"))
    many = score_of(live, queries=["a", "c"], documents=["salt", "b"])[0]
    assert many == expected(("a", "salt"), ("c", "b"))
    raw = score_of(live, queries="a", documents=["salt"], raw_scores=True)[0]
    assert sigmoid(raw[0]) == pytest.approx(scores[0], abs=1e-9)


@pytest.mark.parametrize(
    ("fields", "param", "index"),
    [
        ({"text_1": "a"}, "text_2", None),
        ({"text_2": "a"}, "text_1", None),
        ({"text_1": "a", "queries": "a", "text_2": "b"}, "text_1", None),
        ({"text_1": ["a", "b"], "text_2": "c"}, "text_1", None),
        ({"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1", None),
        ({"queries": [], "documents": "c"}, "queries", None),
        ({"queries": "a", "documents": ["b", ""]}, "documents", 1),
        ({"text_1": ["a", ""], "text_2": ["b", "c"]}, "text_1", 1),
        ({"text_1": ["a", "salt " * 200], "text_2": ["b", "c"]}, "text_1", 1),
        ({"text_1": 3, "text_2": "b"}, "text_1", None),
    ],
)
def test_bad_pairs(live, fields, param, index):
    error = refused(live.client.post("/v1/score", json=fields))
    assert (error["param"], error["index"]) == (param, index)


def test_metrics_tell_the_routes_apart(bert_folder):
    with live_front(bert_folder, reranker_card(bert_folder)) as live:
        results(rerank(live))
        results(rerank(live, path="/rerank"))
        score_of(live, text_1="a", text_2="b")
        for route in ("/v1/rerank", "/rerank", "/v1/score"):
            assert live.metric(f'rose_requests_total{{carrier="http",route="{route}",status="200"}}') == 1
        assert live.metric("rose_items_total") == 9

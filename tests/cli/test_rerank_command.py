"""`rose rerank`: all documents once, best first, whatever the number of requests."""

from __future__ import annotations

import json
import math

import pytest

from rose import cli
from rose.cli.bulk import run as bulk_run
from tests.support.scripted_api import refusal, score_of

QUERY = "which one?"
DOCUMENTS = [f"document {i}" for i in range(100)]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "docs.txt"
    path.write_text("\n".join(DOCUMENTS))
    return str(path)


def rerank(api, *arguments) -> int:
    return cli.main(["rerank", *arguments, "--server", api.url])


def best() -> list[int]:
    return sorted(range(100), key=lambda i: (-score_of(QUERY, DOCUMENTS[i]), i))


def test_best_first_over_several_requests(api, file, monkeypatch, capsys):
    monkeypatch.setattr(bulk_run, "BATCH_ITEMS", 30)
    assert rerank(api, QUERY, file, "--json") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sorted(len(body["documents"]) for body in api.requests) == [1, 10, 30, 30, 30]  # 1: for the activation
    assert [row["index"] for row in rows] == best()
    assert [row["rank"] for row in rows] == list(range(1, 101))
    assert all(row["document"] == DOCUMENTS[row["index"]] for row in rows)
    assert all(row["score"] == score_of(QUERY, row["document"]) for row in rows)


def steep(query: str, document: str) -> float:
    """Raw scores of 40 and more, whose sigmoid in float64 is 1.0 for all of them; the best comes last in the file."""
    return 40.0 + DOCUMENTS.index(document)


def test_saturated_scores_are_ordered_by_what_is_before_the_sigmoid(api, file, monkeypatch, capsys):
    monkeypatch.setattr(bulk_run, "BATCH_ITEMS", 50)
    api.activation, api.score = "sigmoid", steep
    assert rerank(api, QUERY, file, "--json") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["index"] for row in rows] == list(range(99, -1, -1))
    assert {row["score"] for row in rows} == {1.0}


def test_scores_are_shown_as_the_model_shows_them(api, file, capsys):
    api.activation = "sigmoid"
    assert rerank(api, QUERY, file, "--json") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["index"] for row in rows] == best()
    expected = [1 / (1 + math.exp(-score_of(QUERY, DOCUMENTS[i]))) for i in best()]
    assert [row["score"] for row in rows] == pytest.approx(expected, rel=1e-15)
    assert rerank(api, QUERY, file, "--json", "--raw-scores", "--top", "1") == 0
    assert json.loads(capsys.readouterr().out)["score"] == score_of(QUERY, DOCUMENTS[best()[0]])


def test_equal_scores_stay_in_the_order_of_the_file(api, file, monkeypatch, capsys):
    monkeypatch.setattr(bulk_run, "BATCH_ITEMS", 30)
    api.score = lambda query, document: float(DOCUMENTS.index(document) % 2)
    assert rerank(api, QUERY, file, "--json") == 0
    found = [json.loads(line)["index"] for line in capsys.readouterr().out.splitlines()]
    assert found == [*range(1, 100, 2), *range(0, 100, 2)]


def test_for_people_it_is_score_line_and_text(api, file, capsys):
    assert rerank(api, QUERY, file, "--top", "3") == 0
    expected = [f"{score_of(QUERY, DOCUMENTS[i]):.4f}\t{i + 1}\t{DOCUMENTS[i]}" for i in best()[:3]]
    assert capsys.readouterr().out.splitlines() == expected


PLAIN = {"model": "tiny", "query": QUERY, "priority": "bulk"}


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        (["--instruction", "find", "--truncate"], {"instruction": "find", "truncate": True}),
        (["--method", "dense", "--query-prompt-name", "q"], {"method": "dense", "query_prompt_name": "q"}),
        (["--method", "dense", "--document-prompt-name", ""], {"method": "dense", "document_prompt_name": ""}),
        (
            ["--method", "combined", "--weights", "dense=1, sparse=0.3"],
            {"method": "combined", "weights": {"dense": 1.0, "sparse": 0.3}},
        ),
        (["--label", "entailment"], {"label": "entailment"}),
        (["--label", "0"], {"label": 0}),
        (["--max-tokens-per-doc", "64"], {"max_tokens_per_doc": 64}),
        ([], {}),
    ],
)
def test_what_is_asked_for_reaches_the_server(api, file, arguments, fields):
    assert rerank(api, QUERY, file, *arguments) == 0
    bodies = [{name: value for name, value in body.items() if name != "documents"} for body in api.requests]
    assert bodies[0] == PLAIN | fields | {"raw_scores": True}
    # What is compared has no activation to be asked for.
    assert bodies[1:] == ([] if "method" in fields else [PLAIN | fields])


def test_a_request_that_is_too_large_is_halved(api, file, capsys):
    limit = 30

    def too_many(body):
        return refusal(413, "payload_too_large", "too much") if len(body["documents"]) > limit else None

    api.fault = too_many
    assert rerank(api, QUERY, file, "--json") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["index"] for row in rows] == best()
    assert all(row["document"] == DOCUMENTS[row["index"]] for row in rows)
    limit = 0
    assert rerank(api, QUERY, file) == 2
    assert capsys.readouterr().err == f"rose: {file}, line 1: too much\n"


def test_another_server_of_the_api_is_sent_nothing_it_may_not_know(api, file, capsys):
    api.models = [{"id": "other", "owned_by": "somebody"}]
    api.answer = lambda path, body: {
        "results": [{"index": i, "relevance_score": score_of(QUERY, text)} for i, text in enumerate(body["documents"])]
    }
    assert rerank(api, QUERY, file, "--json") == 0
    assert [json.loads(line)["index"] for line in capsys.readouterr().out.splitlines()] == best()
    assert [set(body) for body in api.requests] == [{"model", "query", "documents"}]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--top", "0"], "--top 0: expected 1 or more"),
        (["--batch-tokens", "9"], "--batch-tokens is for an engine"),
        (["--max-tokens-per-doc", "0"], "--max-tokens-per-doc 0: expected 1 or more"),
        (["--weights", "dense=1"], "--weights is for --method combined"),
    ],
)
def test_wrong_options(api, file, capsys, arguments, message):
    assert rerank(api, QUERY, file, *arguments) == 2
    assert message in capsys.readouterr().err


def test_weights_that_are_none(api, file, capsys):
    with pytest.raises(SystemExit) as ended:
        rerank(api, QUERY, file, "--method", "combined", "--weights", "dense")
    assert ended.value.code == 2
    assert "argument --weights: 'dense': expected such as dense=1,sparse=0.3" in capsys.readouterr().err


def test_a_bad_document_is_named_with_its_line(api, file, monkeypatch, capsys):
    monkeypatch.setattr(bulk_run, "BATCH_ITEMS", 30)
    bad = DOCUMENTS[70]

    def refuse(body):
        documents = body["documents"]
        if bad not in documents:
            return None
        return refusal(400, "invalid_input", "too long", param="documents", index=documents.index(bad))

    api.fault = refuse
    assert rerank(api, QUERY, file) == 2
    assert capsys.readouterr().err == f"rose: {file}, line 71: too long\n"
    api.fault = lambda body: refusal(501, "unsupported", "this model has no scores")
    assert rerank(api, QUERY, file) == 2
    assert capsys.readouterr().err == "rose: this model has no scores\n"


def test_an_empty_query_and_an_empty_file(api, tmp_path, file, capsys):
    assert rerank(api, "", file) == 2
    (tmp_path / "empty.txt").write_text("")
    assert rerank(api, QUERY, str(tmp_path / "empty.txt")) == 2
    assert capsys.readouterr().err.splitlines() == [
        "rose: the query is empty",
        f"rose: {tmp_path / 'empty.txt'}: there is no text in it",
    ]

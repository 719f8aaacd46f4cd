"""Texts embedded each by itself and compared: cosine, lexical weights and token vectors, by their written formulas."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer

from rose.gateway import comparing, scoring
from rose.proto import rose_pb2 as pb
from rose.proto.convert import tokens_from_proto
from tests.gateway.cards import COLBERT, DENSE, SPARSE, m3_card, pplx_card
from tests.gateway.conftest import DIMENSION, card_for, live_front
from tests.gateway.expected import token_vectors, vector_of, weight_of
from tests.support import tiny_tokenizers

QUERY = "the river the sea"
DOCUMENTS = ["The river meets the sea sea sea.", "salt", "the quiet harbour was quiet", "der Zug nach Freiburg"]


@pytest.fixture(scope="module")
def m3_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("m3")
    tiny_tokenizers.save(tiny_tokenizers.unigram(), folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(m3_folder):
    return Tokenizer.from_file(str(m3_folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def live(m3_folder):
    with live_front(m3_folder, m3_card(m3_folder)) as live:
        yield live


def ids_of(tokenizer, *texts):
    return [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]


def dense_score(query, document):
    return float(vector_of(query, DIMENSION) @ vector_of(document, DIMENSION))


def sparse_score(query, document):
    """FlagEmbedding's: shared tokens, special ones left out, each once with its largest weight."""
    special = {0, 1, 2, 3, 4}
    return sum(weight_of(one) ** 2 for one in {*query} & {*document} - special)


def colbert_score(query, document):
    """FlagEmbedding's: <s> is dropped; the divisor is the query tokens that were summed over."""
    best = [max(float(q @ d) for d in token_vectors(document, 16, 1)) for q in token_vectors(query, 16, 1)]
    return sum(best) / (len(query) - 1)


FORMULAS = {"dense": dense_score, "sparse": sparse_score, "colbert": colbert_score}


def rerank(live, documents=DOCUMENTS, **fields):
    response = live.client.post("/v1/rerank", json={"query": QUERY, "documents": documents} | fields)
    assert response.status_code == 200, response.text
    return response.json()


def scores(answer):
    by_index = {one["index"]: one["relevance_score"] for one in answer["results"]}
    return [by_index[i] for i in range(len(by_index))]


@pytest.mark.parametrize("method", list(FORMULAS))
def test_each_method_is_its_formula(live, tokenizer, method):
    """Report C108 (FlagEmbedding#903): one definition, whichever route asks."""
    query, *documents = ids_of(tokenizer, QUERY, *DOCUMENTS)
    expected = [FORMULAS[method](query, one) for one in documents]
    answer = rerank(live, method=method)
    assert scores(answer) == pytest.approx(expected, abs=1e-6)
    assert [one["index"] for one in answer["results"]] == list(np.argsort(-np.array(expected), kind="stable"))
    assert (answer["method"], answer["activation"]) == (method, "none")
    assert list(live.engines[0].seen[-1].outputs) == [method]
    paired = live.client.post("/v1/score", json={"text_1": QUERY, "text_2": DOCUMENTS, "method": method}).json()
    assert [one["score"] for one in paired["data"]] == pytest.approx(expected, abs=1e-6)
    for raw_scores in (True, False):
        raw = rerank(live, method=method, raw_scores=raw_scores)
        assert (scores(raw), raw["activation"]) == (scores(answer), "none")


def test_the_sparse_formula_has_something_to_add_up(tokenizer):
    query, *documents = ids_of(tokenizer, QUERY, *DOCUMENTS)
    assert sparse_score(query, documents[0]) > 0
    assert len(set(documents[0])) < len(documents[0])


@pytest.mark.parametrize(
    "weights",
    [
        None,
        {"dense": 0.4, "sparse": 0.2, "colbert": 0.4},
        {"dense": 1.0, "colbert": 3, "sparse": 0},
        {"dense": 1e308, "sparse": 1e308},
    ],
)
def test_combined_is_the_weighted_mean(live, tokenizer, weights):
    """Report C108: as FlagEmbedding's compute_score adds them up; all in one request of the model."""
    query, *documents = ids_of(tokenizer, QUERY, *DOCUMENTS)
    even = dict.fromkeys(FORMULAS, 1.0)
    used = {name: weight / max(weights.values()) for name, weight in weights.items()} if weights else even
    expected = [
        sum(weight * FORMULAS[name](query, one) for name, weight in used.items() if weight) / sum(used.values())
        for one in documents
    ]
    answer = rerank(live, method="combined", **({} if weights is None else {"weights": weights}))
    assert scores(answer) == pytest.approx(expected, abs=1e-6)
    assert set(live.engines[0].seen[-1].outputs) == {name for name, weight in used.items() if weight}


def test_token_vectors_of_many_documents_are_compared_in_groups(m3_folder, tokenizer, monkeypatch):
    """Only so many are held at a time; the order and the scores are those of one group."""
    documents = [f"{i} " + "salt " * (i % 7) for i in range(60)]
    query, *ids = ids_of(tokenizer, QUERY, *documents)
    monkeypatch.setattr(comparing, "HELD_NUMBERS", 50 * 16)
    with live_front(m3_folder, m3_card(m3_folder)) as live:
        answer = rerank(live, documents, method="combined")
        assert len(live.engines[0].seen) > 5
        assert max(sum(request.tokens.lengths) for request in live.engines[0].seen) <= 50
        expected = [sum(formula(query, one) for formula in FORMULAS.values()) / 3 for one in ids]
        assert scores(answer) == pytest.approx(expected, abs=1e-6)
        many = live.client.post("/v1/score", json={"text_1": documents, "text_2": documents, "method": "colbert"})
        assert many.status_code == 413
        assert many.json()["error"]["param"] == "text_1"


def test_parts_of_token_vectors_stay_within_a_frame(m3_folder, monkeypatch):
    monkeypatch.setattr("rose.gateway.replicas.PART_BYTES", 64 * (16 + 1) * 4)
    with live_front(m3_folder, m3_card(m3_folder)) as live:
        rerank(live, ["salt " * 6] * 8, method="combined")
        assert max(sum(request.tokens.lengths) for request in live.engines[0].seen) <= 64


def test_vectors_are_the_default_and_never_called_a_head(live, text_folder):
    """Report C101: a model without a head compares vectors and says so; asked for a head, it refuses."""
    assert rerank(live)["method"] == "dense"
    response = live.client.post("/v1/rerank", json={"query": "a", "documents": ["b"], "method": "cross"})
    assert response.status_code == 400
    assert "a head that scores pairs" in response.json()["error"]["message"]
    with live_front(text_folder, card_for(text_folder, outputs=[pb.OutputCard(name="x", dtype=pb.INT8)])) as other:
        response = other.client.post("/v1/rerank", json={"query": "a", "documents": ["b"]})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "model")


def test_a_quantised_model_is_compared_by_its_float_vectors(text_folder):
    card = pplx_card(text_folder, default_output="int8")
    with live_front(text_folder, card) as live:
        assert rerank(live)["method"] == "dense"
        assert list(live.engines[0].seen[-1].outputs) == ["dense"]


def test_lexical_weights_that_were_not_loaded_are_no_weights(m3_folder):
    """Report C110 (FlagEmbedding#550): the output is unavailable, with the reason, and nothing else suffers."""
    missing = pb.OutputCard()
    missing.CopyFrom(SPARSE)
    missing.unavailable = "the checkpoint has no sparse_linear.pt"
    with live_front(m3_folder, card_for(m3_folder, outputs=[DENSE, missing, COLBERT], prompts={})) as live:
        for method in ("sparse", "combined"):
            response = live.client.post("/v1/rerank", json={"query": "a", "documents": ["b"], "method": method})
            assert response.status_code == 400
            assert "no sparse_linear.pt" in response.json()["error"]["message"]
        response = live.embed("a", outputs=["dense", "sparse"])
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["index"]) == (400, "outputs", 1)
        assert "no sparse_linear.pt" in error["message"]
        assert rerank(live, method="combined", weights={"dense": 1, "colbert": 1})["method"] == "combined"


def test_prompts_of_both_sides_are_applied_and_named(text_folder):
    """Report C04 (tei#665): the library puts a prompt before queries, so does the server, and both say which."""
    with live_front(text_folder, card_for(text_folder)) as live:
        tokenizer = Tokenizer.from_file(str(text_folder / "tokenizer.json"))

        def last():
            return [ids.tolist() for ids in tokens_from_proto(live.engines[0].seen[-1].tokens)]

        answer = rerank(live, ["salt"])
        assert answer["prompts"] == {"query": "query", "document": "passage"}
        assert last() == ids_of(tokenizer, "query: " + QUERY, "passage: salt")
        answer = rerank(live, ["salt"], query_prompt_name="", document_prompt_name="query")
        assert answer["prompts"] == {"document": "query"}
        assert last() == ids_of(tokenizer, QUERY, "query: salt")
        answer = rerank(live, ["salt"], query_prompt_name="", document_prompt_name="")
        assert "prompts" not in answer
        bad = live.client.post("/rerank", json={"query": "a", "documents": ["b"], "document_prompt_name": "x"})
        assert bad.json()["error"]["param"] == "document_prompt_name"
        bad = live.client.post("/rerank", json={"query": "a", "documents": ["b"], "instruction": "x"})
        assert bad.json()["error"]["param"] == "instruction"


def test_long_texts_to_compare(text_folder):
    """Report C48: refused with the index; documents are cut where that is asked, queries never."""
    with live_front(text_folder, card_for(text_folder, prompts={})) as live:
        long = "salt " * 200

        def failed(**body):
            response = live.client.post("/v1/rerank", json=body)
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            return error["param"], error["index"]

        assert failed(query="a", documents=["b", long]) == ("documents", 1)
        assert failed(query=long, documents=["b"], truncate=True) == ("query", None)
        rerank(live, ["b", long], truncate=True)
        assert list(live.engines[0].seen[-1].tokens.lengths)[2] == 128
        rerank(live, [long], max_tokens_per_doc=3)
        assert live.engines[0].seen[-1].tokens.lengths[1] == 5
        assert failed(query="a", documents=["b", ""]) == ("documents", 1)


def test_a_cut_document_keeps_its_tokens_whatever_its_prompt_has(text_folder):
    """`max_tokens_per_doc` counts the document's own tokens: a prompt must not crowd different documents out."""
    prompts = {"query": "query: ", "passage": "the long prompt of a passage: ", "huge": "salt " * 200, "no": ""}
    with live_front(text_folder, card_for(text_folder, prompts=prompts)) as live:
        tokenizer = Tokenizer.from_file(str(text_folder / "tokenizer.json"))
        documents = ["salt river sea", "river salt sea", "sea"]
        whole = ids_of(tokenizer, *(prompts["passage"] + one for one in documents))
        opening = len(ids_of(tokenizer, prompts["passage"])[0]) - 1
        for most in (1, 2, 50):
            answer = rerank(live, documents, max_tokens_per_doc=most)
            sent = [ids.tolist() for ids in tokens_from_proto(live.engines[0].seen[-1].tokens)][1:]
            assert sent == [
                ids if len(ids) <= opening + most + 1 else [*ids[: opening + most], ids[-1]] for ids in whole
            ]
            assert len(set(scores(answer))) == 3
        rerank(live, documents, max_tokens_per_doc=2, document_prompt_name="no")
        assert list(live.engines[0].seen[-1].tokens.lengths)[1:] == [4, 4, 3]
        for fields in ({"truncate": True}, {"truncate": True, "max_tokens_per_doc": 3}):
            body = {"query": "a", "documents": ["salt"], "document_prompt_name": "huge"} | fields
            response = live.client.post("/v1/rerank", json=body)
            assert (response.status_code, response.json()["error"]["param"]) == (400, "document_prompt_name")
            assert "leaves none for a document" in response.json()["error"]["message"]


def test_each_distinct_query_is_embedded_once(live):
    body = {"text_1": ["salt", "river", "salt"], "text_2": ["a", "b", "c"], "method": "dense"}
    assert live.client.post("/v1/score", json=body).status_code == 200
    assert len(live.engines[0].seen[-1].tokens.lengths) == 5


def test_a_cosine_is_never_beyond_one():
    """Rounding alone gives 1.0000000000000002 of some texts and themselves, of which math.acos is an error."""
    vectors = np.random.default_rng(0).standard_normal((2000, 384)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    for other, expected in ((vectors, 1.0), (-vectors, -1.0)):
        found = scoring.cosine(vectors, other)
        assert np.abs(found).max() <= 1.0
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)

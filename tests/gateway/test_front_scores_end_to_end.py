"""Pairs, lexical weights, token vectors and chunks through real processes, against the libraries that define them."""

from __future__ import annotations

import base64
from itertools import pairwise

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import CrossEncoder
from tokenizers import Tokenizer

from rose.proto import rose_pb2 as pb
from tests.gateway.test_front_end_to_end import served
from tests.models.test_bge_m3 import published
from tests.models.test_pplx import reference_rows
from tests.models.test_rerankers import published_ids, published_logits
from tests.support.tiny_families import (
    tiny_bge_m3,
    tiny_cross_encoder_bert,
    tiny_pplx_context,
    tiny_qwen3_reranker,
)

QUERY = "What is the capital of France?"
DOCUMENTS = ["Paris is the capital of France.", "London is the capital of England.", "Berlin.", "salt " * 20, "x"]


@pytest.fixture(autouse=True)
def _quiet():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def asked(client, route, **body):
    response = client.post(route, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def scores(answer):
    by_index = {one["index"]: one["relevance_score"] for one in answer["results"]}
    return [by_index[i] for i in range(len(by_index))]


@pytest.fixture(scope="module")
def cross(tmp_path_factory):
    folder = tiny_cross_encoder_bert(tmp_path_factory.mktemp("ce") / "m")
    with served(folder) as (client, stub):
        yield client, stub, CrossEncoder(str(folder), device="cpu")


def test_a_cross_encoder_scores_as_sentence_transformers_does(cross):
    """Report C106: one label through the sigmoid, the library's own numbers to 1e-4; logits on request."""
    client, stub, reference = cross
    pairs = [(QUERY, document) for document in DOCUMENTS]
    shown = reference.predict(pairs)
    raw = reference.predict(pairs, activation_fn=torch.nn.Identity())
    answer = asked(client, "/v1/rerank", query=QUERY, documents=DOCUMENTS)
    assert scores(answer) == pytest.approx(shown, abs=1e-4)
    assert [one["index"] for one in answer["results"]] == np.argsort(-raw, kind="stable").tolist()
    assert scores(asked(client, "/v1/rerank", query=QUERY, documents=DOCUMENTS, raw_scores=True)) == pytest.approx(
        raw, abs=1e-4
    )
    tokens = sum(len(ids) for ids in reference.tokenizer(*map(list, zip(*pairs, strict=True)))["input_ids"])
    assert answer["usage"]["prompt_tokens"] == tokens
    paired = asked(client, "/v1/score", text_1=QUERY, text_2=DOCUMENTS)
    assert [one["score"] for one in paired["data"]] == pytest.approx(shown, abs=1e-4)
    over_grpc = stub.Rerank(pb.RerankRequest(query=QUERY, documents=DOCUMENTS))
    assert {one.index: one.relevance_score for one in over_grpc.results} == pytest.approx(
        dict(enumerate(shown)), abs=1e-4
    )


def test_token_types_matter_and_are_sent(cross):
    client, _, reference = cross
    swapped = reference.predict([(document, QUERY) for document in DOCUMENTS])
    found = asked(client, "/v1/score", text_1=DOCUMENTS, text_2=[QUERY] * len(DOCUMENTS))
    assert [one["score"] for one in found["data"]] == pytest.approx(swapped, abs=1e-4)
    straight = reference.predict([(QUERY, document) for document in DOCUMENTS])
    assert np.abs(straight - swapped).max() > 1e-3


def test_a_cut_pair_scores_as_the_library_cuts_it(cross):
    """Report C48 (vllm P#22280): the longest first is the document; without asking, the pair is refused."""
    client, _, reference = cross
    long = "the river meets the sea " * 60
    assert client.post("/v1/rerank", json={"query": QUERY, "documents": [long]}).status_code == 400
    answer = asked(client, "/v1/rerank", query=QUERY, documents=[long, "x"], truncate=True)
    assert scores(answer) == pytest.approx(reference.predict([(QUERY, long), (QUERY, "x")]), abs=1e-4)


def test_many_pairs_come_back_in_order(cross):
    client, _, reference = cross
    documents = [f"{i} " + "salt flour ferry " * (i * 7 % 11) for i in range(150)]
    expected = reference.predict([(QUERY, document) for document in documents], batch_size=16)
    assert scores(asked(client, "/v1/rerank", query=QUERY, documents=documents)) == pytest.approx(expected, abs=1e-4)


def test_a_template_reranker_scores_as_its_authors_script(tmp_path):
    """Report C102 (vllm#21681): the server writes the template; the score is the published softmax of yes and no."""
    folder = tiny_qwen3_reranker(tmp_path / "m")
    pairs = [(QUERY, document) for document in DOCUMENTS]
    logits = published_logits(folder, published_ids(folder, pairs)).double()
    with served(folder) as (client, stub):
        answer = asked(client, "/v1/rerank", query=QUERY, documents=DOCUMENTS)
        assert scores(answer) == pytest.approx(logits.softmax(-1)[:, 0].tolist(), abs=1e-4)
        raw = asked(client, "/v1/rerank", query=QUERY, documents=DOCUMENTS, raw_scores=True)
        assert scores(raw) == pytest.approx((logits[:, 0] - logits[:, 1]).tolist(), abs=1e-4)
        answer = stub.Score(pb.ScoreRequest(pairs=[pb.Pair(text_1=QUERY, text_2=one) for one in DOCUMENTS]))
        assert list(answer.scores) == pytest.approx(logits.softmax(-1)[:, 0].tolist(), abs=1e-4)
        assert client.post("/v1/embeddings", json={"input": "a"}).status_code == 400


def test_bge_m3_by_its_published_formulas(tmp_path):
    """Reports C108 (FlagEmbedding#903) and C110: outputs and scores of all kinds, to 1e-4."""
    folder = tiny_bge_m3(tmp_path / "m")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [QUERY, *DOCUMENTS]
    (q_dense, q_weights, q_rows), *references = published(folder, [one.ids for one in tokenizer.encode_batch(texts)])
    expected = {
        "dense": [float(q_dense @ dense) for dense, _, _ in references],
        "sparse": [sum(q_weights[t] * w[t] for t in q_weights.keys() & w.keys()) for _, w, _ in references],
        "colbert": [float((q_rows @ rows.T).amax(dim=1).mean()) for _, _, rows in references],
    }
    expected["combined"] = np.mean([expected[name] for name in ("dense", "sparse", "colbert")], axis=0).tolist()
    with served(folder) as (client, _):
        data = asked(client, "/v1/embeddings", input=texts, outputs=["dense", "sparse", "colbert"])["data"]
        for item, (dense, weights, rows) in zip(data, [(q_dense, q_weights, q_rows), *references], strict=True):
            assert np.abs(np.array(item["embedding"]) - dense.numpy()).max() < 1e-5
            found = dict(zip(item["sparse"]["indices"], item["sparse"]["values"], strict=True))
            assert found == pytest.approx(weights, abs=1e-4)
            assert np.abs(np.array(item["colbert"]) - rows.numpy()).max() < 1e-4
        for method, reference in expected.items():
            answer = asked(client, "/v1/rerank", query=QUERY, documents=DOCUMENTS, method=method)
            assert scores(answer) == pytest.approx(reference, abs=1e-4), method


def test_chunks_are_pooled_from_their_documents_rows(tmp_path):
    """Late chunking: the reference joins by the separator, runs once, and means the rows between separators."""
    folder = tiny_pplx_context(tmp_path / "m")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    documents = [["The river meets the sea.", "salt", "a b c"], ["alone"], ["x", "<|endoftext|> y"]]
    separator = tokenizer.token_to_id("<|endoftext|>")
    plain = documents[:2]
    sequences = [tokenizer.encode("<|endoftext|>".join(chunks)).ids for chunks in plain]
    with served(folder) as (client, _):
        found = asked(client, "/v1/contextualizedembeddings", input=documents, encoding_format="float")["data"]
        codes = asked(client, "/v1/contextualizedembeddings", input=documents)["data"]
        assert [len(document["data"]) for document in found] == [3, 1, 2]
        for document, signed, ids, rows in zip(
            found, codes, sequences, reference_rows(folder, sequences), strict=False
        ):
            cuts = [-1, *(i for i, one in enumerate(ids) if one == separator), len(ids)]
            means = [rows[start + 1 : end].mean(0) for start, end in pairwise(cuts)]
            for chunk, code, mean in zip(document["data"], signed["data"], means, strict=True):
                vector = torch.tensor(chunk["embedding"], dtype=torch.float64)
                assert torch.cosine_similarity(vector, mean, dim=0) > 0.99999
                raw = np.frombuffer(base64.b64decode(code["embedding"]), np.int8).astype(int)
                assert np.abs(raw - np.rint(np.tanh(mean.numpy()) * 127)).max() <= 1
        alone = asked(client, "/v1/embeddings", input="alone")["data"][0]["embedding"]
        assert np.abs(np.array(alone) - np.array(found[1]["data"][0]["embedding"])).max() < 1e-5

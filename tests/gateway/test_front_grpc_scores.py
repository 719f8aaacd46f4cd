"""Rerank, Score and the outputs beyond one vector over gRPC: the rules and numbers of the HTTP routes."""

from __future__ import annotations

import grpc
import numpy as np
import pytest
from tokenizers import Tokenizer

from rose.proto import rose_pb2 as pb
from rose.proto import rose_pb2_grpc
from rose.proto.annotations import spans_to_proto, token_types_to_bytes
from rose.proto.convert import tensor_from_proto, tokens_to_proto
from tests.gateway.cards import m3_card, pplx_card, reranker_card, score
from tests.gateway.conftest import DIMENSION, card_for, live_front
from tests.gateway.expected import logits_of, token_vectors, vector_of, weight_of
from tests.gateway.test_front_grpc import channel_to, failed
from tests.support import tiny_tokenizers
from tests.support.tiny_families import tiny_cross_encoder_bert, tiny_qwen3_reranker

QUERY = "where does the river meet the sea?"
DOCUMENTS = ["salt", "The river meets the sea.", "south of the old lighthouse"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    folder = tiny_cross_encoder_bert(tmp_path_factory.mktemp("grpc") / "m")
    with live_front(folder, reranker_card(folder)) as live, channel_to(live) as channel:
        yield live, rose_pb2_grpc.RoseStub(channel), Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def m3(tmp_path_factory):
    folder = tmp_path_factory.mktemp("m3")
    tiny_tokenizers.save(tiny_tokenizers.unigram(), folder)
    with live_front(folder, m3_card(folder)) as live, channel_to(live) as channel:
        yield live, rose_pb2_grpc.RoseStub(channel), Tokenizer.from_file(str(folder / "tokenizer.json"))


def logits(tokenizer, *pairs):
    return [logits_of(one.ids, one.type_ids, 1)[0] for one in tokenizer.encode_batch(list(pairs))]


def test_rerank_gives_what_http_gives(bert):
    live, stub, tokenizer = bert
    answer = stub.Rerank(pb.RerankRequest(query=QUERY, documents=DOCUMENTS, raw_scores=True))
    expected = logits(tokenizer, *((QUERY, one) for one in DOCUMENTS))
    assert [one.index for one in answer.results] == list(np.argsort(-np.array(expected), kind="stable"))
    assert {one.index: one.relevance_score for one in answer.results} == pytest.approx(
        dict(enumerate(expected)), abs=1e-6
    )
    shown = stub.Rerank(pb.RerankRequest(query=QUERY, documents=DOCUMENTS, top_n=2, return_documents=True))
    over_http = live.client.post("/v1/rerank", json={"query": QUERY, "documents": DOCUMENTS, "top_n": 2}).json()
    assert [(one.index, one.relevance_score) for one in shown.results] == [
        (one["index"], one["relevance_score"]) for one in over_http["results"]
    ]
    assert [one.document for one in shown.results] == [DOCUMENTS[one.index] for one in shown.results]
    assert shown.prompt_tokens == over_http["usage"]["prompt_tokens"]
    assert shown.timing.compute_us == 600
    assert live.metric('rose_requests_total{carrier="grpc",route="Rerank",status="OK"}') == 2


def test_scores_are_in_the_order_of_the_pairs(bert):
    live, stub, tokenizer = bert
    pairs = [("a", "salt"), ("b", "salt"), ("a", "river")]
    messages = [pb.Pair(text_1=first, text_2=second) for first, second in pairs]
    raw = stub.Score(pb.ScoreRequest(pairs=messages, raw_scores=True))
    assert list(raw.scores) == pytest.approx(logits(tokenizer, *pairs), abs=1e-6)
    shown = stub.Score(pb.ScoreRequest(pairs=messages))
    assert list(shown.scores) == pytest.approx([1 / (1 + np.exp(-x)) for x in raw.scores], abs=1e-9)
    assert live.metric('rose_requests_total{carrier="grpc",route="Score",status="OK"}') == 2


def test_an_instruction_reaches_the_template(tmp_path):
    folder = tiny_qwen3_reranker(tmp_path / "m")
    with live_front(folder, reranker_card(folder, max_tokens=512)) as live, channel_to(live) as channel:
        stub = rose_pb2_grpc.RoseStub(channel)
        tokens = [
            stub.Rerank(pb.RerankRequest(query="a", documents=["b"], instruction=text)).prompt_tokens
            for text in ("", "x")
        ]
        body = {"query": "a", "documents": ["b"]}
        assert tokens[0] == live.client.post("/rerank", json=body).json()["usage"]["prompt_tokens"]
        assert tokens[1] < tokens[0]


@pytest.mark.parametrize(
    ("call", "request_", "param", "index"),
    [
        ("Rerank", pb.RerankRequest(documents=["a"]), "query", None),
        ("Rerank", pb.RerankRequest(query="a"), "documents", None),
        ("Rerank", pb.RerankRequest(query="a", documents=["b", ""]), "documents", 1),
        ("Rerank", pb.RerankRequest(query="a", documents=["b", "salt " * 200]), "documents", 1),
        ("Rerank", pb.RerankRequest(query="a", documents=["b"], instruction="x"), "instruction", None),
        ("Score", pb.ScoreRequest(), "text_1", None),
        ("Score", pb.ScoreRequest(pairs=[pb.Pair(text_1="a", text_2="b"), pb.Pair(text_1="a")]), "text_2", 1),
        ("Score", pb.ScoreRequest(pairs=[pb.Pair(text_1="a", text_2="b"), pb.Pair(text_2="a")]), "text_1", 1),
        ("Embed", pb.EmbedRequest(texts=pb.Texts(items=["a"])), "outputs", 0),
        ("Embed", pb.EmbedRequest(texts=pb.Texts(items=["a"]), token_types=b"\0\0\0\0"), "token_types", None),
        ("Embed", pb.EmbedRequest(texts=pb.Texts(items=["a"]), spans=pb.Spans(counts=[1])), "spans", None),
    ],
)
def test_bad_requests(bert, call, request_, param, index):
    """Report C48: long pairs are named as over HTTP."""
    _, stub, _ = bert
    code, error = failed(lambda: getattr(stub, call)(request_))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert error.param == param
    assert (error.index if error.HasField("index") else None) == index


def test_fan_out_is_bounded(bert):
    """Report C73: as over HTTP."""
    _, stub, _ = bert
    for call in (
        lambda: stub.Rerank(pb.RerankRequest(query="a", documents=["b"] * 2049)),
        lambda: stub.Score(pb.ScoreRequest(pairs=[pb.Pair(text_1="a", text_2="b")] * 2049)),
    ):
        code, error = failed(call)
        assert (code, error.kind) == (grpc.StatusCode.INVALID_ARGUMENT, "payload_too_large")
        assert "2048" in error.message


def test_models_of_several_labels_say_that_one_has_to_be_named(tmp_path):
    """Report C106: no list where one number is due."""
    folder = tiny_cross_encoder_bert(tmp_path / "m", labels=3)
    with live_front(folder, reranker_card(folder, 3)) as live, channel_to(live) as channel:
        _, error = failed(lambda: rose_pb2_grpc.RoseStub(channel).Rerank(pb.RerankRequest(query="a", documents=["b"])))
        assert error.param == "label"


def test_pairs_that_the_caller_wrote_are_scored_as_they_are(bert):
    _, stub, _ = bert
    ids, types = np.array([2, 5, 6, 3], dtype=np.int32), np.array([0, 0, 1, 1], dtype=np.int32)
    answer = stub.Embed(pb.EmbedRequest(tokens=tokens_to_proto([ids]), token_types=token_types_to_bytes([types])))
    assert tensor_from_proto(answer.outputs[0].values)[0, 0] == pytest.approx(logits_of(ids, types, 1)[0], abs=1e-6)


def test_spans_go_through(text_folder):
    spans = [np.array([[0, 2], [3, 4]], dtype=np.int32), np.array([[1, 2]], dtype=np.int32)]
    sequences = [np.array([5, 6, 7, 8], dtype=np.int32), np.array([5, 9], dtype=np.int32)]
    with live_front(text_folder, pplx_card(text_folder)) as live, channel_to(live) as channel:
        request = pb.EmbedRequest(tokens=tokens_to_proto(sequences), spans=spans_to_proto(spans))
        (output,) = rose_pb2_grpc.RoseStub(channel).Embed(request).outputs
        assert list(output.splits) == [0, 2, 3]
        expected = np.stack([vector_of(ids, DIMENSION) for ids in ([5, 6], [8], [9])])
        assert np.array_equal(tensor_from_proto(output.values), expected)


def test_all_outputs_in_one_call(m3):
    _, stub, tokenizer = m3
    texts = ["the river the sea the river", "salt"]
    answer = stub.Embed(pb.EmbedRequest(texts=pb.Texts(items=texts), outputs=["dense", "sparse", "colbert"]))
    found = {output.name: (tensor_from_proto(output.values), list(output.splits)) for output in answer.outputs}
    assert list(found) == ["dense", "sparse", "sparse_indices", "colbert"]
    assert found["sparse"][1] == found["sparse_indices"][1]
    for i, encoding in enumerate(tokenizer.encode_batch(texts)):
        assert np.array_equal(found["dense"][0][i], vector_of(encoding.ids, DIMENSION))
        rows, splits = found["colbert"]
        assert np.array_equal(rows[splits[i] : splits[i + 1]], token_vectors(encoding.ids, 16, 1))
        weights, splits = found["sparse"]
        kept = slice(splits[i], splits[i + 1])
        pairs = dict(zip(found["sparse_indices"][0][kept, 0].tolist(), weights[kept, 0].tolist(), strict=True))
        expected = {one: weight_of(one) for one in sorted({*encoding.ids}) if one > 4 and weight_of(one) > 0}
        assert pairs == pytest.approx(expected)


def test_prompts_of_compared_texts_are_named(text_folder):
    """Report C04: over this carrier too."""
    with live_front(text_folder, card_for(text_folder)) as live, channel_to(live) as channel:
        _, call = rose_pb2_grpc.RoseStub(channel).Rerank.with_call(pb.RerankRequest(query="a", documents=["b"]))
        trailing = dict(call.trailing_metadata())
        assert (trailing["rose-prompt-query"], trailing["rose-prompt-document"]) == ("query", "passage")


def test_scores_have_no_place_among_texts(text_folder):
    with (
        live_front(text_folder, card_for(text_folder, outputs=[score()], default_output="score")) as live,
        channel_to(live) as channel,
    ):
        _, error = failed(
            lambda: rose_pb2_grpc.RoseStub(channel).Embed(
                pb.EmbedRequest(texts=pb.Texts(items=["a"]), outputs=["score"])
            )
        )
        assert error.param == "outputs"

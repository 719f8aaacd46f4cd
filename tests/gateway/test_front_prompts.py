"""Models that leave a prompt's own tokens out of what they pool: which tokens each carrier has pooled."""

from __future__ import annotations

import grpc
import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer

from rose.proto import rose_pb2 as pb
from rose.proto import rose_pb2_grpc
from rose.proto.annotations import spans_from_proto
from rose.proto.convert import tensor_from_proto
from tests.gateway.cards import DENSE
from tests.gateway.conftest import MAX_TOKENS, card_for, live_front
from tests.gateway.expected import vector_of
from tests.gateway.test_front_end_to_end import served, vectors
from tests.support import tiny_tokenizers
from tests.support.tiny_checkpoints import tiny_bert, tiny_qwen3, tiny_xlm_roberta

PROMPTS = {"query": "query: ", "passage": "passage: "}
TEXTS = ["the river meets the sea", "salt"]


@pytest.fixture(scope="module")
def excluding(text_folder):
    """A front over one engine whose pooling leaves prompts out."""
    with live_front(text_folder, card_for(text_folder, excludes_prompt=True, outputs=[DENSE])) as live:
        yield live


def behind(folder, prompt, texts, limit=None):
    """Ids of prompt and text, from the first one that the prompt alone does not have."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    count = len(tokenizer.encode(prompt).ids) - 1  # [SEP] belongs to the text
    ids = [tokenizer.encode(prompt + text).ids for text in texts]
    cut = [own if limit is None or len(own) <= limit else [*own[: limit - 1], own[-1]] for own in ids]
    return [own[count:] for own in cut]


def rows(ids):
    return np.stack([vector_of(own, 64) for own in ids])


def test_only_the_tokens_behind_the_prompt_are_pooled(excluding, text_folder):
    data = excluding.embed(TEXTS, prompt_name="query").json()
    assert data["prompt_name"] == "query"
    found = np.array([item["embedding"] for item in data["data"]])
    np.testing.assert_allclose(found, rows(behind(text_folder, "query: ", TEXTS)), atol=1e-6)
    in_words = excluding.embed(TEXTS, prompt="passage: ").json()["data"]
    expected = rows(behind(text_folder, "passage: ", TEXTS))
    np.testing.assert_allclose([item["embedding"] for item in in_words], expected, atol=1e-6)


def test_nothing_is_left_out_where_no_prompt_applies(excluding):
    """Not even of the text that begins like one."""
    for fields in ({}, {"prompt_name": ""}, {"prompt": ""}):
        assert excluding.embed(["query: salt"], **fields).status_code == 200
        assert not excluding.engines[0].seen[-1].HasField("spans")


def test_a_cut_leaves_the_prompt_out_too(excluding, text_folder):
    long = ["the river meets the sea " * 40]
    found = excluding.embed(long, prompt_name="query", truncate=True).json()["data"][0]["embedding"]
    np.testing.assert_allclose(found, rows(behind(text_folder, "query: ", long, MAX_TOKENS))[0], atol=1e-6)


def test_a_text_of_which_nothing_is_left_is_named(excluding):
    answer = excluding.embed(["salt"], prompt="the river " * 80, truncate=True)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("the prompt takes all 128 tokens")
    assert answer.json()["error"]["index"] == 0


def test_pieces_of_a_long_input_are_refused_beside_a_prompt(excluding):
    answer = excluding.embed(["the river " * 200], prompt_name="query", split_long_inputs=True)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "split_long_inputs"
    assert excluding.embed(["the river " * 200], split_long_inputs=True).status_code == 200


def test_the_card_says_so(excluding, shared):
    assert excluding.client.get("/v1/models").json()["data"][0]["include_prompt"] is False
    assert shared.client.get("/v1/models").json()["data"][0]["include_prompt"] is True


def test_texts_that_are_compared(excluding, text_folder):
    """The query behind its prompt, documents behind theirs; an error counts from the first query."""
    body = {"query": "where is the sea", "documents": TEXTS}
    results = excluding.client.post("/v1/rerank", json=body).json()["results"]
    (query,) = rows(behind(text_folder, "query: ", ["where is the sea"]))
    expected = rows(behind(text_folder, "passage: ", TEXTS)) @ query
    assert {one["index"]: one["relevance_score"] for one in results} == pytest.approx(
        dict(enumerate(expected)), abs=1e-6
    )
    body["document_prompt_name"] = ""
    assert excluding.client.post("/v1/rerank", json=body).status_code == 200
    request = excluding.engines[0].seen[-1]
    spans = [own.tolist() for own in spans_from_proto(request.spans, 3)]
    assert [own[0][0] for own in spans[1:]] == [0, 0]
    assert spans[0][0][0] > 0


def test_over_grpc(excluding, text_folder):
    with grpc.insecure_channel(excluding.listening.grpc) as channel:
        request = pb.EmbedRequest(texts=pb.Texts(items=TEXTS), prompt_name="query")
        answer = rose_pb2_grpc.RoseStub(channel).Embed(request)
    assert not answer.outputs[0].splits  # a row a text, as ever
    found = tensor_from_proto(answer.outputs[0].values)
    np.testing.assert_allclose(found, rows(behind(text_folder, "query: ", TEXTS)), atol=1e-6)


def test_other_poolings_than_the_mean_refuse_a_prompt(text_folder):
    """A folder that names prompts does not load then; one that names none may still be sent one."""
    with live_front(text_folder, card_for(text_folder, excludes_prompt=True, prompts={}, pooling="cls")) as live:
        answer = live.embed(["salt"], prompt="query: ")
        assert live.embed(["salt"]).status_code == 200
    assert answer.status_code == 400
    assert "it pools by cls" in answer.json()["error"]["message"]


def test_a_first_token_that_takes_the_prompts_last_one_in_is_pooled(tmp_path):
    """A byte-level tokenizer: "q: " ends in a blank, which is part of the one token behind it."""
    tokenizer = tiny_tokenizers.byte_level()
    tiny_tokenizers.save(tokenizer, tmp_path)
    alone, whole = tokenizer.encode("q: ").ids, tokenizer.encode("q: the").ids
    assert len(alone) == len(whole)
    assert alone[:-1] == whole[:-1]
    with live_front(tmp_path, card_for(tmp_path, excludes_prompt=True, outputs=[DENSE], vocab_size=2000)) as live:
        found = live.embed(["the"], prompt="q: ").json()["data"][0]["embedding"]
    np.testing.assert_allclose(found, vector_of(whole[-1:], 64), atol=1e-6)


@pytest.mark.parametrize(
    ("make", "pooling", "default"),
    [(tiny_bert, "mean", None), (tiny_xlm_roberta, "mean", "passage"), (tiny_qwen3, "lasttoken", None)],
)
def test_a_server_gives_sentence_transformers_vectors(tmp_path, make, pooling, default):
    path = make(tmp_path / "m", pooling=pooling, include_prompt=False, prompts=PROMPTS, default_prompt_name=default)
    theirs = SentenceTransformer(str(path), device="cpu")
    texts = [*TEXTS, "query: salt", "  two blanks before it"]
    with served(path) as (client, _), torch.inference_mode():
        for fields in ({}, {"prompt_name": "query"}, {"prompt": "Represent this: "}):
            np.testing.assert_allclose(vectors(client, texts, **fields), theirs.encode(texts, **fields), atol=1e-5)

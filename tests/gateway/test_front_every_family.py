"""Each family through processes of its own, front and engine, asked once for all it gives over HTTP.

The numbers are compared with the same folder's model run in this process; that model against the libraries which define
it is the matter of tests/models.
"""

from __future__ import annotations

import base64
from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from tests.gateway.test_front_end_to_end import served, vectors
from tests.models.test_bge_m3 import lexical
from tests.support.running import batch_of, embed, encode, load, load_reranker, score
from tests.support.tiny_families import (
    QWEN3_QUERY,
    tiny_bge_m3,
    tiny_cross_encoder_bert,
    tiny_cross_encoder_xlmr,
    tiny_e5,
    tiny_pplx,
    tiny_pplx_context,
    tiny_qwen3_classifier,
    tiny_qwen3_embedding,
    tiny_qwen3_reranker,
)

QUERY = "where does the river meet the sea?"
TEXTS = ["The river meets the sea.", "salt", "south of the old lighthouse " * 5]


def asked(client, route, **body):
    response = client.post(route, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def close(found, expected, tolerance=1e-4):
    assert np.abs(np.asarray(found, dtype=np.float64) - np.asarray(expected, dtype=np.float64)).max() < tolerance


@torch.inference_mode()
def dense(model, texts):
    return embed(model, encode(model.folder, texts)).numpy()


def check_e5(client, folder):
    """The prefix is in no file: the caller's own words."""
    model = load(folder)
    close(vectors(client, TEXTS, prompt="query: "), dense(model, [f"query: {text}" for text in TEXTS]))
    close(vectors(client, [f"passage: {TEXTS[0]}"]), dense(model, [f"passage: {TEXTS[0]}"]))


def check_qwen3_embedding(client, folder):
    model = load(folder)
    close(vectors(client, TEXTS), dense(model, TEXTS))
    prompted = dense(model, [QWEN3_QUERY + text for text in TEXTS])
    close(vectors(client, TEXTS, prompt_name="query"), prompted)
    short = prompted[:, :16] / np.linalg.norm(prompted[:, :16], axis=1, keepdims=True)
    close(vectors(client, TEXTS, prompt_name="query", dimensions=16), short)
    answer = asked(client, "/v1/rerank", query=QUERY, documents=TEXTS)
    (query,) = dense(model, [QWEN3_QUERY + QUERY])
    close(by_index(answer), dense(model, TEXTS) @ query)


def check_pplx(client, folder):
    model = load(folder)
    ids = encode(model.folder, TEXTS)
    close(vectors(client, TEXTS), embed(model, ids).detach())
    for form, output, dtype in (("base64_int8", "int8", np.int8), ("base64_binary", "binary", np.uint8)):
        data = asked(client, "/v1/embeddings", input=TEXTS, encoding_format=form)["data"]
        raw = np.stack([np.frombuffer(base64.b64decode(item["embedding"]), dtype) for item in data])
        differ = raw != embed(model, ids, output).numpy()
        assert differ.mean() < 0.001, form


def check_pplx_context(client, folder):
    """One document of three chunks: spans of its own ids, between separators."""
    model = load(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    chunks = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    ids = [one for i, chunk in enumerate(chunks) for one in (*([model.folder.separator_id] if i else []), *chunk)]
    ends = list(accumulate(len(chunk) + 1 for chunk in chunks))
    spans = [(start, end - 1) for start, end in pairwise([0, *ends])]
    with torch.inference_mode():
        expected = model(batch_of(model, [ids], spans=[spans]), ["dense"])["dense"]
    answer = asked(client, "/v1/contextualizedembeddings", input=[TEXTS], encoding_format="float")
    close([item["embedding"] for item in answer["data"][0]["data"]], expected)


def check_m3(client, folder):
    model = load(folder)
    ids = encode(model.folder, TEXTS)
    with torch.inference_mode():
        outputs = model(batch_of(model, ids), ["dense", "sparse", "colbert"])
    weights = outputs["sparse"].split([len(own) for own in ids])
    rows = [row[1:] for row in outputs["colbert"].split([len(own) for own in ids])]  # the first token has none
    data = asked(client, "/v1/embeddings", input=TEXTS, outputs=["dense", "sparse", "colbert"])["data"]
    close([item["embedding"] for item in data], outputs["dense"])
    for item, own, weight, row in zip(data, ids, weights, rows, strict=True):
        close(item["colbert"], row)
        found = dict(zip(item["sparse"]["indices"], item["sparse"]["values"], strict=True))
        assert found == pytest.approx(lexical(own, weight), abs=1e-4)
    pairs = asked(client, "/v1/score", text_1=TEXTS[0], text_2=TEXTS[1:], method="colbert")["data"]
    close([one["score"] for one in pairs], [float((rows[0] @ row.T).amax(1).mean()) for row in rows[1:]])


def check_scores(client, folder):
    """Sigmoids and raw scores, best first."""
    with torch.inference_mode():
        raw = score(load_reranker(folder), [(QUERY, text) for text in TEXTS])[:, 0].double()
    answer = asked(client, "/v1/rerank", query=QUERY, documents=TEXTS)
    close(by_index(answer), raw.sigmoid())
    assert [one["index"] for one in answer["results"]] == raw.argsort(descending=True).tolist()
    pairs = asked(client, "/v1/score", text_1=QUERY, text_2=TEXTS, raw_scores=True)["data"]
    close([one["score"] for one in pairs], raw)


def check_classes(client, folder):
    """Three labels: the probability of the named one."""
    with torch.inference_mode():
        logits = score(load_reranker(folder), [(QUERY, text) for text in TEXTS]).double()
    answer = asked(client, "/v1/rerank", query=QUERY, documents=TEXTS, label="LABEL_2", raw_scores=False)
    close(by_index(answer), logits.softmax(1)[:, 2])


def by_index(answer):
    found = {one["index"]: one["relevance_score"] for one in answer["results"]}
    return [found[i] for i in range(len(found))]


def classes(path):
    return tiny_cross_encoder_bert(path, labels=3)


FAMILIES = {
    "e5": (tiny_e5, check_e5),
    "Qwen3-Embedding": (tiny_qwen3_embedding, check_qwen3_embedding),
    "pplx-embed": (tiny_pplx, check_pplx),
    "pplx-embed-context": (tiny_pplx_context, check_pplx_context),
    "bge-m3": (tiny_bge_m3, check_m3),
    "xlmr-cross-encoder": (tiny_cross_encoder_xlmr, check_scores),
    "bert-classes": (classes, check_classes),
    "Qwen3-Reranker": (tiny_qwen3_reranker, check_scores),
    "Qwen3-Reranker-seq-cls": (tiny_qwen3_classifier, check_scores),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_served_is_what_the_model_gives(tmp_path, name):
    make, check = FAMILIES[name]
    folder = make(tmp_path / name)
    with served(folder) as (client, _):
        check(client, folder)

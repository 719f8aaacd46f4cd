"""/v1/embeddings with named outputs: dense, sparse, colbert and quantised vectors side by side, each with its type."""

from __future__ import annotations

import base64

import msgspec
import numpy as np
import pytest
from openai import OpenAI
from tokenizers import Tokenizer

from rose.gateway import schemas
from rose.proto import rose_pb2 as pb
from rose.proto.convert import tensor_to_proto
from tests.gateway.cards import m3_card, pplx_card, score
from tests.gateway.conftest import DIMENSION, card_for, live_front
from tests.gateway.expected import token_vectors, vector_of, weight_of
from tests.support import tiny_tokenizers

TEXTS = ["the river the sea the river", "salt", "der Zug nach Freiburg hält <mask>"]


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


@pytest.fixture(scope="module")
def pplx(text_folder):
    with live_front(text_folder, pplx_card(text_folder)) as live:
        yield live


def data(response):
    assert response.status_code == 200, response.text
    found = response.json()["data"]
    assert [item["index"] for item in found] == list(range(len(found)))
    return found


def weights_of(ids):
    """token id -> weight: special ids (0 .. 4) left out, largest of each, only above zero."""
    return {one: weight_of(one) for one in sorted({*ids}) if one > 4 and weight_of(one) > 0}


def test_all_three_in_one_request(live, tokenizer):
    response = live.embed(TEXTS, outputs=["dense", "sparse", "colbert"])
    assert list(live.engines[0].seen[-1].outputs) == ["dense", "sparse", "colbert"]
    for item, encoding in zip(data(response), tokenizer.encode_batch(TEXTS), strict=True):
        assert set(item) == {"object", "index", "embedding", "sparse", "colbert"}
        assert np.array_equal(np.float32(item["embedding"]), vector_of(encoding.ids, DIMENSION))
        found = dict(zip(item["sparse"]["indices"], item["sparse"]["values"], strict=True))
        assert found == pytest.approx(weights_of(encoding.ids))
        assert list(found) == sorted(found)
        assert np.array_equal(np.float32(item["colbert"]), token_vectors(encoding.ids, 16, 1))
    msgspec.json.decode(response.content, type=schemas.EmbeddingResponse)


@pytest.mark.parametrize("outputs", [["dense"], ["sparse"], ["colbert"], ["colbert", "dense"], ["sparse", "colbert"]])
def test_any_subset(live, outputs):
    whole = data(live.embed(TEXTS, outputs=["dense", "sparse", "colbert"]))
    names = {"embedding" if name == "dense" else name for name in outputs}
    for item, full in zip(data(live.embed(TEXTS, outputs=outputs)), whole, strict=True):
        expected = {name: full[name] for name in names} | {"object": "embedding", "index": full["index"]}
        assert item == {"embedding": None} | expected
    assert list(live.engines[0].seen[-1].outputs) == outputs


def test_weights_by_the_vocabularys_own_spelling(live, tokenizer):
    for item, encoding in zip(
        data(live.embed(TEXTS, outputs=["sparse"], sparse_format="tokens")), tokenizer.encode_batch(TEXTS), strict=True
    ):
        assert item["sparse"] == pytest.approx(
            {tokenizer.id_to_token(one): weight for one, weight in weights_of(encoding.ids).items()}
        )


def test_special_tokens_have_no_weight_and_repeated_ones_the_largest(m3_folder, tokenizer):
    """Report C108 (FlagEmbedding#1515): whatever the engine says of <s>, </s> and <mask>."""

    def answer(card, request):
        rows = np.arange(1, sum(request.tokens.lengths) + 1, dtype=np.float32)[:, None]
        splits = np.cumsum([0, *request.tokens.lengths]).tolist()
        return pb.EmbedResponse(outputs=[pb.Output(name="sparse", values=tensor_to_proto(rows), splits=splits)])

    with live_front(m3_folder, m3_card(m3_folder)) as live:
        live.engines[0].answer = answer
        ids = [0, 9, 7, 9, 4, 7, 2]
        (item,) = data(live.embed(ids, outputs=["sparse"]))
        assert item["sparse"] == {"indices": [7, 9], "values": [6.0, 4.0]}


def test_token_vectors_in_base64_come_with_their_shape(live, tokenizer):
    items = data(live.embed(TEXTS, outputs=["dense", "colbert"], encoding_format="base64"))
    for item, encoding in zip(items, tokenizer.encode_batch(TEXTS), strict=True):
        expected = token_vectors(encoding.ids, 16, 1)
        assert (item["colbert"]["dtype"], item["colbert"]["shape"]) == ("float32", list(expected.shape))
        raw = np.frombuffer(base64.b64decode(item["colbert"]["data"]), "<f4").reshape(expected.shape)
        assert np.array_equal(raw, expected)
        assert np.array_equal(np.frombuffer(base64.b64decode(item["embedding"]), "<f4"), vector_of(encoding.ids, 64))


def test_dimensions_beside_other_outputs_cut_the_dense_vector_alone(live, tokenizer):
    items = data(live.embed(TEXTS, outputs=["dense", "sparse"], dimensions=24))
    assert live.engines[0].seen[-1].dimensions == 0
    for item, encoding in zip(items, tokenizer.encode_batch(TEXTS), strict=True):
        head = vector_of(encoding.ids, DIMENSION)[:24].astype(np.float64)
        assert np.abs(np.array(item["embedding"]) - head / np.linalg.norm(head)).max() < 1e-6
    data(live.embed(TEXTS, outputs=["dense"], dimensions=24))
    assert live.engines[0].seen[-1].dimensions == 24


def test_openais_own_client_reads_the_dense_vector_and_finds_the_rest_beside_it(live, tokenizer):
    client = OpenAI(base_url=f"{live.url}/v1", api_key="none")
    answer = client.embeddings.create(input=TEXTS, model="embedder", extra_body={"outputs": ["dense", "sparse"]})
    for item, encoding in zip(answer.data, tokenizer.encode_batch(TEXTS), strict=True):
        assert np.array_equal(np.float32(item.embedding), vector_of(encoding.ids, DIMENSION))
        assert item.sparse["indices"] == list(weights_of(encoding.ids))
    alone = client.embeddings.create(input=TEXTS, model="embedder", extra_body={"outputs": ["sparse"]})
    assert alone.data[0].embedding is None


@pytest.mark.parametrize(
    ("fields", "param", "index", "words"),
    [
        ({"outputs": []}, "outputs", None, "empty"),
        ({"outputs": ["dense", "nope"]}, "outputs", 1, "it has: dense, sparse, colbert"),
        ({"outputs": ["dense", "dense"]}, "outputs", 1, "twice"),
        ({"outputs": "dense"}, "outputs", None, "expected a list of texts or null"),
        ({"outputs": [1]}, "outputs", None, "item 0 of outputs is the number 1: expected a text"),
        ({"outputs": ["sparse"], "dimensions": 8}, "dimensions", None, "not asked for"),
        ({"outputs": ["sparse"], "output_dtype": "ubinary"}, "output_dtype", None, "not asked for"),
        ({"outputs": ["sparse"], "sparse_format": "dict"}, "sparse_format", None, "dict"),
        ({"output_dtype": "int8"}, "output_dtype", None, "no quantiser"),
        ({"output_dtype": "uint8"}, "output_dtype", None, "no quantiser"),
        ({"output_dtype": "fp16"}, "output_dtype", None, "expected one of float"),
        ({"output_dtype": "ubinary", "dimensions": 12}, "dimensions", None, "a multiple of 8"),
        ({"prompt": 3}, "prompt", None, "the number 3: expected a text or null"),
    ],
)
def test_bad_fields(live, fields, param, index, words):
    response = live.embed("salt", **fields)
    error = response.json()["error"]
    assert response.status_code == 400, response.text
    assert (error["param"], error["index"]) == (param, index)
    assert words in error["message"]


def test_a_score_is_no_output_of_a_text(text_folder):
    with live_front(text_folder, card_for(text_folder, outputs=[score()], default_output="score")) as live:
        for fields in ({}, {"outputs": ["score"]}):
            response = live.embed("salt", **fields)
            assert response.status_code == 400
            assert "/v1/rerank" in response.json()["error"]["message"]


def test_token_vectors_of_very_long_requests_are_refused_with_the_limit(live, monkeypatch):
    """Report C73: a row a token multiplies what a request costs, so its numbers have an end of their own."""
    monkeypatch.setattr("rose.gateway.outputs.MOST_NUMBERS", 16 * 100)
    response = live.embed(["salt " * 10] * 5, outputs=["colbert"])
    assert response.status_code == 413
    assert (response.json()["error"]["param"], "1600" in response.json()["error"]["message"]) == ("outputs", True)
    assert live.embed(["salt " * 10] * 5).status_code == 200


def test_tokens_of_a_request_have_a_bound(text_folder):
    """Report C73: on the embeddings route as well."""
    with live_front(text_folder, card_for(text_folder), max_request_tokens=50) as live:
        assert live.embed(["salt " * 20] * 2).status_code == 200
        response = live.embed(["salt " * 20] * 3)
        assert (response.status_code, response.json()["error"]["code"]) == (413, "payload_too_large")
        assert "66 tokens" in response.json()["error"]["message"]
        assert live.embed([[5] * 30, [6] * 30]).status_code == 413


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_bytes_and_bits_are_what_their_dtype_says(pplx, encoding):
    def rows(dtype, numpy_dtype, **fields):
        items = data(pplx.embed([[5, 6], [7]], output_dtype=dtype, encoding_format=encoding, **fields))
        assert {item["dtype"] for item in items} == {dtype}
        if encoding == "float":
            return np.array([item["embedding"] for item in items]).astype(numpy_dtype)
        return np.stack([np.frombuffer(base64.b64decode(item["embedding"]), numpy_dtype) for item in items])

    dense = np.stack([vector_of(ids, DIMENSION) for ids in ([5, 6], [7])])
    signed = np.rint(np.tanh(dense) * 127).astype(np.int8)
    assert np.array_equal(rows("int8", np.int8), signed)
    assert np.array_equal(rows("int8", np.int8, dimensions=20), signed[:, :20])
    assert np.array_equal(rows("uint8", np.uint8), (signed.astype(int) + 128).astype(np.uint8))
    packed = np.packbits(dense > 0, axis=1)
    assert np.array_equal(rows("ubinary", np.uint8), packed)
    assert np.array_equal(rows("binary", np.int8), (packed.astype(int) - 128).astype(np.int8))
    assert np.array_equal(rows("ubinary", np.uint8, dimensions=16), packed[:, :2])


def test_perplexitys_formats_say_what_they_are(pplx):
    (item,) = data(pplx.embed([5, 6], encoding_format="base64_binary"))
    assert (item["dtype"], item["bit_order"]) == ("binary", "lsb")
    raw = np.frombuffer(base64.b64decode(item["embedding"]), np.uint8)
    assert np.array_equal(np.unpackbits(raw, bitorder="little"), vector_of([5, 6], DIMENSION) >= 0)
    (item,) = data(pplx.embed([5, 6], encoding_format="base64_int8"))
    assert item["dtype"] == "int8"
    (item,) = data(pplx.embed([5, 6]))
    assert set(item) == {"object", "index", "embedding"}


def test_quantised_vectors_beside_the_float_one(pplx):
    (item,) = data(pplx.embed([5, 6], outputs=["dense", "int8", "binary"]))
    dense = vector_of([5, 6], DIMENSION)
    assert np.array_equal(np.float32(item["embedding"]), dense)
    assert item["int8"] == np.rint(np.tanh(dense) * 127).astype(int).tolist()
    assert item["binary"] == np.packbits(dense >= 0, bitorder="little").tolist()
    (item,) = data(pplx.embed([5, 6], outputs=["int8"], encoding_format="base64"))
    assert (item["int8"]["dtype"], item["int8"]["shape"]) == ("int8", [DIMENSION])


def test_a_prompt_in_words_is_applied_and_told(text_folder):
    """Report C04 (tei#665): whichever way a prompt comes, the answer says that it was applied."""
    with live_front(text_folder, card_for(text_folder, default_prompt_name="passage")) as live:
        by_name, in_words = live.embed("salt", prompt_name="query"), live.embed("salt", prompt="query: ")
        assert data(by_name) == data(in_words)
        assert (by_name.json()["prompt_name"], "prompt" in by_name.json()) == ("query", False)
        assert (in_words.json()["prompt"], "prompt_name" in in_words.json()) == ("query: ", False)
        none = live.embed("salt", prompt="")
        assert data(none) == data(live.embed("salt", prompt_name=""))
        assert not {"prompt", "prompt_name"} & set(none.json())
        for fields, param in (
            ({"input": "a", "prompt": "x", "prompt_name": "query"}, "prompt"),
            ({"input": [5], "prompt": "x"}, "prompt"),
        ):
            response = live.client.post("/v1/embeddings", json=fields)
            assert (response.status_code, response.json()["error"]["param"]) == (400, param)

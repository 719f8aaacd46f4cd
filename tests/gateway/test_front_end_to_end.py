"""Text in, vectors out, through real processes: front and engine as `rose serve` starts them, against the reference."""

from __future__ import annotations

import base64
import json
from contextlib import contextmanager
from pathlib import Path

import grpc
import httpx
import numpy as np
import pytest

from rose.proto import rose_pb2 as pb
from rose.proto import rose_pb2_grpc
from rose.proto.convert import tensor_from_proto
from tests.gateway.processes import ports, running, wait_for
from tests.support.tiny_checkpoints import tiny_bert, tiny_qwen3, tiny_xlm_roberta

SNAPSHOT = Path(__file__).parents[1] / "data" / "minilm_test_128.json"
TEXTS = [
    *("The river meets the sea.", "  leading and trailing \n", "猫在窗台上睡着了。", "a [SEP] b </s> c", "x"),
    "Packed batches carry no padding, so every token is real work. " * 3,
]


@contextmanager
def served(folder):
    """The whole server on a folder: HTTP client and gRPC stub."""
    arguments = ["--num-threads", "1", "--device", "cpu"]
    with running("serve", folder=str(folder), engines=[arguments], config={}) as process:
        http, grpc_address = ports(process)
        with (
            httpx.Client(base_url=f"http://{http}", timeout=60) as client,
            grpc.insecure_channel(grpc_address) as channel,
        ):
            wait_for(lambda: process.poll() is not None or client.get("/ready").status_code == 200, timeout_s=90)
            yield client, rose_pb2_grpc.RoseStub(channel)


def vectors(client, value, **fields):
    response = client.post("/v1/embeddings", json={"input": value, **fields})
    assert response.status_code == 200, response.text
    data = response.json()["data"]
    assert [item["index"] for item in data] == list(range(len(data)))
    if fields.get("encoding_format") == "base64":
        return np.stack([np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in data])
    return np.array([item["embedding"] for item in data], dtype=np.float32)


def cosines(found, expected):
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    return (found * expected).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(expected, axis=1)


@pytest.fixture(scope="module", params=[tiny_bert, tiny_xlm_roberta], ids=["bert", "xlm-roberta"])
def live(request, tmp_path_factory):
    """A tiny model, served; and the reference library on the same folder."""
    from sentence_transformers import SentenceTransformer

    folder = request.param(tmp_path_factory.mktemp("tiny") / "model", pooling="mean", normalize=True)
    with served(folder) as (client, stub):
        yield client, stub, SentenceTransformer(str(folder), device="cpu")


def test_vectors_and_token_counts_are_the_reference_librarys(live):
    client, _, reference = live
    expected = reference.encode(TEXTS, normalize_embeddings=False)
    found = vectors(client, TEXTS)
    assert (cosines(found, expected) > 0.99999).all()
    assert np.abs(found - expected).max() < 1e-5
    usage = client.post("/v1/embeddings", json={"input": TEXTS}).json()["usage"]
    assert usage["prompt_tokens"] == sum(len(reference.tokenizer(text)["input_ids"]) for text in TEXTS)


def test_ids_base64_grpc_and_company_give_the_same_vectors(live):
    client, stub, reference = live
    found = vectors(client, TEXTS)
    ids = [reference.tokenizer(text)["input_ids"] for text in TEXTS]
    assert np.array_equal(vectors(client, TEXTS, encoding_format="base64"), found)
    assert np.abs(vectors(client, ids) - found).max() < 1e-6
    answer = stub.Embed(pb.EmbedRequest(texts=pb.Texts(items=TEXTS)))
    assert np.abs(tensor_from_proto(answer.outputs[0].values) - found).max() < 1e-6
    alone = np.concatenate([vectors(client, text) for text in TEXTS])
    assert np.abs(alone - found).max() < 1e-5


def test_order_holds_for_many_texts_of_mixed_lengths(live):
    """Report C12 (ollama#6187) against a scheduler that batches by length."""
    client, _, _ = live
    texts = [f"{i} " + "salt flour ferry " * (i * 13 % 9) for i in range(200)]
    found = vectors(client, texts, encoding_format="base64")
    for i in (0, 1, 57, 198, 199):
        assert np.abs(vectors(client, texts[i]) - found[i]).max() < 1e-5


def test_dimensions_are_cut_and_normalised_again(live):
    """Report C69 (vllm#15465)."""
    client, _, reference = live
    whole = reference.encode(TEXTS)
    found = vectors(client, TEXTS, dimensions=24)
    expected = whole[:, :24] / np.linalg.norm(whole[:, :24], axis=1, keepdims=True)
    assert np.abs(found - expected).max() < 1e-5


def test_bad_ids_leave_the_engine_alive(live):
    """Report C60 (vllm#11375): the last valid id works, the next one is a named 400, and so on after it."""
    client, _, reference = live
    size = client.get("/v1/models").json()["data"][0]
    limit = reference[0].auto_model.config.vocab_size
    assert vectors(client, [0, limit - 1]).shape == (1, size["dimension"])
    for bad in ([limit], [-1], [2**63], [[1], []]):
        assert client.post("/v1/embeddings", json={"input": bad}).status_code == 400
    assert vectors(client, "x").shape == (1, size["dimension"])


def test_quantised_vectors_are_those_of_the_model(tmp_path):
    """Signed bytes and sign bits of a model with a quantiser, whole and cut, against its own float vectors."""
    folder = tiny_qwen3(tmp_path / "model", bidirectional=True, pooling="mean", normalize=False, quantizer=True)
    with served(folder) as (client, _):
        dense = vectors(client, TEXTS)

        def raw(encoding, dtype, **fields):
            fields |= {"input": TEXTS, "encoding_format": encoding}
            data = client.post("/v1/embeddings", json=fields).json()["data"]
            return np.stack([np.frombuffer(base64.b64decode(item["embedding"]), dtype) for item in data])

        signed = raw("base64_int8", np.int8)
        assert np.abs(signed - np.tanh(dense.astype(np.float64)) * 127).max() < 0.501
        assert np.array_equal(raw("base64_int8", np.int8, dimensions=20), signed[:, :20])
        bits = raw("base64_binary", np.uint8)
        assert np.array_equal(bits, np.packbits(dense >= 0, axis=1, bitorder="little"))
        assert np.array_equal(raw("base64_binary", np.uint8, dimensions=24), bits[:, :3])


@pytest.fixture(scope="module")
def minilm(minilm_folder):
    with served(minilm_folder) as (client, _):
        yield client


@pytest.mark.weights
def test_minilm_matches_a_public_snapshot_of_another_server(minilm):
    """The numbers another server publishes for "test" cut to 128, with its own tolerance; alone and three at once."""
    expected = np.array(json.loads(SNAPSHOT.read_text())["values"], dtype=np.float32)
    alone = vectors(minilm, "test", dimensions=128)[0]
    assert np.abs(alone - expected).max() < 4e-3
    assert cosines(alone[None], expected[None])[0] > 0.9999
    assert np.linalg.norm(alone) == pytest.approx(1, abs=1e-5)
    assert np.abs(vectors(minilm, ["test"] * 3, dimensions=128) - alone).max() < 1e-5


@pytest.mark.weights
def test_minilm_knows_what_belongs_together(minilm):
    near, also, far = vectors(
        minilm, ["The capital of France is Paris.", "Paris is the capital of France.", "A recipe for pasta."]
    )
    assert near @ also > 0.9
    assert near @ far < 0.3


def test_a_cased_backbone_in_a_subfolder_is_served_in_lower_case(tmp_path):
    """As early sentence-transformers saved models: `0_Transformer/` holds all but modules.json and the pooling."""
    from sentence_transformers import SentenceTransformer

    folder = tiny_xlm_roberta(tmp_path / "early", max_seq_length=64)
    backbone = folder / "0_Transformer"
    backbone.mkdir()
    for path in [path for path in folder.iterdir() if path.is_file() and path.name != "modules.json"]:
        path.rename(backbone / path.name)
    modules = json.loads((folder / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (folder / "modules.json").write_text(json.dumps(modules))
    stated = json.loads((backbone / "sentence_bert_config.json").read_text())
    (backbone / "sentence_bert_config.json").write_text(json.dumps(stated | {"do_lower_case": True}))
    reference = SentenceTransformer(str(folder), device="cpu")
    texts = [*TEXTS[:5], "The RIVER Meets THE Sea"]
    with served(folder) as (client, _):
        found = vectors(client, texts)
    assert cosines(found, reference.encode(texts)).min() >= 0.99999

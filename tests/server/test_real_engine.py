"""The reactor around the real engine and a small real model, against the same model run by hand."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest
import torch

from rose.attention_backends.base import WorkspaceReport
from rose.client import Client
from rose.config import read_model_folder
from rose.convert import load_model
from rose.engine import build_engine
from rose.errors import InvalidInput, StartupError
from rose.server.run import Serving, warm_up
from rose.server.selfcheck import self_check
from tests.server.by_hand import by_hand, cosine, random_sequences
from tests.server.served import BUDGETS, Served
from tests.support.tiny_checkpoints import tiny_bert, tiny_qwen3


@pytest.fixture(scope="module", params=["tcp", "unix"])
def bert(request, tmp_path_factory):
    base = tmp_path_factory.mktemp("bert")
    served = Served(tiny_bert(base / "model"), "127.0.0.1:0" if request.param == "tcp" else f"unix:{base}/link.sock")
    yield served
    served.close()


@pytest.fixture(scope="module")
def pplx(tmp_path_factory):
    served = Served(tiny_qwen3(tmp_path_factory.mktemp("pplx"), bidirectional=True), "127.0.0.1:0")
    yield served
    served.close()


def test_two_hundred_sequences_in_order_and_right(bert):
    """Report C12 (ollama#6187): vector i belongs to text i, whatever the scheduler packs together."""
    lengths = np.random.default_rng(3).choice([1, 2, 9, 33, 64, 100, 128], size=200)
    sequences = random_sequences(bert.model.vocab_size, lengths)
    with Client(bert.address) as client:
        result = client.embed(sequences)
    assert result.timing.batches > 10
    for ids, row in zip(sequences, result.vectors, strict=True):
        assert cosine(row, by_hand(bert.model, ids, "dense")) > 0.999999


def test_singles_and_batches_agree_over_the_wire(bert):
    sequences = random_sequences(bert.model.vocab_size, [5, 5, 128, 1], seed=1)
    with Client(bert.address) as client:
        together = client.embed(sequences).vectors
        alone = np.concatenate([client.embed([ids]).vectors for ids in sequences])
    np.testing.assert_allclose(together, alone, atol=1e-5)


def test_cut_vectors_have_unit_length_where_the_model_normalises(bert):
    sequences = random_sequences(bert.model.vocab_size, [7, 20], seed=2)
    with Client(bert.address) as client:
        card = client.info()
        whole = client.embed(sequences).vectors
        cut = client.embed(sequences, dimensions=10).vectors
    assert card.outputs[0].normalized == bert.folder.normalize
    expected = whole[:, :10]
    if bert.folder.normalize:
        expected = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(cut, expected, atol=1e-6)


def test_integer_outputs_travel_as_integers(pplx):
    sequences = random_sequences(pplx.model.vocab_size, [3, 50], seed=4)
    with Client(pplx.address) as client:
        result = client.embed(sequences, outputs=["binary", "int8"])
    assert result.outputs["int8"].dtype == np.int8
    assert result.outputs["binary"].dtype == np.uint8
    for i, ids in enumerate(sequences):
        difference = result.outputs["int8"][i].astype(int) - by_hand(pplx.model, ids, "int8").astype(int)
        assert np.abs(difference).max() <= 1, "one step of the grid, where a value lies on its edge"
        assert (result.outputs["int8"][i] != 0).any()


@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_ids_around_the_end_of_the_vocabulary(bert, offset):
    """Report C60 (vllm#11375): vocab_size - 1 works, vocab_size is named, the next request is served."""
    last = bert.model.vocab_size - 1
    with Client(bert.address) as client:
        if offset <= 0:
            assert np.isfinite(client.embed([[last + offset]]).vectors).all()
        else:
            with pytest.raises(InvalidInput, match=f"token id {last + 1} "):
                client.embed([[last + offset]])
            assert client.embed([[last]]).vectors.shape == (1, 64)


def test_the_card_describes_the_folder(bert):
    with Client(bert.address) as client:
        card = client.info()
    assert card.model == "tiny"
    assert card.architecture == "BertModel"
    assert (card.hidden_size, card.max_tokens, card.max_batch_tokens) == (64, 128, 512)
    assert card.tokenizer_sha256.hex() == bert.folder.tokenizer_sha256
    assert (card.pooling, card.causal, card.device, card.dtype) == ("mean", False, "cpu", "float32")
    assert card.backend == "torch_sdpa", "what serves, not what was asked for"


def test_counters_of_the_engine_are_in_the_stats(bert):
    with Client(bert.address) as client:
        before = client.stats()
        client.embed([[1, 2, 3]])
        after = client.stats()
    assert after.engine_counters["batches"] == before.engine_counters["batches"] + 1
    assert after.tokens_total == before.tokens_total + 3


def test_memory_of_attention_plans_is_in_the_stats(bert, monkeypatch):
    with Client(bert.address) as client:
        assert client.stats().engine_counters["attention_device_bytes"] == 0
        held = WorkspaceReport(device_bytes=4 << 20, used_bytes=70_000, limit_bytes=512 << 20, keys=3, fence_waits=1)
        monkeypatch.setattr(bert.engine.backend, "workspace", lambda: held)
        counters = client.stats().engine_counters
    told = {name.removeprefix("attention_"): n for name, n in counters.items() if name.startswith("attention_")}
    assert told == asdict(held)


def test_a_model_that_gives_nan_is_not_served(tmp_path):
    """Report C112 (onnxruntime#32600): some machines' kernels give NaN; one forward before serving shows it."""
    model = load_model(read_model_folder(tiny_bert(tmp_path)))
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    engine = build_engine(model, BUDGETS, num_threads=1)
    with pytest.raises(StartupError, match="'dense' is not finite"):
        self_check(engine, model)
    engine.close()


def test_warming_up_reaches_every_bucket_of_single_queries(tmp_path):
    model = load_model(read_model_folder(tiny_bert(tmp_path)))
    engine = build_engine(model, BUDGETS, num_threads=1)
    asked = []
    engine.warmup = asked.extend
    warm_up(engine, BUDGETS, torch.device("cuda"), Serving())
    assert {engine.key_for([n]) for n in (63, 64, 127, 128)} <= set(asked)
    assert max(key.tokens for key in asked) == BUDGETS.bulk_tokens
    warm_up(engine, BUDGETS, torch.device("cuda"), Serving(warm_up=False))
    assert len(asked) == len(set(asked))
    engine.close()

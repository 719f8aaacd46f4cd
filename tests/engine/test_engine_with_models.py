"""The engine over real architectures with tiny weights: company changes nothing, and nothing gets mixed up."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from rose.attention_backends import load_backend
from rose.batch import Batch
from rose.config import EngineConfig, read_model_folder
from rose.convert import load_model
from rose.engine import Item, Request, build_engine
from rose.errors import StartupError
from tests.support.tiny_checkpoints import tiny_bert, tiny_qwen3, tiny_xlm_roberta

FAMILIES = {"bert": tiny_bert, "xlm_roberta": tiny_xlm_roberta, "qwen3": tiny_qwen3}
CONFIG = EngineConfig(online_tokens=96, bulk_tokens=256, max_sequences=16, max_tokens=64)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    folder = FAMILIES[request.param](tmp_path_factory.mktemp(request.param) / "model")
    return load_model(read_model_folder(folder))


@pytest.fixture
def engine(model):
    engine = build_engine(model, CONFIG, num_threads=1)
    yield engine
    engine.close()


def sequences(model, lengths) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.integers(5, model.vocab_size, n).astype(np.int32) for n in lengths]


def embed(engine, *requests: Request) -> dict[Item, np.ndarray]:
    for request in requests:
        engine.add(request)
    found = {}
    while not engine.idle:
        for result in engine.step():
            found.update(zip(result.items, result.outputs["dense"].result(), strict=True))
        time.sleep(0.0002)
    return found


def alone(model, ids: np.ndarray) -> np.ndarray:
    """The model called by hand on one sequence, without any part of the engine."""
    batch = Batch.pack([ids.tolist()])
    batch.attention = load_backend("torch_sdpa", model.attention_spec(torch.device("cpu"), torch.float32)).plan(batch)
    with torch.inference_mode():
        return model(batch, ["dense"])["dense"][0].numpy()


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def test_every_vector_equals_that_of_its_sequence_run_by_hand(model, engine):
    """Report C12 (ollama#6187): whatever the lengths and however they are batched, each answer is its question's."""
    lengths = np.random.default_rng(0).integers(1, CONFIG.max_tokens + 1, 60)
    ids = sequences(model, lengths)
    got = embed(engine, Request(1, ids), Request(2, ids[:1]), Request(3, ids[::-1]))
    assert len(got) == 121
    for index, array in enumerate(ids):
        expected = alone(model, array)
        for vector in (got[Item(1, index)], got[Item(3, len(ids) - 1 - index)]):
            assert cosine(vector, expected) >= 0.99999
            np.testing.assert_allclose(vector, expected, rtol=1e-3, atol=1e-5)


def test_warming_up_changes_no_answer(model, engine):
    ids = sequences(model, [7, 31])
    before = embed(engine, Request(1, ids))
    engine.warmup([engine.key_for([64]), engine.key_for([7, 31])])
    after = embed(engine, Request(2, ids))
    for index in range(2):
        np.testing.assert_array_equal(before[Item(1, index)], after[Item(2, index)])


def test_a_device_without_an_executor_is_refused_at_start(model):
    with pytest.raises(StartupError, match="meta"):
        build_engine(model, CONFIG, "meta", backend="torch_sdpa")


def test_an_unknown_backend_is_refused_at_start(model):
    with pytest.raises(StartupError, match="unknown attention backend 'nonsense'"):
        build_engine(model, CONFIG, backend="nonsense")

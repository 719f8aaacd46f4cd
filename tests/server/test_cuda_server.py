"""The reactor on a CUDA device: no descriptor to wait for, only events to ask."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from rose.client import Client
from rose.config import EngineConfig, ServerConfig, read_model_folder
from rose.convert import load_model
from rose.engine import build_engine
from rose.proto.address import parse_address
from rose.server.card import model_card
from rose.server.listener import Listener
from rose.server.run import Serving, build_reactor, device_alive, warm_up
from rose.server.selfcheck import self_check
from rose.server.waiting import sharpen_sleep
from tests.server.by_hand import by_hand, cosine, random_sequences
from tests.support.tiny_checkpoints import tiny_bert

pytestmark = pytest.mark.gpu

BUDGETS = EngineConfig(max_tokens=512, graph_bytes=256 << 20)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    base = tmp_path_factory.mktemp("cuda")
    tiny_bert(base / "model", hidden_size=256, num_heads=4, max_positions=512)
    folder = read_model_folder(base / "model")
    device, dtype = torch.device("cuda"), torch.bfloat16
    model = load_model(folder, device, dtype)
    engine = build_engine(model, BUDGETS, device, dtype)
    warm_up(engine, BUDGETS, device, Serving())
    self_check(engine, model)
    listener = Listener(parse_address(f"unix:{base}/link.sock"))
    card = model_card(
        folder, model, BUDGETS, ServerConfig(), served_name="tiny", dtype="bfloat16", device="cuda", backend="auto"
    )
    reactor = build_reactor(engine, model, card, listener, BUDGETS, ServerConfig(), device)
    reactor.listen()
    thread = threading.Thread(target=lambda: (sharpen_sleep(), reactor.run()), daemon=True)
    thread.start()
    yield str(listener.address), thread, load_model(folder)
    reactor.stop()
    reactor.stop()
    thread.join(10)
    engine.close()


def test_vectors_are_those_of_the_model_in_order(served):
    address, _, reference = served
    lengths = np.random.default_rng(0).choice([1, 3, 64, 65, 200, 512], size=150)
    sequences = random_sequences(reference.vocab_size, lengths)
    with Client(address) as client:
        for _ in range(3):  # plain, captured, replayed
            vectors = client.embed(sequences).vectors
            for ids, row in zip(sequences[:60], vectors, strict=False):
                assert cosine(row, by_hand(reference, ids, "dense")) > 0.998


def test_queries_one_after_the_other_replay_graphs(served):
    address, _, reference = served
    with Client(address) as client:
        before = client.stats().engine_counters["graph_hits"]
        ids = random_sequences(reference.vocab_size, [100])[0]
        for _ in range(50):
            assert cosine(client.embed([ids]).vectors[0], by_hand(reference, ids, "dense")) > 0.998
        assert client.stats().engine_counters["graph_hits"] >= before + 48


def test_idle_it_uses_no_core(served):
    address, thread, _ = served
    stat = Path(f"/proc/self/task/{thread.native_id}/schedstat")
    with Client(address) as client:
        client.embed([[1, 2]])
        before = int(stat.read_text().split()[0])
        time.sleep(0.5)
        assert int(stat.read_text().split()[0]) - before < 5_000_000


def test_the_device_answers():
    assert device_alive(torch.device("cuda"))

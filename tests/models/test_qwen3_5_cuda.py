"""Qwen3.5 on a CUDA device in bf16 against the same folder in fp32 on the CPU, by batch and by graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rose.attention_backends import load_backend
from rose.batch import Batch
from rose.config import read_model_folder
from rose.convert import load_generative, load_model
from tests.support.paged_session import PagedSession
from tests.support.running import embed, load, logits_of, random_sequences
from tests.support.tiny_qwen3_5 import tiny_qwen3_5

pytestmark = pytest.mark.gpu
DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
# Heads of the published models, and few of them.
SHAPE = {
    "hidden_size": 256,
    "head_dim": 256,
    "key_heads": 2,
    "value_heads": 4,
    "key_dim": 128,
    "value_dim": 128,
    "intermediate_size": 384,
    "max_positions": 4096,
}
LENGTHS = [300, 1, 64, 65, 7, 1000]


@pytest.fixture
def exact():
    """Nothing is rounded to tf32 where fp32 is asked for."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = allowed


def on_device(model, sequences, dtype):
    batch = Batch.pack(sequences, DEVICE)
    batch.attention = load_backend("torch_sdpa", model.attention_spec(DEVICE, dtype)).plan(batch)
    return batch


@pytest.mark.parametrize(("dtype", "least"), [(torch.float32, 0.999999), (DTYPE, 0.998)])
@pytest.mark.parametrize("causal", [True, False])
def test_vectors(tmp_path, exact, causal, dtype, least):
    folder = read_model_folder(tiny_qwen3_5(tmp_path / "m", pooling="mean", **SHAPE), causal=causal)
    sequences = random_sequences(LENGTHS, 400)
    expected = embed(load_model(folder), sequences)
    fast = load_model(folder, DEVICE, dtype)
    found = fast(on_device(fast, sequences, dtype), ["dense"])["dense"].cpu()
    assert torch.cosine_similarity(found, expected).min() >= least


def test_a_row_has_the_same_bits_alone_and_in_company(tmp_path):
    """Delta rule and convolution take a sequence's chunks one by one; products of the same many tokens are alike."""
    model = load(tiny_qwen3_5(tmp_path / "m", pooling="mean", **SHAPE), device=DEVICE, dtype=DTYPE)
    a, b, c = random_sequences([200, 100, 100], 400)
    first = model(on_device(model, [a, b, c], DTYPE), ["dense"])["dense"]
    second = model(on_device(model, [c, a, b], DTYPE), ["dense"])["dense"]
    torch.testing.assert_close(first, second[[1, 2, 0]], rtol=0, atol=2e-2)
    assert torch.cosine_similarity(first, second[[1, 2, 0]]).min() > 0.9999


def test_logits_over_pages(tmp_path, exact):
    """Chunks, steps and mixed batches in fp32: every row is that of the CPU's one full forward, and greedy too."""
    folder = read_model_folder(tiny_qwen3_5(tmp_path / "m", tied=False, **SHAPE))
    sequences = random_sequences([150, 40], 400)
    expected = [logits_of(load_generative(folder), [ids], every_row=True) for ids in sequences]
    session = PagedSession(load_generative(folder, DEVICE, torch.float32), device="cuda", pages=40)
    done = [0, 0]
    for cuts in [(70, 0), (1, 33), (64, 1), (1, 1), (14, 5)]:
        chunks = [(s, sequences[s][done[s] : done[s] + n]) for s, n in enumerate(cuts) if n]
        chunks.sort(key=lambda chunk: len(chunk[1]) > 1)
        for (s, ids), rows in zip(chunks, session.every_row(chunks), strict=True):
            torch.testing.assert_close(rows.cpu(), expected[s][done[s] : done[s] + len(ids)], rtol=1e-3, atol=1e-3)
            done[s] += len(ids)
    assert done == [150, 40]


def staged(batch):
    """What a replay reads: the arrays that the engine stages for each batch of a graph's key."""
    paged = batch.paged
    return [batch.ids, batch.positions, paged.kv_lengths, paged.slots, paged.states, paged.page_table]


def test_steps_inside_a_graph(tmp_path, exact):
    """A decoding batch captured once and replayed on other tokens and lengths: each replay is the plain step, and
    leaves the rows as that does. One sequence starts in the graph, from zero."""
    model = load_generative(read_model_folder(tiny_qwen3_5(tmp_path / "m", **SHAPE)), DEVICE, torch.float32)
    first, second = random_sequences([70, 5], 400)
    plain, graphed = PagedSession(model, device="cuda"), PagedSession(model, device="cuda")
    graphed.table, graphed.rows = plain.table, plain.rows
    for session in (plain, graphed):
        session.run([(0, first), (1, second)])
    batch = graphed.batch([(0, [7]), (1, [8]), (2, [9])], bound=160)
    own = [tensor.clone() for tensor in staged(batch)]
    rows = batch.cu_seqlens[1:] - 1
    pools = [pool(layer) for layer in model.recurrent.layers for pool in (batch.states.conv, batch.states.recurrent)]
    before = [pool.clone() for pool in pools]
    with torch.inference_mode():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            model(batch, rows)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = model(batch, rows)
    for pool, old in zip(pools, before, strict=True):
        pool.copy_(old)
    for step, tokens in enumerate([(7, 8, 9), (10, 11, 12), (13, 14, 15)]):
        chunks = [(sequence, [token]) for sequence, token in enumerate(tokens)]
        for tensor, value in zip(staged(batch), own if step == 0 else staged(graphed.batch(chunks)), strict=True):
            tensor.copy_(value)
        graph.replay()
        torch.testing.assert_close(captured, plain.run(chunks), rtol=1e-4, atol=1e-4)
    for layer in model.recurrent.layers:
        for pool in ("conv", "recurrent"):
            ours, theirs = (getattr(s.states, pool)(layer)[s.rows[:3].long()] for s in (graphed, plain))
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_whole_batches_inside_a_graph(tmp_path):
    """Captured with three sequences, replayed with the same many of other lengths: nothing asks the host."""
    model = load(tiny_qwen3_5(tmp_path / "m", pooling="mean", **SHAPE), device=DEVICE, dtype=DTYPE)
    backbone = model.backbone
    backend = load_backend("triton_short", replace(model.attention_spec(DEVICE, DTYPE), max_length=256))

    def batch_of(lengths):
        batch = on_device(model, random_sequences(lengths, 400, seed=lengths[0]), DTYPE)
        batch.max_length = 256
        batch.attention = backend.plan(batch)
        return batch

    batch = batch_of([100, 100, 56])
    with torch.inference_mode():
        backbone(batch)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = backbone(batch)
        for lengths in ([100, 100, 56], [1, 3, 252], [64, 128, 64]):
            other = batch_of(lengths)
            for name in ("ids", "positions", "cu_seqlens"):
                getattr(batch, name).copy_(getattr(other, name))
            graph.replay()
            torch.testing.assert_close(captured, backbone(other), rtol=0, atol=0)

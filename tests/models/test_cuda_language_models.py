"""Language models in bf16 on a CUDA device against the same folder in fp32 on the CPU, and the head inside a graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rose.attention_backends import load_backend
from rose.batch import Batch
from rose.config import read_model_folder
from rose.convert import load_generative
from tests.support.running import logits_of, random_sequences
from tests.support.tiny_language_models import LLAMA3_ROPE, tiny_lm

pytestmark = pytest.mark.gpu
DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
# 64 values a head and 256 a row, so that the shapes are ones the kernels are made for.
SIZE = {"hidden_size": 256, "num_heads": 4, "intermediate_size": 384}
MODELS = {
    "llama3": ("llama", {"config": {"rope_scaling": LLAMA3_ROPE}}),
    "llama_biases": ("llama", {"config": {"attention_bias": True, "mlp_bias": True}}),
    "smollm2": ("llama", {"tied": True, "num_heads": 9, "num_kv_heads": 3, "hidden_size": 576}),
    "mistral": ("mistral", {"config": {"sliding_window": 16}}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 64, "tied": True}),
}
SEQUENCES = random_sequences([11, 1, 90, 40], 400)


@pytest.fixture(params=MODELS)
def folder(request, tmp_path):
    model_type, arguments = MODELS[request.param]
    return read_model_folder(tiny_lm(tmp_path / "m", model_type, **SIZE | arguments))


def on_device(model) -> tuple[Batch, torch.Tensor]:
    """(the packed sequences with a plan, every one of their rows)."""
    batch = Batch.pack(SEQUENCES, DEVICE)
    spec = replace(model.attention_spec(DEVICE, DTYPE), layout="ragged")
    batch.attention = load_backend("torch_sdpa", spec).plan(batch)
    return batch, torch.arange(batch.num_tokens, dtype=torch.int32, device=DEVICE)


def test_bf16_on_the_device(folder):
    exact, fast = load_generative(folder), load_generative(folder, DEVICE)
    assert {p.dtype for p in fast.parameters()} == {DTYPE}
    found = fast(*on_device(fast))
    assert found.dtype == torch.float32
    expected = logits_of(exact, SEQUENCES, every_row=True)
    assert torch.cosine_similarity(found.cpu(), expected).min() >= 0.998


def test_a_graph_replays_the_plain_run(folder):
    model = load_generative(folder, DEVICE)
    batch, rows = on_device(model)
    plain = model(batch, rows)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model(batch, rows)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, plain)

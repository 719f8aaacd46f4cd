"""Every family in bf16 on a CUDA device against the same folder in fp32 on the CPU, and every head inside a graph."""

from __future__ import annotations

import pytest
import torch

from rose.attention_backends import load_backend
from rose.batch import Batch
from rose.config import read_model_folder
from rose.convert import load_model
from tests.support.running import batch_of, encode, encode_pairs
from tests.support.tiny_families import (
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
from tests.support.tiny_tokenizers import CORPUS

pytestmark = pytest.mark.gpu
DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
# 64 values a head and 256 a row, so that the shapes are ones the kernels are made for.
SIZE = {"hidden_size": 256, "num_heads": 4, "intermediate_size": 384}
FAMILIES = {
    "bge_m3": (tiny_bge_m3, SIZE, {}),
    "e5": (tiny_e5, SIZE, {}),
    "qwen3_embedding": (tiny_qwen3_embedding, SIZE | {"head_dim": 64}, {}),
    "pplx": (tiny_pplx, SIZE | {"head_dim": 64}, {}),
    "pplx_context": (tiny_pplx_context, SIZE | {"head_dim": 64}, {}),
    "cross_encoder_bert": (tiny_cross_encoder_bert, SIZE | {"labels": 2}, {}),
    "cross_encoder_xlmr": (tiny_cross_encoder_xlmr, SIZE, {}),
    "qwen3_reranker": (tiny_qwen3_reranker, SIZE | {"head_dim": 64}, {}),
    "qwen3_classifier": (tiny_qwen3_classifier, SIZE | {"head_dim": 64}, {"template": "qwen3"}),
}
PAIRS = [(CORPUS[i], CORPUS[-1 - i]) for i in range(6)]


@pytest.fixture(params=FAMILIES)
def folder(request, tmp_path):
    make, shape, reading = FAMILIES[request.param]
    return read_model_folder(make(tmp_path / "m", **shape), **reading)


def on_device(model, batch: Batch) -> Batch:
    """The same packed batch on the GPU, with a plan of its own."""
    moved = [None if t is None else t.to(DEVICE) for t in (batch.type_ids, batch.spans)]
    tensors = [t.to(DEVICE) for t in (batch.ids, batch.positions, batch.cu_seqlens)]
    gpu = Batch(*tensors, batch.lengths, batch.max_length, *moved)
    gpu.attention = load_backend("torch_sdpa", model.attention_spec(DEVICE, DTYPE)).plan(gpu)
    return gpu


def test_bf16_on_the_device(folder):
    exact, fast = load_model(folder), load_model(folder, DEVICE, DTYPE)
    ids, types = encode_pairs(folder, PAIRS) if folder.reranker else (encode(folder, list(CORPUS)), None)
    spans = [[(0, len(own) // 2), (len(own) // 2, len(own)), (1, 1)] for own in ids] if folder.contextual else None
    batch = batch_of(exact, ids, type_ids=types, spans=spans)
    outputs = list(exact.outputs)
    expected, out = exact(batch, outputs), fast(on_device(fast, batch), outputs)
    for name in outputs:
        ours, theirs = out[name].cpu(), expected[name]
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        if name in ("dense", "colbert", "int8"):
            ours, theirs = ours.float(), theirs.float()
            full = theirs.norm(dim=-1) > 0
            assert torch.cosine_similarity(ours[full], theirs[full]).min() >= 0.998
            assert not ours[~full].any()
        elif name in ("sparse", "score"):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0.1 * float(theirs.abs().max()))


def test_heads_inside_a_graph(folder):
    """Replayed on new rows, every head gives what it gives outside: none of them asks the host anything."""
    model = load_model(folder, DEVICE, DTYPE)
    width = folder.architecture.hidden_size
    hidden = torch.randn(48, width, device=DEVICE).to(DTYPE)
    ids = torch.randint(0, 9, (48,), dtype=torch.int32, device=DEVICE)
    bounds = torch.tensor([0, 7, 8, 48], dtype=torch.int32, device=DEVICE)
    spans = torch.tensor([[0, 3], [3, 3], [7, 48]], dtype=torch.int32, device=DEVICE)

    def heads():
        results = [model.head(hidden, bounds)]
        if getattr(model, "spans_unavailable", "") is None:
            results.append(model.head(hidden, bounds, spans))
        if getattr(model, "lexical", None) is not None:
            results += [model.lexical(hidden.float(), ids), model.colbert(hidden.float())]
        return results

    with torch.inference_mode():
        heads()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = heads()
        hidden.copy_(torch.randn(48, width, device=DEVICE))
        graph.replay()
        for inside, outside in zip(captured, heads(), strict=True):
            torch.testing.assert_close(inside, outside, rtol=1e-5, atol=1e-6)

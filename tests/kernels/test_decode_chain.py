"""Steps of generating as chains of kernels that start before their predecessors have finished: the bits they give one
at a time. Steps follow one another over one cache, each reading what the one before has stored."""

from __future__ import annotations

import pytest
import torch

from rose.batch import HeadRotation
from rose.kernels.add_norm import add_rms_norm, rms_norm
from rose.kernels.greedy import greedy_triton
from rose.kernels.latest import keep_latest, take_latest
from rose.kernels.linear import linear, linear_gated, linear_partial
from rose.kernels.paged_attention import paged_decode, paged_prefill
from rose.kernels.qk_norm_rope import rope_table
from rose.kernels.store_kv import qk_norm_rope_store

pytestmark = pytest.mark.gpu
D, H, G, DH, WIDE, V, PAGE, LAYERS = 1024, 16, 8, 128, 3072, 8192, 16, 3
SEQUENCES, START, STEPS, BOUND = 4, 60, 30, 1024


@pytest.fixture
def device():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch.manual_seed(0)
    return torch.device("cuda")


def randn(*shape, scale=1.0):
    return (torch.randn(*shape, device="cuda") * scale).to(torch.bfloat16)


class Model:
    """Three layers of a Qwen3-0.6B shape and the pages of four sequences of 60, 61, 62 and 63 tokens."""

    def __init__(self):
        shapes = (((H + 2 * G) * DH, D), (D, H * DH), (2 * WIDE, D), (D, WIDE))
        self.weights = [[randn(*s, scale=0.03) for s in shapes] for _ in range(LAYERS)]
        self.words, self.gain, self.head_gain = randn(V, D), randn(D), randn(DH)
        self.rotary = rope_table(BOUND, DH, 1e6, "cuda")
        pages = 1 + torch.randperm(SEQUENCES * 8, device="cuda")
        self.table = pages.int().view(SEQUENCES, 8).contiguous()
        self.first = [
            (torch.randn(SEQUENCES * 8 + 1, PAGE, G, DH), torch.randn(SEQUENCES * 8 + 1, PAGE, G, DH))
        ] * LAYERS
        self.latest = torch.zeros(SEQUENCES + 1, dtype=torch.int32, device="cuda")
        self.ids = torch.arange(-2, -2 - SEQUENCES, -1, dtype=torch.int32, device="cuda")
        self.lanes = torch.arange(1, SEQUENCES + 1, dtype=torch.int32, device="cuda")
        self.lengths, self.positions, self.slots = (
            torch.zeros(SEQUENCES, dtype=torch.int32, device="cuda") for _ in range(3)
        )

    def reset(self):
        self.caches = [tuple(x.to("cuda", torch.bfloat16) for x in pair) for pair in self.first]
        self.latest.copy_(torch.arange(SEQUENCES + 1))

    def stage(self, step):
        at = START + step + torch.arange(SEQUENCES, device="cuda")
        self.positions.copy_(at)
        self.lengths.copy_(at + 1)
        self.slots.copy_(self.table.gather(1, (at // PAGE)[:, None]).squeeze(1) * PAGE + at % PAGE)

    def step(self, after):
        ids = after(take_latest(self.ids, self.latest))
        stream = after(self.words[ids])
        x = after(rms_norm(stream, self.gain, 1e-6))
        rotation = HeadRotation(self.positions, self.rotary, self.head_gain, self.head_gain, 1e-6)
        for (qkv_w, o_w, gate_up_w, down_w), pair in zip(self.weights, self.caches, strict=True):
            q, k, v = after(linear(x, qkv_w)).view(SEQUENCES, -1, DH).split([H, G, G], dim=1)
            where = self.table, self.lengths, self.slots, BOUND, DH**-0.5
            a = after(paged_decode(q, k, v, *pair, *where, None, rotation))
            x, stream = after(add_rms_norm(after(linear_partial(a.view(-1, H * DH), o_w)), stream, self.gain, 1e-6))
            p = after(linear_partial(after(linear_gated(x, gate_up_w)), down_w))
            x, stream = after(add_rms_norm(p, stream, self.gain, 1e-6))
        logits = after(torch.mm(x, self.words.T, out_dtype=torch.float32))
        drawn = after(greedy_triton(logits, V))
        keep_latest(drawn, self.lanes, self.latest)
        return drawn


def one_at_a_time(x):
    torch.cuda.synchronize()
    return x


def run(model, step):
    model.reset()
    torch.cuda.synchronize()
    tokens = []
    for number in range(STEPS):
        model.stage(number)
        tokens.append(step().clone())
    torch.cuda.synchronize()
    return torch.stack(tokens), [x for pair in model.caches for x in pair]


def test_steps_back_to_back_and_in_a_graph(device):
    model = Model()
    expected, caches = run(model, lambda: model.step(one_at_a_time))
    assert len(expected.unique()) > STEPS
    for _ in range(5):
        tokens, stored = run(model, lambda: model.step(lambda x: x))
        assert torch.equal(tokens, expected)
        assert all(torch.equal(a, b) for a, b in zip(stored, caches, strict=True))

    kept = []

    def keep(x):
        kept.append(x)
        return x

    # A graph reads the caches of its capture: later resets fill these.
    held = model.caches
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        model.step(lambda x: x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model.step(keep)

    def replay():
        if model.caches is not held:
            for pair, fresh in zip(held, model.caches, strict=True):
                for old, new in zip(pair, fresh, strict=True):
                    old.copy_(new)
            model.caches = held
        for tensor in kept:
            for part in tensor if isinstance(tensor, tuple) else (tensor,):
                part.fill_(torch.nan if part.is_floating_point() else 0)
        graph.replay()
        return out

    for _ in range(3):
        tokens, stored = run(model, replay)
        assert torch.equal(tokens, expected)
        assert all(torch.equal(a, b) for a, b in zip(stored, caches, strict=True))


def test_chunks_back_to_back(device):
    """Norm, rotary and storing, then attention over what was stored, layer after layer on one cache a layer."""
    model = Model()
    model.reset()
    chunks = (33, 1, 16, 40)
    T = sum(chunks)
    cu = torch.tensor([0, *chunks], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    lengths = torch.tensor([33, 20, 70, 100], dtype=torch.int32, device=device)
    at = torch.cat([torch.arange(int(n) - c, int(n)) for n, c in zip(lengths, chunks, strict=True)]).to(device)
    rows = torch.repeat_interleave(torch.arange(4, device=device), torch.tensor(chunks, device=device))
    slots = (model.table[rows, at // PAGE] * PAGE + at % PAGE).int()
    rotation = HeadRotation(at.int(), model.rotary, model.head_gain, model.head_gain, 1e-6)
    start = randn(T, D)

    def forward(after):
        x = start
        for (qkv_w, o_w, _, _), pair in zip(model.weights, model.caches, strict=True):
            qkv = after(linear(x, qkv_w))
            qk_norm_rope_store(qkv, rotation, *pair, slots)
            q = after(qkv).view(T, -1, DH)[:, :H]
            a = after(paged_prefill(q, *pair, model.table, lengths, cu, 0, DH**-0.5))
            x = after(
                rms_norm(after(linear_partial(a.view(T, -1), o_w)).float().sum(0).to(torch.bfloat16), model.gain, 1e-6)
            )
        return x

    expected = forward(one_at_a_time)
    assert torch.isfinite(expected).all()
    for _ in range(30):
        assert torch.equal(forward(lambda x: x), expected)

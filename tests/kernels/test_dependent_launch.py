"""Kernels that start before their predecessors have finished: chains give the bits that they give one at a time."""

from __future__ import annotations

import pytest
import torch

from rose.kernels.add_norm import add_layer_norm, add_rms_norm, rms_norm
from rose.kernels.carried import Carried
from rose.kernels.causal_conv import causal_conv, causal_conv_step
from rose.kernels.delta_heads import DeltaHeads, Gates
from rose.kernels.embed_layer_norm import embed_layer_norm
from rose.kernels.gated_delta_rule import gated_delta_rule
from rose.kernels.gated_delta_step import gated_delta_step
from rose.kernels.gated_norm import gated_norm
from rose.kernels.gated_qk_norm_rope import gated_qk_norm_rope
from rose.kernels.linear import linear, linear_gated, linear_partial
from rose.kernels.pool import pool_finish
from rose.kernels.qk_norm_rope import qk_norm_rope, rope_table
from rose.kernels.short_attention import short_attention
from rose.kernels.sigmoid_gate import sigmoid_gate

pytestmark = pytest.mark.gpu
LENGTHS = [37, 1, 64, 26]


@pytest.fixture
def device():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch.manual_seed(0)
    return torch.device("cuda")


def randn(*shape, scale=1.0):
    return (torch.randn(*shape, device="cuda") * scale).to(torch.bfloat16)


def bert(cu_seqlens, positions):
    """Two post-norm layers of a BGE-M3 shape; `after` runs after every operation."""
    D, H = 1024, 16
    word, position, types = randn(1000, D), randn(600, D), randn(1, D)
    ids = torch.randint(0, 1000, (positions.shape[0],), device="cuda", dtype=torch.int32)
    w = [[randn(*s, scale=0.03) for s in ((3 * D, D), (D, D), (4 * D, D), (D, 4 * D))] for _ in range(2)]
    gain, bias, wide, three = randn(D), randn(D), randn(4 * D), randn(3 * D)

    def run(after):
        x = after(embed_layer_norm(ids, positions, None, word, position, types, gain, bias, 1e-5, 2))
        for qkv_w, o_w, up_w, down_w in w:
            q, k, v = after(linear(x, qkv_w, three)).view(-1, 3, H, D // H).unbind(1)
            a = after(short_attention(q, k, v, cu_seqlens, 64, False, 0.125))
            x = after(add_layer_norm(after(linear_partial(a.view(-1, D), o_w)), bias, x, gain, bias, 1e-5))
            h = after(linear(x, up_w, wide, "gelu"))
            x = after(add_layer_norm(after(linear_partial(h, down_w)), bias, x, gain, bias, 1e-5))
        return after(pool_finish(x, cu_seqlens, "cls", "l2"))

    return run


def qwen3(cu_seqlens, positions):
    """Two pre-norm layers of a Qwen3-0.6B shape, QKV changed in place."""
    D, H, G, dh, wide = 1024, 16, 8, 128, 3072
    stream0, table, gain, head_gain = (
        randn(positions.shape[0], D),
        rope_table(600, dh, 1e6, "cuda"),
        randn(D),
        randn(dh),
    )
    shapes = (((H + 2 * G) * dh, D), (D, H * dh), (2 * wide, D), (D, wide))
    w = [[randn(*s, scale=0.03) for s in shapes] for _ in range(2)]

    def run(after):
        stream, x = stream0, after(rms_norm(stream0, gain, 1e-6))
        for qkv_w, o_w, gate_up_w, down_w in w:
            qkv = after(qk_norm_rope(after(linear(x, qkv_w)), positions, table, head_gain, head_gain, 1e-6, H, G))
            q, k, v = qkv.view(-1, H + 2 * G, dh).split([H, G, G], dim=1)
            a = after(short_attention(q, k, v, cu_seqlens, 64, True, dh**-0.5))
            x, stream = after(add_rms_norm(after(linear_partial(a.view(-1, H * dh), o_w)), stream, gain, 1e-6))
            p = after(linear_partial(after(linear_gated(x, gate_up_w)), down_w))
            x, stream = after(add_rms_norm(p, stream, gain, 1e-6))
        return after(pool_finish(x, cu_seqlens, "mean", "none"))

    return run


def qwen3_5(cu_seqlens, positions):
    """A gated delta net, its step on two of the tokens, and gated attention, of a Qwen3.5-0.8B shape."""
    D, H, G, dh, heads = 1024, 8, 2, 256, DeltaHeads(16, 16, 128, 128)
    C, V = heads.channels, 2048
    stream0, table, gain = randn(positions.shape[0], D), rope_table(600, 64, 1e7, "cuda"), torch.randn(D, device="cuda")
    head_gain, norm = torch.randn(dh, device="cuda"), torch.randn(128, device="cuda")
    a_log, dt_bias = torch.rand(16, device="cuda"), torch.randn(16, device="cuda") - 3
    in_w, out_w, taps = randn(C + V + 32, D, scale=0.03), randn(D, V, scale=0.03), randn(C, 1, 4)
    qkv_w, o_w = randn(2 * (H + G) * dh, D, scale=0.03), randn(D, H * dh, scale=0.03)
    rows = torch.tensor([2, 1], dtype=torch.int32, device="cuda")
    lengths = torch.tensor([9, 1], dtype=torch.int32, device="cuda")
    inputs0, states0 = randn(3, C, 3), torch.randn(3, 16, 128, 128, device="cuda")
    inputs, states = inputs0.clone(), states0.clone()

    def run(after):
        inputs.copy_(inputs0)
        states.copy_(states0)
        x = after(rms_norm(stream0, gain, 1e-6))
        packed = after(linear(x, in_w))
        gates = Gates(packed[:, C + V :], a_log, dt_bias)
        mixed = after(causal_conv(packed[:, :C], taps, cu_seqlens))
        o = after(gated_delta_rule(mixed, gates, cu_seqlens, heads))
        step = after(causal_conv_step(packed[:2, :C], taps, Carried(inputs, rows, lengths)))
        first = after(gated_delta_step(step, gates.rows(0, 2), heads, Carried(states, rows, lengths)))
        y = after(gated_norm(o, packed[:, C : C + V], norm, 1e-6))
        x, stream = after(add_rms_norm(after(linear_partial(y, out_w)), stream0, gain, 1e-6))
        qkv = after(linear(x, qkv_w))
        q = after(gated_qk_norm_rope(qkv, positions, table, head_gain, head_gain, 1e-6, H, G))
        k, v = qkv[:, 2 * H * dh :].unflatten(1, (2, G, dh)).unbind(1)
        a = after(short_attention(q, k, v, cu_seqlens, 64, True, dh**-0.5))
        pieces = after(linear_partial(after(sigmoid_gate(a, qkv)), o_w))
        x, _ = after(add_rms_norm(pieces, stream, gain, 1e-6))
        return torch.cat([pool_finish(x, cu_seqlens, "mean", "none").flatten(), first.flatten(), states.flatten()])

    return run


def one_at_a_time(x):
    torch.cuda.synchronize()
    return x


@pytest.mark.parametrize("model", [bert, qwen3, qwen3_5])
def test_chains(device, model):
    """Back to back, and in a graph whose memory is poisoned between replays, 50 times each."""
    cu_seqlens = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    positions = torch.cat([torch.arange(n, dtype=torch.int32) for n in LENGTHS]).to(device)
    run = model(cu_seqlens, positions)
    torch.cuda.synchronize()
    expected = run(one_at_a_time)
    assert torch.isfinite(expected).all()
    for _ in range(50):
        assert torch.equal(run(lambda x: x), expected)

    kept = []

    def keep(x):
        kept.append(x)
        return x

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(lambda x: x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(keep)
    for _ in range(50):
        for tensor in kept:
            for part in tensor if isinstance(tensor, tuple) else (tensor,):
                part.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)

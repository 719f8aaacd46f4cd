"""Every kernel compiles for sm_90 in bf16 with dependent launch, without a GPU, from its own launch code."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re

import pytest
import torch

import rose.kernels
from rose.kernels import tiles
from rose.kernels.launch import triton
from rose.kernels.tiles import Tile
from tests.support.compiled_kernels import bf16, check

pytestmark = pytest.mark.skipif(
    triton is None or triton.knobs.runtime.interpret, reason="needs Triton's compiler, not its interpreter"
)


def ints(n):
    return torch.empty(n, dtype=torch.int32)


def test_norms(compiled):
    from rose.kernels import add_norm, embed_layer_norm

    x, w = bf16(5, 1024), bf16(1024)
    add_norm.add_layer_norm_triton(torch.empty(4, 5, 1024), w, x, w, w, 1e-5)
    add_norm.add_layer_norm_triton(bf16(1, 5, 384), None, bf16(5, 384), bf16(384), bf16(384), 1e-5)
    add_norm.add_rms_norm_triton(torch.empty(2, 5, 1024), x, w, 1e-6)
    add_norm.rms_norm_triton(x, w, 1e-6)
    embed_layer_norm.embed_layer_norm_triton(ints(5), ints(5), ints(5), x, x, x, w, w, 1e-5, 2)
    check(compiled, 5)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(16, 8, 128), (8, 2, 64), (4, 1, 256)])
def test_qk_norm_rope(compiled, heads, kv_heads, head_dim):
    from rose.kernels.qk_norm_rope import qk_norm_rope_triton

    qkv, table, w = bf16(5, (heads + 2 * kv_heads) * head_dim), torch.empty(64, head_dim), bf16(head_dim)
    qk_norm_rope_triton(qkv, ints(5), table, w, w, 1e-6, heads, kv_heads)
    check(compiled, 1)


def test_latest(compiled):
    from rose.kernels.latest import keep_latest_triton, take_latest_triton

    take_latest_triton(ints(64), ints(65))
    keep_latest_triton(ints(64 * 12).view(64, 12)[:, 0], ints(64), ints(65))
    check(compiled, 2)


@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 4), (8, 2)])
def test_gated_attention(compiled, heads, kv_heads):
    """Qwen3.5: 64 of 256 dimensions are turned, norm weights are in fp32."""
    from rose.kernels.gated_qk_norm_rope import gated_qk_norm_rope_triton
    from rose.kernels.sigmoid_gate import sigmoid_gate_triton

    qkv, w = bf16(5, 2 * (heads + kv_heads) * 256), torch.empty(256)
    q = gated_qk_norm_rope_triton(qkv, ints(5), torch.empty(64, 64), w, w, 1e-6, heads, kv_heads)
    sigmoid_gate_triton(q, qkv)
    check(compiled, 2)


@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize(("value_heads", "sequences"), [(16, 1), (32, 48)])
def test_gated_delta_net(compiled, carried, value_heads, sequences):
    """A layer of Qwen3.5, as slices of its one packed product."""
    from rose.kernels.carried import Carried
    from rose.kernels.causal_conv import causal_conv_step_triton, causal_conv_triton
    from rose.kernels.delta_heads import DeltaHeads, Gates
    from rose.kernels.gated_delta_rule import gated_delta_rule_triton
    from rose.kernels.gated_delta_step import gated_delta_step_triton
    from rose.kernels.gated_norm import gated_norm_triton

    heads, tokens = DeltaHeads(16, value_heads, 128, 128), 200 if sequences == 1 else sequences
    C, V = heads.channels, value_heads * 128
    packed = bf16(tokens, C + V + 2 * value_heads)
    gates = Gates(packed[:, C + V :], torch.empty(value_heads), torch.empty(value_heads))
    weight, bounds = bf16(C, 1, 4), ints(sequences + 1)
    conv = Carried(bf16(9, C, 3), ints(sequences), ints(sequences)) if carried else None
    states = Carried(torch.empty(9, value_heads, 128, 128), *conv[1:]) if carried else None
    qkv = causal_conv_triton(packed[:, :C], weight, bounds, conv)
    o = gated_delta_rule_triton(qkv, gates, bounds, heads, states)
    gated_norm_triton(o, packed[:, C : C + V], torch.empty(128), 1e-6)
    if carried and sequences == tokens:
        causal_conv_step_triton(packed[:, :C], weight, conv)
        gated_delta_step_triton(qkv, gates, heads, states)
    check(compiled, 6 if carried and sequences == tokens else 4)
    assert "wgmma" in compiled[1].asm["ptx"]
    assert "wgmma" in compiled[2].asm["ptx"]


def test_activations(compiled):
    from rose.kernels import activation

    activation.activate_in_place_triton(bf16(5, 4096), "gelu")
    activation.gated_activation_triton(bf16(5, 6144), "silu")
    check(compiled, 2)


@pytest.mark.parametrize(("mode", "how"), [("cls", "l2"), ("mean", "tanh_int8"), ("max", "sign_bits"), ("mean", "l2")])
def test_pool(compiled, mode, how):
    from rose.kernels.pool import pool_finish_triton

    pool_finish_triton(bf16(5, 1024), ints(3), mode, how)
    check(compiled, 2 if (mode, how) == ("mean", "l2") else 1)


def test_pool_spans(compiled):
    from rose.kernels.pool import pool_spans_triton

    pool_spans_triton(bf16(5, 1024), ints(6).view(3, 2))
    check(compiled, 1)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(16, 16, 64), (16, 8, 128), (8, 2, 256)])
@pytest.mark.parametrize(
    ("tokens", "max_length", "causal"), [(128, 128, False), (128, 512, True), (512, 512, False), (8192, 512, False)]
)
def test_short_attention(compiled, heads, kv_heads, head_dim, tokens, max_length, causal):
    from rose.kernels.short_attention import short_attention_triton

    qkv = bf16(tokens, heads + 2 * kv_heads, head_dim)
    q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
    short_attention_triton(q, k, v, ints(3), max_length, causal, 0.125)
    check(compiled, 1)


def cache_and_packed(tokens, heads, kv_heads, head_dim):
    """(k_cache, v_cache) of pages of 16, and q, k, v as views of one packed tensor."""
    qkv = bf16(tokens, heads + 2 * kv_heads, head_dim)
    caches = bf16(64, 16, kv_heads, head_dim), bf16(64, 16, kv_heads, head_dim)
    return caches, qkv.split([heads, kv_heads, kv_heads], dim=1)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(16, 8, 128), (32, 8, 128), (8, 2, 256), (14, 2, 64)])
@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize(("sequences", "bound"), [(1, 1024), (64, 1024), (64, 16384)])
def test_paged_decode(compiled, heads, kv_heads, head_dim, rotated, sequences, bound):
    from rose.batch import HeadRotation
    from rose.kernels.paged_decode import decode_tile, paged_decode_triton

    caches, qkv = cache_and_packed(sequences, heads, kv_heads, head_dim)
    w = bf16(head_dim)
    rotation = HeadRotation(ints(sequences), torch.empty(bound, head_dim), w, w, 1e-6) if rotated else None
    table = torch.empty(sequences, bound // 16, dtype=torch.int32)
    paged_decode_triton(*qkv, *caches, table, ints(sequences), ints(sequences), bound, 0.1, None, rotation)
    check(compiled, 1 if decode_tile(sequences, kv_heads, head_dim, bound).splits == 1 else 2)
    text = compiled[0].asm["ptx"]
    cached = [m.start() for m in re.finditer(r"ld\.global[a-z0-9.:_]*\.v4\.b32", text)]
    assert cached[0] < text.index("griddepcontrol.wait"), "the first block of the cache waits for the new token"


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(16, 8, 128), (8, 2, 256), (14, 2, 64)])
@pytest.mark.parametrize("tokens", [512, 4096])
def test_paged_prefill(compiled, heads, kv_heads, head_dim, tokens):
    from rose.kernels.paged_prefill import paged_prefill_triton

    caches, (q, _, _) = cache_and_packed(tokens, heads, kv_heads, head_dim)
    table = torch.empty(3, 512, dtype=torch.int32)
    paged_prefill_triton(q, *caches, table, ints(3), ints(4), 1, 0.1)
    check(compiled, 1)
    assert "wgmma" in compiled[0].asm["ptx"]


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "turned"), [(16, 8, 128, 128), (8, 2, 256, 64)])
def test_store_kv(compiled, heads, kv_heads, head_dim, turned):
    from rose.batch import HeadRotation
    from rose.kernels.store_kv import qk_norm_rope_store_triton, store_kv_triton

    caches, (_, k, v) = cache_and_packed(5, heads, kv_heads, head_dim)
    store_kv_triton(k, v, *caches, ints(5))
    w = bf16(head_dim)
    rotation = HeadRotation(ints(5), torch.empty(64, turned), w, w, 1e-6)
    qk_norm_rope_store_triton(bf16(5, (heads + 2 * kv_heads) * head_dim), rotation, *caches, ints(5))
    check(compiled, 2)


@pytest.mark.parametrize(("width", "gain"), [(1024, torch.bfloat16), (2560, torch.bfloat16), (1024, torch.float32)])
def test_embed_rms_norm(compiled, width, gain):
    from rose.kernels.embed_rms_norm import embed_rms_norm_triton

    embed_rms_norm_triton(ints(4), bf16(1000, width), torch.empty(width, dtype=gain), 1e-6)
    check(compiled, 1)


@pytest.mark.parametrize("vocabulary", [32_000, 151_936, 248_320])
def test_sampling(compiled, vocabulary):
    from rose.kernels.greedy import greedy_triton
    from rose.kernels.sample_triton import sample_triton

    logits, fractions = torch.empty(4, vocabulary), torch.empty(4)
    greedy_triton(logits, vocabulary)
    seeds = torch.empty(4, dtype=torch.int64)
    sample_triton(logits, fractions, ints(4), fractions, fractions, seeds, ints(4), vocabulary, 1e-5)
    check(compiled, 4)


def _table_cases():
    """Every distinct committed tile of every shape."""
    for name, rows in tiles._table().items():
        op, shape = name.split(":")
        if op.startswith("fp8-"):
            continue
        n, k = map(int, shape.split("x"))
        seen = set()
        for bucket, tile in rows.items():
            if tile is not None and tile not in seen:
                seen.add(tile)
                yield op, n, k, 4096 if bucket == tiles.LARGE else int(bucket), tile


SMALL = [("linear", 3072, 2048), ("partial", 2048, 2048), ("gated", 3072, 1280)]
QWEN3_5_4B = [("linear", 12352, 2560), ("linear", 10240, 2560), ("partial", 2560, 4096), ("gated", 9216, 2560)]
CASES = [
    *_table_cases(),
    ("linear", 3072, 1024, 128, Tile(64, 32, 64, 1, 4, 4)),
    ("linear", 200, 1000, 37, Tile(16, 32, 64, 1, 4, 3)),
    ("partial", 1024, 4096, 128, Tile(64, 64, 64, 4, 4, 4, "prefetch")),
    ("gated", 3072, 1024, 128, Tile(64, 32, 64, 1, 4, 4, "prefetch")),
    ("linear", 3072, 1024, 128, Tile(128, 32, 128, 1, 8, 4, "sm90", late_launch=True)),
    ("linear", 4096, 1024, 4096, Tile(128, 128, 64, 1, 8, 3, "sm90", ahead=3)),
    ("partial", 1024, 4096, 512, Tile(64, 64, 128, 4, 4, 4, "sm90")),
    ("gated", 3072, 1024, 128, Tile(64, 32, 64, 1, 4, 4, "sm90", ahead=8)),
    *((op, n, k, 1, tiles.few_tokens(op, n, k)) for op, n, k in SMALL),
    *((op, n, k, 1, tiles.heavy(op, n, k)) for op, n, k in QWEN3_5_4B),
    # Heads, in fp32: of Qwen3-8B and Qwen3.5-4B.
    ("logits", 151936, 4096, 1, Tile(16, 64, 256, 1, 4, 4)),
    ("logits", 248320, 2560, 64, Tile(64, 64, 128, 1, 4, 3, "sm90", ahead=8)),
]


@pytest.mark.parametrize(("op", "n", "k", "tokens", "tile"), CASES)
def test_gemm(compiled, op, n, k, tokens, tile):
    from rose.kernels.linear import run_tile

    gated, plain = op == "gated", op == "linear"
    weight = bf16(2 * n if gated else n, k)
    activation = "gelu" if plain else "silu" if gated else None
    bias, dtype = bf16(n) if plain else None, torch.float32 if op == "logits" else None
    out = run_tile(bf16(tokens, k), weight, bias, activation, tile, pieces=op == "partial", gated=gated, dtype=dtype)
    assert op != "logits" or out.dtype == torch.float32
    check(compiled, 1)
    if tile.bm >= 64:
        assert "wgmma" in compiled[0].asm["ptx"]
    if tile.kind == "sm90":
        text = compiled[0].asm["ptx"]
        assert text.index("cp.async.bulk.tensor") < text.index("griddepcontrol.wait"), (
            "weights wait for the activations"
        )
    if tile.kind == "prefetch":
        assert "cp.async.bulk.prefetch.L2" in compiled[0].asm["ptx"]


def test_every_kernel_of_the_room_is_covered(kernel_modules):
    """A kernel file that is not among them would escape these tests."""
    sources = {
        m.name: inspect.getsource(importlib.import_module(f"rose.kernels.{m.name}"))
        for m in pkgutil.iter_modules(rose.kernels.__path__)
    }
    with_kernels = {
        name for name, source in sources.items() if re.search(r"^@(_?jit|gluon_\w+)\b", source, re.MULTILINE)
    }
    assert with_kernels == set(kernel_modules)

"""Norm and partial rotary of gated heads against transformers' Qwen3.5 functions; gates and values stay as they are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from rose.kernels.gated_qk_norm_rope import gated_qk_norm_rope_ref, gated_qk_norm_rope_triton
from rose.kernels.qk_norm_rope import rope_table

SHAPES = [(16, 4, 256, 64), (3, 1, 64, 64), (8, 2, 48, 12), (2, 2, 32, 8)]


def transformers_rope(q, k, positions, theta, rotary):
    """q, k: [T, heads, head_dim] fp64."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import apply_rotary_pos_emb

    inverse = 1.0 / theta ** (torch.arange(0, rotary, 2, dtype=torch.float64) / rotary)
    angles = positions.double().cpu()[:, None] * inverse
    embedding = torch.cat([angles, angles], dim=-1)[None].to(q.device)
    q, k = (x.transpose(0, 1)[None] for x in (q, k))
    q, k = apply_rotary_pos_emb(q, k, embedding.cos(), embedding.sin())
    return q[0].transpose(0, 1), k[0].transpose(0, 1)


@pytest.mark.parametrize("run", [gated_qk_norm_rope_ref, gated_qk_norm_rope_triton])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "rotary"), SHAPES)
def test_against_transformers(place, close, run, heads, kv_heads, head_dim, rotary):
    qkv = place.randn(5, 2 * (heads + kv_heads) * head_dim)
    positions = place.tensor([0, 1, 2, 0, 511])
    table = rope_table(512, rotary, 1e7, place.device)
    weights = [torch.randn(head_dim, device=place.device) for _ in range(2)]
    packed = qkv.double().unflatten(1, (-1, head_dim))
    q, k = packed[:, : 2 * heads : 2], packed[:, 2 * heads : 2 * heads + kv_heads]
    q, k = (F.rms_norm(x, (head_dim,), w.double(), 1e-6) for x, w in zip((q, k), weights, strict=True))
    q, k = transformers_rope(q, k, positions, 1e7, rotary)
    changed = qkv.clone()
    out = run(changed, positions, table, *weights, 1e-6, heads, kv_heads)
    more = 25 if place.dtype is torch.float32 else 2  # angles are kept in fp32
    close(out, q, more)
    at = slice(2 * heads * head_dim, (2 * heads + kv_heads) * head_dim)
    close(changed[:, at].unflatten(1, (kv_heads, head_dim)), k, more)
    assert torch.equal(changed[:, : at.start], qkv[:, : at.start])
    assert torch.equal(changed[:, at.stop :], qkv[:, at.stop :])

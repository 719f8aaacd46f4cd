"""Per-head QK norm + rotary against transformers' Qwen3 functions, in place, leaving values alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from rose.kernels.qk_norm_rope import qk_norm_rope_ref, qk_norm_rope_triton, rope_table


def transformers_rope(q, k, positions, theta, head_dim):
    """q, k: [T, heads, head_dim] fp64."""
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    inverse = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = positions.double().cpu()[:, None] * inverse
    embedding = torch.cat([angles, angles], dim=-1)[None].to(q.device)
    q, k = (x.transpose(0, 1)[None] for x in (q, k))
    q, k = apply_rotary_pos_emb(q, k, embedding.cos(), embedding.sin())
    return q[0].transpose(0, 1), k[0].transpose(0, 1)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(16, 8, 128), (3, 1, 64), (4, 2, 256), (5, 5, 32)])
@pytest.mark.parametrize("norm", [True, False])
def test_against_transformers(place, close, heads, kv_heads, head_dim, norm):
    qkv = place.randn(5, (heads + 2 * kv_heads) * head_dim)
    positions = place.tensor([0, 1, 2, 0, 511])
    table = rope_table(512, head_dim, 1e4, place.device)
    weights = [place.randn(head_dim) if norm else None for _ in range(2)]
    q, k, v = qkv.double().view(5, -1, head_dim).split([heads, kv_heads, kv_heads], dim=1)
    if norm:
        q, k = (F.rms_norm(x, (head_dim,), w.double(), 1e-6) for x, w in zip((q, k), weights, strict=True))
    q, k = transformers_rope(q, k, positions, 1e4, head_dim)
    expected = torch.cat([q, k, v], dim=1).reshape(5, -1)
    for run in (qk_norm_rope_triton, qk_norm_rope_ref):
        changed = qkv.clone()
        out = run(changed, positions, table, *weights, 1e-6, heads, kv_heads)
        assert out.data_ptr() == changed.data_ptr()
        close(out, expected, factor=25 if place.dtype is torch.float32 else 2)  # angles are kept in fp32
        values = (heads + kv_heads) * head_dim
        assert torch.equal(out[:, values:], qkv[:, values:])

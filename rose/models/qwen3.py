"""Qwen3 (arXiv:2505.09388): pre-norm decoder with grouped-query attention, per-head q/k norm, rotary and SwiGLU.

    stream = embed(ids)
    each layer:  stream += W_o attention(norm(stream));  stream += W_down (silu(W_gate x) * W_up x), x = norm(stream)
    hidden = norm(stream)

The residual stream is threaded beside the normalised rows, so that each add is fused with the norm after it. The same
model is causal (Qwen3-Embedding) or bidirectional (pplx-embed): that is the attention spec's business. Parameter names
are those of Qwen3Model, with q/k/v packed into `qkv_proj` and gate/up into `gate_up_proj`.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from rose.batch import Batch
from rose.config import ArchitectureConfig
from rose.layers.attention import RotaryAttention
from rose.layers.embedding import Embedding
from rose.layers.mlp import GatedMLP
from rose.layers.norm import RMSNorm
from rose.layers.rotary import Rotary


class Qwen3Layer(nn.Module):
    def __init__(self, config: ArchitectureConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = RotaryAttention(
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.norm_eps,
            bias=config.attention_bias,
        )
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.activation)

    def forward(self, x: Tensor, stream: Tensor, batch: Batch, rotary: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Between `input_layernorm`, which the caller applies, and the next norm, which adds what is returned.

        Args:
            x: [T, D], the normalised stream. stream: [T, D]. rotary: [max_positions, head_dim].

        Returns:
            (pieces [P, T, D] of the feed-forward, stream [T, D] with the attention added).
        """
        x, stream = self.post_attention_layernorm.add(self.self_attn(x, batch, rotary, layer), stream)
        return self.mlp(x), stream


class Qwen3(nn.Module):
    """The backbone, without a language-model head."""

    def __init__(self, config: ArchitectureConfig) -> None:
        super().__init__()
        if config.rope_theta is None:
            raise ValueError("Qwen3 needs a rotary base")
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Qwen3Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.rotary = Rotary(config.max_positions, config.head_dim, config.rope_theta, config.rope_scaling)

    def forward(self, batch: Batch) -> Tensor:
        """-> hidden rows [T, D]."""
        layers = [cast(Qwen3Layer, layer) for layer in self.layers]
        norms = [*(layer.input_layernorm for layer in layers[1:]), self.norm]
        x, stream = self.embed_tokens.normalised(batch.ids, layers[0].input_layernorm)
        for index, (layer, norm) in enumerate(zip(layers, norms, strict=True)):
            pieces, stream = layer(x, stream, batch, self.rotary.table, index)
            x, stream = norm.add(pieces, stream)
        return x

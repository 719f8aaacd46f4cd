"""Qwen3.5 (qwen3_5, text): a hybrid decoder, in which most layers are gated delta nets and every fourth attends.

    stream = embed(ids)
    each layer:  stream += mixer(norm(stream));  stream += W_down (silu(W_gate x) * W_up x), x = norm(stream)
    mixer: a gated delta net, or gated attention with rotary embedding of a quarter of each head
    hidden = norm(stream)

Norms are by 1 + weight. The attending layers are causal or bidirectional by the attention spec; the delta nets run
forwards whatever that says. Parameter names are those of Qwen3_5TextModel, with the products that share an input packed
into one.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from rose.batch import Batch
from rose.config import ArchitectureConfig
from rose.config.gated_delta import GatedDeltaConfig
from rose.layers.embedding import Embedding
from rose.layers.gated_attention import GatedAttention
from rose.layers.gated_delta_net import GatedDeltaNet
from rose.layers.mlp import GatedMLP
from rose.layers.norm import ZeroCentredRMSNorm
from rose.layers.rotary import Rotary
from rose.models.base import RecurrentSpec


class Qwen35Layer(nn.Module):
    """With `linear_attn` or `self_attn`, never both."""

    def __init__(self, config: ArchitectureConfig, delta: GatedDeltaConfig | None) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        self.input_layernorm = ZeroCentredRMSNorm(size, eps)
        if delta is not None:
            self.linear_attn = GatedDeltaNet(size, delta, eps)
        else:
            heads = config.num_heads, config.num_kv_heads, config.head_dim
            self.self_attn = GatedAttention(size, *heads, eps, bias=config.attention_bias)
        self.recurrent = delta is not None
        self.post_attention_layernorm = ZeroCentredRMSNorm(size, eps)
        self.mlp = GatedMLP(size, config.intermediate_size, config.activation)

    def forward(self, x: Tensor, stream: Tensor, batch: Batch, rotary: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Between `input_layernorm`, which the caller applies, and the next norm, which adds what is returned.

        Args:
            x: [T, D], the normalised stream. stream: [T, D]. rotary: [max_positions, rotary dims].

        Returns:
            (pieces [P, T, D] of the feed-forward, stream [T, D] with the mixer's answer added).
        """
        mixed = self.linear_attn(x, batch, layer) if self.recurrent else self.self_attn(x, batch, rotary, layer)
        x, stream = self.post_attention_layernorm.add(mixed, stream)
        return self.mlp(x), stream


class Qwen35(nn.Module):
    """The backbone, without a language-model head.

    Attributes:
        kv_layers: layers that attend, and keep keys and values.
        recurrent: what the others keep, or None where there are none.
    """

    def __init__(self, config: ArchitectureConfig) -> None:
        super().__init__()
        if config.rope_theta is None or config.rotary_dim is None:
            raise ValueError("Qwen3.5 needs a rotary base and the number of turned dimensions")
        self.config = config
        delta = config.gated_delta
        delta_layers = () if delta is None else delta.layers
        self.kv_layers = tuple(index for index in range(config.num_layers) if index not in delta_layers)
        self.recurrent = None if delta is None else _recurrent_spec(delta)
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Qwen35Layer(config, delta if index in delta_layers else None) for index in range(config.num_layers)
        )
        self.norm = ZeroCentredRMSNorm(config.hidden_size, config.norm_eps)
        self.rotary = Rotary(config.max_positions, config.rotary_dim, config.rope_theta, config.rope_scaling)

    def forward(self, batch: Batch) -> Tensor:
        """-> hidden rows [T, D]."""
        layers = [cast(Qwen35Layer, layer) for layer in self.layers]
        norms = [*(layer.input_layernorm for layer in layers[1:]), self.norm]
        x, stream = self.embed_tokens.normalised(batch.ids, layers[0].input_layernorm)
        for index, (layer, norm) in enumerate(zip(layers, norms, strict=True)):
            pieces, stream = layer(x, stream, batch, self.rotary.table, index)
            x, stream = norm.add(pieces, stream)
        return x


def _recurrent_spec(delta: GatedDeltaConfig) -> RecurrentSpec:
    return RecurrentSpec(
        layers=delta.layers,
        conv_channels=delta.conv_channels,
        conv_width=delta.conv_width,
        value_heads=delta.value_heads,
        key_dim=delta.key_dim,
        value_dim=delta.value_dim,
    )

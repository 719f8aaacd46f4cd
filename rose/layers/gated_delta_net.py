"""The gated delta net (arXiv:2412.06464): a convolution, a recurrence with a matrix for its state, a gated norm.

    q | k | v, z, b, a = W_in x;   q | k | v = silu(conv(q | k | v));   o = delta_rule(q, k, v, b, a)
    answer = W_out (norm(o) * silu(z))

What a sequence carries from token to token is the convolution's last inputs and the state; both start at zero with the
sequence, and are kept in the batch's pools where the sequence goes on in a later batch. Knows batches; which rows of
the pools a sequence has is the engine's business.
"""

from __future__ import annotations

from torch import Tensor, nn

from rose.batch import Batch, PagedContext
from rose.config.gated_delta import GatedDeltaConfig
from rose.kernels.carried import Carried
from rose.kernels.causal_conv import causal_conv, causal_conv_step
from rose.kernels.delta_heads import DeltaHeads, Gates
from rose.kernels.gated_delta_rule import gated_delta_rule
from rose.kernels.gated_delta_step import gated_delta_step
from rose.kernels.gated_norm import gated_norm
from rose.layers.linear import Linear
from rose.layers.parameter import parameter


class _CausalConv(nn.Module):
    """weight: [channels, 1, width]."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = parameter(channels, 1, width)


class _GatedNorm(nn.Module):
    """weight: [head dim], in fp32 as the release checkpoints store it."""

    fp32_parameters = frozenset({"weight"})

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = parameter(size)


class GatedDeltaNet(nn.Module):
    """in_proj's rows are those of in_proj_qkv, in_proj_z, in_proj_b and in_proj_a: one product instead of four.

    A_log, dt_bias: [value heads], in fp32: they stand in exponents.
    """

    fp32_parameters = frozenset({"A_log", "dt_bias"})

    def __init__(self, hidden_size: int, config: GatedDeltaConfig, eps: float) -> None:
        super().__init__()
        self.heads = DeltaHeads(config.key_heads, config.value_heads, config.key_dim, config.value_dim)
        self.channels = config.conv_channels
        self.width = config.value_heads * config.value_dim
        self.in_proj = Linear(hidden_size, self.channels + self.width + 2 * config.value_heads)
        self.conv1d = _CausalConv(self.channels, config.conv_width)
        self.A_log = parameter(config.value_heads)
        self.dt_bias = parameter(config.value_heads)
        self.norm = _GatedNorm(config.value_dim, eps)
        self.out_proj = Linear(self.width, hidden_size)

    def forward(self, x: Tensor, batch: Batch, layer: int) -> Tensor:
        """x: [T, D] -> pieces [P, T, D] of the output projection."""
        packed = self.in_proj(x)
        qkv, z, logits = packed.split([self.channels, self.width, 2 * self.heads.value_heads], dim=1)
        gates = Gates(logits, self.A_log, self.dt_bias)
        if batch.paged is None:
            mixed = causal_conv(qkv, self.conv1d.weight, batch.cu_seqlens)
            answer = gated_delta_rule(mixed, gates, batch.cu_seqlens, self.heads)
        else:
            answer = self._go_on(qkv, gates, batch, batch.paged, layer)
        return self.out_proj.pieces(gated_norm(answer, z, self.norm.weight, self.norm.eps))

    def _go_on(self, qkv: Tensor, gates: Gates, batch: Batch, paged: PagedContext, layer: int) -> Tensor:
        """[T, value heads, value dim] of sequences that may have begun in an earlier batch: those with one token take a
        step, chunks of prompts are walked through."""
        if batch.states is None or paged.states is None:
            raise RuntimeError("this batch has pages and no recurrent states: the engine sets both for a hybrid model")
        inputs = Carried(batch.states.conv(layer), paged.states, paged.kv_lengths)
        state = Carried(batch.states.recurrent(layer), paged.states, paged.kv_lengths)
        steps = paged.decodes
        if steps == batch.num_sequences:
            mixed = causal_conv_step(qkv, self.conv1d.weight, inputs)
            return gated_delta_step(mixed, gates, self.heads, state)
        mixed = causal_conv(qkv, self.conv1d.weight, batch.cu_seqlens, inputs)
        answer = gated_delta_rule(mixed, gates, batch.cu_seqlens[steps:], self.heads, state.since(steps))
        if steps:
            answer[:steps] = gated_delta_step(mixed[:steps], gates.rows(0, steps), self.heads, state.until(steps))
        return answer

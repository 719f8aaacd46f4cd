"""BERT (arXiv:1810.04805): post-norm encoder with learned absolute positions.

    x = LayerNorm(word + position + type)
    each layer:  x = LayerNorm(x + W_o attention(x));  x = LayerNorm(x + W_2 gelu(W_1 x))

Parameter names are those of BertModel, with query, key and value packed into `qkv_proj`. XLM-RoBERTa is this same model
with another position offset.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from rose.batch import Batch
from rose.config import ArchitectureConfig
from rose.layers.attention import SelfAttention
from rose.layers.embedding import BertEmbeddings
from rose.layers.linear import Linear
from rose.layers.norm import DenseAddNorm


class BertAttention(nn.Module):
    """`self` and `output`, as the checkpoints name them."""

    def __init__(self, config: ArchitectureConfig) -> None:
        super().__init__()
        self.self = SelfAttention(config.hidden_size, config.num_heads)
        self.output = DenseAddNorm(config.hidden_size, config.hidden_size, config.norm_eps)

    def forward(self, x: Tensor, batch: Batch, layer: int) -> Tensor:
        return cast(Tensor, self.output(self.self(x, batch, layer), x))


class BertIntermediate(nn.Module):
    def __init__(self, config: ArchitectureConfig) -> None:
        super().__init__()
        self.dense = Linear(config.hidden_size, config.intermediate_size, bias=True, activation=config.activation)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.dense(x))


class BertLayer(nn.Module):
    def __init__(self, config: ArchitectureConfig) -> None:
        super().__init__()
        self.attention = BertAttention(config)
        self.intermediate = BertIntermediate(config)
        self.output = DenseAddNorm(config.intermediate_size, config.hidden_size, config.norm_eps)

    def forward(self, x: Tensor, batch: Batch, layer: int) -> Tensor:
        """x: [T, D] -> [T, D]."""
        x = self.attention(x, batch, layer)
        return cast(Tensor, self.output(self.intermediate(x), x))


class BertEncoder(nn.Module):
    def __init__(self, config: ArchitectureConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(BertLayer(config) for _ in range(config.num_layers))

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        for index, layer in enumerate(self.layer):
            x = layer(x, batch, index)
        return x


class Bert(nn.Module):
    """The backbone; BertModel's pooler is left out, because no embedder uses it."""

    def __init__(self, config: ArchitectureConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = BertEmbeddings(
            config.vocab_size,
            config.max_positions,
            config.position_offset,
            config.type_vocab_size,
            config.hidden_size,
            config.norm_eps,
        )
        self.encoder = BertEncoder(config)

    def forward(self, batch: Batch) -> Tensor:
        """-> hidden rows [T, D]."""
        return cast(Tensor, self.encoder(self.embeddings(batch), batch))

"""The numbers of one architecture, under the same names whatever family the checkpoint comes from.

Knows config.json; knows neither weights nor pooling.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchitectureConfig:
    """Shape of a transformer backbone.

    Attributes:
        architecture: class name from `architectures` ("BertModel", "XLMRobertaModel", "Qwen3Model", ...).
        model_type: `model_type` of config.json ("bert", "xlm-roberta", "qwen3", ...).
        head_dim: dimensions per attention head; not always hidden_size / num_heads.
        norm_eps: epsilon of LayerNorm or RMSNorm.
        activation: "gelu" (erf), "gelu_tanh", "relu" or "silu".
        max_positions: longest sequence the position table or the rotary range allows, in tokens.
        position_offset: added to a token's index in its sequence to find its row in the position table
            (0 for BERT, pad_token_id + 1 for the RoBERTa family).
        causal: whether token i sees only tokens 0..i.
        causal_source: where `causal` came from ("config.json: is_causal", "default of qwen3", ...), printed at start.
        rope_theta: rotary base, or None without rotary embedding.
        dtype: dtype the checkpoint stores or asks for ("float32", "bfloat16", "float16").
    """

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    activation: str
    max_positions: int
    position_offset: int = 0
    type_vocab_size: int = 0
    causal: bool
    causal_source: str
    rope_theta: float | None = None
    attention_bias: bool = False
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None
    dtype: str = "float32"

"""The language models that decoding is measured on: numbers of the published checkpoints' config.json files.

Knows shapes; knows neither engines nor clocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rose.bench.shapes import Shape

_QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
}
_QWEN35 = {
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "mamba_ssm_dtype": "float32",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def _rope(mrope_section: list[int]) -> dict[str, Any]:
    return {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "mrope_section": mrope_section,
        "mrope_interleaved": True,
    }


def _hybrid(layers: int) -> list[str]:
    """Every fourth layer attends."""
    return ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)]


def _lm(transformers_class: str, base: Mapping[str, Any], **numbers: Any) -> Shape:
    return Shape(config={**base, **numbers}, pooling=None, transformers_class=transformers_class)


LLM_SHAPES: Mapping[str, Shape] = {
    "qwen3-0.6b": _lm(
        "Qwen3ForCausalLM",
        _QWEN3,
        hidden_size=1024,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        intermediate_size=3072,
        tie_word_embeddings=True,
    ),
    "qwen3-8b": _lm(
        "Qwen3ForCausalLM",
        _QWEN3,
        hidden_size=4096,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=12288,
        tie_word_embeddings=False,
    ),
    "qwen3.5-4b": _lm(
        "Qwen3_5ForCausalLM",
        _QWEN35,
        hidden_size=2560,
        num_hidden_layers=32,
        layer_types=_hybrid(32),
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=256,
        intermediate_size=9216,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        vocab_size=248320,
        max_position_embeddings=262144,
        rope_parameters=_rope([11, 11, 10]),
        eos_token_id=248044,
    ),
    # For trying the loads where there is no GPU.
    "tiny-qwen3": _lm(
        "Qwen3ForCausalLM",
        _QWEN3,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=96,
        vocab_size=1000,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=990,
    ),
    "tiny-qwen3.5": _lm(
        "Qwen3_5ForCausalLM",
        _QWEN35,
        hidden_size=64,
        num_hidden_layers=4,
        layer_types=_hybrid(4),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=96,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        vocab_size=1000,
        max_position_embeddings=512,
        rope_parameters=_rope([2, 1, 1]),
        eos_token_id=990,
    ),
}

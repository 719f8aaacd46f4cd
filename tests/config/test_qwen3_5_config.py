"""config.json of Qwen3.5: flat or nested, what the attending layers see, and what is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from rose.config.architecture import read_architecture
from rose.config.json_file import JsonFile
from rose.errors import CheckpointError

# The 9B model's own numbers.
TEXT = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 12288,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "mamba_ssm_dtype": "float32",
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
}
OUTER = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "vision_config": {"depth": 27}}


def read(outer=None, causal=None, **changes):
    """The flat form, or the nested one where `outer` is given."""
    text = TEXT | changes
    data = {"architectures": ["Qwen3_5ForCausalLM"]} | text if outer is None else OUTER | {"text_config": text} | outer
    return read_architecture(JsonFile(Path("config.json"), data), causal)


@pytest.mark.parametrize("outer", [None, {}], ids=["flat", "nested"])
def test_the_9b_models_numbers(outer):
    config = read(outer)
    delta = config.gated_delta
    assert (config.num_layers, config.head_dim, config.rotary_dim, config.rope_theta) == (32, 256, 64, 1e7)
    assert (config.num_heads, config.num_kv_heads, config.max_positions) == (16, 4, 262144)
    assert delta.layers == tuple(i for i in range(32) if i % 4 != 3)
    assert (delta.key_heads, delta.value_heads, delta.key_dim, delta.value_dim) == (16, 32, 128, 128)
    assert (delta.conv_channels, delta.conv_width) == (8192, 4)
    assert (config.dtype, config.tie_word_embeddings, config.rope_scaling) == ("bfloat16", False, None)
    assert (config.causal, config.causal_source) == (True, f"default of {config.model_type}")


def test_silence_means_the_familys_defaults():
    config = read(
        rope_parameters={"rope_type": "default", "rope_theta": 1e7},
        head_dim=None,
        linear_num_value_heads=None,
        layer_types=None,
        full_attention_interval=None,
    )
    assert (config.rotary_dim, config.gated_delta.value_heads, len(config.gated_delta.layers)) == (64, 32, 24)


def test_layer_types_win_over_the_interval():
    kinds = ["full_attention", *["linear_attention"] * 31]
    assert read(layer_types=kinds).gated_delta.layers == tuple(range(1, 32))
    assert read(layer_types=["full_attention"] * 32).gated_delta is None


@pytest.mark.parametrize(("inner", "outer", "tied"), [(True, None, True), (True, False, False), (None, True, True)])
def test_tied_by_the_outer_key_first(inner, outer, tied):
    assert read({"tie_word_embeddings": outer}, tie_word_embeddings=inner).tie_word_embeddings is tied


@pytest.mark.parametrize(
    ("outer", "inner", "causal", "source"),
    [
        ({}, {"is_causal": False}, False, "text_config.is_causal"),
        ({"is_causal": False}, {}, False, "is_causal"),
        ({"retrieval_attention_contract": "bidirectional"}, {}, False, "retrieval_attention_contract"),
        ({}, {"retrieval_attention_contract": "causal"}, True, "text_config.retrieval_attention_contract"),
        ({"use_bidirectional_attention": True}, {"is_causal": False}, False, "use_bidirectional_attention"),
        (None, {"is_causal": False}, False, "is_causal"),
    ],
)
def test_what_attending_layers_see(outer, inner, causal, source):
    config = read(outer, **inner)
    assert (config.causal, config.causal_source) == (causal, f"config.json: {source}")


def test_contradictions_are_settled_by_the_caller():
    said = {"outer": {"retrieval_attention_contract": "causal"}, "is_causal": False}
    with pytest.raises(
        CheckpointError, match=r"contradictory \(retrieval_attention_contract = causal, text_config.is_c"
    ):
        read(**said)
    assert read(causal=False, **said).causal_source == "the caller's choice"


def test_yarn_stretches_the_turned_dimensions():
    rope = TEXT["rope_parameters"] | {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 262144,
    }
    config = read(rope_parameters=rope)
    assert (config.rope_scaling.kind, config.max_positions, config.rotary_dim) == ("yarn", 1048576, 64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_output_gate": False}, "attn_output_gate is false"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not served for this family"),
        ({"layer_types": ["sliding_attention"] * 32}, "layer_types sliding_attention are not served"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types names 3 layers, and num_hidden_layers is 32"),
        ({"linear_num_value_heads": 24}, "24 is not a multiple of linear_num_key_heads 16"),
        ({"num_key_value_heads": 5}, "16 is not a multiple of num_key_value_heads 5"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1, and must be at least 2"),
        ({"mamba_ssm_dtype": "float8"}, "mamba_ssm_dtype 'float8' is not served"),
        ({"retrieval_attention_contract": "both"}, "'both', and must be causal or bidirectional"),
        ({"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 1.5}}, "partial_rotary_factor 1.5"),
        ({"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.13}}, "is 33, and must be even"),
        ({"rope_parameters": {"rope_theta": 1e7, "rope_type": "longrope"}}, "rotary scaling 'longrope' is not served"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"the weights are quantised \(gptq\)"),
    ],
)
def test_what_is_not_served_is_named(changes, message):
    with pytest.raises(CheckpointError, match=message):
        read(**changes)


def test_mixtures_of_experts_are_another_type():
    with pytest.raises(CheckpointError, match="model_type 'qwen3_5_moe' is not served"):
        read({"model_type": "qwen3_5_moe"})

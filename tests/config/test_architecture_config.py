"""config.json of every family, in the spellings that libraries have written it, and what is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from rose.config.architecture import read_architecture
from rose.config.json_file import JsonFile
from rose.errors import CheckpointError

BERT = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "vocab_size": 100,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
}
QWEN = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 200,
    "hidden_size": 2560,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 512,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "hidden_act": "silu",
}


def read(base, causal=None, **changes):
    return read_architecture(JsonFile(Path("config.json"), base | changes), causal)


def test_bert():
    config = read(BERT)
    assert (config.architecture, config.num_kv_heads, config.head_dim) == ("BertModel", 4, 12)
    assert (config.max_positions, config.position_offset, config.causal) == (512, 0, False)
    assert (config.norm_eps, config.activation, config.dtype) == (1e-12, "gelu", "float32")


@pytest.mark.parametrize("model_type", ["roberta", "xlm-roberta", "camembert"])
def test_roberta_family_starts_behind_the_pad_row(model_type):
    config = read(BERT, model_type=model_type, max_position_embeddings=8194, pad_token_id=1)
    assert (config.position_offset, config.max_positions) == (2, 8192)
    assert read(BERT, model_type=model_type, pad_token_id=None).position_offset == 2  # the family's own pad id is 1
    assert read(BERT, model_type=model_type, pad_token_id=5).position_offset == 6


def test_head_dim_is_the_configs_own():
    """hidden_size / num_heads would be 80."""
    config = read(QWEN)
    assert (config.head_dim, config.num_kv_heads, config.rope_theta) == (128, 8, 1e6)
    assert read(QWEN, head_dim=None).head_dim == 128  # the family's default, as its library has it


def test_rope_theta_in_either_place():
    new = {"rope_theta": None, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    assert read(QWEN, **new).rope_theta == 5e5
    with pytest.raises(CheckpointError, match="rope_theta is missing"):
        read(QWEN, rope_theta=None)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtype_in_either_spelling(key):
    assert read(QWEN, **{key: "bfloat16"}).dtype == "bfloat16"
    assert read(QWEN, **{key: "torch.float16"}).dtype == "float16"


@pytest.mark.parametrize(
    ("changes", "causal", "source"),
    [
        ({}, True, "default of qwen3"),
        ({"is_causal": False}, False, "config.json: is_causal"),
        ({"is_causal": True}, True, "config.json: is_causal"),
        ({"use_bidirectional_attention": True}, False, "config.json: use_bidirectional_attention"),
        ({"use_bidirectional_attention": False}, True, "config.json: use_bidirectional_attention"),
        ({"is_decoder": False, "architectures": ["Qwen3Model"]}, False, "config.json: is_decoder"),
        ({"is_causal": False, "is_decoder": False}, False, "config.json: is_causal"),
        ({"model_type": "bidirectional_pplx_qwen3"}, False, "default of bidirectional_pplx_qwen3"),
    ],
)
def test_attention_mode_and_where_it_was_read(changes, causal, source):
    config = read(QWEN, **changes)
    assert (config.causal, config.causal_source) == (causal, source)


def test_attention_mode_of_bert():
    assert read(BERT).causal_source == "default of bert"
    assert read(BERT, is_decoder=True).causal


@pytest.mark.parametrize(
    "changes",
    [
        {"is_causal": True, "use_bidirectional_attention": True},
        {"is_causal": True, "is_decoder": False},
        {"is_decoder": False},  # beside Qwen3ForCausalLM
    ],
)
def test_contradiction_is_refused_unless_settled(changes):
    with pytest.raises(CheckpointError, match=r"contradictory.*--causal or --bidirectional"):
        read(QWEN, **changes)
    config = read(QWEN, causal=False, **changes)
    assert (config.causal, config.causal_source) == (False, "the caller's choice")


@pytest.mark.parametrize(
    ("base", "changes", "words"),
    [
        (QWEN, {"model_type": "gpt2"}, "model_type 'gpt2' is not served; there are bert, roberta"),
        (QWEN, {"model_type": None}, "model_type is missing"),
        (
            QWEN,
            {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}},
            "'longrope' is not served: it has other",
        ),
        (QWEN, {"rope_scaling": {"type": "su"}}, "'su' is not served: it is an older name of longrope"),
        (QWEN, {"rope_scaling": {"type": "ntk-ish"}}, "'ntk-ish' is not served: there are default, linear, dynamic"),
        (QWEN, {"rope_scaling": {"type": "linear"}}, "factor is missing"),
        (QWEN, {"rope_scaling": {"type": "linear", "factor": 0.5}}, "rotary scaling is 0.5, and must be at least 1"),
        (QWEN, {"rope_scaling": {"type": "yarn", "factor": 0.5}}, "rotary scaling is 0.5, and must be at least 1"),
        (QWEN, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        (
            QWEN,
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4}},
            "low_freq_factor 4 and high_freq_factor 4 leave no ramp",
        ),
        (QWEN, {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rotary settings that differ by layer"),
        (QWEN, {"rope_theta": 0}, "rope_theta is 0, and must be above 0"),
        (QWEN, {"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
        (QWEN, {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 1}, "sliding-window"),
        (QWEN, {"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        (QWEN, {"num_key_value_heads": 5}, "not a multiple of num_key_value_heads 5"),
        (QWEN, {"quantization_config": {"quant_method": "gptq"}}, r"quantised \(gptq\)"),
        (QWEN, {"hidden_act": "gelu_fancy"}, "hidden_act 'gelu_fancy'"),
        (QWEN, {"vocab_size": 0}, "vocab_size is 0, and must be at least 1"),
        (QWEN, {"vocab_size": "many"}, "vocab_size is 'many', and must be a whole number"),
        (QWEN, {"rms_norm_eps": "tiny"}, "rms_norm_eps is 'tiny', and must be a number"),
        (QWEN, {"is_causal": 1}, "is_causal is 1, and must be true or false"),
        (QWEN, {"architectures": "Qwen3Model"}, "must be a list of strings"),
        (BERT, {"position_embedding_type": "relative_key"}, "relative_key"),
        (BERT, {"add_cross_attention": True}, "add_cross_attention"),
        (BERT, {"num_attention_heads": 5}, "not a multiple of num_attention_heads 5"),
        (BERT, {"model_type": "roberta", "pad_token_id": 511}, "first 512 rows are not for tokens"),
        (BERT, {"num_hidden_layers": None}, "num_hidden_layers is missing"),
    ],
)
def test_refused_by_name(base, changes, words):
    with pytest.raises(CheckpointError, match=words) as caught:
        read(base, **changes)
    assert "config.json" in caught.value.message


def test_window_wider_than_any_layer_uses_is_no_window():
    assert read(QWEN, use_sliding_window=False, sliding_window=4096, max_window_layers=0).num_layers == 2


def test_yarn_reaches_past_the_stated_positions():
    """The published recipe adds the factor alone and leaves max_position_embeddings as it is."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = read(QWEN, max_position_embeddings=40960, rope_scaling=rope)
    assert config.max_positions == 131072
    assert config.rope_scaling.original == 32768
    assert read(QWEN, max_position_embeddings=40960, rope_scaling=rope | {"factor": 1.1}).max_positions == 40960


def test_yarn_without_its_original_length_takes_the_stated_one():
    rope = {"rope_type": "yarn", "factor": 2.0}
    config = read(QWEN, max_position_embeddings=4096, rope_scaling=rope)
    assert (config.rope_scaling.original, config.max_positions) == (4096, 8192)


@pytest.mark.parametrize("kind", ["linear", "dynamic"])
def test_other_scalings_reach_no_further_than_the_file_says(kind):
    """Some publish the stretched length and some the plain one; more than is stated is never promised."""
    config = read(QWEN, max_position_embeddings=4096, rope_scaling={"type": kind, "factor": 4.0})
    assert config.max_positions == 4096
    assert (config.rope_scaling is None) == (kind == "dynamic")

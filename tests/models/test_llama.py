"""Hidden rows of Llama and its relatives against transformers on the same random weights, in fp32, to 1e-5."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from rose.config import read_model_folder
from rose.convert import load_model
from rose.errors import CheckpointError
from tests.support.running import hidden_of, load, random_sequences
from tests.support.tiny_checkpoints import edit_json
from tests.support.tiny_language_models import LLAMA3_ROPE, tiny_lm

LENGTHS = [11, 1, 100, 11, 11, 2]
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
ROPES = {
    "default": None,
    "linear": {"type": "linear", "factor": 2.5},
    "dynamic": {"type": "dynamic", "factor": 4.0},
    "llama3": LLAMA3_ROPE,
    "yarn": YARN,
    "yarn_of_its_own": YARN | {"attention_factor": 1.3, "beta_fast": 16, "beta_slow": 2, "truncate": False},
    "yarn_with_mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2},
}
SHAPES = {
    "grouped": {},
    "no_grouping": {"num_kv_heads": 4},
    "one_kv_head": {"num_kv_heads": 1},
    "head_dim_above": {"head_dim": 32},
    "attention_bias": {"config": {"attention_bias": True}},
    "mlp_bias": {"config": {"mlp_bias": True}},
    "tied": {"tied": True},
    "eps": {"config": {"rms_norm_eps": 1e-3}},
}


@pytest.fixture(autouse=True)
def _quiet():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def reference(path: Path):
    return transformers.AutoModel.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


@torch.inference_mode()
def expected_rows(model, sequences: list[list[int]]) -> list[torch.Tensor]:
    return [model(input_ids=torch.tensor([ids])).last_hidden_state[0] for ids in sequences]


def assert_same(path: Path, lengths: list[int] = LENGTHS) -> None:
    sequences = random_sequences(lengths, 400)
    ours = hidden_of(load(path, pooling="last"), sequences)
    for mine, their in zip(ours, expected_rows(reference(path), sequences), strict=True):
        torch.testing.assert_close(mine, their, **TOLERANCE)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_llama(tmp_path, shape):
    assert_same(tiny_lm(tmp_path / "m", **shape))


def test_the_first_llamas_state_no_base(tmp_path):
    path = tiny_lm(tmp_path / "m")
    edit_json(path / "config.json", rope_theta=None)  # takes the key away
    assert_same(path)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_rotary_scalings(tmp_path, model_type, rope):
    """Every kind served, in the spelling of older config files (rope_scaling)."""
    assert_same(tiny_lm(tmp_path / "m", model_type, num_layers=1, config={"rope_scaling": rope}))


@pytest.mark.parametrize("rope", [rope for rope in ROPES.values() if rope], ids=[name for name in ROPES if ROPES[name]])
def test_rotary_scalings_as_transformers_saves_them(tmp_path, rope):
    """The same once transformers has written them its own way (rope_parameters, with the base among them)."""
    theirs = reference(tiny_lm(tmp_path / "ours", num_layers=1, config={"rope_scaling": rope, "rope_theta": 5e5}))
    theirs.save_pretrained(tmp_path / "saved")
    ours = load(tmp_path / "saved", pooling="last")
    assert ours.folder.architecture.rope_theta == 5e5
    sequences = random_sequences(LENGTHS, 400)
    for mine, their in zip(hidden_of(ours, sequences), expected_rows(theirs, sequences), strict=True):
        torch.testing.assert_close(mine, their, **TOLERANCE)


@pytest.mark.parametrize("name", ["default", "linear", "llama3", "yarn", "yarn_of_its_own"])
def test_tables_are_the_references_at_far_positions(tmp_path, name):
    """Bit for bit: a last bit of a frequency would be a thousandth of a turn out here."""
    rope = ROPES[name] and {**ROPES[name], "original_max_position_embeddings": 8192}
    if name == "linear":
        rope = ROPES[name]
    path = tiny_lm(tmp_path / "m", head_dim=128, num_layers=1, max_positions=32768, config={"rope_scaling": rope})
    table = load(path, pooling="last").backbone.rotary.table
    assert table.shape == (32768, 128)
    cos, sin = reference(path).rotary_emb(torch.zeros(1), torch.arange(32768)[None])
    torch.testing.assert_close(table, torch.cat([cos[0, :, :64], sin[0, :, :64]], dim=-1), rtol=0, atol=0)


def test_qwen2_has_biases_in_front_only(tmp_path):
    path = tiny_lm(tmp_path / "m", "qwen2")
    assert_same(path)
    attention = load(path, pooling="last").backbone.layers[0].self_attn
    assert attention.qkv_proj.bias is not None
    assert attention.o_proj.bias is None


@pytest.mark.parametrize(("window", "seen"), [(7, 6), (1, 0), (None, None), (256, None), (1000, None)])
def test_mistral_window(tmp_path, window, seen):
    path = tiny_lm(tmp_path / "m", "mistral", config={"sliding_window": window})
    assert read_model_folder(path, pooling="last").architecture.window == seen
    assert_same(path)


def test_mistral_without_a_word_of_its_window_has_the_familys(tmp_path):
    path = tiny_lm(tmp_path / "m", "mistral", max_positions=8192)
    edit_json(path / "config.json", sliding_window=None)  # takes the key away
    assert read_model_folder(path, pooling="last").architecture.window == 4095


def test_bidirectional_llama(tmp_path):
    """An embedder trained from Llama sees all of its text; only the config says so."""
    path = tiny_lm(tmp_path / "m", kind="Model", prefix="", config={"is_causal": False}, pooling="mean")
    ours = load(path)
    rows = [hidden_of(ours, [ids])[0][0] for ids in ([7, 8, 9], [7, 8, 10])]
    assert not torch.allclose(*rows, atol=1e-3)
    theirs = reference(path)
    with torch.inference_mode():
        mask = torch.zeros(1, 1, 9, 9)
        ids = random_sequences([9], 400)[0]
        expected = theirs(input_ids=torch.tensor([ids]), attention_mask=mask).last_hidden_state[0]
    torch.testing.assert_close(hidden_of(ours, [ids])[0], expected, **TOLERANCE)


def test_old_checkpoints_carry_their_frequencies(tmp_path):
    """rotary_emb.inv_freq was a stored buffer, in each layer and later in the model: both are left out."""
    places = ["model.layers.0.self_attn", "model.layers.1.self_attn", "model"]
    path = tiny_lm(tmp_path / "m", extra={f"{place}.rotary_emb.inv_freq": torch.ones(8) for place in places})
    assert_same(path)


def test_half_precision_is_refused_for_qwen2_and_served_for_llama(tmp_path):
    """Report C165 (vllm#14126): activations past fp16's range came out as one repeated token."""
    qwen2 = read_model_folder(tiny_lm(tmp_path / "q", "qwen2"), pooling="last")
    with pytest.raises(CheckpointError, match="Qwen2ForCausalLM is not served in float16"):
        load_model(qwen2, dtype=torch.float16)
    ours = load(tiny_lm(tmp_path / "l"), pooling="last", dtype=torch.float16)
    assert ours.backbone.norm.weight.dtype == torch.float16

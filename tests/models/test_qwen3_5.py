"""Qwen3.5 against transformers on the same random weights, in fp32: every published layout, token by token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from rose.config import read_model_folder
from rose.convert import load_generative
from rose.errors import CheckpointError
from rose.models.base import RecurrentSpec
from tests.support.running import logits_of, random_sequences
from tests.support.tiny_checkpoints import edit_json, read_json
from tests.support.tiny_qwen3_5 import tiny_qwen3_5

# Below, at and above a chunk of 64 and several of them; shorter than the convolution's reach.
LENGTHS = [11, 1, 64, 65, 2, 150]
MODELS = {
    "text": {},
    "untied": {"tied": False},
    "multimodal": {"layout": "multimodal"},
    "multimodal_untied_in_shards": {"layout": "multimodal", "tied": False, "shards": 3},
    "as_many_value_heads_as_key_heads": {"key_heads": 2, "value_heads": 2, "value_dim": 16},
    "three_value_heads_a_key_head": {"key_heads": 1, "value_heads": 3},
    "wider_convolution": {"config": {"linear_conv_kernel_dim": 6}},
    "attention_first_and_biased": {
        "config": {"layer_types": ["full_attention", "linear_attention"] * 2, "attention_bias": True}
    },
    "half_of_a_head_turned": {
        "config": {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
                "mrope_section": [4, 2, 2],
            }
        }
    },
}


@pytest.fixture(autouse=True)
def _quiet():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def load(path: Path, dtype: torch.dtype = torch.float32):
    return load_generative(read_model_folder(path), dtype=dtype)


def reference(path: Path):
    """transformers' own text model of a folder, whatever stands around it."""
    theirs = transformers.Qwen3_5ForCausalLM
    return theirs.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


@torch.inference_mode()
def expected_logits(model, sequences: list[list[int]]) -> torch.Tensor:
    """After every token, each sequence alone and unpadded: [T, V]."""
    return torch.cat([model(input_ids=torch.tensor([ids])).logits[0] for ids in sequences])


def assert_logits(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == torch.float32
    assert float((found - expected).abs().max()) <= 1e-4 * float(expected.abs().max())
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("arguments", MODELS.values(), ids=MODELS)
def test_logits(tmp_path, arguments):
    path = tiny_qwen3_5(tmp_path / "m", **arguments)
    theirs, ours = reference(path), load(path)
    sequences = random_sequences(LENGTHS, 400)
    assert_logits(logits_of(ours, sequences, every_row=True), expected_logits(theirs, sequences))


@pytest.mark.parametrize("layout", ["text", "multimodal"])
def test_as_transformers_saves_it(tmp_path, layout):
    """The names and the config that save_pretrained writes, a real vision tower among them."""
    path = tiny_qwen3_5(tmp_path / "m", layout)
    config = transformers.AutoConfig.from_pretrained(path)
    name = read_json(path / "config.json")["architectures"][0]
    torch.manual_seed(5)
    theirs = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    theirs.save_pretrained(tmp_path / "saved", max_shard_size="200KB")
    sequences = random_sequences(LENGTHS, 400)
    assert_logits(logits_of(load(tmp_path / "saved"), sequences, every_row=True), expected_logits(theirs, sequences))


@pytest.mark.parametrize("layout", ["text", "multimodal"])
def test_greedy_text_is_the_references(tmp_path, layout):
    """Fifty tokens, one full forward each, past the first chunk of 64. Untied: a tied head would repeat its token."""
    path = tiny_qwen3_5(tmp_path / "m", layout, tied=False)
    ours, theirs = load(path), reference(path)
    settings = {"do_sample": False, "max_new_tokens": 50, "eos_token_id": None, "pad_token_id": 0}
    for prompt in random_sequences([30, 1], 400):
        expected = theirs.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), **settings)[0]
        ids = list(prompt)
        for _ in range(50):
            ids.append(int(logits_of(ours, [ids])[0].argmax()))
        assert ids == expected.tolist()
        assert len(set(ids[len(prompt) :])) > 20


def test_what_the_engine_is_told(tmp_path):
    model = load(tiny_qwen3_5(tmp_path / "m", num_layers=8, max_positions=128))
    assert (model.num_layers, model.kv_layers, model.max_tokens) == (8, (3, 7), 128)
    assert model.recurrent == RecurrentSpec(
        layers=(0, 1, 2, 4, 5, 6), conv_channels=192, conv_width=4, value_heads=4, key_dim=16, value_dim=32
    )
    spec = model.attention_spec(torch.device("cpu"), torch.float32)
    assert (spec.layout, spec.causal, spec.num_heads, spec.num_kv_heads, spec.head_dim) == ("paged", True, 4, 2, 32)


def test_what_stands_in_exponents_stays_in_fp32(tmp_path):
    """Logits of a bf16 model are those of the folder in fp32 but for rounding; A_log, dt_bias and the gated norm are
    not rounded, and 1 + weight is added in fp32."""
    path = tiny_qwen3_5(tmp_path / "m")
    half, full = load(path, torch.bfloat16), load(path)
    net, exact = (model.backbone.layers[0].linear_attn for model in (half, full))
    for name in ("A_log", "dt_bias"):
        assert torch.equal(getattr(net, name), getattr(exact, name))
    assert torch.equal(net.norm.weight, exact.norm.weight)
    norm = half.backbone.norm
    assert norm.weight.dtype == torch.bfloat16
    assert torch.equal(norm.gain, 1 + norm.weight.float())
    sequences = random_sequences(LENGTHS, 400)
    found = logits_of(half, sequences, torch.bfloat16)
    assert torch.cosine_similarity(found, logits_of(full, sequences)).min() > 0.998


def test_company_and_order_do_not_matter(tmp_path):
    """Nothing of a packed sequence reaches the next one: convolution and state begin anew."""
    model = load(tiny_qwen3_5(tmp_path / "m"))
    sequences = random_sequences([70, 2, 130, 1, 3], 400)
    together = logits_of(model, sequences)
    for index, own in enumerate(sequences):
        torch.testing.assert_close(logits_of(model, [own])[0], together[index], rtol=1e-5, atol=1e-5)


def test_what_is_left_out_is_said(tmp_path, caplog):
    """A vision tower and the layers that guess ahead are not loaded, and the log says how many tensors of which."""
    path = tiny_qwen3_5(tmp_path / "m", "multimodal")
    with caplog.at_level("INFO", logger="rose"):
        load(path)
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert "2 tensors left out (model.visual.blocks.0.attn.qkv.weight ...): the vision tower" in said
    assert "2 tensors left out (mtp.fc.weight ...): layers that guess further tokens ahead" in said


@pytest.mark.parametrize(
    ("left_out", "message"),
    [
        ("model.layers.0.linear_attn.in_proj_b.weight", r"linear_attn.in_proj_b.weight is missing; layers.0.linear_at"),
        ("model.layers.1.linear_attn.A_log", r"lacks layers.1.linear_attn.A_log"),
        ("model.layers.3.self_attn.q_norm.weight", r"lacks layers.3.self_attn.q_norm.weight"),
    ],
)
def test_a_missing_tensor_is_named(tmp_path, left_out, message):
    from safetensors.torch import load_file, save_file

    path = tiny_qwen3_5(tmp_path / "m")
    tensors = load_file(path / "model.safetensors")
    del tensors[left_out]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        load(path)


def test_an_unknown_tensor_is_refused(tmp_path):
    path = tiny_qwen3_5(tmp_path / "m", extra={"model.layers.0.linear_attn.in_proj_c.weight": torch.ones(4, 48)})
    with pytest.raises(CheckpointError, match=r"the model has no place for .*in_proj_c"):
        load(path)


def test_float16_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="not served in float16"):
        load(tiny_qwen3_5(tmp_path / "m"), torch.float16)


def test_weights_that_are_tied_by_the_outer_config(tmp_path):
    """The class around goes by the outer key; a text_config that says otherwise is passed over."""
    path = tiny_qwen3_5(tmp_path / "m", "multimodal")
    nested = read_json(path / "config.json")["text_config"] | {"tie_word_embeddings": False}
    edit_json(path / "config.json", text_config=nested)
    assert read_model_folder(path).architecture.tie_word_embeddings
    load(path)

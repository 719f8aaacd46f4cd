"""Quantised folders: every dialect loads, keeps its scales, and answers as the arithmetic it describes says."""

from __future__ import annotations

import shutil

import pytest
import torch
import transformers
import transformers.integrations.finegrained_fp8
from safetensors.torch import load_file, save_file

from rose.config import read_model_folder
from rose.convert import load_generative
from rose.convert.quantized.flows import FLOWS, hand_over_codes
from rose.errors import CheckpointError
from rose.kernels.quantize import FP8
from rose.layers.linear import Linear
from rose.layers.quantized import CodedAddNorm, CodedRMSNorm, PartedLinear, QuantizedLinear
from tests.support.quantized_folders import DIALECTS, INPUTS, quantize_folder
from tests.support.running import embed, load, load_reranker, logits_of, random_sequences, score
from tests.support.tiny_checkpoints import edit_json, read_json, tiny_bert, tiny_qwen3, write_json
from tests.support.tiny_families import tiny_cross_encoder_bert, tiny_qwen3_reranker
from tests.support.tiny_language_models import tiny_lm
from tests.support.tiny_qwen3_5 import tiny_qwen3_5

WIDE = {"hidden_size": 128, "intermediate_size": 256}  # whole blocks, q, k and v too (32 x 4, 2, 2: k and v are not)
SEQUENCES = random_sequences([9, 4, 20], 150)


def cosine(a, b):
    return float(torch.nn.functional.cosine_similarity(a.double(), b.double()).min())


def linears(model):
    return {n: m for n, m in model.backbone.named_modules() if isinstance(m, QuantizedLinear)}


def expected_vectors(path, plain_path, values, dialect):
    """The plain model with the codes' values for weights, and every product's input rounded by hand."""
    shutil.copytree(path, plain_path)
    tensors = load_file(plain_path / "model.safetensors")
    for name in list(tensors):
        if name in values:
            tensors[name] = values[name]
        elif name.endswith(("weight_scale", "weight_scale_inv", "input_scale", "activation_scale")):
            del tensors[name]
    save_file(tensors, plain_path / "model.safetensors")
    edit_json(plain_path / "config.json", quantization_config=None)
    (plain_path / "hf_quant_config.json").unlink(missing_ok=True)
    model = load(plain_path)
    coded = {id(m) for m in model.backbone.modules() if type(m).__name__ in ("Linear", "GatedLinear")}
    for module in model.backbone.modules():
        if id(module) in coded:
            rounded(module, dialect)
    return embed(model, SEQUENCES)


def rounded(module, dialect):
    def inputs(x):
        x = x.float()
        if "static" in dialect or dialect in ("modelopt", "modelopt-file"):
            scale = torch.full((1, 1), INPUTS / 448)
        elif "block" in dialect:
            groups = x.view(len(x), -1, 128)
            scale = groups.abs().amax(-1) / 448
            return ((groups / scale[..., None]).to(FP8).float() * scale[..., None]).view_as(x)
        else:
            scale = x.abs().amax(1, keepdim=True) / (127 if dialect == "int8" else 448)
        if dialect == "int8":
            return (x / scale).round() * scale
        return (x / scale).clamp(-448, 448).to(FP8).float() * scale

    forward, partial = module.forward, getattr(module, "partial", None)
    module.forward = lambda x: forward(inputs(x))
    if partial is not None:
        module.partial = lambda x: partial(inputs(x))


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("family", ["bert", "qwen3"])
def test_every_dialect_is_its_own_arithmetic(tmp_path, dialect, family):
    path = {"bert": tiny_bert, "qwen3": tiny_qwen3}[family](tmp_path / "q", **WIDE)
    before = embed(load(path), SEQUENCES)
    values = quantize_folder(path, dialect)
    assert len(values) == (12 if family == "bert" else 14)
    model = load(path)
    out = embed(model, SEQUENCES)
    expected = expected_vectors(path, tmp_path / "plain", values, dialect)
    # Sums in another order may turn a code that lay between two over to the other.
    assert cosine(out, expected) > 0.9999
    assert 0.9 < cosine(out, before) < 0.9999999  # near the plain model, and not it
    assert 1 - cosine(out, expected) < 0.05 * (1 - cosine(out, before))
    assert {m.weight.dtype for m in linears(model).values()} == {torch.int8 if dialect == "int8" else FP8}


def test_the_names_of_transformers_own_scales():
    """What it calls the scales of one a tensor, and the type of those that are powers of two."""
    fp8_linear = transformers.integrations.finegrained_fp8.FP8Linear
    assert {"weight_scale_inv", "activation_scale"} < {*fp8_linear(128, 256, None, "static").state_dict()}
    scale = fp8_linear(128, 256, (128, 128), scale_fmt="ue8m0").state_dict()["weight_scale_inv"]
    assert scale.dtype == torch.float8_e8m0fnu


def test_the_older_name_of_the_config(tmp_path):
    path = tiny_qwen3(tmp_path / "q", **WIDE)
    quantize_folder(path, "channel-token")
    expected = embed(load(path), SEQUENCES)
    config = read_json(path / "config.json")
    write_json(
        path / "config.json", {k.replace("quantization_config", "compression_config"): v for k, v in config.items()}
    )
    assert torch.equal(embed(load(path), SEQUENCES), expected)
    assert read_model_folder(path).quantized_by == "compressed-tensors"


def test_fused_parts_keep_their_own_scales(tmp_path):
    """q, k and v have three scales; the fused layer has a row each, and no code changes."""
    path = tiny_qwen3(tmp_path / "q", **WIDE)
    quantize_folder(path, "tensor-static")
    stored = load_file(path / "model.safetensors")
    layer = linears(load(path))["layers.0.self_attn.qkv_proj"]
    names = [f"layers.0.self_attn.{part}_proj" for part in "qkv"]
    codes = torch.cat([stored[f"{name}.weight"].view(torch.uint8) for name in names])
    assert torch.equal(layer.weight.view(torch.uint8), codes)
    scales = torch.cat([stored[f"{n}.weight_scale"].expand(stored[f"{n}.weight"].shape[0]) for n in names])
    assert torch.equal(layer.weight_scale, scales)
    assert layer.weight_scale.unique().numel() == 3
    assert linears(load(path))["layers.0.self_attn.o_proj"].weight_scale.shape == (1,)


def test_parts_that_are_not_alike_stay_parts(tmp_path):
    """k and v have 64 rows: blocks do not end between them. Other input scales, or a part that is plain: likewise."""
    path = tiny_qwen3(tmp_path / "blocks", **WIDE)
    quantize_folder(path, "fp8-block")
    attention = load(path).backbone.layers[0].self_attn.qkv_proj
    assert isinstance(attention, PartedLinear)
    assert [part.weight.shape[0] for part in attention.parts] == [128 + 64, 64]
    path = tiny_qwen3(tmp_path / "inputs", **WIDE)
    quantize_folder(path, "tensor-static")
    tensors = load_file(path / "model.safetensors")
    tensors["layers.0.self_attn.v_proj.input_scale"] *= 2
    save_file(tensors, path / "model.safetensors")
    attention = load(path).backbone.layers[0].self_attn.qkv_proj
    assert [part.input_scale.item() for part in attention.parts] == pytest.approx([INPUTS / 448, 2 * INPUTS / 448])
    path = tiny_qwen3(tmp_path / "mixed", **WIDE)
    quantize_folder(path, "channel-token", keep=("layers.1.self_attn.k_proj", "mlp.up_proj"))
    layer = load(path).backbone.layers[1]
    assert [type(part) for part in layer.self_attn.qkv_proj.parts] == [QuantizedLinear, Linear, QuantizedLinear]
    assert [type(part) for part in layer.mlp.gate_up_proj.parts] == [QuantizedLinear, Linear]


@pytest.mark.parametrize("dialect", ["fp8-block", "channel-token", "tensor-static"])
def test_a_hybrid_models_narrow_products_stay_plain(tmp_path, dialect):
    """Qwen3.5: in_proj_b and in_proj_a stay in high precision beside coded parts of one fused product."""
    path = tiny_qwen3_5(tmp_path / "q", hidden_size=128, intermediate_size=128)
    folder = read_model_folder(path, task="generate")
    sequences = random_sequences([7, 12], 150)
    before = logits_of(load_generative(folder), sequences)
    quantize_folder(path, dialect, keep=("in_proj_a", "in_proj_b"))
    model = load_generative(read_model_folder(path, task="generate"))
    net = model.backbone.layers[0].linear_attn.in_proj
    assert isinstance(net.parts[-1], Linear)
    assert cosine(logits_of(model, sequences), before) > 0.97
    coded = [m for m in model.backbone.modules() if isinstance(m, CodedRMSNorm)]
    # Only the feed-forward's and the attending layer's norms have one reader that takes settled codes.
    assert len(coded) == (5 if dialect == "tensor-static" else 0)
    assert all(torch.equal(m._gain, 1 + m.weight) for m in coded)


@pytest.mark.parametrize("dialect", ["tensor-static", "channel-token", "int8"])
def test_rerankers_and_language_models_load(tmp_path, dialect):
    pairs = [("a query", "a document"), ("two", "other words in it")]
    for make, name in ((tiny_cross_encoder_bert, "bert"), (tiny_qwen3_reranker, "qwen")):
        path = make(tmp_path / name, **WIDE)
        before = score(load_reranker(path), pairs)
        quantize_folder(path, dialect)
        model = load_reranker(path)
        assert linears(model)
        assert torch.allclose(score(model, pairs), before, atol=0.15 * float(before.abs().max()) + 0.05)
    path = tiny_lm(tmp_path / "lm", **WIDE)
    before = logits_of(load_generative(read_model_folder(path)), SEQUENCES)
    quantize_folder(path, dialect)
    after = logits_of(load_generative(read_model_folder(path)), SEQUENCES)
    assert 0.98 < cosine(after, before) < 0.9999999


def test_layers_hand_over_codes(tmp_path):
    """With settled scales, norms and activations answer in codes; the vectors are the same to the bit."""
    for make, family, count in ((tiny_bert, "bert", 5), (tiny_qwen3, "qwen3", 6)):
        path = make(tmp_path / family, **WIDE)
        quantize_folder(path, "tensor-static")
        model = load(path)
        handed = [m for m in model.backbone.modules() if isinstance(m, CodedAddNorm | CodedRMSNorm)]
        handed += [m for m in linears(model).values() if m.output_scale is not None]
        assert len(handed) == count
        out = embed(model, SEQUENCES)
        apart = load_without_flows(path)
        assert not any(isinstance(m, CodedAddNorm | CodedRMSNorm) for m in apart.backbone.modules())
        assert torch.equal(embed(apart, SEQUENCES), out)
        assert hand_over_codes(apart.backbone, family) == count
        assert torch.equal(embed(apart, SEQUENCES), out)


def load_without_flows(path):
    kept = dict(FLOWS)
    FLOWS.clear()
    try:
        return load(path)
    finally:
        FLOWS.update(kept)


def test_a_quantised_head_is_read_as_numbers(tmp_path):
    path = tiny_lm(tmp_path / "lm", **WIDE)
    tensors = load_file(path / "model.safetensors")
    codes = (tensors["lm_head.weight"] / 0.01).clamp(-448, 448).to(FP8)
    tensors |= {"lm_head.weight": codes, "lm_head.weight_scale": torch.tensor([0.01])}
    save_file(tensors, path / "model.safetensors")
    edit_json(path / "config.json", quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic"})
    model = load_generative(read_model_folder(path))
    assert torch.equal(model.lm_head.weight, codes.float() * 0.01)


def test_in_bf16_the_answers_stay_near(tmp_path):
    path = tiny_bert(tmp_path / "q", **WIDE)
    quantize_folder(path, "tensor-static")
    wide, half = load(path), load(path, dtype=torch.bfloat16)
    assert all(m.dtype == torch.bfloat16 for m in linears(half).values())
    assert all(m.weight_scale.dtype == torch.float32 for m in linears(half).values())
    from tests.support.running import batch_of

    vectors = half(batch_of(half, SEQUENCES, torch.bfloat16), ["dense"])["dense"]
    assert cosine(vectors, embed(wide, SEQUENCES)) > 0.99


def change_group(path, part, **changes):
    config = read_json(path / "config.json")
    config["quantization_config"]["config_groups"]["group_0"][part] |= changes
    edit_json(path / "config.json", **config)


REFUSED = [
    (lambda p: change_group(p, "weights", num_bits=4), "4-bit float by tensor are not served"),
    (lambda p: change_group(p, "weights", symmetric=False), "asymmetric"),
    (lambda p: change_group(p, "weights", strategy="group"), "by group are not served; there are tensor"),
    (lambda p: change_group(p, "input_activations", strategy="token"), "by token, static are not served"),
    (lambda p: edit_json(p / "config.json", quantization_config={"quant_method": "awq"}), r"quantised \(awq\)"),
    (
        lambda p: edit_json(p / "config.json", quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4"}),
        "quant_algo 'NVFP4'",
    ),
    (
        lambda p: edit_json(
            p / "config.json", quantization_config={"quant_method": "compressed-tensors", "format": "pack-quantized"}
        ),
        "format 'pack-quantized'",
    ),
    (
        lambda p: edit_json(
            p / "config.json", quantization_config={"quant_method": "fp8", "weight_block_size": [64, 64]}
        ),
        r"weight_block_size \[64, 64\]",
    ),
    (lambda p: edit_json(p / "config.json", quantization_config=None), "F8_E4M3, which is not served as a weight"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[message[:20] for _, message in REFUSED])
def test_what_is_not_served_is_refused_by_name(tmp_path, change, message):
    path = tiny_bert(tmp_path / "q", **WIDE)
    quantize_folder(path, "tensor-static")
    change(path)
    with pytest.raises(CheckpointError, match=message):
        load(path)


def set_tensor(path, name, value):
    tensors = load_file(path / "model.safetensors")
    if value is None:
        del tensors[name]
    else:
        tensors[name] = value
    save_file(tensors, path / "model.safetensors")


LAYER = "encoder.layer.1.output.dense"


@pytest.mark.parametrize(
    ("leaf", "value", "message"),
    [
        ("weight_scale", None, "weight_scale is missing, without which"),
        ("input_scale", None, "input_scale is missing"),
        ("input_scale", torch.zeros(1), "must be above zero"),
        ("weight_scale", torch.tensor([float("nan")]), "no scale"),
        ("weight_scale", torch.ones(7), r"has shape \(7,\)"),
        ("weight_zero_point", torch.ones(1, dtype=torch.int8), "asymmetric codes"),
        ("weight", torch.full((128, 256), float("nan")).to(FP8), "not finite"),
        ("weight", torch.zeros(128, 256, dtype=torch.int8), "holds I8, and quantization_config says F8_E4M3"),
    ],
)
def test_damaged_scales_and_codes_are_named(tmp_path, leaf, value, message):
    path = tiny_bert(tmp_path / "q", **WIDE)
    quantize_folder(path, "tensor-static")
    set_tensor(path, f"{LAYER}.{leaf}", value)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(path)
    assert LAYER in caught.value.message


def test_an_ignored_module_of_codes_is_a_contradiction(tmp_path):
    path = tiny_bert(tmp_path / "q", **WIDE)
    quantize_folder(path, "channel-token")
    config = read_json(path / "config.json")
    config["quantization_config"]["ignore"].append(r"re:.*layer\.1\.output.*")
    edit_json(path / "config.json", **config)
    with pytest.raises(CheckpointError, match="says nothing of it"):
        load(path)


def test_zero_points_and_cache_scales_are_left_out(tmp_path):
    path = tiny_lm(tmp_path / "q", **WIDE)
    quantize_folder(path, "channel-token")
    before = logits_of(load_generative(read_model_folder(path)), SEQUENCES)
    set_tensor(path, "model.layers.0.mlp.down_proj.weight_zero_point", torch.zeros(128, 1, dtype=torch.int8))
    set_tensor(path, "model.layers.0.self_attn.k_scale", torch.ones(1))
    assert torch.equal(logits_of(load_generative(read_model_folder(path)), SEQUENCES), before)


def test_a_quantised_folder_is_not_converted(tmp_path):
    from rose.convert.offline import Wishes, find_source, open_weights

    path = tiny_lm(tmp_path / "q", **WIDE)
    quantize_folder(path, "channel-token")
    with pytest.raises(CheckpointError, match=r"is quantised .compressed-tensors.: convert the plain checkpoint"):
        open_weights(find_source(path), Wishes(to="embedder"))

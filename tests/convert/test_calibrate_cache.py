"""Scales of keys and values: what transformers' own cache holds, written where compressed-tensors reads them."""

from __future__ import annotations

import pytest
import torch
import transformers
from safetensors.torch import load_file

from rose.config import read_model_folder
from rose.convert import load_generative
from rose.convert.calibrate.cache import CacheScales
from rose.convert.calibrate.subject import Verdict, open_subject
from rose.errors import InvalidInput
from tests.convert.test_calibrate_folders import ALWAYS, IDS, WIDE, made
from tests.support.running import logits_of
from tests.support.tiny_checkpoints import read_json, tiny_qwen3
from tests.support.tiny_language_models import tiny_lm
from tests.support.tiny_qwen3_5 import tiny_qwen3_5

WATCHED = [ids for i, ids in enumerate(IDS) if i % 4 != 3]
FAMILIES = {"llama": tiny_lm, "qwen3": lambda path, **shape: tiny_lm(path, "qwen3", tied=True, **shape)}


def their_caches(path):
    """Keys and values of each layer, as transformers stores them over all watched texts."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        caches = [model(torch.tensor([ids]), use_cache=True).past_key_values for ids in WATCHED]
    count = model.config.num_hidden_layers
    return [
        [torch.cat([getattr(c.layers[n], kind).flatten() for c in caches]) for kind in ("keys", "values")]
        for n in range(count)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_scales_hold_the_largest_of_transformers_cache(tmp_path, family):
    path = FAMILIES[family](tmp_path / "plain", **WIDE)
    outcome = made(path, tmp_path / "made", "fp8-tensor", kv_cache=True)
    stored = load_file(tmp_path / "made" / "model.safetensors")
    assert outcome.report["kv_cache_damage"] > 0
    for number, caches in enumerate(their_caches(path)):
        for leaf, values in zip(("k_scale", "v_scale"), caches, strict=True):
            scale = stored[f"model.layers.{number}.self_attn.{leaf}"]
            assert scale.shape == (1,)
            # Rounded up to bf16, 0.8 % at most; the largest value differs by the order of sums.
            assert 1 - 1e-5 < float(scale) * 448 / float(values.abs().max()) < 1.0079
            assert torch.equal(scale, scale.bfloat16().float())


def test_compressed_tensors_reads_the_scheme_and_the_names(tmp_path):
    """Its own schema and leaf names. Its hooks look for a cache among the arguments of transformers' attention."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import KVCacheScaleType, QuantizationConfig

    made(tiny_lm(tmp_path / "plain", **WIDE), tmp_path / "made", "fp8-channel", kv_cache=True)
    config = QuantizationConfig.model_validate(read_json(tmp_path / "made" / "config.json")["quantization_config"])
    scheme = config.kv_cache_scheme
    assert (scheme.num_bits, scheme.type, scheme.strategy) == (8, "float", "tensor")
    assert (scheme.symmetric, scheme.dynamic) == (True, False)
    leaves = {name.rpartition(".")[2] for name in load_file(tmp_path / "made" / "model.safetensors")}
    assert {KVCacheScaleType.KEY.value, KVCacheScaleType.VALUE.value} < leaves
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float32)


def test_serving_leaves_them_out(tmp_path):
    """The cache stays in the model's dtype: the same answers as of the folder without them."""
    path = tiny_lm(tmp_path / "plain", **WIDE)
    made(path, tmp_path / "with", "fp8-tensor", kv_cache=True)
    made(path, tmp_path / "without", "fp8-tensor")
    both = [load_generative(read_model_folder(tmp_path / name)) for name in ("with", "without")]
    assert torch.equal(*(logits_of(model, IDS[:4]) for model in both))


def test_only_layers_that_attend_have_any(tmp_path):
    path = tiny_qwen3_5(tmp_path / "plain", **WIDE)
    made(path, tmp_path / "made", "fp8-channel", kv_cache=True)
    kinds = read_json(path / "config.json")
    kinds = kinds.get("text_config", kinds)["layer_types"]
    names = [name for name in load_file(tmp_path / "made" / "model.safetensors") if name.endswith("k_scale")]
    assert len(names) == kinds.count("full_attention") > 0
    assert all(kinds[int(name.split("layers.")[1].split(".")[0])] == "full_attention" for name in names)


def test_the_gate_is_held_with_the_cache_rounded(tmp_path):
    """Layers are judged beside rounded keys and values; the model itself is left as it was."""
    path = tiny_lm(tmp_path / "plain", **WIDE)
    subject = open_subject(read_model_folder(path), IDS)
    plain = subject.answers(range(4))
    cache = CacheScales(subject)
    with cache.watched(subject):
        subject.answers(range(len(IDS)))
    cache.settle()
    with cache.rounded(subject):
        rounded = subject.answers(range(4))
    assert 0 < abs(rounded[:, 0] - plain[:, 0]).max() < 0.5
    assert (subject.answers(range(4)) == plain).all()
    seen = []

    def judge(before, after):
        seen.append(float(abs(after[:, 0] - before[:, 0]).max()))
        return Verdict(False, {})

    report = made(path, tmp_path / "made", "fp8-channel", judge, kv_cache=True).report
    assert min(seen) > 0  # even with every layer kept plain: keys and values are rounded then too
    assert not report["passed"]
    assert not (tmp_path / "made").exists()
    assert report["layers_quantised"] == 0


def test_an_embedder_keeps_none(tmp_path):
    with pytest.raises(InvalidInput, match="embedders and rerankers keep no keys and values"):
        made(tiny_qwen3(tmp_path / "plain"), tmp_path / "made", "fp8-channel", ALWAYS, kv_cache=True)
    assert not (tmp_path / "made").exists()

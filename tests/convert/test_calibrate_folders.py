"""Calibrated folders: read by ROSE as they were judged, and by compressed-tensors' own code."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rose.config import read_model_folder
from rose.convert import load_generative
from rose.convert.calibrate import SCHEMES, Settings, Verdict, calibrate, open_subject
from rose.convert.calibrate.observe import Observer
from rose.convert.calibrate.targets import coarse, quantize_weight
from rose.errors import CheckpointError, InvalidInput
from rose.kernels.quantize import FP8
from rose.kernels.scaled_mm import dequantize
from rose.layers.quantized import CodedRMSNorm, QuantizedLinear
from tests.support.running import embed, load, logits_of, random_sequences
from tests.support.tiny_checkpoints import (
    Dense,
    edit_json,
    read_json,
    tiny_bert,
    tiny_qwen3,
    tiny_xlm_roberta,
    write_json,
)
from tests.support.tiny_families import tiny_bge_m3, tiny_cross_encoder_xlmr, tiny_qwen3_reranker
from tests.support.tiny_language_models import tiny_lm
from tests.support.tiny_qwen3_5 import tiny_qwen3_5

WIDE = {"hidden_size": 128, "intermediate_size": 256}
IDS = random_sequences([9, 4, 20, 31, 12, 7, 18, 25, 3, 14, 22, 16], 150, seed=5)
ALWAYS = lambda plain, other: Verdict(True, {"off": float(np.abs(plain - other).max())})  # noqa: E731


def made(path, target, scheme, judge=ALWAYS, **settings):
    """The folder; `read` goes to reading it."""
    read = settings.pop("read", {})
    folder = read_model_folder(path, **read)
    subject = open_subject(folder, IDS)
    own = Settings(scheme=scheme, **settings)
    return calibrate(subject, own, judge, target, read=lambda p: read_model_folder(p, **read))


def quantised(model):
    return {name: m for name, m in model.backbone.named_modules() if isinstance(m, QuantizedLinear)}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("make", [tiny_bert, tiny_xlm_roberta, tiny_qwen3])
def test_a_folder_answers_as_it_was_judged(tmp_path, scheme, make):
    """`calibrate` itself refuses a folder whose answers differ in one bit from those of the judged model."""
    path = make(tmp_path / "plain", **WIDE)
    before = embed(load(path), IDS)
    outcome = made(path, tmp_path / "made", scheme)
    model = load(tmp_path / "made")
    near = torch.nn.functional.cosine_similarity(embed(model, IDS), before).min()
    assert 0.95 < near < 0.9999999
    assert outcome.folder == tmp_path / "made"
    assert len(quantised(model)) >= 8
    stored = load_file(tmp_path / "made" / "model.safetensors")
    plain = load_file(path / "model.safetensors")
    assert set(plain) <= set(stored)
    for name, tensor in plain.items():
        if stored[name].dtype == tensor.dtype:
            assert torch.equal(stored[name], tensor), name  # norms, embeddings and biases are left alone
        else:
            assert tensor.dim() == 2
            assert "embed" not in name
    assert read_json(tmp_path / "made" / "calibration.json")["layers"]


def test_scalars_of_the_source_are_passed_on(tmp_path):
    scalar = torch.tensor(2.6592)
    path = tiny_bert(tmp_path / "plain", **WIDE, extra={"cls.logit_scale": scalar})
    made(path, tmp_path / "made", "fp8-channel")
    stored = load_file(tmp_path / "made" / "model.safetensors")["cls.logit_scale"]
    assert stored.shape == ()
    assert torch.equal(stored, scalar)


CT_FAMILIES = {"bert": tiny_bert, "llama": tiny_lm, "qwen3": lambda p, **a: tiny_lm(p, "qwen3", tied=True, **a)}


def reference_rows(path, family):
    """Hidden rows by transformers with compressed-tensors, one sequence at a time."""
    import transformers

    cls = transformers.AutoModel if family == "bert" else transformers.AutoModelForCausalLM
    model = cls.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        outs = [model(input_ids=torch.tensor([s]), attention_mask=torch.ones(1, len(s))) for s in IDS[:4]]
    schemes = sum(getattr(m, "quantization_scheme", None) is not None for m in model.modules())
    if family == "bert":
        rows = [out.last_hidden_state[0].mean(0) for out in outs]
        return torch.nn.functional.normalize(torch.stack(rows), dim=1), schemes
    return torch.stack([out.logits[0, -1] for out in outs]), schemes


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", CT_FAMILIES)
def test_compressed_tensors_own_code_loads_it(tmp_path, scheme, family):
    """One layer at a time, so that no code turned over by another order of sums is carried from layer to layer."""
    pytest.importorskip("compressed_tensors")
    path = CT_FAMILIES[family](tmp_path / "plain", **WIDE)
    only = "*intermediate*" if family == "bert" else "*gate_up*"
    names = [name for name, _ in load_any(path).backbone.named_modules()]
    keep = [n for n in names if n.endswith(("_proj", ".dense")) and not n.endswith(only.strip("*") + ".dense")]
    keep = [n for n in keep if only.strip("*") not in n]
    one = made(path, tmp_path / "one", scheme, keep=tuple(keep))
    assert one.report["layers_quantised"] == 2
    ours = answers(load_any(tmp_path / "one"))
    theirs, count = reference_rows(tmp_path / "one", family)
    assert count == (2 if family == "bert" else 4)
    # It divides a token's largest magnitude by 127.5 where other engines, and ROSE, have 127.
    least = 0.9999 if scheme == "int8" else 0.99998
    assert torch.nn.functional.cosine_similarity(ours, theirs).min() > least
    made(path, tmp_path / "all", scheme)
    theirs, count = reference_rows(tmp_path / "all", family)
    assert count == (12 if family == "bert" else 14)
    ours, plain = answers(load_any(tmp_path / "all")), answers(load_any(path))
    if scheme == "int8":
        assert torch.nn.functional.cosine_similarity(ours, theirs).min() > 0.9995
        return
    off = (1 - torch.nn.functional.cosine_similarity(ours, theirs)).mean()
    assert off < 0.3 * (1 - torch.nn.functional.cosine_similarity(plain, theirs)).mean()


def load_any(path):
    folder = read_model_folder(path)
    return load(path) if folder.generation is None else load_generative(folder)


def answers(model):
    return embed(model, IDS[:4]) if hasattr(model, "head") else logits_of(model, IDS[:4])


@pytest.mark.parametrize("make", [tiny_cross_encoder_xlmr, tiny_qwen3_reranker, tiny_bge_m3])
def test_heads_and_files_beside_them_are_left_alone(tmp_path, make):
    path = make(tmp_path / "plain", **WIDE)
    read = {} if make is tiny_bge_m3 else {"task": "rerank"}
    made(path, tmp_path / "made", "fp8-tensor", read=read)
    for own in path.iterdir():
        if own.is_file() and own.name not in ("config.json", "model.safetensors"):
            assert (tmp_path / "made" / own.name).read_bytes() == own.read_bytes(), own.name
    read_model_folder(tmp_path / "made", **read)
    config = read_json(tmp_path / "made" / "config.json")
    assert config.pop("quantization_config")["quant_method"] == "compressed-tensors"
    assert config == read_json(path / "config.json")


def test_a_dense_module_is_copied_whole(tmp_path):
    path = tiny_bert(tmp_path / "plain", dense=[Dense(128, 32)], **WIDE)
    made(path, tmp_path / "made", "int8")
    files = {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()}
    assert files <= {str(p.relative_to(tmp_path / "made")) for p in (tmp_path / "made").rglob("*")}


def test_norms_by_one_plus_weight_and_narrow_gates_are_left_alone(tmp_path):
    """Qwen3.5: norm weights are written bit for bit; in_proj_a and in_proj_b stay plain, in_proj_qkv and _z do not."""
    path = tiny_qwen3_5(tmp_path / "plain", hidden_size=128, intermediate_size=256)
    read = {"task": "generate"}
    before = logits_of(load_generative(read_model_folder(path, **read)), IDS[:4])
    outcome = made(path, tmp_path / "made", "fp8-tensor", read=read)
    stored, plain = load_file(tmp_path / "made" / "model.safetensors"), load_file(path / "model.safetensors")
    for name, tensor in plain.items():
        small = any(part in name for part in ("norm", "in_proj_a", "in_proj_b", "conv1d", "A_log", "dt_bias", "mtp"))
        if small or "embed" in name:
            assert torch.equal(stored[name], tensor), name
    assert any(name.endswith("in_proj_qkv.weight_scale") for name in stored)
    assert len(outcome.report["always_kept"]) == 6
    model = load_generative(read_model_folder(tmp_path / "made", **read))
    gains = [m for m in model.backbone.modules() if isinstance(m, CodedRMSNorm)]
    assert gains
    assert all(torch.equal(m._gain, 1 + m.weight.float()) for m in gains)
    assert torch.nn.functional.cosine_similarity(logits_of(model, IDS[:4]), before).min() > 0.95


def test_tied_and_untied_heads_stay(tmp_path):
    """Reports C90, C91 (transformers#38870, Qwen3-VL-Embedding#89): one matrix under one name, or two that differ."""
    for tied in (True, False):
        path = tiny_lm(tmp_path / f"plain-{tied}", tied=tied, **WIDE)
        made(path, tmp_path / f"made-{tied}", "fp8-channel")
        stored = load_file(tmp_path / f"made-{tied}" / "model.safetensors")
        assert ("lm_head.weight" in stored) is not tied
        assert "lm_head" in read_json(tmp_path / f"made-{tied}" / "config.json")["quantization_config"]["ignore"]
        model = load_generative(read_model_folder(tmp_path / f"made-{tied}"))
        assert logits_of(model, IDS[:2]).isfinite().all()


def test_from_bin_files_under_a_prefix_in_shards(tmp_path):
    """Reports C93, C95, C96 (tei#564, flash-attention#2778, ms-swift#10070): .bin, a shared tensor, another prefix."""
    path = tiny_bert(tmp_path / "plain", prefix="bert.", **WIDE)
    tensors = load_file(path / "model.safetensors")
    tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"]
    torch.save(tensors, path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    made(path, tmp_path / "made", "fp8-tensor", shard_bytes=60_000)
    assert (tmp_path / "made" / "model.safetensors.index.json").exists()
    assert not list((tmp_path / "made").glob("*.bin"))
    ignore = read_json(tmp_path / "made" / "config.json")["quantization_config"]["ignore"]
    assert "bert.embeddings.word_embeddings" in ignore
    assert len(quantised(load(tmp_path / "made"))) == 8


@pytest.mark.parametrize("scheme", ["fp8-tensor", "int8"])
def test_direction_of_attention_survives(tmp_path, scheme):
    """Reports C05, C06 (llm2vec#74, #79): a bidirectional model stays one, in a batch of one and of several."""
    path = tiny_qwen3(tmp_path / "plain", bidirectional=True, **WIDE)
    made(path, tmp_path / "made", scheme)
    model = load(tmp_path / "made")
    alone, among = embed(model, IDS[:1]), embed(model, IDS[:3])[:1]
    assert torch.nn.functional.cosine_similarity(alone, among).min() > 0.9999
    changed = [[*IDS[0][:-1], IDS[0][-1] + 1]]
    from tests.support.running import hidden_of

    first, other = hidden_of(model, IDS[:1])[0][0], hidden_of(model, changed)[0][0]
    assert not torch.allclose(first, other)
    causal = read_model_folder(made(tiny_qwen3(tmp_path / "c", **WIDE), tmp_path / "cm", scheme).folder)
    assert causal.architecture.causal


def test_what_was_trained_into_the_weights_is_what_is_calibrated(tmp_path):
    """Report C97 (sentence-transformers#3246): codes are those of the folder's own weights, not of a base's."""
    path, other = tiny_bert(tmp_path / "a", seed=0, **WIDE), tiny_bert(tmp_path / "b", seed=9, **WIDE)
    for source in (path, other):
        made(source, source.with_name(source.name + "-made"), "fp8-channel")
        stored = load_file(source.with_name(source.name + "-made") / "model.safetensors")
        for name, tensor in load_file(source / "model.safetensors").items():
            if stored[name].dtype == FP8:
                near = dequantize(stored[name], stored[f"{name}_scale"].flatten())
                assert (near - tensor).norm() / tensor.norm() < 0.04


def judge_by(limit):
    def judge(plain, other):
        off = float(np.abs(plain - other).max())
        return Verdict(off <= limit, {"off": off})

    return judge


def test_layers_are_put_back_until_the_gate_holds(tmp_path):
    path = tiny_bert(tmp_path / "plain", **WIDE)
    all_off = made(path, None, "fp8-tensor").report["measures"]["off"]
    outcome = made(path, tmp_path / "made", "fp8-tensor", judge_by(all_off * 0.6))
    report = outcome.report
    assert report["passed"]
    assert 0 < len(report["kept"]) < 8
    worst = sorted(report["layers"], key=lambda layer: -layer["damage"])
    assert {layer["name"] for layer in worst[: len(report["kept"])]} == set(report["kept"])
    fewer = [t for t in report["trials"] if t["kept"] == len(report["kept"]) - 1]
    assert fewer
    assert not fewer[0]["passed"]
    model = load(tmp_path / "made")
    assert len(quantised(model)) == 8 - len(report["kept"])
    assert not any(name in quantised(model) for name in report["kept"])


def test_where_no_number_of_layers_helps_all_stay_plain(tmp_path):
    path = tiny_bert(tmp_path / "plain", **WIDE)
    outcome = made(path, tmp_path / "never", "int8", lambda plain, other: Verdict(False, {"off": 1.0}))
    assert not outcome.report["passed"]
    assert outcome.report["layers_quantised"] == 0
    assert outcome.folder is None
    assert not list(tmp_path.glob("*never*"))
    assert not made(path, None, "int8").folder


def test_the_model_is_left_as_it_was(tmp_path):
    path = tiny_bert(tmp_path / "plain", **WIDE)
    subject = open_subject(read_model_folder(path), IDS)
    before = subject.answers(range(len(IDS)))
    calibrate(subject, Settings(scheme="fp8-tensor"), judge_by(1e-3), None)
    assert np.array_equal(subject.answers(range(len(IDS))), before)


def test_bad_input_is_named_and_leaves_nothing(tmp_path):
    path = tiny_bert(tmp_path / "plain", **WIDE)
    with pytest.raises(InvalidInput, match="'int4' is not one of"):
        made(path, tmp_path / "x", "int4")
    with pytest.raises(InvalidInput, match=r"--percentile is 20.0, and must be 90 to 100"):
        made(path, tmp_path / "x", "int8", percentile=20.0)
    with pytest.raises(InvalidInput, match=r"--keep \*nothing\* names no layer"):
        made(path, tmp_path / "x", "int8", keep=("*nothing*",))
    with pytest.raises(InvalidInput, match="every layer is kept"):
        made(path, tmp_path / "x", "int8", keep=("*",))
    with pytest.raises(InvalidInput, match="3 texts are too few"):
        calibrate(open_subject(read_model_folder(path), IDS[:3]), Settings(scheme="int8"), ALWAYS, None)
    (tmp_path / "there").mkdir()
    with pytest.raises(CheckpointError, match="there already"):
        made(path, tmp_path / "there", "int8")
    made(path, tmp_path / "made", "int8")
    with pytest.raises(CheckpointError, match=r"quantised already \(compressed-tensors\)"):
        made(tmp_path / "made", tmp_path / "twice", "int8")
    edit_json(path / "config.json", quantization_config={"quant_method": "gguf"})
    with pytest.raises(CheckpointError, match=r"quantised \(gguf\)"):
        made(path, tmp_path / "x", "int8")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["made", "plain", "there"]


def test_a_result_that_answers_otherwise_never_appears(tmp_path):
    path = tiny_bert(tmp_path / "plain", **WIDE)
    subject = open_subject(read_model_folder(path), IDS)

    def read(folder):
        edit_json(folder / "1_Pooling" / "config.json", pooling_mode_mean_tokens=False, pooling_mode_cls_token=True)
        return read_model_folder(folder)

    with pytest.raises(CheckpointError, match="does not answer as the calibrated model did"):
        calibrate(subject, Settings(scheme="int8"), ALWAYS, tmp_path / "made", read=read)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plain"]


def test_the_source_is_not_touched(tmp_path):
    path = tiny_bert(tmp_path / "plain", **WIDE)
    digests = {p: hashlib.sha256(p.read_bytes()).hexdigest() for p in path.rglob("*") if p.is_file()}
    made(path, tmp_path / "made", "fp8-block")
    assert {p: hashlib.sha256(p.read_bytes()).hexdigest() for p in path.rglob("*") if p.is_file()} == digests


def test_percentiles_of_what_was_seen():
    torch.manual_seed(0)
    observer, x = Observer(), torch.randn(200_000)
    for part in x.split(1000):
        observer.see(part)
    for share in (50.0, 99.0, 99.9):
        exact = float(x.abs().quantile(share / 100, interpolation="lower")) if len(x) < 1e6 else 0
        assert exact <= observer.percentile(share) <= exact * 1.04
    assert observer.percentile(100.0) == float(x.abs().max())
    assert 0.038 < observer.beyond(2.0) <= 0.0456  # what lies in the bin of the bound itself is not counted
    observer.see(torch.tensor([float("inf"), float("nan"), 1.0]))
    assert observer.odd == 2


def test_weights_are_as_near_as_eight_bits_allow():
    torch.manual_seed(0)
    weight = torch.randn(300, 200) * torch.rand(300, 1)
    for name, bound in (("fp8-tensor", 0.04), ("fp8-channel", 0.03), ("fp8-block", 0.03), ("int8", 0.012)):
        codes, scale = quantize_weight(weight, SCHEMES[name].scheme)
        own = scale if name == "fp8-block" else scale.flatten()
        assert (dequantize(codes, own) - weight).norm() / weight.norm() < bound
        assert torch.equal(scale, scale.bfloat16().float())  # what other engines round scales to changes nothing
        assert codes.float().abs().max() <= (127 if name == "int8" else 448)
    assert (coarse(torch.tensor([1.0, 1.001, 3e-5])) >= torch.tensor([1.0, 1.001, 3e-5])).all()


def test_a_percentile_clamps_and_says_so(tmp_path):
    path = tiny_bert(tmp_path / "plain", **WIDE)
    all_, most = (made(path, None, "fp8-tensor", percentile=p).report["layers"] for p in (100.0, 99.0))
    for whole, cut in zip(all_, most, strict=True):
        assert cut["input_scale"] < whole["input_scale"]
        assert whole["input_clamped"] == 0.0
        assert 0 < cut["input_clamped"] < 0.02


def test_the_gate_holds_over_all_texts_too(tmp_path):
    """Three of twelve are held out: an answer that is good for those alone is not good."""
    path = tiny_bert(tmp_path / "plain", **WIDE)
    sizes = []

    def judge(plain, other):
        sizes.append(len(plain))
        return Verdict(len(plain) == 3, {"texts": float(len(plain))})

    report = made(path, tmp_path / "made", "int8", judge).report
    assert not report["passed"]
    assert set(sizes) == {3, 12}
    assert report["measures"] == {"texts": 3.0}
    assert report["over_all_texts"] == {"texts": 12.0}
    assert not (tmp_path / "made").exists()


def test_a_backbone_in_a_folder_of_its_own(tmp_path):
    path = tiny_bert(tmp_path / "plain", **WIDE)
    (path / "0_Transformer").mkdir()
    for own in [p for p in path.iterdir() if p.is_file() and not p.name.startswith(("modules", "config_sentence"))]:
        own.rename(path / "0_Transformer" / own.name)
    modules = read_json(path / "modules.json")
    modules[0]["path"] = "0_Transformer"
    write_json(path / "modules.json", modules)
    made(path, tmp_path / "made", "fp8-tensor")
    files = sorted(p.name for p in (tmp_path / "made" / "0_Transformer").iterdir())
    assert files == sorted(p.name for p in (path / "0_Transformer").iterdir())
    assert not (tmp_path / "made" / "config.json").exists()
    assert len(quantised(load(tmp_path / "made"))) == 8

"""`--to llm`: adapters merged into a language model, against PEFT's own merge and its answer at run time."""

from __future__ import annotations

import pytest
import torch
import transformers
from safetensors.torch import load_file

from rose import cli
from rose.config import read_model_folder
from rose.convert import load_generative
from rose.convert.offline import Wishes, convert, decide, find_source, open_weights
from rose.errors import CheckpointError
from tests.support.running import logits_of
from tests.support.tiny_checkpoints import edit_json, read_json, save_weights, tiny_bert
from tests.support.tiny_families import tiny_pplx
from tests.support.tiny_language_models import CHAT_TEMPLATE, tiny_lm, write_generation_config
from tests.support.tiny_qwen3_5 import tiny_qwen3_5

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EVERY = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
SEQUENCE = [7, 40, 41, 99, 5, 230, 17, 60, 61, 62]
ADAPTERS = {
    "attention": ("llama", {}, {"target_modules": ATTENTION}),
    "everything": ("llama", {}, {"target_modules": EVERY, "use_rslora": True}),
    "biases": ("llama", {"config": {"attention_bias": True}}, {"target_modules": ATTENTION, "bias": "all"}),
    "head": ("llama", {}, {"target_modules": [*ATTENTION, "lm_head"]}),
    "head_saved": ("llama", {}, {"target_modules": ATTENTION, "modules_to_save": ["lm_head", "embed_tokens"]}),
    "embedding": ("llama", {}, {"target_modules": ["embed_tokens", "q_proj"]}),
    "norms_saved": ("llama", {"tied": True}, {"target_modules": ATTENTION, "modules_to_save": ["norm"]}),
    "dora": ("mistral", {}, {"target_modules": ATTENTION, "use_dora": True}),
    "tied": ("qwen3", {"tied": True}, {"target_modules": EVERY}),
    "qwen2": ("qwen2", {"shards": 3}, {"target_modules": EVERY}),
}


@pytest.fixture(autouse=True)
def _quiet():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def converted(source, target, **wishes):
    found = find_source(source, **{key: wishes.pop(key) for key in ("base", "adapters") if key in wishes})
    wished = Wishes(to="llm", **wishes)
    with open_weights(found, wished) as weights:
        return convert(decide(found, wished, weights), weights, target)


def logits(model) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([SEQUENCE])).logits[0]


def trained(base, path, **settings):
    """An adapter as PEFT writes it, with random numbers where training would have put its own: (logits with it at run
    time, the state dict of PEFT's own merge)."""
    peft = pytest.importorskip("peft", reason="the oracle of merging is PEFT, which is not installed")
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **settings)).eval()
    draw = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=draw) * 0.1
            parameter.data += noise.abs() if "magnitude" in name else noise
    model.save_pretrained(path)
    answer = logits(model)
    return answer, model.merge_and_unload().state_dict()


@pytest.mark.parametrize(("model_type", "arguments", "settings"), ADAPTERS.values(), ids=ADAPTERS)
def test_merged_is_pefts_merge_and_its_answer(tmp_path, model_type, arguments, settings):
    base = tiny_lm(tmp_path / "base", model_type, **arguments)
    answer, merged = trained(base, tmp_path / "lora", **settings)
    target = converted(tmp_path / "lora", tmp_path / "made")
    written = load_file(target / "model.safetensors")
    tied = arguments.get("tied", False)
    assert written.keys() == {name for name in merged if not (tied and name == "lm_head.weight")}
    for name, tensor in written.items():
        torch.testing.assert_close(tensor, merged[name], rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    ours = load_generative(read_model_folder(target))
    torch.testing.assert_close(logits_of(ours, [SEQUENCE], every_row=True), answer, rtol=1e-4, atol=1e-4)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    torch.testing.assert_close(logits(theirs), answer, rtol=1e-4, atol=1e-4)
    plain = load_generative(read_model_folder(base))
    assert not torch.allclose(logits_of(plain, [SEQUENCE], every_row=True), answer, atol=1e-2)


def test_a_tied_matrix_is_never_changed_on_one_side(tmp_path):
    base = tiny_lm(tmp_path / "base", tied=True)
    trained(base, tmp_path / "lora", target_modules=["q_proj", "embed_tokens"])
    with pytest.raises(CheckpointError, match="one of two tied matrices; untie them first"):
        converted(tmp_path / "lora", tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_a_language_model_is_kept_as_it_is(tmp_path):
    """Names, configs, templates and defaults; only the dtype changes."""
    source = tiny_lm(tmp_path / "a", shards=2)
    write_generation_config(source, eos_token_id=[5, 6], temperature=0.6)
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates/tools.jinja").write_text("{{ tools }}", encoding="utf-8")
    target = converted(source, tmp_path / "b", dtype="bfloat16")
    before, after = read_json(source / "config.json"), read_json(target / "config.json")
    assert after == {key: value for key, value in before.items() if key != "torch_dtype"} | {"dtype": "bfloat16"}
    assert read_json(target / "generation_config.json") == {"eos_token_id": [5, 6], "temperature": 0.6}
    old = {n: t for file in sorted(source.glob("*.safetensors")) for n, t in load_file(file).items()}
    new = load_file(target / "model.safetensors")
    assert new.keys() == old.keys()
    assert all(torch.equal(tensor, old[name].bfloat16()) for name, tensor in new.items())
    generation = read_model_folder(target).generation
    assert generation.templates == {"default": CHAT_TEMPLATE, "tools": "{{ tools }}"}
    record = {choice["name"]: choice["value"] for choice in read_json(target / "rose.json")["choices"]}
    assert record["end tokens"] == ", ".join(map(str, generation.end_ids))
    assert (record["dtype"], record["attention"]) == ("bfloat16", "causal")


def test_what_is_computed_or_there_twice_is_left_out(tmp_path):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    source = tiny_lm(tmp_path / "a", tied=True, head=True, extra=extra)
    target = converted(source, tmp_path / "b")
    gone = {"lm_head.weight", *extra}
    assert load_file(target / "model.safetensors").keys() == load_file(source / "model.safetensors").keys() - gone


def test_a_tied_pair_under_the_heads_name_gets_the_embeddings(tmp_path):
    source = tiny_lm(tmp_path / "a", tied=True)
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_weights(source, tensors)
    written = load_file(converted(source, tmp_path / "b") / "model.safetensors")
    assert torch.equal(written["model.embed_tokens.weight"], tensors["lm_head.weight"])
    assert "lm_head.weight" not in written


def test_a_bare_model_with_a_tied_head_becomes_the_class_with_one(tmp_path):
    source = tiny_lm(tmp_path / "a", kind="Model", prefix="", tied=True)
    target = converted(source, tmp_path / "b")
    assert read_json(target / "config.json")["architectures"] == ["LlamaForCausalLM"]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    found = logits_of(load_generative(read_model_folder(target)), [SEQUENCE], every_row=True)
    torch.testing.assert_close(found, logits(theirs), rtol=1e-4, atol=1e-4)


def test_what_the_model_keeps_in_fp32_is_not_rounded(tmp_path):
    """Qwen3.5's decays stand in exponents."""
    source = tiny_qwen3_5(tmp_path / "a")
    stored = load_file(source / "model.safetensors")
    kept = [name for name in stored if name.endswith(("A_log", "dt_bias", "linear_attn.norm.weight"))]
    assert kept
    written = load_file(converted(source, tmp_path / "b", dtype="bfloat16") / "model.safetensors")
    assert written.keys() == stored.keys()
    assert {tensor.dtype for name, tensor in written.items() if name not in kept} == {torch.bfloat16}
    for name in kept:
        assert torch.equal(written[name], stored[name]), name


@pytest.mark.parametrize(
    ("make", "arguments", "wishes", "words"),
    [
        (tiny_lm, {}, {"pooling": "mean"}, "a language model is kept as it is: leave --pooling out"),
        (tiny_lm, {}, {"causal": False}, "leave --bidirectional out"),
        (tiny_lm, {}, {"max_tokens": 64}, "leave --max-tokens out"),
        (tiny_lm, {}, {"template": "qwen3"}, "leave --rerank-template out"),
        (tiny_lm, {"head": False}, {}, "lacks lm_head.weight, which a language model draws tokens with"),
        (tiny_lm, {"kind": "Model", "prefix": ""}, {}, "lacks lm_head.weight"),
        (tiny_lm, {"config": {"is_causal": False}}, {}, "a text is continued causally"),
        (tiny_bert, {}, {}, "BertModel is no language model"),
        (tiny_pplx, {}, {}, "PPLXQwen3Model is no language model"),
    ],
)
def test_refused_by_name(tmp_path, make, arguments, wishes, words):
    source = make(tmp_path / "a", **arguments)
    with pytest.raises(CheckpointError, match=words):
        converted(source, tmp_path / "b", **wishes)
    assert not (tmp_path / "b").exists()


def test_as_it_is_typed(tmp_path, capsys):
    source = tiny_lm(tmp_path / "a")
    edit_json(source / "config.json", eos_token_id=9)
    assert cli.main(["convert", str(source), "--to", "llm", "-o", str(tmp_path / "b")]) == 0
    rows = {line.split("  ")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert rows["end tokens"].endswith("  config.json: eos_token_id and the tokenizer's eos_token")
    assert "  LlamaForCausalLM, 21 tensors  " in rows["written as"]
    assert read_model_folder(tmp_path / "b").generation.end_ids[0] == 9

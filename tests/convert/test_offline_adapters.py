"""Merged adapters against PEFT's run-time answer, and against the formulas in fp64."""

from __future__ import annotations

import math
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn.functional import cosine_similarity

from rose import cli
from rose.convert.offline import Wishes, convert, decide, find_source, open_weights
from rose.convert.offline.delta import Delta
from rose.errors import CheckpointError
from tests.support.running import embed, encode, load, load_reranker, score
from tests.support.tiny_checkpoints import Draw, edit_json, tiny_bert, tiny_qwen3, write_json
from tests.support.tiny_families import tiny_qwen3_reranker
from tests.support.tiny_tokenizers import CORPUS

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
IDS = torch.tensor([[7, 40, 41, 99, 5, 230, 17, 60, 61, 62]])


@pytest.fixture(autouse=True)
def _quiet():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def converted(source, target, to="embedder", *, base=None, adapters=(), **wishes):
    found = find_source(source, base=base, adapters=adapters)
    wished = Wishes(to=to, **wishes)
    with open_weights(found, wished) as weights:
        return convert(decide(found, wished, weights), weights, target)


def trained(base, path, auto=transformers.AutoModelForCausalLM, seed=0, **settings):
    """An adapter as PEFT writes it, with random numbers where training would have put its own; and its answer."""
    peft = pytest.importorskip("peft", reason="the oracle of merging is PEFT, which is not installed")
    model = peft.get_peft_model(auto.from_pretrained(base, dtype=torch.float32), peft.LoraConfig(**settings)).eval()
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "magnitude" not in name:
            parameter.data += torch.randn(parameter.shape, generator=draw) * 0.1
        elif "magnitude" in name:
            parameter.data *= 1 + 0.2 * torch.rand(parameter.shape, generator=draw)
    model.save_pretrained(path)
    return path, hidden(model)


def hidden(model) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=IDS, output_hidden_states=True).hidden_states[-1]


def answer(folder) -> torch.Tensor:
    return hidden(transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval())


QWEN3 = {
    "plain": {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION},
    "rank-stabilised": {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION, "use_rslora": True},
    "patterns": {
        "r": 4,
        "target_modules": [*ATTENTION, "up_proj"],
        "rank_pattern": {"v_proj": 2, "layers.1.self_attn.q_proj": 6},
        "alpha_pattern": {"o_proj": 32, "^model.layers.0.self_attn.k_proj": 1},
    },
    "dora": {"r": 4, "target_modules": ["q_proj", "down_proj"], "use_dora": True},
    "rank-stabilised dora": {"r": 3, "target_modules": "all-linear", "use_dora": True, "use_rslora": True},
    "modules to save": {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["norm", "up_proj"]},
    "embedding": {"r": 4, "target_modules": ["embed_tokens", "q_proj"]},
    "embedding dora": {"r": 4, "target_modules": ["embed_tokens"], "use_dora": True},
    "conv1d flag on linears": {"r": 4, "target_modules": ATTENTION, "fan_in_fan_out": True},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", QWEN3)
@pytest.mark.parametrize("auto", [transformers.AutoModelForCausalLM, transformers.AutoModel])
def test_merged_is_base_and_adapter_at_run_time(tmp_path, name, auto):
    """Report C97 (sentence-transformers#3246): the merge happened, and is what runs unmerged; whatever stood before
    the names in the model that was trained."""
    base = tiny_qwen3(tmp_path / "base", prefix="model.", tied=False, extra={"lm_head.weight": torch.ones(460, 64)})
    settings = dict(QWEN3[name])
    if auto is transformers.AutoModel and "alpha_pattern" in settings:
        settings["alpha_pattern"] = {"o_proj": 32, "^layers.0.self_attn.k_proj": 1}
    vocabulary = load_file(base / "model.safetensors")["model.embed_tokens.weight"].shape[0]
    tensors = load_file(base / "model.safetensors") | {"lm_head.weight": torch.ones(vocabulary, 64)}
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    path, expected = trained(base, tmp_path / "adapter", auto, **settings)
    target = converted(path, tmp_path / "out", base=base)
    torch.testing.assert_close(answer(target), expected, rtol=1e-5, atol=1e-5)
    assert (answer(target) - answer(base)).abs().max() > 0.01
    assert load(target).default_output == "dense"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "settings",
    [
        {"r": 4, "target_modules": ["query", "value", "word_embeddings"], "bias": "all"},
        {"r": 4, "target_modules": ["query", "dense"], "bias": "lora_only"},
        {"r": 4, "target_modules": ["query", "key"], "lora_bias": True},
        {"r": 4, "target_modules": ["query", "dense"], "use_dora": True, "bias": "lora_only"},
    ],
    ids=["all biases", "biases of its modules", "bias in B", "dora and biases"],
)
def test_biases(tmp_path, settings):
    base = tiny_bert(tmp_path / "base", prefix="bert.")
    path, expected = trained(base, tmp_path / "adapter", transformers.AutoModel, **settings)
    target = converted(path, tmp_path / "out", base=base)
    torch.testing.assert_close(answer(target), expected, rtol=1e-5, atol=1e-5)
    assert (answer(target) - answer(base)).abs().max() > 0.01


@pytest.mark.filterwarnings("ignore")
def test_stacked_adapters_are_merged_first_to_last(tmp_path):
    """As LLM2Vec trains them: the second on top of the merged first. DoRA, because there the order matters."""
    peft = pytest.importorskip("peft", reason="the oracle of merging is PEFT, which is not installed")
    base = tiny_qwen3(tmp_path / "base", pooling=None)
    settings = {"r": 4, "target_modules": ATTENTION, "use_dora": True}
    first, _ = trained(base, tmp_path / "first", transformers.AutoModel, 1, **settings)
    model = peft.PeftModel.from_pretrained(transformers.AutoModel.from_pretrained(base, dtype=torch.float32), first)
    merged = tmp_path / "merged"
    model.merge_and_unload().save_pretrained(merged)
    second, expected = trained(merged, tmp_path / "second", transformers.AutoModel, 2, **settings)
    asked = {"causal": True, "pooling": "mean"}
    both = converted(base, tmp_path / "both", adapters=[first, second], **asked)
    torch.testing.assert_close(answer(both), expected, rtol=1e-5, atol=1e-5)
    onto = converted(first, tmp_path / "onto", base=base, adapters=[second], **asked)
    torch.testing.assert_close(answer(onto), expected, rtol=1e-5, atol=1e-5)
    turned = converted(base, tmp_path / "turned", adapters=[second, first], **asked)
    assert (answer(turned) - expected).abs().max() > 1e-3


def adapter(path, tensors, **config):
    """A folder by hand, without PEFT."""
    path.mkdir()
    written = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": "nowhere"} | config
    write_json(path / "adapter_config.json", written)
    save_file(
        {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}, path / "adapter_model.safetensors"
    )
    return path


Q = "layers.0.self_attn.q_proj"


def pair(out=128, into=64, rank=4, seed=3, name=Q):
    draw = Draw(seed)
    return {f"{name}.lora_A.weight": draw.matrix(rank, into), f"{name}.lora_B.weight": draw.matrix(out, rank)}


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("dora", [False, True])
def test_the_formulas_in_fp64(tmp_path, rslora, dora):
    base = tiny_qwen3(tmp_path / "base")
    tensors = pair()
    magnitude = torch.rand(128, generator=torch.Generator().manual_seed(5)) + 0.5
    further = {f"{Q}.lora_magnitude_vector": magnitude} if dora else {}
    path = adapter(tmp_path / "adapter", tensors | further, use_rslora=rslora, use_dora=dora)
    target = converted(path, tmp_path / "out", base=base)
    weight = load_file(base / "model.safetensors")[f"{Q}.weight"].double()
    a, b = (tensors[f"{Q}.lora_{part}.weight"].double() for part in "AB")
    expected = weight + (8 / math.sqrt(4) if rslora else 8 / 4) * torch.einsum("or,ri->oi", b, a)
    if dora:
        expected = expected * (magnitude.double() / expected.square().sum(1).sqrt())[:, None]
    merged = load_file(target / "model.safetensors")
    torch.testing.assert_close(merged.pop(f"{Q}.weight").double(), expected, rtol=1e-6, atol=1e-6)
    before = load_file(base / "model.safetensors")
    assert all(torch.equal(tensor, before[name]) for name, tensor in merged.items())


def test_a_large_matrix_is_merged_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("rose.convert.offline.delta._BLOCK", 4 * 64 * 7)  # seven rows, which do not divide 128
    test_the_formulas_in_fp64(tmp_path, False, True)


def test_a_row_of_a_merge_is_the_matrixs_and_costs_a_block_each(tmp_path, monkeypatch):
    monkeypatch.setattr("rose.convert.offline.delta._BLOCK", 4 * 64 * 7)
    base, head = tiny_qwen3_reranker(tmp_path / "base", tied=False), "lm_head.weight"
    count = load_file(base / "model.safetensors")[head].shape[0]
    paths = [
        adapter(
            tmp_path / f"adapter{seed}", pair(count, 64, seed=seed, name="lm_head") | pair(seed=seed, name=f"model.{Q}")
        )
        for seed in (1, 2)
    ]
    found = find_source(base, adapters=paths)
    apply, rows = Delta.apply, []
    monkeypatch.setattr(Delta, "apply", lambda self, some, at: rows.append(len(some)) or apply(self, some, at))
    with open_weights(found, Wishes(to="reranker")) as weights:
        whole = torch.cat([part.clone() for part in weights.parts(head)])
        assert len(whole) == count > 100
        for index in (0, 6, 7, 20, count - 1):
            rows.clear()
            assert torch.equal(weights.read_row(head, index), whole[index])
            assert len(rows) == 2, "a block, by each adapter"
            assert max(rows) <= 7
        assert torch.equal(weights.read_row("model.norm.weight", 3), weights.read("model.norm.weight")[3])


def test_a_merge_in_bf16_is_rounded_once(tmp_path):
    base = tiny_qwen3(tmp_path / "base", config={"torch_dtype": "bfloat16"})
    stored = {name: tensor.bfloat16() for name, tensor in load_file(base / "model.safetensors").items()}
    save_file(stored, base / "model.safetensors", metadata={"format": "pt"})
    tensors = pair()
    target = converted(adapter(tmp_path / "adapter", tensors), tmp_path / "out", base=base)
    delta = 2 * tensors[f"{Q}.lora_B.weight"] @ tensors[f"{Q}.lora_A.weight"]
    merged = load_file(target / "model.safetensors")[f"{Q}.weight"]
    assert torch.equal(merged, (stored[f"{Q}.weight"].float() + delta).bfloat16())
    whole = converted(tmp_path / "adapter", tmp_path / "whole", base=base, dtype="float32")
    exact = load_file(whole / "model.safetensors")[f"{Q}.weight"]
    torch.testing.assert_close(exact, stored[f"{Q}.weight"].float() + delta, rtol=0, atol=1e-6)


def zero(tensors):
    return {name: torch.zeros_like(tensor) if "lora_B" in name else tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        (zero(pair()), {}, "changes nothing: every lora_B in it is zero"),
        (pair(out=96), {}, r"of shape \(96, 64\), and the base has \(128, 64\): it belongs to another model"),
        (pair(name="layers.9.mlp.up_proj"), {}, r"has tensors for layers\.9\.mlp\.up_proj, which"),
        ({f"{Q}.lora_A.weight": torch.ones(4, 64)}, {}, f"lacks lora_B of {Q}"),
        (pair(), {"r": 16}, "is 16, and its tensors have 4"),
        (pair(), {"use_dora": True}, "contradict each other"),
        (pair(), {"peft_type": "IA3"}, "peft_type 'IA3' is not served"),
        (pair(), {"trainable_token_indices": [1, 2]}, "trainable_token_indices is set"),
        (pair(), {"init_lora_weights": "pissa_niter_16"}, "changes the base as well"),
        (pair() | {f"{Q}.lora_C.weight": torch.ones(2)}, {}, r"q_proj\.lora_C\.weight, which is no tensor"),
        (pair() | {"score.weight": torch.ones(1, 64)}, {}, "has tensors for score, which"),
        ({f"{Q}.bias": torch.ones(128)}, {}, "has tensors for|the base has none"),
    ],
)  # fmt: skip
def test_what_cannot_be_merged_is_refused_by_name(tmp_path, tensors, config, message):
    """Reports C96 (ms-swift#10070) and C97 (trl#386): nothing is left unmatched, and no merge is silently the base."""
    base = tiny_qwen3(tmp_path / "base")
    path = adapter(tmp_path / "adapter", tensors, **config)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=message):
        converted(path, tmp_path / "out", base=base)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_change_that_the_dtype_swallows_is_refused(tmp_path):
    """Report C97 (trl#386): rounded away is not merged either."""
    base = tiny_qwen3(tmp_path / "base")
    stored = {name: tensor.bfloat16() for name, tensor in load_file(base / "model.safetensors").items()}
    save_file(stored, base / "model.safetensors", metadata={"format": "pt"})
    tensors = {name: tensor * 1e-5 for name, tensor in pair().items()}
    path = adapter(tmp_path / "adapter", tensors)
    with pytest.raises(CheckpointError, match="lost in the dtype of the result"):
        converted(path, tmp_path / "out", base=base)
    assert not (tmp_path / "out").exists()


def test_an_adapter_of_the_dropped_head_alone_changes_nothing(tmp_path):
    base = tiny_qwen3(tmp_path / "base")
    rows = load_file(base / "model.safetensors")["embed_tokens.weight"].shape[0]
    path = adapter(
        tmp_path / "adapter", {"lm_head.lora_A.weight": torch.ones(4, 64), "lm_head.lora_B.weight": torch.ones(rows, 4)}
    )
    with pytest.raises(CheckpointError, match="changes nothing of what this model keeps"):
        converted(path, tmp_path / "out", base=base)


def test_a_base_that_is_not_there(tmp_path, capsys):
    path = adapter(tmp_path / "adapter", pair(), base_model_name_or_path=str(tmp_path / "gone"))
    assert cli.main(["convert", str(path), "--to", "embedder", "-o", str(tmp_path / "out")]) == 2
    assert f"its base {tmp_path / 'gone'} is not there; name it with --base" in capsys.readouterr().err
    edit_json(path / "adapter_config.json", base_model_name_or_path=None)
    assert cli.main(["convert", str(path), "--to", "embedder", "-o", str(tmp_path / "out")]) == 2
    assert "base_model_name_or_path is missing; name the base with --base" in capsys.readouterr().err


def test_the_base_is_found_in_the_adapters_config_and_told_in_the_table(tmp_path, capsys):
    base = tiny_qwen3(tmp_path / "base")
    path = adapter(tmp_path / "adapter", pair(), base_model_name_or_path=str(base))
    assert cli.main(["convert", str(path), "--to", "embedder", "-o", str(tmp_path / "out")]) == 0
    assert f"{path}: LoRA on 1 modules, scale 2.0" in capsys.readouterr().out
    texts = list(CORPUS)
    out, plain = load(tmp_path / "out"), load(base)
    assert cosine_similarity(*(embed(m, encode(m.folder, texts)) for m in (out, plain))).min() < 0.9999


def test_an_adapters_own_sentence_files_and_tokenizer_win(tmp_path):
    base = tiny_qwen3(tmp_path / "base", pooling="lasttoken", chat=True)
    path = adapter(tmp_path / "adapter", pair())
    own = tiny_qwen3(tmp_path / "own", pooling="mean", prompts={"query": "q: "})
    for name in ("modules.json", "config_sentence_transformers.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(own / name, path / name)
    shutil.copytree(own / "1_Pooling", path / "1_Pooling")
    folder = load(converted(path, tmp_path / "out", base=base)).folder
    assert (folder.pooling.modes, folder.prompts) == (("mean",), {"query": "q: "})
    assert folder.tokenizer_sha256 == load(own).folder.tokenizer_sha256


def test_a_rerankers_head_is_merged_before_its_rows_are_taken(tmp_path):
    """Report C100 (vllm#27857): the untied head, changed by the adapter, is what yes and no are read from."""
    base = tiny_qwen3_reranker(tmp_path / "base", tied=False)
    rows = load_file(base / "model.safetensors")["lm_head.weight"].shape[0]
    draw = Draw(9)
    tensors = {"lm_head.lora_A.weight": draw.matrix(4, 64), "lm_head.lora_B.weight": draw.matrix(rows, 4)}
    path = adapter(tmp_path / "adapter", tensors)
    target = converted(path, tmp_path / "out", to="reranker", base=base)
    merged = load_file(base / "model.safetensors")
    merged["lm_head.weight"] += 2 * tensors["lm_head.lora_B.weight"] @ tensors["lm_head.lora_A.weight"]
    save_file(merged, base / "model.safetensors", metadata={"format": "pt"})
    pairs = [(CORPUS[0], CORPUS[1]), (CORPUS[4], CORPUS[5]), (CORPUS[2], CORPUS[9])]
    torch.testing.assert_close(
        score(load_reranker(target), pairs), score(load_reranker(base), pairs), rtol=0, atol=1e-4
    )
    tied = tiny_qwen3_reranker(tmp_path / "tied")
    with pytest.raises(CheckpointError, match="one of two tied matrices"):
        converted(path, tmp_path / "other", to="reranker", base=tied)

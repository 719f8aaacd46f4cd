"""Loading a language model: which tensors must be there, which may, and what is said of those that are wrong."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import load_file

from rose.config import read_model_folder
from rose.convert import load_generative, load_model
from rose.errors import CheckpointError
from tests.support.running import logits_of
from tests.support.tiny_checkpoints import Draw, edit_json, save_weights, tiny_bert, tiny_qwen3
from tests.support.tiny_families import tiny_qwen3_classifier, tiny_qwen3_embedding
from tests.support.tiny_language_models import tiny_lm

IDS = [[9, 8, 7, 6, 5], [30, 31]]
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def load(path, **reading):
    return load_generative(read_model_folder(path, **reading))


def rewrite(path, change) -> None:
    """The file's tensors, changed."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_weights(path, tensors)


def test_a_tied_head_is_the_embedding_without_a_copy(tmp_path):
    """Report C90: tied weights left unset gave noise. Here there is one tensor, and it is listed once."""
    model = load(tiny_lm(tmp_path / "m", tied=True))
    assert [name for name, _ in model.named_parameters() if "embed_tokens" in name or "lm_head" in name] == [
        "backbone.embed_tokens.weight"
    ]
    before = logits_of(model, IDS)
    model.backbone.embed_tokens.weight[100] *= 2  # a token that is not in the prompts
    after = logits_of(model, IDS)
    torch.testing.assert_close(after[:, 100], 2 * before[:, 100])
    assert torch.equal(after[:, :100], before[:, :100])


def test_an_untied_head_is_its_own_tensor(tmp_path):
    path = tiny_lm(tmp_path / "m")
    model = load(path)
    assert torch.equal(model.lm_head.weight, load_file(path / "model.safetensors")[HEAD])
    assert model.lm_head.weight.data_ptr() != model.backbone.embed_tokens.weight.data_ptr()


def test_a_tied_head_that_is_in_the_file_too(tmp_path):
    """Some writers store both names; the same matrix twice is one, and two different ones are refused."""
    path = tiny_lm(tmp_path / "m", tied=True, head=True)
    alone = logits_of(load(tiny_lm(tmp_path / "alone", tied=True)), IDS)
    assert torch.equal(logits_of(load(path), IDS), alone)

    def change(tensors):
        tensors[HEAD][3, 5] += 1e-3

    rewrite(path, change)
    with pytest.raises(CheckpointError, match=f"{HEAD} and {EMBED} differ, and tie_word_embeddings of"):
        load(path)
    edit_json(path / "config.json", tie_word_embeddings=False)
    assert not torch.equal(logits_of(load(path), IDS), alone)


def test_a_tied_pair_under_the_heads_name_alone(tmp_path):
    path = tiny_lm(tmp_path / "m", tied=True)
    alone = logits_of(load(path), IDS)
    rewrite(path, lambda tensors: tensors.update({HEAD: tensors.pop(EMBED)}))
    assert torch.equal(logits_of(load(path), IDS), alone)


def test_an_untied_head_that_is_missing_is_refused(tmp_path):
    """Report C90 (tied weights left unset): the embedding never stands for it in silence."""
    path = tiny_lm(tmp_path / "m", head=False)
    with pytest.raises(CheckpointError, match=r"lacks lm_head.weight, .* tie_word_embeddings is false"):
        load(path)


def test_an_untied_embedding_that_is_missing_is_refused(tmp_path):
    path = tiny_lm(tmp_path / "m")
    rewrite(path, lambda tensors: tensors.pop(EMBED))
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight"):
        load(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "model.layers.1.mlp.up_proj.weight is missing"),
        (lambda t: t.pop("model.norm.weight"), "lacks norm.weight"),
        (
            lambda t: t.update({HEAD: Draw(1).matrix(7, 64)}),
            r"lm_head.weight .* has shape \(7, 64\), and the",
        ),
        (lambda t: t.update({"model.lm_head.weight": t[HEAD].clone()}), r"head\.weight is defined twice"),
        (lambda t: t.update({"lm_head.bias": Draw(1).bias(7)}), "lm_head.bias .* is not served"),
        (lambda t: t.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}), "no place for .*q_norm"),
        (lambda t: t[HEAD].fill_(torch.inf), "lm_head.weight .* holds values that are not finite"),
    ],
)
def test_refused_by_name(tmp_path, change, words):
    path = tiny_lm(tmp_path / "m")
    rewrite(path, change)
    with pytest.raises(CheckpointError, match=words):
        load(path)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_shards_and_prefixes(tmp_path, shards, prefix):
    path = tiny_lm(tmp_path / "m", shards=shards, prefix=prefix)
    assert (path / "model.safetensors.index.json").exists() == (shards > 1)
    whole = load(tiny_lm(tmp_path / "whole"))
    assert torch.equal(logits_of(load(path), IDS), logits_of(whole, IDS))


def test_what_is_not_for_generating_is_refused(tmp_path):
    bert = tiny_bert(tmp_path / "bert")
    with pytest.raises(CheckpointError, match="was not read as a language model; read it with task 'generate'"):
        load(bert)
    with pytest.raises(CheckpointError, match="BertModel has no language model's head, so it cannot generate"):
        load(bert, task="generate")
    with pytest.raises(CheckpointError, match="PPLXQwen3Model has no language model's head"):
        load(tiny_qwen3(tmp_path / "pplx", bidirectional=True), task="generate")
    with pytest.raises(CheckpointError, match="Qwen3ForSequenceClassification has no language model's head"):
        load(tiny_qwen3_classifier(tmp_path / "score"), task="generate")


def test_a_language_model_that_pools_nothing_is_no_embedder(tmp_path):
    """Report C84 (sentence-transformers#2779): it is served for what it is, and never by a guessed pooling."""
    folder = read_model_folder(tiny_lm(tmp_path / "m"))
    with pytest.raises(CheckpointError, match="does not say how tokens are pooled into a vector"):
        load_model(folder)


def test_an_embedder_of_a_language_model_can_still_generate(tmp_path):
    """Its folder says both; what it says of pooling comes first, and the caller may settle it."""
    path = tiny_qwen3_embedding(tmp_path / "m", prefix="model.")
    assert read_model_folder(path).generation is None
    model = load(path, task="generate")
    assert logits_of(model, IDS).shape == (2, model.vocab_size)


def test_bidirectional_attention_is_refused(tmp_path):
    path = tiny_lm(tmp_path / "m", config={"is_causal": False})
    words = re.escape("bidirectional (config.json: is_causal), and a text is continued causally")
    with pytest.raises(CheckpointError, match=words):
        load(path, task="generate")
    with pytest.raises(CheckpointError, match="does not say how tokens are pooled"):
        read_model_folder(path)


def test_dtypes(tmp_path):
    """Weights and head in what was asked for, the default by device; the stored dtype does not decide."""
    path = tiny_lm(tmp_path / "m", dtype=torch.bfloat16)
    assert {p.dtype for p in load(path).parameters()} == {torch.float32}
    half = load_generative(read_model_folder(path), dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    with pytest.raises(CheckpointError, match="Qwen3ForCausalLM is not served in float16"):
        load_generative(read_model_folder(tiny_lm(tmp_path / "q", "qwen3")), dtype=torch.float16)

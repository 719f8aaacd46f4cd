"""A folder becomes a model whole, or is refused with the tensor and the file."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from rose.convert.checkpoint import Checkpoint
from rose.errors import CheckpointError
from tests.support.running import embed, load, random_sequences
from tests.support.tiny_checkpoints import (
    Dense,
    edit_json,
    read_json,
    save_weights,
    tiny_bert,
    tiny_qwen3,
    tiny_xlm_roberta,
)

TINY = {"bert": tiny_bert, "xlm_roberta": tiny_xlm_roberta, "qwen3": tiny_qwen3}
PREFIX = {"bert": "bert.", "xlm_roberta": "roberta.", "qwen3": "model."}


def rewrite(path, change):
    """Apply `change` to the tensors of a folder, in place."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def vectors(path, **arguments):
    return embed(load(path, **arguments), random_sequences([9, 4, 20], 150))


@pytest.mark.parametrize("family", TINY)
def test_layout_and_prefix_do_not_matter(tmp_path, family):
    expected = vectors(TINY[family](tmp_path / "plain"))
    assert torch.equal(vectors(TINY[family](tmp_path / "shards", shards=4)), expected)
    assert torch.equal(vectors(TINY[family](tmp_path / "prefix", prefix=PREFIX[family])), expected)
    path = TINY[family](tmp_path / "bin")
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    assert torch.equal(vectors(path), expected)


def test_loaded_model_is_fp32_on_the_cpu_and_not_trained(tmp_path):
    model = load(tiny_bert(tmp_path / "m", config={"torch_dtype": "bfloat16"}))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])


def test_bf16_checkpoint_is_widened_exactly(tmp_path):
    path = tiny_qwen3(tmp_path / "m")
    rewrite(path, lambda tensors: tensors.update({name: t.bfloat16() for name, t in tensors.items()}))
    half = load_file(path / "model.safetensors")
    model = load(path)
    assert torch.equal(model.backbone.embed_tokens.weight, half["embed_tokens.weight"].float())
    qkv = torch.cat([half[f"layers.1.self_attn.{part}_proj.weight"] for part in "qkv"])
    assert torch.equal(model.backbone.layers[1].self_attn.qkv_proj.weight.to_dense(), qkv.float())


def test_asked_dtype_is_the_backbones_and_the_head_stays_fp32(tmp_path):
    model = load(tiny_bert(tmp_path / "m", dense=[Dense(64, 96)]), dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.backbone.parameters()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in model.head.parameters()} == {torch.float32}


def test_weights_outlive_the_file(tmp_path):
    """Parameters are copies: a file that is replaced under a running server changes nothing."""
    path = tiny_bert(tmp_path / "m")
    model = load(path)
    before = embed(model, [[5, 6, 7]])
    data = bytearray((path / "model.safetensors").read_bytes())
    with (path / "model.safetensors").open("r+b") as file:
        file.seek(len(data) // 2)
        file.write(bytes(len(data) // 2))
    assert torch.equal(embed(model, [[5, 6, 7]]), before)


def test_leftovers_of_training_are_dropped_by_rule(tmp_path):
    path = tiny_bert(tmp_path / "m", prefix="bert.")
    expected = vectors(path)

    def add(tensors):
        tensors["bert.embeddings.position_ids"] = torch.arange(128)[None]
        tensors["bert.pooler.dense.weight"] = torch.zeros(64, 64)
        tensors["bert.pooler.dense.bias"] = torch.zeros(64)
        tensors["cls.predictions.bias"] = torch.zeros(9)
        tensors["cls.predictions.transform.dense.weight"] = torch.zeros(64, 64)

    rewrite(path, add)
    assert torch.equal(vectors(path), expected)


def test_layer_norms_under_their_first_names(tmp_path):
    path = tiny_bert(tmp_path / "m")
    expected = vectors(path)

    def rename(tensors):
        for name in [name for name in tensors if ".LayerNorm." in name]:
            old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
            tensors[old] = tensors.pop(name)

    rewrite(path, rename)
    assert torch.equal(vectors(path), expected)


@pytest.mark.parametrize("tied", [True, False])
def test_tied_head(tmp_path, tied):
    """Report C90 (transformers#41038): the file holds either name of a tied pair, or both; no head is needed."""
    path = tiny_qwen3(tmp_path / "m", tied=tied, prefix="model.")
    expected = vectors(path)
    rewrite(path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert torch.equal(vectors(path), expected)
    rewrite(path, lambda tensors: tensors.pop("model.embed_tokens.weight"))
    if tied:
        assert torch.equal(vectors(path), expected)
        return
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight is missing.*tie_word_embeddings is false"):
        load(path)


def broken(change):
    return lambda path: rewrite(path, change)


def drop(name):
    return broken(lambda tensors: tensors.pop(name))


def put(name, *shape, dtype=torch.float32):
    return broken(lambda tensors: tensors.update({name: torch.zeros(*shape, dtype=dtype)}))


def spoil(name, value):
    """One value of one tensor."""
    return broken(lambda tensors: tensors[name].view(-1)[3].fill_(value))


QUERY = "encoder.layer.1.attention.self.query"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (drop("embeddings.LayerNorm.bias"), r"lacks embeddings\.LayerNorm\.bias"),
        (drop(f"{QUERY}.bias"), rf"{QUERY}\.bias is missing; .*qkv_proj\.bias is made of it"),
        (drop("encoder.layer.0.output.dense.weight"), "is missing, under every known prefix"),
        (put("classifier.weight", 2, 64), r"no place for classifier\.weight in .*model\.safetensors"),
        (put("encoder.layer.2.output.dense.bias", 64), r"no place for encoder\.layer\.2\.output"),
        (put(f"{QUERY}.weight", 64, 60), r"do not fit together: their shapes are \[\(64, 60\), \(64, 64\)"),
        (put(f"{QUERY}.weight", 60, 64), r"query.* has shape \(188, 64\), and the model takes \(192, 64\)"),
        (
            put("embeddings.position_embeddings.weight", 100, 64),
            r"has shape \(100, 64\), and the model takes \(128, 64",
        ),
        (put(f"{QUERY}.weight", 64, 64, dtype=torch.float8_e5m2), rf"{QUERY}\.weight in .* holds F8_E5M2"),
        (put("bert.encoder.layer.0.output.dense.weight", 64, 96), "defined twice in .*under '' and 'bert.'"),
        (put("embeddings.LayerNorm.gamma", 64), r"embeddings\.LayerNorm\.weight is defined twice"),
        (spoil(f"{QUERY}.weight", torch.nan), rf"{QUERY}\.weight .* in .*model\.safetensors.* not finite"),
        (spoil("embeddings.LayerNorm.bias", -torch.inf), r"embeddings\.LayerNorm\.bias in .* not finite"),
        (lambda path: (path / "model.safetensors").unlink(), "holds no weights"),
        (lambda path: (path / "model.safetensors").write_bytes(b"\x08"), r"model\.safetensors cannot be read"),
        (lambda path: edit_json(path / "config.json", num_hidden_layers=3), r"lacks encoder\.layer\.2"),
        (lambda path: edit_json(path / "config.json", num_hidden_layers=1), r"no place for encoder\.layer\.1"),
        (lambda path: edit_json(path / "config.json", vocab_size=7), r"and the model takes \(7, 64\)"),
    ],
)
def test_broken_checkpoint_is_refused_with_tensor_and_file(tmp_path, damage, words):
    path = tiny_bert(tmp_path / "m")
    damage(path)
    with pytest.raises(CheckpointError, match=words):
        load(path)


def test_many_missing_names_are_counted(tmp_path):
    path = tiny_bert(tmp_path / "m", config={"num_hidden_layers": 2})
    edit_json(path / "config.json", num_hidden_layers=9)
    with pytest.raises(CheckpointError, match=r"and \d+ more"):
        load(path)


def test_dense_weights_are_held_to_the_same_standard(tmp_path):
    path = tiny_bert(tmp_path / "m", dense=[Dense(64, 96)])
    dense = path / "2_Dense"
    save_weights(dense, {"linear.weight": torch.zeros(90, 64), "linear.bias": torch.zeros(96)})
    with pytest.raises(CheckpointError, match=r"linear\.weight in .*2_Dense.* has shape \(90, 64\)"):
        load(path)
    save_weights(dense, {"linear.weight": torch.zeros(96, 64)})
    with pytest.raises(CheckpointError, match=r"2_Dense lacks linear\.bias"):
        load(path)
    (dense / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="2_Dense holds no weights"):
        load(path)


def test_a_failed_load_reads_no_data(tmp_path, monkeypatch):
    """Names and shapes are settled from the headers: a wrong checkpoint of many gigabytes fails at once."""
    path = tiny_bert(tmp_path / "m")
    rewrite(path, lambda tensors: tensors.update({"stranger": torch.zeros(1)}))
    monkeypatch.setattr(Checkpoint, "read", lambda self, name: pytest.fail("data was read"))
    with pytest.raises(CheckpointError, match="no place for stranger"):
        load(path)


def test_other_heads_are_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match="'BertForTokenClassification' is not served; there are BertModel, Bert"):
        load(tiny_bert(tmp_path / "m", config={"architectures": ["BertForTokenClassification"]}))


def test_a_classifier_is_no_embedder(tmp_path):
    """Asked to be one, its name is refused: what its authors serve is the classifier's answer."""
    path = tiny_bert(tmp_path / "m", config={"architectures": ["BertForSequenceClassification"]})
    with pytest.raises(CheckpointError, match=r"is both: .* scores, and 1_Pooling/config.json makes a vector; settle"):
        load(path)
    with pytest.raises(CheckpointError, match="'BertForSequenceClassification' is not served as an embedder"):
        load(path, task="embed")


@pytest.mark.parametrize("pooling", ["cls", "max", ["mean", "max"]])
def test_prompt_left_out_of_another_pool_than_the_mean_is_refused_where_there_are_prompts(tmp_path, pooling):
    left_out = {"pooling": pooling, "include_prompt": False}
    with pytest.raises(
        CheckpointError, match="include_prompt is false, which is served for mean and last, and not for"
    ):
        load(tiny_bert(tmp_path / "a", **left_out, prompts={"query": "query: "}))
    assert load(tiny_bert(tmp_path / "b", **left_out, prompts={"query": ""})).folder.prompts == {"query": ""}


def test_index_order_is_the_order_of_reading(tmp_path):
    """Shards hold neighbours apart; a fused target still gets all its parts."""
    path = tiny_qwen3(tmp_path / "m", shards=5)
    assert len(set(read_json(path / "model.safetensors.index.json")["weight_map"].values())) == 5
    assert torch.equal(vectors(path), vectors(tiny_qwen3(tmp_path / "whole")))


def test_values_that_overflow_when_cast_are_refused(tmp_path):
    path = tiny_bert(tmp_path / "m")
    rewrite(path, lambda tensors: tensors["embeddings.LayerNorm.weight"].mul_(1e6))
    load(path)
    with pytest.raises(CheckpointError, match=r"embeddings\.LayerNorm\.weight in .* not finite as float16"):
        load(path, dtype=torch.float16)

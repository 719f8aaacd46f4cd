"""Conversion of whole checkpoints: the result reads in sentence-transformers and here, with the source's vectors."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder, SentenceTransformer
from torch.nn.functional import cosine_similarity

from rose.config import read_model_folder
from rose.config.folder import TRANSFORMER_FILES
from rose.convert.offline import Wishes, convert, decide, find_source, open_weights
from rose.errors import CheckpointError
from tests.support.running import embed, encode, load, load_reranker, score
from tests.support.tiny_checkpoints import Dense, edit_json, read_json, tiny_bert, tiny_qwen3, tiny_xlm_roberta
from tests.support.tiny_families import (
    tiny_bge_m3,
    tiny_cross_encoder_bert,
    tiny_cross_encoder_xlmr,
    tiny_qwen3_classifier,
    tiny_qwen3_reranker,
)
from tests.support.tiny_tokenizers import CORPUS

TEXTS = list(CORPUS)
PAIRS = [(CORPUS[i], CORPUS[j]) for i, j in [(0, 1), (4, 5), (7, 9), (12, 13), (10, 10)]]


@pytest.fixture(autouse=True)
def _quiet():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def converted(source, target, to="embedder", *, base=None, adapters=(), force=False, shard_bytes=10**9, **wishes):
    found = find_source(source, base=base, adapters=adapters)
    wished = Wishes(to=to, **wishes)
    with open_weights(found, wished) as weights:
        plan = decide(found, wished, weights)
        return convert(plan, weights, target, force=force, shard_bytes=shard_bytes)


def vectors(path, **reading) -> torch.Tensor:
    model = load(path, **reading)
    return embed(model, encode(model.folder, TEXTS))


def reference(path) -> torch.Tensor:
    return torch.from_numpy(SentenceTransformer(str(path), device="cpu").encode(TEXTS, batch_size=4))


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.shape == b.shape
    assert cosine_similarity(a, b).min() >= 0.99999


CHAIN = {"dense": [Dense(64, 48), Dense(48, 32, bias=False, activation=None)], "prompts": {"query": "query: "}}


def cut(path, dimensions):
    edit_json(path / "config_sentence_transformers.json", truncate_dim=dimensions)
    return path


CASES = {
    "bert": lambda path: tiny_bert(path, pooling="cls", prefix="bert.", **CHAIN),
    "sharded bert": lambda path: tiny_bert(path, pooling=["mean", "max"], shards=3, normalize=False),
    "xlm-roberta": lambda path: tiny_xlm_roberta(path, pooling="mean", max_seq_length=9),
    "qwen3": lambda path: tiny_qwen3(path, prefix="model.", legacy=False, prompts={"query": "ask: ", "document": ""}),
    "cut bert": lambda path: cut(tiny_bert(path, normalize=False, **CHAIN), 16),
    "qwen3 of one matrix": lambda path: tiny_qwen3(path, bidirectional=False, tied=True, shards=2),
}


@pytest.mark.parametrize("name", CASES)
def test_the_result_has_the_sources_vectors_here_and_in_sentence_transformers(tmp_path, name):
    source, target = CASES[name](tmp_path / "a"), tmp_path / "b"
    converted(source, target)
    before = vectors(source)
    same(vectors(target), before)
    same(reference(target), before)
    assert before.std() > 0.01
    a, b = read_model_folder(source), read_model_folder(target)
    for field in (
        "dense",
        "normalize",
        "prompts",
        "default_prompt_name",
        "max_tokens",
        "dimension",
        "tokenizer_sha256",
    ):
        assert getattr(a, field) == getattr(b, field), field
    assert (b.architecture.causal_source, b.subfolder) == ("config.json: is_causal", "")
    assert not any(key.startswith(("model.", "bert.")) for key in load_file(target / "model.safetensors"))


@pytest.mark.parametrize(("causal", "pooling"), [(True, "last"), (False, "mean"), (False, "cls")])
def test_a_language_model_becomes_an_embedder_of_either_attention(tmp_path, causal, pooling):
    """Report C86 (vllm#16892): the attention mode is written out, and every reader goes by it.
    Report C87 (sentence-transformers#3513): the oracle is told the mode by the folder, and the other differs."""
    source = tiny_qwen3(
        tmp_path / "a", pooling=None, prefix="model.", tied=False, extra={"lm_head.weight": torch.ones(3, 64)}
    )
    target = converted(source, tmp_path / "b", causal=causal, pooling=pooling)
    same(vectors(target), torch.nn.functional.normalize(vectors(source, causal=causal, pooling=pooling)))
    same(reference(target), vectors(target))
    assert read_json(target / "config.json")["is_causal"] is causal
    if pooling != "cls" or not causal:
        other = vectors(source, causal=not causal, pooling=pooling)
        assert cosine_similarity(vectors(target), other).min() < 0.99
    assert "lm_head.weight" not in load_file(target / "model.safetensors")


def test_defaults_and_their_sources_are_in_the_table_and_the_record(tmp_path):
    source = tiny_qwen3(tmp_path / "a", pooling=None, prefix="model.")
    target = converted(source, tmp_path / "b", causal=False, prompts={"query": "q: "}, default_prompt="query")
    record = read_json(target / "rose.json")
    said = {choice["name"]: (choice["value"], choice["source"]) for choice in record["choices"]}
    assert said["attention"] == ("bidirectional", "the flag --bidirectional")
    assert said["pooling"] == ("mean", "default of a bidirectional decoder")
    assert said["normalise"] == ("yes", "default of a new embedder")
    assert said["end token"] == ("'<|endoftext|>'", "tokenizer.json: post_processor")
    assert said["dtype"] == ("float32", "as stored: F32")
    assert said["tied weights"] == ("yes", "config.json: tie_word_embeddings")
    assert said["max tokens"] == ("256", "config.json: the position range")
    assert said["default prompt"] == ("query", "the flag --default-prompt")
    digest = hashlib.sha256((source / "model.safetensors").read_bytes()).hexdigest()
    assert record["source"]["sha256"][str(source / "model.safetensors")] == digest
    assert read_model_folder(target).prompts == {"query": "q: "}


def test_an_encoder_without_pooling_is_asked_for(tmp_path):
    source = tiny_bert(tmp_path / "a", pooling=None)
    with pytest.raises(CheckpointError, match="settle it with --pooling"):
        converted(source, tmp_path / "b")
    assert converted(source, tmp_path / "b", pooling="cls").exists()


def test_flags_win_over_files(tmp_path):
    source = tiny_bert(tmp_path / "a", pooling="mean", max_seq_length=64)
    target = converted(source, tmp_path / "b", pooling="cls", normalize=False, max_tokens=12, dtype="bfloat16")
    folder = read_model_folder(target)
    assert (folder.pooling.modes, folder.normalize, folder.max_tokens) == (("cls",), False, 12)
    assert folder.architecture.dtype == "bfloat16"
    assert {tensor.dtype for tensor in load_file(target / "model.safetensors").values()} == {torch.bfloat16}
    same_ish = cosine_similarity(vectors(target), vectors(source, pooling="cls")).min()
    assert 0.9 < same_ish < 1


def test_torch_files_and_old_names(tmp_path):
    """Reports C93 (tei#564) and C95 (flash-attention#2778): .bin files are read, and a shared matrix is not lost."""
    source = tiny_qwen3(tmp_path / "a", prefix="model.")
    tensors = load_file(source / "model.safetensors")
    before = vectors(source)
    (source / "model.safetensors").unlink()
    shared = tensors.pop("model.embed_tokens.weight")
    torch.save(tensors | {"lm_head.weight": shared}, source / "pytorch_model.bin")
    target = converted(source, tmp_path / "b")
    same(vectors(target), before)
    same(reference(target), before)


@pytest.mark.parametrize("prefix", ["", "model.", "language_model.", "model.language_model."])
def test_every_prefix_comes_out_plain(tmp_path, prefix):
    """Report C96 (ms-swift#10070): one plain set of names, whatever stood before them."""
    target = converted(tiny_qwen3(tmp_path / "a", prefix=prefix), tmp_path / "b")
    assert "layers.0.mlp.up_proj.weight" in load_file(target / "model.safetensors")
    same(reference(target), vectors(tmp_path / "a"))


def test_an_unknown_tensor_is_refused_by_name(tmp_path):
    """Report C96 (ms-swift#10070): no tensor is left unmatched without a word."""
    source = tiny_qwen3(tmp_path / "a", prefix="model.", extra={"visual.patch.weight": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"visual\.patch\.weight"):
        converted(source, tmp_path / "b")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


def test_shards_and_their_index(tmp_path):
    source = tiny_bert(tmp_path / "a")
    target = converted(source, tmp_path / "b", shard_bytes=60_000)
    index = read_json(target / "model.safetensors.index.json")
    files = sorted(path.name for path in target.glob("*.safetensors"))
    assert len(files) > 2
    assert sorted(set(index["weight_map"].values())) == files
    same(vectors(target), vectors(source))
    same(reference(target), vectors(source))


def test_bge_m3_keeps_its_heads(tmp_path):
    source = tiny_bge_m3(tmp_path / "a")
    target = converted(source, tmp_path / "b")
    ids = encode(load(source).folder, TEXTS)
    for output in ("dense", "sparse", "colbert"):
        torch.testing.assert_close(embed(load(target), ids, output), embed(load(source), ids, output))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("logit_score", [True, False])
def test_yes_and_no_become_one_row(tmp_path, tied, logit_score):
    """Report C99 (vllm#43062): score.weight is made of the head's rows.
    Report C100 (vllm#27857): an untied head is read first: scores differ and are the language model's."""
    source = tiny_qwen3_reranker(tmp_path / "a", tied=tied, logit_score=logit_score)
    template = None if logit_score else "qwen3"
    target = converted(source, tmp_path / "b", to="reranker", template=template)
    before = score(load_reranker(source, task="rerank", template=template), PAIRS)
    assert before.std() > 0.1
    torch.testing.assert_close(score(load_reranker(target), PAIRS), before, rtol=0, atol=1e-4)
    tensors = load_file(target / "model.safetensors")
    assert tensors["score.weight"].shape == (1, 64)
    assert "lm_head.weight" not in tensors
    theirs = CrossEncoder(str(target), device="cpu", activation_fn=torch.nn.Identity()).predict(PAIRS, batch_size=1)
    torch.testing.assert_close(torch.from_numpy(theirs).reshape(-1, 1), before, rtol=0, atol=1e-4)
    language = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(target, dtype=torch.float32).eval()
    config = load_reranker(source, task="rerank", template=template).folder.reranker
    ids = torch.tensor([[40, 41, 42, 43, 44]])
    with torch.inference_mode():
        logits = language(input_ids=ids).logits[0, -1]
        expected = torch.stack([logits[config.no_id], logits[config.yes_id]]).softmax(0)[1]
        found = classifier(input_ids=ids).logits.sigmoid()[0, 0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_another_prompt_is_replaced_when_the_flag_says_so(tmp_path):
    source = tiny_qwen3_reranker(tmp_path / "a")
    template = source / "chat_template.jinja"
    template.write_text(template.read_text().replace("<Query>: ", "<Question>: "))
    with pytest.raises(CheckpointError, match="--rerank-template qwen3 writes that one anyway"):
        converted(source, tmp_path / "b", to="reranker")
    target = converted(source, tmp_path / "b", to="reranker", template="qwen3")
    before = score(load_reranker(source, template="qwen3"), PAIRS)
    torch.testing.assert_close(score(load_reranker(target), PAIRS), before, rtol=0, atol=1e-4)
    theirs = CrossEncoder(str(target), device="cpu", activation_fn=torch.nn.Identity()).predict(PAIRS, batch_size=1)
    torch.testing.assert_close(torch.from_numpy(theirs).reshape(-1, 1), before, rtol=0, atol=1e-4)


@pytest.mark.parametrize("make", [tiny_cross_encoder_bert, tiny_cross_encoder_xlmr, tiny_qwen3_classifier])
def test_classifiers_stay_what_they_are(tmp_path, make):
    source = make(tmp_path / "a")
    template = "qwen3" if make is tiny_qwen3_classifier else None
    target = converted(source, tmp_path / "b", to="reranker", template=template)
    before = score(load_reranker(source, template=template), PAIRS)
    torch.testing.assert_close(score(load_reranker(target), PAIRS), before, rtol=0, atol=1e-5)
    if template is None:
        theirs = CrossEncoder(str(target), device="cpu", activation_fn=torch.nn.Identity()).predict(PAIRS)
        torch.testing.assert_close(torch.from_numpy(theirs).reshape(before.shape), before, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("make", "wishes", "message"),
    [
        (tiny_bert, {"to": "reranker"}, "has no head that scores"),
        (tiny_qwen3, {"to": "reranker", "causal": False}, "leave --bidirectional out"),
        (tiny_qwen3, {"to": "reranker", "pooling": "mean"}, "leave --pooling out"),
        (tiny_qwen3, {"dtype": "float16"}, "not served in float16"),
        (tiny_bert, {"max_tokens": 4000}, "must be 1 to 128"),
        (tiny_bert, {"default_prompt": "query"}, "none of the prompts"),
    ],
)
def test_what_cannot_be_is_refused_and_leaves_nothing(tmp_path, make, wishes, message):
    source = make(tmp_path / "a")
    with pytest.raises(CheckpointError, match=message):
        converted(source, tmp_path / "b", **wishes)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "holds no weights"),
        (lambda folder: save_file({"linear.weight": torch.ones(48, 64)}, folder / "model.safetensors"), "linear.bias"),
        (
            lambda folder: save_file(
                {"linear.weight": torch.ones(64, 48), "linear.bias": torch.ones(48)}, folder / "model.safetensors"
            ),
            r"has shape \(64, 48\), and the model takes \(48, 64\)",
        ),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\x00" * 9), "cannot be read"),
    ],
    ids=["missing", "half", "turned", "damaged"],
)
def test_a_dense_module_without_its_weights_is_found_before_anything_is_written(tmp_path, change, message):
    """The result could not be served."""
    source = tiny_bert(tmp_path / "a", **CHAIN)
    change(source / "2_Dense")
    with pytest.raises(CheckpointError, match=message) as caught:
        converted(source, tmp_path / "b")
    assert "2_Dense" in caught.value.message
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("name", TRANSFORMER_FILES)
def test_limit_and_lower_case_stay_whatever_their_file_is_called(tmp_path, name):
    source = tiny_bert(tmp_path / "a", max_seq_length=9)
    (source / "sentence_bert_config.json").rename(source / name)
    edit_json(source / name, do_lower_case=True)
    target = converted(source, tmp_path / "b")
    for folder in (read_model_folder(source), read_model_folder(target)):
        assert (folder.max_tokens, folder.do_lower_case) == (9, True)


def test_a_target_that_is_there_or_the_source_itself_is_refused(tmp_path):
    source = tiny_bert(tmp_path / "a")
    target = converted(source, tmp_path / "b")
    (target / "mine.txt").write_text("kept")
    with pytest.raises(CheckpointError, match="--force replaces it"):
        converted(source, target)
    assert (target / "mine.txt").read_text() == "kept"
    for overlapping in (source, source / "inside", tmp_path):
        with pytest.raises(CheckpointError, match="overlaps"):
            converted(source, overlapping, force=True)
    converted(source, target, force=True)
    assert not (target / "mine.txt").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_an_interrupted_run_leaves_no_half_folder(tmp_path):
    source, target = tiny_bert(tmp_path / "a"), tmp_path / "b"

    def interrupt(done):
        if done > 20_000:
            raise KeyboardInterrupt

    found = find_source(source)
    wishes = Wishes(to="embedder")
    with open_weights(found, wishes) as weights:
        plan = decide(found, wishes, weights)
        with pytest.raises(KeyboardInterrupt):
            convert(plan, weights, target, advance=interrupt)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), PermissionError(13, "Permission denied")])
def test_a_full_or_forbidden_disk_is_one_clear_error(tmp_path, monkeypatch, failure):
    source = tiny_bert(tmp_path / "a")

    def fail(*arguments):
        raise failure

    monkeypatch.setattr("rose.convert.offline.write.write_shards", fail)
    with pytest.raises(CheckpointError, match=rf"cannot be written: .*{failure.strerror}"):
        converted(source, tmp_path / "b")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


def test_a_value_that_does_not_fit_the_dtype_is_named(tmp_path):
    source = tiny_bert(tmp_path / "a")
    tensors = load_file(source / "model.safetensors")
    tensors["encoder.layer.1.output.dense.bias"][3] = 70_000.0
    shutil.rmtree(source)
    tiny_bert(source, extra=tensors)
    with pytest.raises(CheckpointError, match=r"encoder\.layer\.1\.output\.dense\.bias holds values .* as F16"):
        converted(source, tmp_path / "b", dtype="float16")


@pytest.mark.parametrize("values", [[float("nan")], [float("inf"), float("-inf")]])
def test_a_value_that_is_not_finite_is_named(tmp_path, values):
    source = tiny_qwen3(tmp_path / "a")
    tensors = load_file(source / "model.safetensors")
    tensors["layers.1.mlp.up_proj.weight"][3, : len(values)] = torch.tensor(values)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight holds values that are not finite as F32"
    ):
        converted(source, tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_a_target_that_cannot_be_replaced_is_kept(tmp_path, monkeypatch):
    source = tiny_bert(tmp_path / "a")
    target = converted(source, tmp_path / "b")
    (target / "mine.txt").write_text("kept")
    rename = Path.rename

    def fail(self, to):
        if ".partial-" in self.name:
            raise OSError(5, "Input/output error")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(CheckpointError, match="Input/output error"):
        converted(source, target, force=True)
    assert (target / "mine.txt").read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize("damage", ["truncated", "pickle with code"])
def test_damaged_weights_are_refused(tmp_path, damage):
    source = tiny_bert(tmp_path / "a")
    weights = source / "model.safetensors"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1000])
    else:
        weights.unlink()
        torch.save({"layer": print}, source / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="cannot be read"):
        converted(source, tmp_path / "b")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


def test_a_promised_end_token_that_is_not_added_is_said(tmp_path):
    source = tiny_qwen3(tmp_path / "a", chat=True)
    edit_json(source / "tokenizer_config.json", add_eos_token=True)
    target = converted(source, tmp_path / "b")
    choices = json.loads((target / "rose.json").read_text())["choices"]
    value = next(choice["value"] for choice in choices if choice["name"] == "end token")
    assert value.startswith("none; the text's own last token is pooled")
    assert "add_eos_token promises one" in value

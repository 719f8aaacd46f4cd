"""What a folder says of scoring pairs: which head, how the pair is written, labels, activation, and what is refused."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rose.config import read_model_folder
from rose.errors import CheckpointError
from tests.support.tiny_checkpoints import edit_json, read_json, tiny_bert, tiny_qwen3, write_json
from tests.support.tiny_families import (
    RERANKER_TEMPLATE,
    tiny_cross_encoder_bert,
    tiny_cross_encoder_xlmr,
    tiny_qwen3_classifier,
    tiny_qwen3_embedding,
    tiny_qwen3_reranker,
)


@pytest.mark.parametrize("make", [tiny_cross_encoder_bert, tiny_cross_encoder_xlmr])
def test_cross_encoder(tmp_path, make):
    folder = read_model_folder(make(tmp_path / "m"))
    reranker = folder.reranker
    assert (reranker.form, reranker.head, reranker.labels) == ("pair", "pooled", ("LABEL_0",))
    assert (reranker.activation, reranker.activation_source) == ("sigmoid", "default for one label")
    assert (folder.pooling, folder.dimension, folder.token_heads) == (None, 1, ())


def test_two_labels_are_what_silence_means(tmp_path):
    """Report C106 (agentmemory#724): no softmax over one logit, no sigmoid over two: the labels are told."""
    path = tiny_cross_encoder_bert(tmp_path / "m", labels=2)
    assert "id2label" not in read_json(path / "config.json")
    reranker = read_model_folder(path).reranker
    assert reranker.labels == ("LABEL_0", "LABEL_1")
    assert (reranker.activation, reranker.activation_source) == ("none", "default for several labels")


def test_label_names(tmp_path):
    path = tiny_cross_encoder_bert(tmp_path / "m", labels=3)
    edit_json(path / "config.json", id2label={"2": "entailment", "0": "contradiction", "1": "neutral"})
    assert read_model_folder(path).reranker.labels == ("contradiction", "neutral", "entailment")
    edit_json(path / "config.json", id2label={"1": "a", "2": "b"})
    with pytest.raises(CheckpointError, match="id2label does not number its labels 0, 1, 2"):
        read_model_folder(path)


IDENTITY, SIGMOID = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Sigmoid"


@pytest.mark.parametrize(
    ("file", "value", "source"),
    [
        (
            "config_sentence_transformers.json",
            {"model_type": "CrossEncoder", "activation_fn": IDENTITY},
            "activation_fn",
        ),
        ("config.json", {"sentence_transformers": {"activation_fn": IDENTITY}}, "activation_fn"),
        ("config.json", {"sbert_ce_default_activation_function": IDENTITY}, "sbert_ce_default_activation_function"),
    ],
)
def test_activation_in_each_of_its_places(tmp_path, file, value, source):
    path = tiny_cross_encoder_bert(tmp_path / "m")
    old = read_json(path / file) if (path / file).exists() else {}
    write_json(path / file, old | value)
    reranker = read_model_folder(path).reranker
    assert (reranker.activation, reranker.activation_source) == ("none", f"{file}: {source}")


@pytest.mark.parametrize("name", ["my_code.Sigmoid", "torch.nn.modules.activation.Tanh"])
def test_other_activations_are_refused(tmp_path, name):
    path = tiny_cross_encoder_bert(tmp_path / "m", config={"sbert_ce_default_activation_function": name})
    with pytest.raises(CheckpointError, match=f"'{name}' is not served; there are Sigmoid, Identity"):
        read_model_folder(path)


def test_template_is_kept_verbatim(tmp_path):
    """The two line ends behind the closed thought are the token that is scored; template engines strip one of them."""
    reranker = read_model_folder(tiny_qwen3_reranker(tmp_path / "m")).reranker
    assert reranker.prefix.startswith("<|im_start|>system\nJudge whether the Document meets the requirements based on ")
    assert reranker.prefix.endswith('Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n')
    assert reranker.suffix == "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    task = "Given a web search query, retrieve relevant passages that answer the query"
    assert reranker.body("a {b}", "c\n") == f"<Instruct>: {task}\n<Query>: a {{b}}\n<Document>: c\n"
    assert reranker.body("q", "d", "Find it") == "<Instruct>: Find it\n<Query>: q\n<Document>: d"
    assert reranker.body("q", "d", "") == "<Instruct>: \n<Query>: q\n<Document>: d"


def test_instruction_of_the_folder(tmp_path):
    path = tiny_qwen3_reranker(tmp_path / "m")
    edit_json(path / "config_sentence_transformers.json", prompts={"mine": "Find the law"}, default_prompt_name="mine")
    assert read_model_folder(path).reranker.instruction == "Find the law"


@pytest.mark.parametrize(
    ("arguments", "name", "reading", "source"),
    [
        ({}, "m", {}, "1_LogitScore/config.json"),
        ({"logit_score": False}, "Qwen3-Reranker-0.6B", {}, "the name Qwen3-Reranker"),
        ({"logit_score": False}, "Qwen3-Reranker-0.6B", {"task": "rerank"}, "the name Qwen3-Reranker"),
        ({"logit_score": False}, "m", {"task": "rerank", "template": "qwen3"}, "the caller's choice"),
        (
            {"logit_score": False, "config": {"_name_or_path": "Qwen/Qwen3-Reranker-4B"}},
            "m",
            {},
            "the name Qwen3-Reran",
        ),
    ],
)
def test_what_makes_a_language_model_a_reranker(tmp_path, arguments, name, reading, source):
    reranker = read_model_folder(tiny_qwen3_reranker(tmp_path / name, **arguments), **reading).reranker
    assert (reranker.form, reranker.head, reranker.labels) == ("template", "yes_no", ("yes",))
    assert reranker.source.startswith(source)
    assert None not in (reranker.yes_id, reranker.no_id)


@pytest.mark.parametrize(
    ("make", "name", "reading", "source"),
    [
        (tiny_qwen3_reranker, "m", {}, "the chat template"),
        (tiny_qwen3_reranker, "m", {"template": "qwen3"}, "the caller's choice"),
        (tiny_qwen3_classifier, "Qwen3-Reranker-seq-cls", {}, "the name Qwen3-Reranker"),
        (tiny_qwen3_classifier, "m", {"template": "none"}, "the caller's choice"),
        (tiny_cross_encoder_bert, "m", {}, "the tokenizer's files"),
    ],
)
def test_what_says_how_a_pair_is_written(tmp_path, make, name, reading, source):
    assert read_model_folder(make(tmp_path / name), **reading).reranker.form_source == source


def test_what_a_folder_is_for_does_not_say_how_a_pair_is_written(tmp_path):
    """Any language model knows a yes and a no; a prompt that it was never trained on would be a guess."""
    path = tiny_qwen3_reranker(tmp_path / "m", logit_score=False)
    with pytest.raises(CheckpointError, match=r"how a pair is written; settle it with --rerank-template qwen3 \(.*\)$"):
        read_model_folder(path, task="rerank")
    assert read_model_folder(path, task="rerank", template="qwen3").reranker.form == "template"


def test_a_language_model_that_says_nothing_is_no_reranker(tmp_path):
    path = tiny_qwen3_reranker(tmp_path / "m", logit_score=False)
    assert read_model_folder(path).generation is not None
    with pytest.raises(CheckpointError, match=r"does not say how tokens are pooled .* or say --task rerank"):
        read_model_folder(path, task="embed")
    assert read_model_folder(tiny_qwen3_embedding(tmp_path / "Qwen3-Reranker-lookalike")).reranker is None


def test_embedder_of_a_reranker(tmp_path):
    folder = read_model_folder(
        tiny_qwen3_reranker(tmp_path / "Qwen3-Reranker", logit_score=False), task="embed", pooling="last"
    )
    assert folder.reranker is None
    assert folder.pooling.modes == ("last",)


def test_pooling_of_a_reranker_is_refused(tmp_path):
    """Rather than being ignored. For a language model it says instead that vectors are wanted."""
    with pytest.raises(CheckpointError, match=r"scores pairs and pools nothing \(.*\); leave --pooling out"):
        read_model_folder(tiny_cross_encoder_bert(tmp_path / "m"), pooling="cls")
    path = tiny_qwen3_reranker(tmp_path / "Qwen3-Reranker", logit_score=False)
    assert read_model_folder(path, pooling="last").reranker is None


def test_converted_classifier_says_how_its_pair_is_written(tmp_path):
    path = tiny_qwen3_classifier(tmp_path / "m")
    with pytest.raises(CheckpointError, match=r"does not say how a pair is written; settle it with --rerank-template"):
        read_model_folder(path)
    assert read_model_folder(path, template="none").reranker.form == "pair"
    templated = read_model_folder(path, template="qwen3").reranker
    assert (templated.form, templated.head) == ("template", "last")
    named = read_model_folder(tiny_qwen3_classifier(tmp_path / "Qwen3-Reranker-0.6B-seq-cls")).reranker
    assert (named.form, named.suffix) == ("template", templated.suffix)
    edit_json(path / "tokenizer_config.json", chat_template=[{"name": "default", "template": RERANKER_TEMPLATE}])
    assert read_model_folder(path).reranker.form == "template"


ALTERED = [
    ("<Query>: ", "<Search>: ", r"has no '\\n<Query>: ' where it is due"),
    ("<Document>: ", "<Passage>: ", r"has no '\\n<Document>: ' where it is due"),
    ("<Instruct>: ", "Task: ", "has no '<Instruct>: ' where it is due"),
    ('"yes" or "no"', '"1" or "0"', "has no .*Judge whether the Document"),
    ("<think>\n\n</think>", "", "has no .*assistant.* where it is due"),
    ("\n<Document>: ", "\n<Title>: {{ title }}\n<Document>: ", r"has further fields \(<Title>: \)"),
]


@pytest.mark.parametrize("make", [tiny_qwen3_reranker, tiny_qwen3_classifier])
@pytest.mark.parametrize(("old", "new", "words"), ALTERED)
def test_a_template_that_differs_in_a_piece_is_another_prompt(tmp_path, make, old, new, words):
    """The judge's sentence alone settles nothing, nor does the folder's name or the task; the named flag does."""
    assert old in RERANKER_TEMPLATE
    path = make(tmp_path / "Qwen3-Reranker-mine")
    (path / "chat_template.jinja").write_text(RERANKER_TEMPLATE.replace(old, new), encoding="utf-8")
    for reading in ({}, {"task": "rerank"}):
        with pytest.raises(CheckpointError, match=words) as refused:
            read_model_folder(path, **reading)
        assert "--rerank-template qwen3" in str(refused.value)
    assert read_model_folder(path, template="qwen3").reranker.form == "template"


def test_a_template_in_string_literals_is_the_same_prompt(tmp_path):
    path = tiny_qwen3_classifier(tmp_path / "m")
    prefix, rest = RERANKER_TEMPLATE.split("<Instruct>", 1)
    literal = prefix.replace('"', '\\"').replace("\n", "\\n")
    (path / "chat_template.jinja").write_text(f'{{{{ "{literal}" }}}}<Instruct>{rest}', encoding="utf-8")
    assert read_model_folder(path).reranker.form == "template"


def test_a_chat_template_that_judges_nothing_leaves_the_name_to_say_it(tmp_path):
    """The first revisions of Qwen3-Reranker have the chat template of the language model they were made from."""
    path = tiny_qwen3_reranker(tmp_path / "Qwen3-Reranker-0.6B", logit_score=False)
    (path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}", encoding="utf-8")
    assert read_model_folder(path).reranker.form == "template"


@pytest.mark.parametrize(
    ("make", "reading", "words"),
    [
        (tiny_bert, {"task": "rerank"}, "BertModel has no head that scores a pair: neither a classifier nor"),
        (tiny_qwen3, {"task": "rerank"}, "the vocabulary has no token 'yes', which the score is read from"),
        (tiny_qwen3_reranker, {"template": "none"}, "yes or no needs a template; leave --rerank-template out"),
        (tiny_qwen3_reranker, {"template": "llama"}, "rerank template 'llama' is not served; there are qwen3, none"),
    ],
)
def test_refusals(tmp_path, make, reading, words):
    """Report C101 (llama.cpp#25447): no usable head, no rerank, and a reason."""
    with pytest.raises(CheckpointError, match=words):
        read_model_folder(make(tmp_path / "m"), **reading)


def test_logit_score_behind_pooling_is_refused(tmp_path):
    path = tiny_qwen3_reranker(tmp_path / "m")
    modules = read_json(path / "modules.json")
    modules.insert(1, {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"})
    write_json(path / "modules.json", modules)
    write_json(path / "1_Pooling/config.json", {"pooling_mode": "mean"})
    with pytest.raises(CheckpointError, match="a LogitScore module behind anything but a Transformer is not served"):
        read_model_folder(path)


def test_logit_score_without_a_language_model_head(tmp_path):
    """A folder of a bare backbone cannot give logits, whatever its modules promise."""
    path = tiny_qwen3_reranker(tmp_path / "m")
    edit_json(path / "config.json", architectures=["Qwen3Model"])
    with pytest.raises(CheckpointError, match="Qwen3Model has no head that scores a pair"):
        read_model_folder(path)


def test_reading_needs_no_torch(tmp_path):
    path = tiny_qwen3_reranker(tmp_path / "m")
    code = (
        "import sys; from rose.config import read_model_folder; "
        f"assert read_model_folder({str(path)!r}).reranker; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

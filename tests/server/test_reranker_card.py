"""What a reranker's start table, card and `rose info` say: every fact that decides a score."""

from __future__ import annotations

import pytest

from rose import cli
from rose.cli.models import _card_facts
from rose.config import EngineConfig, ServerConfig, read_model_folder
from rose.config.reranker import QWEN3_INSTRUCTION, QWEN3_PREFIX, QWEN3_SUFFIX
from rose.server.card import model_card, table
from tests.support.running import load_reranker
from tests.support.tiny_checkpoints import edit_json, tiny_bert
from tests.support.tiny_families import tiny_cross_encoder_bert, tiny_qwen3_classifier, tiny_qwen3_reranker


def told(path, capsys, **reading):
    """(start table, rose info, card) of a folder."""
    folder, engine = read_model_folder(path, **reading), EngineConfig(max_tokens=128)
    names = {"served_name": "m", "dtype": "float32", "device": "cpu", "backend": "sdpa"}
    card = model_card(folder, load_reranker(path, **reading), engine, ServerConfig(address="x"), **names)
    flags = [part for name, value in reading.items() for part in (f"--rerank-{name}", value)]
    assert cli.main(["info", str(path), *flags]) == 0
    return rows(table(card, folder, engine, "x")), rows(capsys.readouterr().out), card


def rows(text):
    """Name -> value; the names of the facts have at most three words."""
    found = {}
    for line in text.splitlines():
        for name in ("yes and no ids", "default prompt", line.split()[0]):
            if line.strip().startswith(name):
                found[name] = line.strip().removeprefix(name).strip()
                break
    return found


def test_yes_and_no_with_a_template(tmp_path, capsys):
    path = tiny_qwen3_reranker(tmp_path / "m")
    reranker = read_model_folder(path).reranker
    *texts, card = told(path, capsys)
    for facts in texts:
        assert facts["head"] == "rows of the language model's head on the last token (1_LogitScore/config.json)"
        assert facts["yes and no ids"] == f"{reranker.yes_id}, {reranker.no_id}"
        assert facts["labels"] == "yes"
        assert facts["activation"] == "sigmoid (config_sentence_transformers.json: activation_fn)"
        assert facts["pair"] == "template qwen3 (the chat template)"
        assert (facts["prefix"], facts["suffix"]) == (repr(QWEN3_PREFIX), repr(QWEN3_SUFFIX))
        assert facts["instruction"] == f"{QWEN3_INSTRUCTION!r} (where a request has none)"
        assert not {"pooling", "normalised", "default prompt", "prompts", "dimensions"} & facts.keys()
    assert list(card.outputs[0].labels) == ["yes"]


def test_classes_and_their_names(tmp_path, capsys):
    path = tiny_cross_encoder_bert(tmp_path / "m", labels=3)
    edit_json(path / "config.json", id2label={"0": "contradiction", "1": "neutral", "2": "entailment"})
    *texts, card = told(path, capsys)
    for facts in texts:
        assert facts["head"].startswith("pooler and classifier on the first token (config.json: Bert")
        assert facts["labels"] == "contradiction, neutral, entailment"
        assert facts["activation"] == "none (default for several labels)"
        assert facts["pair"] == "the tokenizer's own pair of query and document"
        assert not {"yes and no ids", "prefix", "pooling"} & facts.keys()
    assert list(card.outputs[0].labels) == ["contradiction", "neutral", "entailment"]
    facts = dict(_card_facts(card))
    assert facts["output"] == "score: a score of each of 3 labels: contradiction, neutral, entailment"
    assert "pooling" not in facts


@pytest.mark.parametrize(
    ("template", "pair"), [("qwen3", "template qwen3"), ("none", "the tokenizer's own pair of qu")]
)
def test_a_converted_classifier_says_how_it_writes_pairs(tmp_path, capsys, template, pair):
    *texts, _ = told(tiny_qwen3_classifier(tmp_path / "m"), capsys, template=template)
    for facts in texts:
        assert facts["head"].startswith("score.weight on the last token (config.json: Qwen3For")
        assert facts["pair"].startswith(pair)
        assert ("instruction" in facts) == (template == "qwen3")


def test_an_embedder_has_none_of_that(tmp_path, capsys):
    assert cli.main(["info", str(tiny_bert(tmp_path / "m"))]) == 0
    facts = rows(capsys.readouterr().out)
    assert "pooling" in facts
    assert not {"head", "labels", "activation", "pair"} & facts.keys()

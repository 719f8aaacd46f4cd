"""A tokenizer is no model: commands that need one say so before they pull, load or start anything."""

from __future__ import annotations

import pytest

from rose import cli
from rose.cli.shared import find_model
from rose.errors import CheckpointError
from rose.hub import CATALOG

TOKENIZERS = {"xlm-roberta", "qwen3", "qwen3.5"}


def test_the_catalog_knows_which_names_are_tokenizers():
    assert {name for name, known in CATALOG.items() if known.is_tokenizer} == TOKENIZERS
    assert all(CATALOG[name].summary.startswith("tokenizer only") for name in TOKENIZERS)


@pytest.mark.parametrize(
    "command",
    [
        ["info", "qwen3"],
        ["serve", "qwen3"],
        ["generate", "qwen3", "x"],
        ["embed", "{texts}", "--model", "qwen3"],
        ["rerank", "x", "{texts}", "--model", "qwen3"],
        ["convert", "qwen3", "--to", "embedder", "-o", "made"],
        ["calibrate", "qwen3", "--data", "{texts}", "--scheme", "int8", "-o", "made"],
    ],
)
def test_a_short_name_that_is_a_tokenizer_is_refused_unpulled(command, texts, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rose.cli.shared.resolve", lambda *_, **__: pytest.fail("it was pulled"))
    assert cli.main([word.format(texts=texts) for word in command]) == 2
    expected = "rose: qwen3 is a tokenizer only, without a model; rose pull --list tells which names have one\n"
    assert capsys.readouterr().err == expected


def test_so_is_a_folder_that_holds_no_more(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is a tokenizer only"):
        find_model(str(tmp_path), None)
    (tmp_path / "config.json").write_text("{}")
    assert find_model(str(tmp_path), None) == tmp_path


def test_a_front_needs_no_more_than_the_tokenizer(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text("{}")
    calls = []
    monkeypatch.setattr("rose.gateway.fronts.run_fronts", lambda config, folder, **_: calls.append(folder) or 0)
    assert cli.main(["gateway", str(tmp_path), "--replica", "unix:/run/rose"]) == 0
    assert calls == [tmp_path]

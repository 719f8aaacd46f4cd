"""Each kind of name finds its folder, and a wrong one says what would have worked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rose.errors import PullError
from rose.hub import resolve
from rose.hub.hugging_face import is_hub_id

_ASK = """
import sys
from rose.errors import PullError
from rose.hub import resolve
try:
    print("folder", resolve(sys.argv[1]))
except PullError as error:
    print("error", error.message)
"""


def ask_offline(name: str, home: Path) -> str:
    """`resolve(name)` in a process whose hub library is told that there is no network."""
    environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _ASK, name], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def put_snapshot(home: Path, files: dict[str, str]) -> Path:
    """A model in the layout of the hub's own cache."""
    model, commit = home / "hub" / "models--acme--embedder", "0" * 39 + "1"
    snapshot = model / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(commit)
    for name, text in files.items():
        (snapshot / name).write_text(text)
    return snapshot


def test_a_folder_passes_through(tmp_path):
    assert resolve(tmp_path) == tmp_path
    assert resolve(str(tmp_path)) == tmp_path


def test_a_short_name_wins_over_a_folder_in_the_current_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "minilm").mkdir()
    monkeypatch.setattr("rose.hub.names.pull_package", lambda model, cache, progress: cache / model.name)
    assert resolve("minilm", cache=tmp_path / "cache") == tmp_path / "cache" / "minilm"
    assert resolve("./minilm") == Path("minilm")
    assert resolve(Path("minilm")) == Path("minilm")


def test_a_file_is_refused(tmp_path):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"")
    with pytest.raises(PullError, match="is a file; a model is a folder"):
        resolve(weights)


def test_an_unknown_name_lists_what_there_is():
    with pytest.raises(
        PullError, match=r"no model 'minilmm'.*short name \(minilm, e5-small, .*\).*Did you mean 'minilm'\?"
    ):
        resolve("minilmm")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("BAAI/bge-m3", True),
        ("BAAI/bge-m3@refs/pr/1", True),
        ("bge-m3", False),
        ("a/b/c", False),
        ("../up", False),
        ("/abs/olute", False),
        ("a/b@", False),
    ],
)
def test_what_reads_as_a_hub_id(name, expected):
    assert is_hub_id(name) is expected


def test_a_hub_id_is_served_from_the_hub_cache_without_a_network(tmp_path):
    snapshot = put_snapshot(tmp_path, {"config.json": "{}", "model.safetensors": ""})
    assert ask_offline("acme/embedder", tmp_path) == f"folder {snapshot}"


def test_a_hub_id_that_cannot_be_had_says_how_to_go_on(tmp_path):
    answer = ask_offline("acme/embedder", tmp_path)
    assert answer.startswith("error cannot get acme/embedder: the hub cannot be reached")
    assert "copy the model's folder here" in answer


def test_a_hub_repository_without_config_is_no_model(tmp_path):
    put_snapshot(tmp_path, {"README.md": "", "data.json": "{}"})
    assert "has no config.json" in ask_offline("acme/embedder", tmp_path)

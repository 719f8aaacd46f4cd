"""JSON files are read whole, or refused by name."""

from __future__ import annotations

import pytest

from rose.config.json_file import read_json
from rose.errors import CheckpointError


def test_nesting_without_end_is_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"a": ' * 100_000)
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        read_json(path)


@pytest.mark.parametrize("text", ["", "{", "[1,", "nul", "\x00"])
def test_what_is_not_json_is_refused_with_its_path(tmp_path, text):
    path = tmp_path / "modules.json"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=r"modules\.json cannot be read"):
        read_json(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        read_json(tmp_path / "config.json")

"""README's figures of the GPU are those of the committed rows."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def tables():
    spec = importlib.util.spec_from_file_location("rose_readme_tables", ROOT / "benchmarks" / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_made_from_the_rows(tables):
    readme = (ROOT / "README.md").read_text()
    assert tables.filled(readme, tables.read_rows()) == readme, "run: python benchmarks/tables.py --write"


def test_of_several_backends_the_chosen_one_is_shown_and_not_the_best(tables):
    rows = [
        {"load": "latency", "command": "bench --backend a b", "n": 9000, "p50_ms": 1.0},
        {"load": "latency", "command": "bench", "n": 40, "p50_ms": 2.0},
        {"load": "latency", "command": "bench", "n": 50, "p50_ms": 3.0},
    ]
    assert tables.chosen(rows, load="latency")["p50_ms"] == 3.0
    assert tables.chosen(rows, load="decode") is None


def test_a_block_that_is_gone_is_missed(tables):
    with pytest.raises(ValueError, match="no block latency"):
        tables.filled("no markers here", [])

"""Commands start their processes from any folder: above a clone called `rose`, beside files named as libraries are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.tiny_checkpoints import tiny_bert
from tests.support.tiny_families import tiny_cross_encoder_bert

ROOT = Path(__file__).parents[1]


@pytest.fixture
def above_a_clone(tmp_path: Path) -> Path:
    """A folder that holds the clone's folder `rose`, which is no package, and a numpy.py."""
    (tmp_path / "rose" / "rose").mkdir(parents=True)
    (tmp_path / "rose" / "rose" / "__init__.py").write_text("")
    (tmp_path / "numpy.py").write_text("raise SystemExit('numpy.py of the current folder was executed')\n")
    (tmp_path / "texts.txt").write_text("the river\nthe sea\n")
    return tmp_path


def rose(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """As the console script runs it: the current folder is not on its own path."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", "-m", "rose.cli", *arguments, "--device", "cpu", "--num-threads", "1"]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_embed_starts_its_server_from_above_a_clone(above_a_clone):
    tiny_bert(above_a_clone / "tiny")
    done = rose("embed", "texts.txt", "-o", "v.npy", "--model", "./tiny", cwd=above_a_clone)
    assert done.returncode == 0, done.stderr
    assert np.load(above_a_clone / "v.npy").shape == (2, 64)


def test_rerank_starts_its_server_from_above_a_clone(above_a_clone):
    tiny_cross_encoder_bert(above_a_clone / "tiny")
    done = rose("rerank", "the sea", "texts.txt", "--json", "--model", "./tiny", cwd=above_a_clone)
    assert done.returncode == 0, done.stderr
    assert {json.loads(line)["document"] for line in done.stdout.splitlines()} == {"the river", "the sea"}

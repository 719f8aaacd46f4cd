"""`rose embed` and `rose rerank` with servers of their own, on trained weights."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rose.bench.systems import RoseInProcess

pytestmark = pytest.mark.weights
TEXTS = [f"sentence {i} about {('cats', 'dogs', 'ships', 'tea')[i % 4]}" for i in range(300)]


def rose(*arguments: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "rose.cli", *arguments]
    return subprocess.run(command, input=given, env=environment, capture_output=True, text=True, check=False)


def engines_of(folder: Path) -> list[str]:
    """Command lines of engine processes that serve `folder`."""
    found = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has just ended
            found.append(process.read_bytes().decode(errors="replace").replace("\0", " "))
    return [line for line in found if f"rose.server {folder} " in line]


def test_an_engine_of_its_own_gives_the_vectors_of_the_library(minilm_folder, tmp_path):
    (tmp_path / "t.txt").write_text("\n".join(TEXTS))
    link = tmp_path / "minilm-alone"
    link.symlink_to(minilm_folder)
    arguments = ["--model", str(link), "--batch-tokens", "1024", "--num-threads", "1"]
    done = rose("embed", str(tmp_path / "t.txt"), "-o", str(tmp_path / "v.npy"), *arguments)
    assert done.returncode == 0, done.stderr
    system = RoseInProcess(minilm_folder, 1)
    expected = system.embed(TEXTS)
    system.close()
    found = np.load(tmp_path / "v.npy")
    assert found.shape == (300, 384)
    assert float((found.astype(np.float64) * expected).sum(1).min()) >= 0.99999
    assert engines_of(link) == []


def test_a_running_engine_process_is_asked_over_the_light_link(minilm_folder, tmp_path):
    address = f"unix:{tmp_path}/engine"
    engine = subprocess.Popen(
        [sys.executable, "-m", "rose.server", str(minilm_folder), "--address", address, "--served-name", "mine"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert engine.stdout is not None
    try:
        assert engine.stdout.readline().startswith("rose-server ready")
        done = rose("embed", "-", "--model", str(minilm_folder), "--server", address, given="a cat\nthe cat\na ship\n")
    finally:
        engine.terminate()
        engine.wait(30)
        engine.stdout.close()
    assert done.returncode == 0, done.stderr
    vectors = np.array([json.loads(line)["embedding"] for line in done.stdout.splitlines()])
    cosines = vectors @ vectors.T
    assert cosines[0, 1] > 0.8 > 0.5 > cosines[0, 2]


def test_a_model_that_does_not_load_is_told_once_by_each_process(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "t.txt").write_text("a\n")
    done = rose("embed", str(tmp_path / "t.txt"), "--model", str(tmp_path / "model"))
    assert done.returncode == 2
    assert "config.json" in done.stderr or "tokenizer.json" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("rose: rose serve ended with status")
    assert "Traceback" not in done.stderr


def test_documents_are_ranked(minilm_folder):
    documents = "Tea is drunk hot.\nGoethe wrote Faust.\nShips sail.\n"
    done = rose("rerank", "Who is the author of Faust?", "-", "--top", "1", given=documents)
    assert done.returncode == 0, done.stderr
    score, line, text = done.stdout.rstrip("\n").split("\t")
    assert (line, text) == ("2", "Goethe wrote Faust.")
    assert float(score) > 0.5

"""The set-up script does its work once, needs nothing the second time, and says what a bare machine lacks."""

from __future__ import annotations

import hashlib
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A tree with only what scripts/setup.sh reads."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "setup.sh", tmp_path / "scripts")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def setup(checkout: Path, extra: str, python: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "scripts/setup.sh", extra],
        cwd=checkout,
        env={**os.environ, "PYTHON": python},
        capture_output=True,
        text=True,
        check=False,
    )


def fake_python(folder: Path, body: str) -> str:
    script = folder / "fakepython"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    return str(script)


def finish_setup(checkout: Path, extra: str) -> None:
    """What a completed set-up leaves: an interpreter that must not be called again, and the stamp."""
    interpreter = checkout / ".venv" / "bin" / "python"
    interpreter.parent.mkdir(parents=True)
    interpreter.write_text("#!/bin/sh\necho the second run must not call python >&2; exit 9\n")
    interpreter.chmod(0o755)
    both = (checkout / "pyproject.toml").read_bytes() + (checkout / "constraints.txt").read_bytes()
    (checkout / ".venv" / f".rose-setup-{extra}").write_text(hashlib.sha256(both).hexdigest())


def test_a_python_without_venv_is_answered_with_the_apt_line(checkout, tmp_path):
    python = fake_python(tmp_path, f'case "$*" in *ensurepip*) exit 1;; esac; exec {sys.executable} "$@"')
    done = setup(checkout, "gateway", python)
    assert done.returncode == 1
    assert "apt-get install python3-venv" in done.stderr
    assert not (checkout / ".venv").exists()


def test_no_python_at_all_is_answered_with_the_apt_line(checkout):
    done = setup(checkout, "gateway", "python-that-is-not-there")
    assert done.returncode == 1
    assert "apt-get install python3 python3-venv" in done.stderr


def test_an_old_python_is_refused(checkout, tmp_path):
    python = fake_python(tmp_path, 'case "$*" in --version) echo Python 3.9.2;; *) exit 1;; esac')
    done = setup(checkout, "gateway", python)
    assert done.returncode == 1
    assert "Python 3.9.2 is too old: ROSE needs Python 3.11" in done.stderr


@pytest.mark.parametrize(("done_before", "asked"), [("gateway", "gateway"), ("dev", "dev"), ("dev", "gateway")])
def test_the_second_run_calls_nothing(checkout, done_before, asked):
    finish_setup(checkout, done_before)
    done = setup(checkout, asked, "python-that-is-not-there")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_demo_set_up_does_not_pass_for_the_tests(checkout):
    finish_setup(checkout, "gateway")
    assert setup(checkout, "dev", "python-that-is-not-there").returncode == 1


def test_a_changed_requirement_is_installed(checkout):
    finish_setup(checkout, "dev")
    with (checkout / "pyproject.toml").open("a") as file:
        file.write("\n# changed\n")
    assert setup(checkout, "dev", "python-that-is-not-there").returncode == 1


@pytest.mark.weights
def test_the_demo_pairs_the_sentences_and_leaves_no_process(minilm_folder):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "scripts" / "demo.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    sentences = runpy.run_path(str(ROOT / "scripts" / "demo.py"), run_name="demo")["SENTENCES"]
    lines = done.stdout.splitlines()
    for i, sentence in enumerate(sentences):
        found = next(n for n, line in enumerate(lines) if line.startswith(sentence))
        score, nearest = lines[found + 1].strip().split("  ", 1)
        assert nearest == sentences[i ^ 1]
        assert 0.3 < float(score) < 1.0
    assert "/docs" in done.stdout
    assert lines[-1] == "stopped  cleanly"

"""ROSE starts itself again as the package it is, whatever the current folder is called and holds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import rose
from rose.config.own_python import own_python

ROOT = Path(rose.__file__).resolve().parents[1]


def test_the_current_folder_is_not_looked_into(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert own_python("rose.cli") == (sys.executable, "-P", "-m", "rose.cli")


def test_a_clone_that_is_found_through_the_current_folder_is_found_by_its_children_too(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    assert own_python("rose.cli") == (sys.executable, "-m", "rose.cli")


def test_an_installed_command_in_its_own_clone_does_not_look_into_it(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(ROOT))])
    assert own_python("rose.cli") == (sys.executable, "-P", "-m", "rose.cli")


def test_the_package_is_the_same_beside_a_folder_of_its_name(tmp_path, monkeypatch):
    (tmp_path / "rose").mkdir()
    (tmp_path / "rose" / "__init__.py").write_text("raise SystemExit('not this one')\n")
    monkeypatch.chdir(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*own_python("rose.cli"), "version"], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{rose.__version__}\n"), done.stderr

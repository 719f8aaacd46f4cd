"""scripts/gpu_check.py: its commands are ones there are, every test for a GPU is in them, and what it stops is gone."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from rose import cli
from rose.bench import decode, gpu_loads
from rose.bench.llm_shapes import LLM_SHAPES
from rose.bench.shapes import SHAPES

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def gpu_check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "scripts" / "gpu_check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gone(pid: int) -> bool:
    """Within twenty seconds; a zombie is gone."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


# A bench as far as this goes: a server of its own that nobody ends, whose number it tells.
LEAVES_A_SERVER = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
time.sleep(600 if sys.argv[1] == "hangs" else 0)
"""


@pytest.mark.parametrize("how", ["hangs", "ends"])
def test_a_step_takes_what_it_started_along(gpu_check, tmp_path, how):
    command = [sys.executable, "-c", LEAVES_A_SERVER, how]
    limit = 2.0 if how == "hangs" else 60.0
    step = gpu_check.run("bench", command, limit, tmp_path / "log")
    assert step["status"] == (-9 if how == "hangs" else 0)
    assert gone(int((tmp_path / "log").read_text()))


def test_side_by_side_too(gpu_check, tmp_path):
    kept = []
    gpu_check.run_side_by_side(
        [("bench", [sys.executable, "-c", LEAVES_A_SERVER, "hangs"])], 2.0, tmp_path / "log", kept.append
    )
    assert [step["status"] for step in kept] == [-1]
    printed = (tmp_path / "log").read_text()
    assert "stopped after 2 s" in printed
    assert gone(int(re.search(r"^\d+$", printed, re.MULTILINE)[0]))


@pytest.mark.parametrize("part", ["loads", "tests"])
def test_a_run_that_is_stopped_stops_its_steps(tmp_path, part):
    """As a machine that is given back does, or `timeout`: what runs is ended, what waits does not begin."""
    told = tmp_path / "told"
    script = tmp_path / "run.py"
    script.write_text(
        "import importlib.util, pathlib, sys\n"
        f"spec = importlib.util.spec_from_file_location('gpu_check', {str(ROOT / 'scripts' / 'gpu_check.py')!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        f"body = {LEAVES_A_SERVER.replace('flush=True', f'file=open({str(told)!r}, chr(97)), flush=True')!r}\n"
        "step = ('bench', [sys.executable, '-c', body, 'hangs'])\n"
        "module.steps = lambda part, out, quick: iter([step] * 3)\n"
        "module.os.cpu_count = lambda: 2\n"
        f"sys.argv[1:] = ['--part', {part!r}, '--out', {str(tmp_path)!r}]\n"
        "sys.exit(module.main())\n"
    )
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.DEVNULL)
    at_once, end = 2 if part == "tests" else 1, time.monotonic() + 30
    while not (told.exists() and told.read_text().count("\n") == at_once) and time.monotonic() < end:
        time.sleep(0.02)
    servers = [int(line) for line in told.read_text().split()]
    assert all(Path(f"/proc/{server}").exists() for server in servers)
    process.terminate()
    assert process.wait(30) == 128 + 15
    assert all(gone(server) for server in servers)
    assert len(told.read_text().split()) == at_once


def test_every_test_for_a_gpu_is_run_and_no_file_for_nothing(gpu_check):
    names = gpu_check.gpu_tests()
    assert len(names) == len(set(names))
    listed = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu and not slow",
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
    ]
    marked = [path for path in (ROOT / "tests").rglob("test_*.py") if "gpu" in path.read_text()]
    fixtures = [path for folder in gpu_check.FIXTURES for path in (ROOT / folder).glob("test_*.py")]
    files = sorted({str(path.relative_to(ROOT)) for path in (*marked, *fixtures)})
    done = subprocess.run([*listed, *files], cwd=ROOT, capture_output=True, text=True, check=True)
    everything = {line for line in done.stdout.splitlines() if "::" in line}
    chosen = {
        name: {test for test in everything if test == name or test.startswith((f"{name}::", f"{name}["))}
        for name in names
    }
    assert set().union(*chosen.values()) == everything
    assert [name for name, tests in chosen.items() if not tests] == []
    functions = {re.sub(r"\[.*", "", test) for test in everything if test.startswith(gpu_check.DIVIDED)}
    assert functions == {name for name in names if name.startswith(gpu_check.DIVIDED)}


def test_what_is_prepared_has_no_rows_and_is_what_later_parts_run(gpu_check):
    for name, command in gpu_check.prepare_steps(gpu_check.PREPARED):
        module = {"rose.bench.gpu_loads": gpu_loads, "rose.bench.commands": decode}[command[2]]
        parser = argparse.ArgumentParser(exit_on_error=False)
        module.add_arguments(parser)
        options = parser.parse_args(command[4:])
        assert options.out is None
        assert f"prepare/{options.model[0]}" == name
    ((_, coded),) = gpu_check.prepare_steps(["bge-m3:fp8"])
    assert coded[coded.index("--dtype") + 1] == "fp8"
    asked = {*gpu_check.FP8, *gpu_check.MODELS, *gpu_check.GENERATING}
    for part in ("throughput", "concurrency", "decode", "models", "fp8", "select", "loads"):
        for _, command in gpu_check.steps(part, Path("out"), False):
            asked |= {word for flag, word in itertools.pairwise(command) if flag in ("--model", "--shape")}
    assert asked <= set(gpu_check.PREPARED)
    assert asked <= {*SHAPES, *LLM_SHAPES}


@pytest.mark.parametrize("part", ["loads", "models", "throughput", "concurrency", "decode", "fp8", "select", "kernels"])
def test_rows_tell_the_commit(gpu_check, part):
    for _, command in gpu_check.steps(part, Path("out"), False):
        assert gpu_check.commit_of(command, None) == []
        more = gpu_check.commit_of(command, "abc")
        assert more == ([] if command[1].startswith("benchmarks/") else ["--commit", "abc"])
        if command[2:4] == ["rose.cli", "select-backend"]:
            assert cli.build_parser().parse_args([*command[3:], *more]).commit == "abc"
    (doctor,) = (command for name, command in gpu_check.steps("tests", Path("out"), False) if name == "doctor")
    assert gpu_check.commit_of(doctor, "abc") == []


def test_another_model_is_refused(gpu_check, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--part", "tests", "--out", str(tmp_path), "--prepare", "bert"])
    with pytest.raises(SystemExit):
        gpu_check.main()
    assert "--prepare bert: no such model; there are bge-m3, " in capsys.readouterr().err


@pytest.mark.parametrize(("given", "found"), [(None, "1"), ("", "")])
def test_flashinfer_compiles_nothing_unless_it_is_let(gpu_check, tmp_path, monkeypatch, given, found):
    own = {name: value for name, value in os.environ.items() if name != "FLASHINFER_DISABLE_JIT"}
    monkeypatch.setattr(gpu_check.os, "environ", own if given is None else {**own, "FLASHINFER_DISABLE_JIT": given})
    told = [sys.executable, "-c", "import os; print(repr(os.environ['FLASHINFER_DISABLE_JIT']))"]
    monkeypatch.setattr(gpu_check, "steps", lambda part, out, quick: iter([("told", told)]))
    monkeypatch.setattr(gpu_check.signal, "signal", lambda *args: None)
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--part", "loads", "--out", str(tmp_path)])
    assert gpu_check.main() == 0
    assert (tmp_path / "loads.log").read_text().strip() == repr(found)
    assert json.loads((tmp_path / "check_loads.json").read_text())["steps"][0]["status"] == 0

"""Every command answers, and every failure is one clear line with its exit status."""

from __future__ import annotations

import subprocess
import sys

import pytest

import rose
from rose import cli
from rose.errors import CheckpointError


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "rose.cli", *arguments], capture_output=True, text=True, check=False)


def commands() -> list[str]:
    """Names of the sub-commands, read off the help text."""
    listed = cli.build_parser().format_help().partition("commands:")[2].partition("options:")[0]
    return [line.split()[0] for line in listed.splitlines() if line.startswith("    ") and not line.startswith("     ")]


def test_the_commands_are_those_of_the_documentation():
    serving = ["pull", "serve", "gateway", "embed", "rerank", "generate"]
    making = ["convert", "calibrate", "verify"]
    assert commands() == [*serving, *making, "select-backend", "info", "doctor", "bench", "version"]


@pytest.mark.parametrize("name", commands())
def test_every_command_explains_itself_with_an_example(name, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0
    assert f"examples:\n  rose {name}" in capsys.readouterr().out


def test_version(capsys):
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out == rose.__version__ + "\n"


@pytest.mark.parametrize(
    "arguments",
    [[], ["fly"], ["pull", "--no-such-option"], ["serve", "--http", "80a"], ["serve", "--grpc", "65536"], ["gateway"]],
)
def test_wrong_usage_is_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert "usage: rose" in capsys.readouterr().err


def test_an_unknown_model_is_one_line_and_status_2():
    done = run("pull", "minilmm")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("rose: no model 'minilmm'")
    assert done.stderr.count("\n") == 1


def test_a_refusal_in_any_room_is_printed_without_a_traceback(monkeypatch, capsys):
    def refuse(options):
        raise CheckpointError("tensor encoder.layer.0 is missing from model.safetensors")

    monkeypatch.setattr("rose.cli.entry._version", refuse)
    assert cli.main(["version"]) == 2
    assert capsys.readouterr().err == "rose: tensor encoder.layer.0 is missing from model.safetensors\n"


def test_a_module_that_is_not_installed_is_named_with_its_extra(monkeypatch, capsys):
    def lacking(options):
        raise ModuleNotFoundError("No module named 'uvloop'", name="uvloop")

    monkeypatch.setattr("rose.cli.entry._version", lacking)
    assert cli.main(["version"]) == 2
    assert "needs the Python module uvloop" in (line := capsys.readouterr().err)
    assert "rose-serving[gateway]" in line


def test_a_module_of_our_own_that_is_missing_is_a_fault_not_an_answer(monkeypatch):
    def broken(options):
        raise ModuleNotFoundError("No module named 'rose.nothing'", name="rose.nothing")

    monkeypatch.setattr("rose.cli.entry._version", broken)
    with pytest.raises(ModuleNotFoundError):
        cli.main(["version"])


def test_ctrl_c_is_status_130(monkeypatch):
    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr("rose.cli.entry._version", interrupted)
    assert cli.main(["version"]) == 130


def test_list_names_every_model_with_its_licence(capsys):
    assert cli.main(["pull", "--list"]) == 0
    assert "minilm " in (out := capsys.readouterr().out)
    assert "Apache-2.0" in out


def test_verify_is_refused_where_nothing_is_pinned(tmp_path, capsys):
    assert cli.main(["pull", str(tmp_path), "--verify"]) == 2
    assert "short names only" in capsys.readouterr().err


def test_info_of_a_folder_that_is_no_model(tmp_path, capsys):
    assert cli.main(["info", str(tmp_path)]) == 2
    assert "config.json" in capsys.readouterr().err


def test_info_of_a_replica_that_is_not_there(tmp_path, capsys):
    assert cli.main(["info", "--replica", f"unix:{tmp_path}/nobody"]) == 2
    assert "nobody" in capsys.readouterr().err


@pytest.mark.weights
def test_info_says_what_the_folder_says(minilm_folder, capsys):
    assert cli.main(["info", str(minilm_folder)]) == 0
    facts = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert facts["architecture"].startswith("BertModel: 6 layers of 384")
    assert facts["pooling"] == "mean (1_Pooling/config.json)"
    assert facts["dimensions"] == "384"


@pytest.mark.weights
def test_pull_prints_the_folder_and_nothing_else_on_stdout(minilm_folder, capsys):
    assert cli.main(["pull", "minilm", "--verify"]) == 0
    assert capsys.readouterr().out == f"{minilm_folder}\n"


def test_doctor_reports_versions_threads_and_a_reason_for_every_missing_backend(capsys):
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert f"rose      {rose.__version__}" in out
    assert "threads " in out
    backends = [line for line in out.splitlines() if line.startswith("  ")]
    assert backends
    assert all(line.endswith(" ok") or len(line.partition(" no: ")[2]) > 5 for line in backends)
    assert sum(line.split() == ["torch_sdpa", "ok"] for line in backends) == 2
    paged = out[out.index("causal, paged (Qwen3-0.6B generating)") :].splitlines()[1:4]
    assert [line.split()[0] for line in paged] == ["triton_paged", "flashinfer_paged", "torch_paged"]
    assert paged[2].split() == ["torch_paged", "ok"]


def test_doctor_leaves_out_a_paged_backend_that_reads_what_others_left(capsys, monkeypatch):
    from rose.attention_backends import check
    from rose.attention_backends.check_paged import NotFinite

    verdicts = iter([NotFinite("not finite in decoding"), None])
    monkeypatch.setattr(check, "check_paged", lambda *args: next(verdicts))
    assert cli.main(["doctor"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  torch_paged"))
    assert line.split(maxsplit=1)[1] == (
        "no: reads beyond a sequence's end: NaN that another one left in a page comes out (not finite in decoding)"
    )


@pytest.mark.parametrize(
    ("load", "prog"), [("cpu", "python -m rose.bench.embed_cpu"), ("latency", "rose bench latency")]
)
def test_each_load_of_the_bench_explains_its_own_options(load, prog, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", load, "--help"])
    assert ended.value.code == 0
    assert f"usage: {prog}" in capsys.readouterr().out

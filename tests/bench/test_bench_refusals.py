"""What a benchmark is refused for: in one line, with status 2, before anything is made or started."""

from __future__ import annotations

import argparse
import asyncio
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from types import SimpleNamespace

import pytest

from rose import cli
from rose.bench import commands, decode, failures, gpu_loads, loads, records, targets
from rose.bench.decode_ways import Stream, together
from rose.bench.llm_shapes import LLM_SHAPES
from rose.bench.shapes import build_checkpoint, made_folder
from rose.config import ending
from rose.errors import InternalError, InvalidInput, StartupError

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("ROSE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("load", ["latency", "throughput", "concurrency", "decode"])
def test_a_model_that_is_no_shape_is_refused_before_another_is_made(load, cache, capsys):
    known = "tiny-qwen3" if load == "decode" else "tiny-bert"
    assert cli.main(["bench", load, "--model", known, "--model", "nope"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("rose: --model nope: no such shape; there are ")
    assert known in err
    assert err.count("\n") == 1
    assert not cache.exists()


def test_a_machine_without_the_command_gets_the_same_line():
    command = [sys.executable, "-m", "rose.bench.commands", "decode", "--model", "nope"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"rose: --model nope: no such shape; there are .*, or give NAME=FOLDER\n", done.stderr)


@pytest.mark.parametrize(
    ("load", "options"),
    [
        ("throughput", ["--model", "tiny-bert", "--profile"]),
        ("latency", ["--model", "tiny-bert", "--via", "engine"]),
        ("decode", ["--model", "tiny-qwen3", "--via", "engine"]),
        ("cpu", []),
    ],
)
def test_a_missing_reference_is_told_first_and_with_the_extra_that_has_it(load, options, cache, monkeypatch, capsys):
    lacking(monkeypatch, "transformers")
    assert cli.main(["bench", load, *options]) == 2
    assert capsys.readouterr().err == (
        "rose: this command needs the Python module transformers, which is not installed here; "
        "for measurements, install rose-serving[bench]\n"
    )
    assert not cache.exists()


def lacking(monkeypatch, module: str) -> None:
    monkeypatch.setattr(ending, "find_spec", lambda name: None if name == module else object())


def test_the_front_is_asked_for_where_one_is_started(monkeypatch, tmp_path):
    lacking(monkeypatch, "uvloop")

    def ask(*options: str) -> None:
        parser = argparse.ArgumentParser()
        decode.add_arguments(parser)
        arguments = parser.parse_args(["--model", f"a={tmp_path}", *options])
        next(targets.targets(arguments, "x", [], LLM_SHAPES))

    ask("--via", "engine")
    ask("--url", "http://127.0.0.1:1/v1")
    for options in (["--via", "engine", "link"], []):
        with pytest.raises(StartupError, match=r"uvloop.*rose-serving\[bench\]"):
            ask(*options)
    lacking(monkeypatch, "transformers")
    ask("--no-check")  # nothing is compared, and the folder is there


def test_every_module_is_in_the_extra_that_is_named():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {name: {re.split(r"[<>=\[]", entry)[0].lower() for entry in entries} for name, entries in extras.items()}
    assert any(entry.startswith("rose-serving[gateway]") for entry in extras["bench"])
    distributions = packages_distributions()
    for extra, (_, modules) in ending.EXTRAS.items():
        for module in modules:
            if module in distributions:  # pyarrow need not be installed
                assert {name.lower().replace("_", "-") for name in distributions[module]} & named[extra], (
                    extra,
                    module,
                )
            assert f"install rose-serving[{extra}]" in ending.missing(f"{module}.part")
    assert ending.missing("torch").endswith("which is not installed here")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return build_checkpoint("tiny-qwen3", tmp_path_factory.mktemp("lm") / "tiny-qwen3", shapes=LLM_SHAPES)


def test_prompts_over_the_models_limit_are_left_out_with_a_line(folder, capsys):
    size = ["--batch", "1", "--new-tokens", "8", "--rounds", "1", "--via", "engine", "--no-check"]
    options = ["--model", f"tiny-qwen3={folder}", "--prompt", "16", "505", "2048", *size]
    assert commands.run_load("decode", options, "x", prog="x", about="x") == 0
    out = capsys.readouterr().out
    assert "prompts of 505, 2048 tokens and 8 new ones are over the 512 that tiny-qwen3 takes: left out\n" in out
    assert out.count("tok/s") == 1
    options[options.index("16")] = "513"
    with pytest.raises(StartupError, match=r"of 513, 505, 2048 tokens .* there is nothing to time"):
        commands.run_load("decode", options, "x", prog="x", about="x")


def test_one_stream_that_fails_ends_the_others_and_only_its_error_is_told():
    told, ended = [], []

    async def refused() -> Stream:
        raise InvalidInput("too long")

    async def slow() -> Stream:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)
        raise AssertionError

    async def rounds() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        with pytest.raises(InvalidInput, match="too long"):
            await together([slow(), refused(), refused(), slow()])
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(rounds())
    assert (told, ended) == ([], [True, True])


def test_a_refusal_is_a_line_and_a_fault_has_its_place(capsys):
    for error, fault in (
        (InvalidInput("the prompt has 9"), False),
        (InternalError("lost"), True),
        (KeyError("k"), True),
    ):
        try:
            raise error
        except Exception as caught:
            failures.failed("m 1 x 9 via link", caught)
        out = capsys.readouterr().out
        assert out.startswith("m 1 x 9 via link failed, no row:")
        assert (out.count("\n") > 1) == ("test_bench_refusals.py" in out) == fault
        assert str(error) in out


def test_made_checkpoints_are_kept_in_the_users_own_cache(cache):
    parser = argparse.ArgumentParser()
    targets.add_common_arguments(parser)
    assert parser.parse_args([]).folders == made_folder() == cache / "shapes"


@pytest.mark.parametrize("error", [InternalError("no such kernel"), StartupError("it did not start"), OSError("disk")])
def test_a_model_that_fails_leaves_the_others_their_turn(error, tmp_path, capsys):
    made = [SimpleNamespace(name=name) for name in ("first", "second", "third")]
    run = []

    def one(target):
        run.append(target.name)
        if target.name == "second":
            raise error
        return 2 if target.name == "third" else 0

    assert failures.over_models(made, one, alone=False) == 3
    assert run == ["first", "second", "third"]
    assert f"second failed, no row:{' ' if isinstance(error, StartupError) else chr(10)}" in capsys.readouterr().out
    with pytest.raises(type(error)):
        failures.over_models(made[1:2], one, alone=True)


def test_wrong_answers_of_one_model_cost_that_model(tmp_path, monkeypatch, capsys):
    """On one device in turn: both are asked for, the first answers wrongly."""
    checked = []

    def check(driver, reference, load, vocab_size, least_cosine):
        checked.append(load.tokens)
        if len(checked) == 1:
            raise loads.DisagreementError("cosine 0.1")
        return 1.0

    monkeypatch.setattr(loads, "check", check)
    out = tmp_path / "rows.jsonl"
    models = ["--model", "tiny-bert", "--model", "tiny-qwen3-embedding"]
    options = [*models, "--via", "engine", "--tokens", "128", "512", "--n", "2", "--out", str(out)]
    parser = argparse.ArgumentParser()
    gpu_loads.add_arguments(parser)
    assert gpu_loads.main("latency", parser.parse_args(options), "x") == 1
    assert "tiny-bert failed, no row: cosine 0.1\n" in capsys.readouterr().out
    assert [(row.model, row.tokens) for row in records.read_rows(out)] == [
        ("tiny-qwen3-embedding", 128),
        ("tiny-qwen3-embedding", 512),
    ]

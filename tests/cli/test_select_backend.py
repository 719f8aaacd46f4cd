"""`rose select-backend` on the CPU: it measures, keeps, explains, reports; and what is asked wrongly is refused."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rose import cli
from rose.bench.llm_shapes import LLM_SHAPES
from rose.bench.shapes import SHAPES
from rose.cli.selecting import parse_batch
from rose.config import EngineConfig, read_model_folder
from rose.config.profile import Machine, read_profile, write_profile
from rose.config.profile_files import SHIPPED, find_profile
from rose.engine.profiles import attention_shape, this_machine
from rose.errors import StartupError
from rose.models.base import attention_spec
from rose.select.rows import read_rows
from rose.server.__main__ import build_parser as engine_parser
from rose.server.profile import profile_of_folder
from rose.server.run import fit_budgets
from tests.support.tiny_checkpoints import tiny_bert
from tests.support.tiny_language_models import tiny_lm


@pytest.fixture
def cache(monkeypatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("ROSE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_bert(tmp_path_factory.mktemp("select") / "tiny-model")


def test_a_model_on_the_cpu_is_measured_and_then_served_by_it(cache, model, capsys, tmp_path) -> None:
    report = tmp_path / "report"
    assert cli.main(["select-backend", str(model), "--seconds", "30", "--report", str(report)]) == 0
    (written,) = (cache / "profiles").glob("*.json")
    out = capsys.readouterr().out
    assert str(written) in out
    assert "threads: " in out
    profile = read_profile(written)
    (numbers,) = profile.models
    assert numbers.name == "tiny-model"
    assert numbers.num_threads is not None
    assert numbers.online_tokens is not None
    assert numbers.bulk_tokens is not None
    assert numbers.online_tokens <= numbers.bulk_tokens
    assert numbers.saturation
    assert {row[0] for row in numbers.threads} >= {"float32"}
    assert (report / "report.html").read_text().count("<svg") == 2

    folder, cpu = read_model_folder(model), torch.device("cpu")
    found = profile_of_folder(folder, cpu, torch.float32, "auto")
    assert found.numbers == numbers
    assert found.notes == ()
    limits = fit_budgets({}, folder, cpu, found.numbers)
    assert (limits.online_tokens, limits.bulk_tokens) == (numbers.online_tokens, numbers.bulk_tokens)
    asked = fit_budgets({"bulk_tokens": 4096, "online_tokens": 77}, folder, cpu, found.numbers)
    assert (asked.online_tokens, asked.bulk_tokens) == (77, 4096)
    assert profile_of_folder(folder, cpu, torch.float32, "none").numbers is None


def test_a_run_that_replaces_a_profile_tells_what_it_changes(cache, model, capsys) -> None:
    arguments = ["select-backend", str(model), "--seconds", "30"]
    assert cli.main(arguments) == 0
    assert "it replaces" not in capsys.readouterr().out
    (written,) = (cache / "profiles").glob("*.json")
    first = read_profile(written)
    (numbers,) = first.models
    write_profile(
        replace(first, date="2026-01-01", models=(replace(numbers, online_tokens=7, bulk_tokens=9),)), written
    )
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    (now,) = read_profile(written).models
    assert "  it replaces that of 2026-01-01:\n" in out
    assert f"    tokens of a batch, online: 7 -> {now.online_tokens}\n" in out
    assert f"    tokens of a batch, bulk: 9 -> {now.bulk_tokens}\n" in out
    written.write_text("{")
    assert cli.main(arguments) == 0
    assert "  it replaces a file that is no profile: " in capsys.readouterr().out


def test_explaining_tells_what_serving_takes_from_the_profile(cache, model, capsys, tmp_path) -> None:
    assert cli.main(["select-backend", str(model), "--seconds", "30"]) == 0
    (written,) = (cache / "profiles").glob("*.json")
    mine = read_profile(written)
    (numbers,) = mine.models
    other = tmp_path / "other.json"
    write_profile(replace(mine, machine=Machine(device="another one, 64 logical CPUs")), other)
    capsys.readouterr()
    for options in ([], ["--profile", str(written)], ["--profile", str(other)]):
        assert cli.main(["select-backend", str(model), "--explain", "4x64", *options]) == 0
        out = capsys.readouterr().out
        assert f"profile: {other if str(other) in options else written}" in out
        assert "holds nothing" not in out
        assert f"\n  tokens of a batch, bulk: {numbers.bulk_tokens}\n" in out
        # What serves a float32 batch on any CPU; the others are left out with their reason.
        assert "\n  torch_sdpa: " in out
        assert "otherwise triton_short: not measured; left out: " in out
    bare = ["select-backend", "--shape", "16x64", "--explain", "4x64", "--profile", str(written)]
    assert cli.main(bare) == 0
    assert "it holds nothing of this shape" in capsys.readouterr().out


def test_heads_alone_with_a_second_run(cache, capsys, tmp_path) -> None:
    rows, kept = tmp_path / "select.jsonl", tmp_path / "heads.json"
    shape = ["--shape", "2/1x16:causal", "--seconds", "30", "--batch-tokens", "512"]
    assert cli.main(["select-backend", *shape, "--check", "--rows", str(rows), "-o", str(kept)]) == 0
    out = capsys.readouterr()
    assert "100%) are served within 3% of the best" in out.out
    assert "triton_short is not measured: needs a CUDA device, this is cpu" in out.err
    grids = read_profile(kept).grids
    assert [grid.shape.layout for grid in grids] == ["ragged", "paged"]
    assert all(set(point.us) == {"torch_sdpa"} for point in grids[0].points)
    found = read_rows(rows)
    assert {row.run for row in found} == {"first", "check"}
    assert {row.chosen for row in found} == {"torch_sdpa", "torch_paged"}
    assert all(row.command.startswith("rose select-backend --shape 2/1x16:causal --check") for row in found)


def test_explaining_a_shipped_profile_measures_nothing(cache, capsys) -> None:
    path = SHIPPED / "nvidia_h200_bge-m3.json"
    shipped = str(path)
    (us,) = (p.us for p in read_profile(path).grids[0].points if (p.sequences, p.tokens, p.max_length) == (1, 512, 512))
    arguments = ["select-backend", "--shape", "16x64", "--dtype", "bfloat16", "--profile", shipped]
    assert cli.main([*arguments, "--explain", "1x512"]) == 0
    out = capsys.readouterr().out
    assert "of NVIDIA H200" in out
    assert f"  flash_attention4: measured at 1 x 512: {us['flash_attention4']:.0f} µs" in out
    assert f"otherwise flashinfer2: {us['flashinfer2']:.0f} µs" in out
    assert cli.main([*arguments, "--explain", "37+128+1+300+64"]) == 0
    assert "5 sequences, 530 tokens, longest up to 512" in capsys.readouterr().out
    assert not cache.exists()


def test_explaining_a_model_that_generates_tells_of_steps_over_pages(cache, tmp_path, capsys) -> None:
    folder = tiny_lm(tmp_path / "lm", "qwen3")
    assert cli.main(["select-backend", str(folder), "--explain", "8x1000"]) == 0
    told = capsys.readouterr().out
    assert "causal, paged" in told
    assert "a step of generating: 8 sequences, 8000 tokens in the cache" in told
    assert "  torch_paged: first in the order of preference" in told
    assert "otherwise triton_paged: not measured; left out: needs a CUDA device" in told
    assert "torch_sdpa" not in told, "which serves whole sequences only"
    assert cli.main(["select-backend", str(folder), "--task", "embed", "--pooling", "mean", "--explain", "8x100"]) == 0
    told = capsys.readouterr().out
    assert "  torch_sdpa: next in the fall-back order" in told
    assert "paged" not in told
    assert cli.main(["select-backend", "--shape", "4/2x64:causal", "--explain", "8x1000"]) == 0
    told = capsys.readouterr().out
    assert "torch_sdpa" in told
    assert "torch_paged" in told


def test_explaining_what_serves_here(cache, model, capsys) -> None:
    assert cli.main(["select-backend", str(model), "--explain", "4x64"]) == 0
    out = capsys.readouterr().out
    assert "profile: none" in out
    assert "  torch_sdpa: " in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--shape", "bge"], "--shape 'bge': expected heads, such as 16/8x128"),
        (["--shape", "16/3x64"], "16 query heads cannot share 3 key/value heads"),
        (["--shape", "16x64", "--device", "cuda:7"], "torch sees no CUDA device"),
        (["--shape", "16x64", "--explain", "sixteen"], "--explain: 'sixteen' is no batch"),
        (["--shape", "16x64", "--seconds", "0"], "--seconds must be a number above 0"),
        (["--shape", "16x64", "--batch-tokens", "9"], "--batch-tokens must be at least 512"),
        (["--shape", "16x64", "--explain", "1x5", "--profile", "/nowhere.json"], "/nowhere.json is missing"),
    ],
)
def test_what_is_asked_wrongly_is_refused_in_a_line(arguments, said, capsys) -> None:
    assert cli.main(["select-backend", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("rose: ")
    assert said in err
    assert err.count("\n") == 1


def test_batches_as_they_are_written() -> None:
    assert parse_batch("3x128") == [128] * 3
    assert parse_batch("37+2x64+1") == [37, 64, 64, 1]
    for bad in ("", "x", "0x4", "4x0", "-1", "3x", "9999999x1", "1+", "1.5"):
        with pytest.raises(StartupError):
            parse_batch(bad)


def test_the_server_takes_its_profile_from_the_command_line(tmp_path) -> None:
    parse = engine_parser().parse_args
    assert parse(["m", "--profile", "p.json"]).profile == "p.json"
    assert parse(["m", "--no-profile"]).profile == "none"
    assert "profile" not in vars(parse(["m"]))
    with pytest.raises(SystemExit):
        parse(["m", "--profile", "p", "--no-profile"])
    assert EngineConfig().profile == "auto"


def test_serving_hands_it_on(monkeypatch, tmp_path, capsys) -> None:
    commands = []
    monkeypatch.setattr(
        "rose.gateway.supervise.serve",
        lambda folder, config, engines, **_: commands.extend(list(engine("unix:/s")) for engine in engines) or 0,
    )
    assert cli.main(["serve", str(tmp_path), "--profile", "p.json"]) == 0
    assert cli.main(["serve", str(tmp_path), "--no-profile"]) == 0
    assert commands[0][commands[0].index("--profile") + 1] == "p.json"
    assert "--no-profile" in commands[1]
    assert "--profile" not in commands[1]
    assert cli.main(["serve", str(tmp_path), "--profile", "p", "--no-profile"]) == 2
    assert "--profile and --no-profile exclude each other" in capsys.readouterr().err


def test_a_profile_of_another_machine_is_told_of_at_start(cache, model, tmp_path, caplog) -> None:
    folder, cpu = read_model_folder(model), torch.device("cpu")
    shape = attention_shape(attention_spec(folder, cpu, torch.float32))
    asked = str(SHIPPED / "nvidia_h200.json")
    assert "it is not used" in find_profile(asked, this_machine(cpu), shape).notes[0]
    profile_of_folder(folder, cpu, torch.float32, asked)
    assert "nvidia_h200.json was measured on NVIDIA H200" in caplog.text


@pytest.mark.parametrize("quick", [False, True])
def test_the_gpu_check_gives_options_that_there_are(quick: bool) -> None:
    path = Path(__file__).parents[2] / "scripts" / "gpu_check.py"
    spec = importlib.util.spec_from_file_location("gpu_check", path)
    assert spec is not None
    assert spec.loader is not None
    gpu_check = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gpu_check)
    steps = list(gpu_check.steps("select", Path("out"), quick))
    assert [name for name, _ in steps] == [f"select/{model}" for model in gpu_check.SELECTED]
    for _, command in steps:
        assert command[1:3] == ["-m", "rose.cli"]
        options = cli.build_parser().parse_args(command[3:])
        assert options.shape in {*SHAPES, *LLM_SHAPES}
        assert options.check
        assert options.rows == Path("out/select.jsonl")


def test_the_shipped_file_is_plain_json() -> None:
    for path in SHIPPED.glob("*.json"):
        assert json.loads(path.read_text())["version"] == 1

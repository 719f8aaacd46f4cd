"""Throughput and concurrency: floors, kernels, pictures, the GPU check, and the commands themselves on tiny models."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from rose.attention_backends import auto
from rose.bench import breakdown, carriers, commands, concurrency, plots_batch, records, throughput
from rose.bench.floors import decode_floor_ms, floor_ms
from rose.bench.llm_shapes import LLM_SHAPES
from rose.bench.loads import Load
from rose.bench.meter import RUNS
from rose.bench.plots import main as plots_main
from rose.bench.plots_batch import draw_batches
from rose.bench.records import Facts
from rose.bench.shapes import SHAPES, build_checkpoint
from rose.bench.steady import FIRSTS
from rose.bench.targets import Target
from rose.config import read_model_folder
from rose.config.profile import AttentionGrid, ModelNumbers, Point, Profile, write_profile
from rose.engine.profiles import attention_shape, model_shape, this_machine
from rose.models.base import attention_spec


@pytest.mark.parametrize(
    ("model", "tokens", "per_s"),
    [  # by hand from bytes and products, with the chip's measured ceilings
        ("bge-m3", 512, 2340),
        ("bge-m3", 1024, 1086),
        ("bge-m3", 4096, 190),
        ("pplx-embed-0.6b", 512, 1534),
        ("pplx-embed-0.6b", 1024, 686),
        ("pplx-embed-0.6b", 4096, 105),
    ],
)
def test_floors_of_batches(model, tokens, per_s):
    assert 1e5 / floor_ms(SHAPES[model].config, tokens, 100) == pytest.approx(per_s, rel=0.005)


@pytest.mark.parametrize(("model", "ms"), [("qwen3-0.6b", 0.28), ("qwen3-8b", 3.60), ("qwen3.5-4b", 2.0)])
def test_floors_of_decoding(model, ms):
    assert decode_floor_ms(LLM_SHAPES[model].config, 1, 1) == pytest.approx(ms, rel=0.02)


def test_a_cache_costs_its_bytes():
    config = LLM_SHAPES["qwen3-0.6b"].config
    more = decode_floor_ms(config, 64, 2048) - decode_floor_ms(config, 64, 0)
    assert more == pytest.approx(64 * 2048 * 28 * 2 * 8 * 128 * 2 / 4.21e12 * 1e3, rel=1e-6)


def test_kernels_are_named_shortly_and_added_up():
    gemm = "void cutlass::device_kernel<at::cuda::Gemm<float, 3> >(Params<int>)"
    times = breakdown.kernel_times([(gemm, 2, 300.0), ("flash_fwd_kernel<x>", 1, 600.0), (gemm, 1, 100.0)])
    assert [(one.name, one.calls, one.ms, one.share) for one in times] == [
        ("flash_fwd_kernel", 1, 0.6, 0.6),
        ("cutlass::device_kernel", 3, 0.4, 0.4),
    ]
    assert breakdown.shares_by_kind(times) == {"attention": 0.6, "product": 0.4}
    assert breakdown.kind_of("_add_layer_norm_kernel") == "norm"
    assert breakdown.kind_of("something_else") == "other"
    steps = {"_paged_decode": "attention", "_merge": "attention", "_gated_delta_step": "recurrence"}
    steps |= {"_causal_conv_step": "recurrence", "_greedy_blocks": "sampling", "_take_latest": "sampling"}
    steps |= {"_gated_norm": "norm", "_gemm_gated": "product", "_store_kv": "store"}
    steps |= {"_qk_norm_rope_store": "store", "_sigmoid_gate": "activation", "gemvx::kernel": "product"}
    steps |= {"VariableLengthMergeStatesKernel": "attention", "_quantize_static": "quantisation"}
    assert {name: breakdown.kind_of(name) for name in steps} == steps
    groups = breakdown.grouped(breakdown.kernel_times([("x_gemm", 1, 5.0), ("rope", 1, 2.0), ("memcpy", 1, 1.0)]))
    assert list(groups) == [*breakdown.GROUPS.values(), "other"]
    assert {name: [one.name for one in group] for name, group in groups.items() if group} == {
        "products": ["x_gemm"],
        "other": ["rope", "memcpy"],
    }


def test_gaps_are_the_idle_time_between_neighbours():
    a, b = "a_kernel<4>(int)", "b_kernel"
    found = breakdown.gaps(
        [(b, 16_000, 18_000), (a, 0, 10_000), (a, 21_000, 30_000), (b, 29_000, 40_000), (a, 42_000, 43_000)]
    )
    assert found == [breakdown.Gap("a_kernel", "b_kernel", 1, 0.006), breakdown.Gap("b_kernel", "a_kernel", 2, 0.005)]
    within = breakdown.gaps([(a, 0, 100), (b, 10, 20), (a, 150, 160)])
    assert within == [breakdown.Gap("a_kernel", "a_kernel", 1, 0.0001)], "idle is the time in which nothing runs"
    assert breakdown.gaps([]) == []


@pytest.fixture
def told_counters(monkeypatch):
    """Names of the counters that any engine told, as the driver gives them."""
    names: list[set[str]] = []
    ask = carriers.LinkDriver.engine_counters

    def noted(self):
        found = ask(self)
        names.append(set(found))
        return found

    monkeypatch.setattr(carriers.LinkDriver, "engine_counters", noted)
    return names


def run(load, *options):
    return commands.run_load(load, list(options), f"x {load}", prog="x", about="x")


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("loads")


def test_throughput_from_folder_to_row_and_profile(scratch, capfd):
    out = scratch / "rows.jsonl"
    size = ["--tokens", "48", "--batch", "6", "--clients", "2", "--seconds", "0.5", "--warm", "0.2"]
    ways = ["--via", "link", "http", "--folders", str(scratch / "made"), "--out", str(out), "--profile"]
    assert run("throughput", "--model", "tiny-bge-m3", *size, *ways) == 0
    rows = {row.via: row for row in records.read_rows(out)}
    assert set(rows) == {"link", "http"}
    for row in rows.values():
        assert (row.load, row.tokens, row.batch, row.in_flight) == ("throughput-48", 48, 6, 2)
        assert row.cosine is not None
        assert row.cosine > 0.99999
        assert row.n >= 1
        assert row.tokens_per_s == pytest.approx(row.per_s * 48, rel=0.01)
        # Of each client, at most a request more or less reaches over an edge of the window.
        assert row.per_s * 0.5 / 6 == pytest.approx(row.n, abs=3)
        assert row.busy_share is not None
        assert 0.05 < row.busy_share <= 1.1
        assert row.floor_share is None, "the floors are a GPU's"
    told = json.loads((scratch / "kernels_tiny-bge-m3_6x48.json").read_text())
    assert told["share_by_kind"]["product"] > 0.05
    assert 0 < told["kernels_ms"] <= told["profiled_ms"] * 2
    told = capfd.readouterr().out
    assert told.index("products") < told.index("throughput-48"), "a run that is cut short has its profile"


def test_a_profile_that_fails_costs_no_row(scratch, monkeypatch, capsys):
    def fail(*_):
        raise RuntimeError("no profiler here")

    monkeypatch.setattr(breakdown, "profile_model", fail)
    monkeypatch.setattr(throughput, "_run_model", lambda *_: print("the loads") or 0)
    where = ["--model", "tiny-bge-m3", "--folders", str(scratch / "made")]
    assert run("throughput", *where, "--profile") == 1
    assert capsys.readouterr().out.rstrip().endswith("the loads")
    assert run("throughput", *where) == 0


def test_a_row_names_the_backend_that_the_servers_profile_chooses(scratch, monkeypatch, tmp_path):
    """The server looks its profile up; a row told the backend of the table, and of batches of the default size."""

    class Named:
        def __init__(self, name, spec) -> None:
            self.name = name

    monkeypatch.setattr(auto, "try_backend", Named)
    monkeypatch.setenv("ROSE_CACHE", str(tmp_path))
    folder = build_checkpoint("tiny-bge-m3", scratch / "made" / "tiny-bge-m3")
    read = read_model_folder(folder)
    cpu = torch.device("cpu")
    facts = Facts(run_id="r", commit="c", date="d", command="x", machine="m", model="tiny-bge-m3", dtype="float32")
    target = Target("tiny-bge-m3", folder, cpu, torch.float32, facts, None, folder)
    load = Load("throughput-512", 512, 100, 4)
    assert throughput.backend_name(target, read, load, "auto") == "flash_attention4"
    shape = attention_shape(attention_spec(read, cpu, torch.float32))
    numbers = ModelNumbers(shape=model_shape(read.architecture, shape), name="tiny", bulk_tokens=32768)
    points = tuple(
        Point(tokens=n * 512, sequences=n, max_length=512, us={best: 1.0, "flash_attention4": 2.0})
        for n, best in ((1, "flashinfer3"), (64, "flashinfer2"))
    )
    made = Profile(
        machine=this_machine(cpu),
        source="a test",
        grids=(AttentionGrid(shape=shape, points=points),),
        models=(numbers,),
    )
    write_profile(made, tmp_path / "profiles" / "cpu.json")
    assert throughput.backend_name(target, read, load, "auto") == "flashinfer2", "64 sequences fill a batch"
    assert throughput.backend_name(target, read, Load("concurrency-1", 512, 1, 4), "auto") == "flashinfer3"
    assert throughput.backend_name(target, read, load, "torch_sdpa") == "torch_sdpa"


@pytest.mark.parametrize("fronts", [1, 4])
def test_concurrency_from_text_to_row(scratch, capfd, told_counters, fronts):
    out = scratch / f"texts_{fronts}.jsonl"
    size = ["--tokens", "64", "--in-flight", "1", "5", "--seconds", "0.5", "--warm", "0.2"]
    size += ["--fronts", str(fronts), "--spin-seconds", "0.001"]
    where = ["--folders", str(scratch / "made"), "--out", str(out), "--verbose", "--profile"]
    assert run("concurrency", "--model", "tiny-pplx-embed", *size, *where) == 0
    assert told_counters
    assert all({*FIRSTS, *RUNS, "device_us"} <= names for names in told_counters), "or first runs would be none unseen"
    rows = records.read_rows(out)
    assert [(row.load, row.in_flight, row.batch) for row in rows] == [("concurrency-1", 1, 1), ("concurrency-5", 5, 1)]
    assert {row.fronts or 1 for row in rows} == {fronts}
    profile = json.loads((scratch / "kernels_tiny-pplx-embed_5x64.json").read_text())
    assert (profile["load"], profile["batch"], profile["tokens"]) == ("concurrency-5", 5, 64)
    assert profile["share_by_kind"]["product"] > 0.05
    for row in rows:
        assert row.via == "http"
        assert row.n >= 1
        assert row.cosine is not None
        assert row.cosine > 0.99999
        assert row.p50_ms <= row.p90_ms <= row.p99_ms <= row.max_ms
        assert row.settled_s is not None
        assert row.settled_s >= 0.2
        assert row.first_runs == 0, "whatever comes together has run before"
    told = capfd.readouterr().out
    for what in ("folder of", "texts", "reference", "server ready", "every shape", "check", "5 clients"):
        assert re.search(rf"^ +\d+\.\d\d s  {what}", told, re.M), what


def test_concurrency_is_of_a_server_that_is_warm_and_throughput_asks_for_it():
    for load, expected in ((concurrency, True), (throughput, False)):
        parser = argparse.ArgumentParser()
        load.add_arguments(parser)
        assert parser.parse_args([]).warm_up is expected
        assert parser.parse_args(["--no-warm-up"]).warm_up is False
        assert parser.parse_args(["--warm-up"]).warm_up is True


def test_rows_leave_out_what_they_do_not_have(tmp_path):
    facts = {"run_id": "r", "commit": "c", "date": "d", "command": "x", "machine": "m, n", "dtype": "bfloat16"}
    size = {"tokens": 128, "batch": 1, "in_flight": 8, "via": "engine", "backend": "b", "graph_hit_share": 1.0}
    times = {"p50_ms": 1.0, "p90_ms": 1.0, "p99_ms": 1.0, "max_ms": 1.0, "per_s": 1.0, "n": 1}
    row = records.Row(**facts, **size, **times, load="decode", model="qwen3-0.6b", new_tokens=128, step_ms=1.5)
    other = records.Row(**facts, **size, **times, load="decode", model="qwen3-0.6b", new_tokens=32, step_ms=1.4)
    records.write_rows(tmp_path / "r", [row, other])
    assert sorted(records.read_rows(tmp_path / "r"), key=lambda one: -(one.new_tokens or 0)) == [row, other]
    assert "cosine" not in json.loads((tmp_path / "r").read_text().splitlines()[0])


@pytest.mark.parametrize("counts", [(None,), (None, 2, 4)])
def test_every_number_of_fronts_is_drawn_and_the_most_in_full(counts):
    facts = {"run_id": "r", "commit": "c", "date": "d", "command": "x", "machine": "m, n", "dtype": "bfloat16"}
    times = {"p50_ms": 1.0, "p90_ms": 2.0, "p99_ms": 3.0, "max_ms": 4.0, "n": 9, "per_s": 9.0}
    own = {"model": "bge-m3", "tokens": 512, "batch": 1, "via": "http", "backend": "b", "graph_hit_share": 1.0}
    rows = [
        records.Row(**facts, **times, **own, load=f"concurrency-{n}", in_flight=n, fronts=fronts)
        for fronts in counts
        for n in (1, 16)
    ]
    axes = Figure().subplots()
    plots_batch._concurrency(axes, rows, "bge-m3")
    drawn = {line.get_label(): to_rgba(line.get_color())[3] for line in axes.get_lines()[:-1]}
    assert len(drawn) == 3 * len(counts)
    last = "p50" if counts[-1] is None else f"p50, {counts[-1]} fronts"
    assert drawn[last] == 1.0
    assert [drawn[label] for label in drawn if label.startswith("p50")] == sorted(
        {n / len(counts) for n in range(1, len(counts) + 1)}
    )


def test_pictures_of_every_load(tmp_path, monkeypatch):
    facts = {"run_id": "r", "commit": "c", "date": "d", "command": "x", "machine": "m, n", "dtype": "bfloat16"}
    times = {"p50_ms": 1.0, "p90_ms": 2.0, "p99_ms": 3.0, "max_ms": 4.0, "n": 9}
    base = {**facts, **times, "backend": "b", "graph_hit_share": 1.0}
    bge = {**base, "model": "bge-m3"}
    rows = [
        records.Row(**bge, load=f"throughput-{n}", tokens=n, batch=100, in_flight=4, via=via, per_s=rate)
        for n, rate in ((512, 1700.0), (4096, 140.0))
        for via in ("link", "http")
    ]
    rows += [
        records.Row(**bge, load=f"concurrency-{n}", tokens=512, batch=1, in_flight=n, via="http", per_s=9.0)
        for n in (1, 16)
    ]
    decoding = {**base, "load": "decode", "model": "qwen3-8b", "tokens": 128, "new_tokens": 128, "step_ms": 4.0}
    rows += [records.Row(**decoding, batch=1, in_flight=n, via="link", per_s=9.0) for n in (1, 64)]
    written = draw_batches(rows, tmp_path)
    assert [path.name for path in written] == ["throughput_bge-m3.svg", "concurrency_bge-m3.svg", "decode_qwen3-8b.svg"]
    assert all(path.stat().st_size > 10_000 for path in written)
    records.write_rows(tmp_path / "rows", rows)
    monkeypatch.setattr("sys.argv", ["plots", str(tmp_path / "rows"), "--out", str(tmp_path / "again")])
    assert plots_main() == 0
    assert len(list((tmp_path / "again").iterdir())) == 3


@pytest.mark.parametrize("part", ["throughput", "concurrency", "decode"])
@pytest.mark.parametrize("quick", [False, True])
def test_the_gpu_check_gives_options_that_there_are(part, quick):
    path = Path(__file__).parents[2] / "scripts" / "gpu_check.py"
    spec = importlib.util.spec_from_file_location("gpu_check", path)
    assert spec is not None
    assert spec.loader is not None
    gpu_check = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gpu_check)
    module = importlib.import_module(f"rose.bench.{part}")
    steps = list(gpu_check.steps(part, Path("out"), quick))
    assert len(steps) >= 2
    for _, command in steps:
        assert command[1:4] == ["-m", "rose.bench.commands", part]
        parser = argparse.ArgumentParser(exit_on_error=False)
        module.add_arguments(parser)
        options = parser.parse_args(command[4:])
        assert options.out == Path("out/loads.jsonl")
        assert set(options.model) <= {*SHAPES, *LLM_SHAPES}


@pytest.mark.parametrize(("part", "commands", "models"), [("loads", 4, 2), ("models", 1, 4), ("fp8", 2, 2)])
def test_the_gpu_checks_other_parts_too(part, commands, models):
    from rose.bench import gpu_loads, throughput

    spec = importlib.util.spec_from_file_location("gpu_check", Path(__file__).parents[2] / "scripts" / "gpu_check.py")
    assert spec is not None
    assert spec.loader is not None
    gpu_check = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gpu_check)
    parsed = 0
    found = set()
    for _, command in gpu_check.steps(part, Path("out"), False):
        module = {"rose.bench.gpu_loads": gpu_loads, "rose.bench.commands": throughput}.get(command[2])
        if module is None:
            continue
        parser = argparse.ArgumentParser(exit_on_error=False)
        module.add_arguments(parser)
        found |= set(parser.parse_args(command[4:]).model)
        parsed += 1
    assert found <= set(SHAPES)
    assert (parsed, len(found)) == (commands, models)


def test_the_gpu_checks_tests_are_kept_as_they_end(tmp_path):
    path = Path(__file__).parents[2] / "scripts" / "gpu_check.py"
    spec = importlib.util.spec_from_file_location("gpu_check", path)
    assert spec is not None
    assert spec.loader is not None
    gpu_check = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gpu_check)
    released = tmp_path / "released"
    waits = f"import pathlib, time\nwhile not pathlib.Path({str(released)!r}).exists(): time.sleep(0.01)"
    commands = [("last", [sys.executable, "-c", waits]), ("first", [sys.executable, "-c", "print('hello')"])]
    commands += [("fails", [sys.executable, "-c", "raise SystemExit(3)"])]
    kept = []

    def ended(step):
        kept.append((step["step"], step["status"]))
        if len(kept) == 2:
            released.touch()  # the last one waits for what was kept of the others

    gpu_check.run_side_by_side(commands, 60.0, tmp_path / "log", ended)
    assert sorted(kept[:2]) == [("fails", 3), ("first", 0)]
    assert kept[2:] == [("last", 0)]
    assert "hello" in (tmp_path / "log").read_text()


def test_requests_of_clients_are_not_each_others():
    from rose.bench.loads import Load
    from rose.bench.throughput import packed_requests
    from rose.proto import rose_pb2 as pb

    load = Load("throughput-16", 16, 3, 4)
    made = [packed_requests("link", "m", load, 1000, client) for client in range(3)]
    assert len({blob for own in made for blob in own}) == 12
    again = pb.EmbedRequest.FromString(made[1][2])
    assert list(again.tokens.lengths) == [16, 16, 16]
    body = json.loads(packed_requests("http", "m", load, 1000, 1)[2])
    assert np.frombuffer(again.tokens.ids, "<i4").tolist() == [i for ids in body["input"] for i in ids]

"""The published loads as a bench: floors, rows, the check before the clock, pictures; on tiny shapes, without a GPU."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from rose.bench import gpu_loads, loads, plots, plots_batch, quantised_shapes, records
from rose.bench.drivers import EngineDriver
from rose.bench.llm_shapes import LLM_SHAPES
from rose.bench.processes import served
from rose.bench.reference import Reference, cosines
from rose.bench.shapes import SHAPES, build_checkpoint
from rose.config import EngineConfig, read_model_folder
from rose.convert import load_model
from rose.engine import build_engine

FACTS = records.Facts(
    run_id="r", commit="c", date="2026-01-01", command="x", machine="m, n", model="tiny-bge-m3", dtype="float32"
)


@pytest.mark.parametrize(
    ("model", "tokens", "sequences", "milliseconds"),
    [
        # h200: 24 x 1024 with 4096 inside, and 28 x 1024 with 16/8 heads of 128, worked out by hand.
        ("bge-m3", 128, 1, 0.143),
        ("bge-m3", 4096, 1, 5.26),
        ("bge-m3", 512, 50, 21.4),
        ("pplx-embed-0.6b", 128, 1, 0.209),
        ("pplx-embed-0.6b", 4096, 1, 9.51),
    ],
)
def test_floors(model: str, tokens: int, sequences: int, milliseconds: float) -> None:
    assert plots.floor_ms(SHAPES[model].config, tokens, sequences) == pytest.approx(milliseconds, rel=0.01)


def test_percentiles_are_nearest_rank() -> None:
    taken = [i * 1e-3 for i in range(1, 101)]
    assert records.percentiles(taken) == records.Percentiles(50.0, 90.0, 99.0, 100.0)


def row(**values: object) -> records.Row:
    base = {
        **dataclasses.asdict(FACTS),
        "load": "latency",
        "tokens": 128,
        "batch": 1,
        "in_flight": 1,
        "via": "engine",
        "backend": "torch_sdpa",
        "graph_hit_share": 1.0,
        "p50_ms": 1.0,
        "p90_ms": 1.0,
        "p99_ms": 1.0,
        "max_ms": 1.0,
        "per_s": 1.0,
        "n": 100,
        "cosine": 1.0,
    }
    return records.Row(**{**base, **values})  # type: ignore[arg-type]


def test_a_new_run_replaces_its_own_loads_only_even_if_it_is_slower(tmp_path: Path) -> None:
    path = tmp_path / "loads.jsonl"
    records.write_rows(path, [row(p50_ms=1.0), row(via="link", p50_ms=2.0)])
    records.write_rows(path, [row(p50_ms=9.0)])
    assert {(r.via, r.p50_ms) for r in records.read_rows(path)} == {("engine", 9.0), ("link", 2.0)}


H200_ROWS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200" / "loads.jsonl"


def test_the_committed_rows_are_one_a_load_and_as_they_are_written(tmp_path: Path) -> None:
    """Rows of two machines put together by hand could hold an old run of a load beside the new one."""
    rows = records.read_rows(H200_ROWS)
    assert len({row.key for row in rows}) == len(rows)
    records.write_rows(tmp_path / "again.jsonl", rows)
    assert (tmp_path / "again.jsonl").read_text() == H200_ROWS.read_text()
    for row in rows:
        assert row.model in {**SHAPES, **LLM_SHAPES}
        assert all((row.run_id, row.commit, row.date, row.command, row.machine, row.backend))
        assert 0 < row.p50_ms <= row.p90_ms <= row.p99_ms <= row.max_ms
        least = quantised_shapes.LEAST_COSINE if row.dtype in quantised_shapes.SCHEME_OF else loads.LEAST_COSINE
        assert row.load == "decode" or row.cosine > least


@pytest.fixture(scope="module", params=["tiny-bge-m3", "tiny-pplx-embed", "tiny-qwen3-embedding", "tiny-bert"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(request.param, tmp_path_factory.mktemp("shapes") / request.param)


@pytest.fixture
def driver(folder: Path):
    read = read_model_folder(folder)
    engine = build_engine(load_model(read, "cpu"), EngineConfig(max_tokens=512, bulk_tokens=1024, online_tokens=1024))
    made = EngineDriver(engine)
    yield made
    made.close()


def test_a_load_is_checked_timed_and_recorded(folder: Path, driver: EngineDriver) -> None:
    reference = Reference(folder, torch.device("cpu"))
    load = loads.Load("scoring", 96, 12, 3)  # more than one batch
    found = loads.run(driver, load, reference, vocab_size=1000, facts=FACTS, backend="torch_sdpa", seconds_at_most=60)
    assert found.cosine > 0.99999
    assert found.n == 3
    assert 0 < found.p50_ms <= found.p99_ms <= found.max_ms


def test_no_ids_are_sent_twice() -> None:
    """Neither in the warm-up nor while the clock runs: nothing could answer out of what it remembers."""

    class Remembering:
        via = "engine"

        def __init__(self) -> None:
            self.sent: list[bytes] = []

        def prepare(self, sequences):
            return b"".join(ids.tobytes() for ids in sequences)

        def send(self, prepared):
            self.sent.append(prepared)

        def counters(self):
            return 0, len(self.sent)

    driver = Remembering()
    taken, _, _ = loads.measure(driver, loads.Load("latency", 128, 1, 3_000), 250_002, 60.0)
    assert len(taken) == 3_000
    assert len(driver.sent) == len(set(driver.sent)) == 3_000 + loads.WARM_UP


def test_a_disagreement_stops_before_the_clock(folder: Path, driver: EngineDriver) -> None:
    class Other(Reference):
        def embed(self, sequences):
            return super().embed([(s * 7) % 900 + 5 for s in sequences])

    with pytest.raises(loads.DisagreementError, match="cosine"):
        loads.check(driver, Other(folder, torch.device("cpu")), loads.Load("latency", 64, 1, 1), 1000)


def test_requests_differ_and_repeat() -> None:
    load = loads.Load("latency", 64, 2, 4)
    first, again = (loads.requests(load, 1000, 4) for _ in range(2))
    np.testing.assert_array_equal(np.array(first), np.array(again))
    assert len({s.tobytes() for block in first for s in block}) == 8
    assert min(int(s.min()) for block in first for s in block) >= 5


def test_cosines_by_row() -> None:
    a = np.array([[1, 0], [1, 1]], np.float32)
    np.testing.assert_allclose(cosines(a, np.array([[0, 2], [3, 3]], np.float32)), [0, 1], atol=1e-12)


def test_pictures(tmp_path: Path) -> None:
    rows = [row(model="bge-m3", tokens=n, via=v, p50_ms=n / 100, p99_ms=n / 90) for n in (128, 512) for v in plots.WAYS]
    (path,) = plots.draw([*rows, row(model="bge-m3", load="scoring", batch=5, tokens=512)], tmp_path)
    assert path.name == "latency_bge-m3.svg"
    assert path.read_text().lstrip().startswith("<?xml")
    assert path.stat().st_size > 10_000  # lines, markers and legend were drawn


def test_pictures_show_the_backend_that_serves_and_no_row_of_eight_bits() -> None:
    rows = [
        row(model="bge-m3", n=40, backend="flash_attention4"),
        row(model="bge-m3", n=9_000, backend="flashinfer2", command="bench --backend flashinfer2"),
        row(model="bge-m3", n=9_000, dtype="fp8"),
    ]
    (found,) = plots.chosen(plots_batch.in_full(rows), "bge-m3", "latency")
    assert (found.backend, found.n, found.dtype) == ("flash_attention4", 40, "float32")
    assert [r.n for r in plots_batch.in_full(rows)] == [40, 9_000]


def run_all(tmp_path: Path) -> int:
    parser = argparse.ArgumentParser()
    gpu_loads.add_arguments(parser)
    model = ["--model", "tiny-bert", "--via", "engine", "--tokens", "128", "--n", "2", "--folders", str(tmp_path)]
    arguments = parser.parse_args([*model, "--out", str(tmp_path / "rows.jsonl")])
    return gpu_loads.main("latency", arguments, f"x --out {arguments.out}")


def test_scoring_is_timed_over_the_ways_asked_for_and_of_other_servers(tmp_path, capsys):
    """Ways beyond the usual two, and servers given by --url, were passed over without a word."""
    parser = argparse.ArgumentParser()
    gpu_loads.add_arguments(parser)
    size = ["--model", "tiny-bge-m3", "--batch", "5", "--n", "2", "--folders", str(tmp_path)]

    def vias(*options: str) -> list[str]:
        out = tmp_path / f"{len(options)}.jsonl"
        assert gpu_loads.main("scoring", parser.parse_args([*size, "--out", str(out), *options]), "x") == 0
        rows = records.read_rows(out)
        assert {(row.load, row.tokens, row.batch, row.n) for row in rows} == {("scoring", 512, 5, 2)}
        assert min(row.cosine or 0 for row in rows) > 0.99999
        return sorted(row.via for row in rows)

    assert vias("--via", "grpc", "http") == ["grpc", "http"]
    with served(tmp_path / "tiny-bge-m3", "tiny-bge-m3", ["--no-warm-up"], []) as where:
        assert vias("--url", where.http) == ["http"]
    arguments = parser.parse_args(size)
    assert [gpu_loads._ways(load, arguments) for load in (loads.LATENCY[0], loads.SCORING[0])] == [
        ("engine", "link", "grpc", "http"),
        ("engine", "link"),
    ]


def test_a_disagreement_ends_the_run_and_another_failure_only_its_load(tmp_path, monkeypatch):
    assert run_all(tmp_path) == 0
    (found,) = records.read_rows(tmp_path / "rows.jsonl")
    assert (found.model, found.tokens, found.command) == ("tiny-bert", 128, "x --out rows.jsonl")

    def fail(*_args, **_options):
        raise RuntimeError("no kernel for this load")

    def disagree(*_args, **_options):
        raise loads.DisagreementError("cosine 0.5")

    monkeypatch.setattr(loads, "check", fail)
    assert run_all(tmp_path) == 1
    monkeypatch.setattr(loads, "check", disagree)
    with pytest.raises(loads.DisagreementError):
        run_all(tmp_path)

"""Rows of a run and of its check, the share within three hundredths, and what a report shows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from rose.attention_backends import AttentionSpec
from rose.attention_backends.auto import AutoBackend
from rose.config import EngineConfig
from rose.config.profile import AttentionGrid, Machine, ModelNumbers, ModelShape, Point, Profile
from rose.config.profile_files import Found
from rose.select.explain import explain, explain_generating, hint, usage
from rose.select.grid import GridLoad
from rose.select.plots import draw
from rose.select.report import write_report
from rose.select.rows import chosen_for, read_rows, rows_of, share_within, summary, write_rows
from rose.select.session import Budget, measure_grid
from tests.select.fakes import SHAPE, Clock, FakeWays

SPEC = AttentionSpec(
    num_heads=16,
    num_kv_heads=16,
    head_dim=64,
    dtype=torch.bfloat16,
    device=torch.device("cpu"),
    causal=False,
    scale=0.125,
)
FACTS = dict.fromkeys(("run_id", "commit", "date", "command", "machine"), "x") | {"model": "bge-m3"}
LOADS = tuple(GridLoad((length,) * count) for count in (1, 16) for length in (128, 512, 2048))


def run(factor: float = 1.0):
    """`factor` on the time of the one that wins for many sequences."""
    ways = FakeWays(
        {
            "flash_attention4": lambda load: 700 + load.tokens * (1.0 if load.sequences == 1 else 1.3),
            "flashinfer3": lambda load: (900 + load.tokens * 1.05) * (factor if load.sequences > 1 else 1.0),
            "torch_sdpa": lambda load: 1000 + load.tokens * 1.25,
        }
    )
    return measure_grid(ways, LOADS, Budget(60, Clock()), seed=1)


def test_a_first_run_chooses_its_own_best_everywhere() -> None:
    first = run()
    rows = rows_of(first, first.grid, "first", FACTS)
    assert len(rows) == len(LOADS)
    assert all(row.behind <= 0.01 for row in rows)
    assert share_within(rows) == 1.0
    assert {row.point: row.chosen for row in rows}["16 x 512"] == "flashinfer3"
    assert summary(rows)[0] == "6 of 6 points (100%) are served within 3% of the best"


def test_a_second_run_tells_where_the_profile_no_longer_holds() -> None:
    first, again = run(), run(factor=1.4)
    rows = rows_of(again, first.grid, "check", FACTS)
    assert share_within(rows) == 0.5
    lines = summary(rows)
    assert lines[0] == "3 of 6 points (50%) are served within 3% of the best"
    worst = max(rows, key=lambda row: row.behind)
    assert f"{worst.point}: flashinfer3 is {worst.behind:.1%} behind {worst.best}" in lines[1]
    assert any(line.startswith("  fixed to flash_attention4: ") and line.endswith("at 3") for line in lines)


def test_what_is_never_chosen_for_its_time_is_not_the_best() -> None:
    first = run()
    points = tuple(replace(point, us={**point.us, "torch_sdpa": 1.0}) for point in first.grid.points)
    measured = tuple(replace(found, point=point) for found, point in zip(first.measured, points, strict=False))
    rows = rows_of(replace(first, measured=measured), first.grid, "check", FACTS)
    assert {row.best for row in rows} == {"flash_attention4", "flashinfer3"}
    assert share_within(rows) == 1.0


def test_rows_are_kept_by_point_and_run(tmp_path: Path) -> None:
    path = tmp_path / "select.jsonl"
    first = run()
    write_rows(path, rows_of(first, first.grid, "first", FACTS))
    write_rows(path, rows_of(run(1.4), first.grid, "check", FACTS))
    assert len(read_rows(path)) == 2 * len(LOADS)
    write_rows(path, rows_of(first, first.grid, "check", {**FACTS, "run_id": "y"}))
    rows = read_rows(path)
    assert len(rows) == 2 * len(LOADS)
    assert {row.run_id for row in rows if row.run == "check"} == {"y"}


def test_steps_of_generating_have_one_backend_for_all() -> None:
    points = (
        Point(tokens=128, sequences=1, max_length=128, us={"triton_paged": 10.0, "torch_paged": 9.0}),
        Point(tokens=65536, sequences=64, max_length=1024, us={"triton_paged": 10.0, "torch_paged": 90.0}),
    )
    grid = AttentionGrid(shape=replace(SHAPE, layout="paged", causal=True), points=points)
    assert [chosen_for(point, grid, {}) for point in points] == ["triton_paged", "triton_paged"]
    assert chosen_for(points[0], grid, {"triton_paged": "gone"}) == "torch_paged"


def test_explaining_tells_of_the_others() -> None:
    grid = run().grid
    lines = list(explain([512] * 16, 64, grid, {"flashinfer2": "not installed"}))
    assert lines[0] == "16 sequences, 8192 tokens, longest up to 512"
    assert lines[1].startswith("  flashinfer3: measured at 16 x 512:")
    assert any(line.startswith("  otherwise flash_attention4: 11") and "spread" in line for line in lines)
    assert "  otherwise flashinfer2: not measured; left out: not installed" in lines
    far = list(explain([16384], 64, grid, {}))
    assert "nothing was measured within a factor of two" in far[2]
    assert far[1].startswith("  flash_attention4: one or few long sequences")
    everything = dict.fromkeys(("triton_short", "flash_attention4", "flashinfer3", "flashinfer2", "torch_sdpa"), "no")
    assert "  no backend is left to serve it" in list(explain([512], 64, grid, everything))


def test_explaining_a_step_of_generating() -> None:
    points = (
        Point(tokens=128, sequences=1, max_length=128, us={"triton_paged": 10.0, "torch_paged": 9.0}),
        Point(tokens=65536, sequences=64, max_length=1024, us={"triton_paged": 10.0, "torch_paged": 90.0}),
    )
    grid = AttentionGrid(shape=replace(SHAPE, layout="paged", causal=True), points=points)
    lines = list(explain_generating([1024] * 64, grid, {"flashinfer_paged": "not installed"}))
    assert lines == [
        "a step of generating: 64 sequences, 65536 tokens in the cache, longest up to 1024",
        "  triton_paged: fastest over 2 measured steps; a cache is bound to one backend for all batches",
        "  measured at 64 x 1024: 10 µs, spread unknown",
        "  otherwise torch_paged: 90 µs, spread unknown",
        "  otherwise flashinfer_paged: not measured; left out: not installed",
    ]
    lines = list(explain_generating([128], grid, {"triton_paged": "gone", "flashinfer_paged": "gone"}))
    assert lines[1:3] == [
        "  torch_paged: next best over 2 measured steps; a cache is bound to one backend for all batches",
        "  measured at 1 x 128: 9 µs, spread unknown",
    ]
    assert "  otherwise triton_paged: 10 µs, spread unknown; left out: gone" in lines
    plain = list(explain_generating([7], None, {"triton_paged": "needs a GPU", "flashinfer_paged": "needs a GPU"}))
    assert plain[1].startswith("  torch_paged: first in the order of preference")
    assert plain[2] == "  no step was measured within a factor of two of it"
    everything = dict.fromkeys(("triton_paged", "flashinfer_paged", "torch_paged"), "no")
    assert "  no backend is left to serve it" in list(explain_generating([7], None, everything))


def auto_of(*names: str) -> AutoBackend:
    """`auto` without its kernels."""
    made = object.__new__(AutoBackend)
    made._spec, made.left_out, made.measured = SPEC, {}, run().grid.points
    made.backends = dict.fromkeys(names)
    return made


def test_the_table_at_start_has_each_fact_with_its_source() -> None:
    shape = ModelShape(hidden_size=1024, num_layers=24, intermediate_size=4096, attention=SHAPE)
    numbers = ModelNumbers(shape=shape, name="m", bulk_tokens=8192, inflection_tokens=4096, fastest_dtype="bfloat16")
    limits = EngineConfig(online_tokens=2048, bulk_tokens=8192, max_tokens=8192)
    found = Found(numbers=numbers, paths=(Path("p.json"),))
    lines = usage(found, auto_of("flash_attention4", "flashinfer3", "triton_short"), limits).splitlines()
    table = {line[2:].split("  ")[0].strip(): line for line in lines}
    assert "p.json" in table["profile"]
    assert "flash_attention4: measured at 1 x 512" in table["1 x 512"]
    assert "flashinfer3: measured at 16 x 512" in table["16 x 512"]
    assert "1 x 16384" not in table, "it is longer than what is served"
    assert table["batches"].endswith("2048 tokens online, 8192 bulk: measured")
    assert table["graphs"].endswith("up to 4096 tokens: measured")
    assert table["dtype"].endswith("--dtype bfloat16")
    plain = usage(Found(), auto_of("torch_sdpa"), EngineConfig())
    assert "attention  torch_sdpa, whatever the load" in plain
    assert "profile    none" in plain
    assert "by default or as asked for" in plain


def test_an_unknown_gpu_gets_one_line() -> None:
    here = Machine(device="NVIDIA B200")
    line = hint(Found(), here, SHAPE, on_gpu=True)
    assert line.startswith("no profile of NVIDIA B200 for 16/16 heads of 64, bfloat16, bidirectional, ragged: defaults")
    assert "\n" not in line
    assert hint(Found(), here, SHAPE, on_gpu=False) == ""
    assert hint(Found(grid=run().grid), here, SHAPE, on_gpu=True) == ""


@pytest.fixture(scope="module")
def profile() -> Profile:
    numbers = ModelNumbers(
        shape=ModelShape(hidden_size=1024, num_layers=24, intermediate_size=4096, attention=SHAPE),
        name="owner/model <b>",
        online_tokens=1024,
        bulk_tokens=8192,
        inflection_tokens=4096,
        saturation=((512, 900.0), (1024, 1500.0)),
        launch=((512, 1500.0, 1700.0, 900.0), (1024, 1500.0, 2000.0, 1500.0)),
        padding=((0, 500.0, 700.0),),
        threads=(("float32", 1, 5000.0), ("float32", 2, 3000.0)),
    )
    return Profile(
        machine=Machine(device="NVIDIA H200", driver="580", packages={"torch": "2.11"}),
        source="a test",
        grids=(run().grid,),
        models=(numbers,),
        products={"linear:3072x1024": {"512": {"table": 9.0, "library": 8.0}}},
    )


def test_pictures_and_a_page_that_loads_nothing_from_elsewhere(profile: Profile, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pictures = draw(profile, tmp_path, floor=lambda count, length: 0.1 * count * length, formats=("svg", "png"))
    assert len(pictures) == 10
    assert {path.suffix for path in pictures} == {".svg", ".png"}
    for path in pictures:
        if path.suffix == ".svg":
            ElementTree.parse(path)
        else:
            assert path.read_bytes().startswith(b"\x89PNG")
    crossing = next(path for path in pictures if path.name.startswith("crossovers") and path.suffix == ".svg")
    text = crossing.read_text()
    for label in ("flash_attention4", "flashinfer3", "floor", "16 sequences"):
        assert label in text
    page = tmp_path / "report.html"
    write_report(profile, pictures, page, {"flashinfer2": "wrong <script>"})
    written = page.read_text()
    assert "<script" not in written
    assert "wrong &lt;script&gt;" in written
    assert "owner/model &lt;b&gt;" in written
    assert 'src="http' not in written
    assert "<link" not in written
    assert written.count("<svg") == 5
    assert 'class="best"' in written


def test_a_profile_of_nothing_draws_nothing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    empty = Profile(machine=Machine(device="x"), source="nothing", grids=(AttentionGrid(shape=SHAPE, points=()),))
    assert draw(empty, tmp_path) == []
    write_report(empty, [], tmp_path / "r.html", {})
    assert "Fastest ways on x" in (tmp_path / "r.html").read_text()

"""A grid measured with fake clocks: what is chosen, what is excluded and why, what time does not allow."""

from __future__ import annotations

import random

import pytest
import torch

from rose.attention_backends.choose import Load, choose
from rose.engine.buckets import Buckets
from rose.select.grid import GridLoad, batches, bound_of, decodes
from rose.select.session import Budget, measure_grid
from rose.select.ways import measure_load, wrong
from tests.select.fakes import Clock, FakeWays

LOADS = tuple(GridLoad((length,) * count) for count in (1, 16) for length in (128, 512, 4096))


def ways(clock: Clock | None = None) -> FakeWays:
    """FA4 is fastest for one sequence, fa3 for many; sdpa never."""
    return FakeWays(
        {
            "triton_short": lambda load: 500 + 0.5 * load.tokens,
            "flash_attention4": lambda load: 700 + load.tokens * (1.0 if load.sequences == 1 else 1.3),
            "flashinfer3": lambda load: 900 + load.tokens * 1.05,
            "torch_sdpa": lambda load: 1000 + load.tokens * 1.4,
        },
        clock=clock,
    )


def run(fake: FakeWays, loads=LOADS, seconds: float = 60.0, clock: Clock | None = None):
    return measure_grid(fake, loads, Budget(seconds, clock or Clock()), seed=7)


def chosen(grid, sequences: int, length: int) -> str:
    choice = choose(64, Load(sequences * length, sequences, bound_of(length)), grid.excluded, grid.points)
    assert choice is not None
    return choice.backend


def test_each_point_goes_to_the_fastest() -> None:
    grid = run(ways()).grid
    assert chosen(grid, 1, 128) == "triton_short"
    assert chosen(grid, 1, 512) == "flash_attention4"
    assert chosen(grid, 16, 512) == "flashinfer3"
    assert len(grid.points) == len(LOADS)
    assert all("triton_short" not in point.us for point in grid.points if point.max_length > 256)


def test_the_last_resort_is_timed_where_it_is_alone() -> None:
    """Its answers are the truth, its time nobody's choice, and slow enough to take that of all others."""
    fake = ways()
    grid = run(fake).grid
    assert all("torch_sdpa" not in point.us for point in grid.points)
    assert {name for name, _, _ in fake.prepared} == set(fake.names)
    alone = run(FakeWays({"torch_sdpa": fake.times["torch_sdpa"]})).grid
    assert [set(point.us) for point in alone.points] == [{"torch_sdpa"}] * len(LOADS)


def test_the_order_of_loads_changes_nothing() -> None:
    grids = []
    for seed in range(3):
        loads = list(LOADS)
        random.Random(seed).shuffle(loads)
        grids.append(run(ways(), loads).grid)
    assert grids[0] == grids[1] == grids[2]


def test_every_way_of_a_load_gets_the_same_input_and_loads_differ() -> None:
    fake = ways()
    run(fake)
    seeds: dict[str, set[int]] = {}
    for _, load, seed in fake.prepared:
        seeds.setdefault(load, set()).add(seed)
    assert all(len(found) == 1 for found in seeds.values())
    assert len({next(iter(found)) for found in seeds.values()}) == len(LOADS)


def test_a_backend_that_gives_nan_is_excluded_for_good() -> None:
    fake = ways()
    fake.answers["flash_attention4"] = lambda load, answer: answer * torch.nan if load.sequences == 16 else answer
    grid = run(fake).grid
    assert grid.excluded == {"flash_attention4": "gave what is not finite at 16 x 128"}
    assert all("flash_attention4" not in point.us for point in grid.points), "its earlier times are gone too"
    assert chosen(grid, 1, 512) == "flashinfer3"


def test_a_backend_that_gives_a_wrong_answer_is_excluded_with_how_wrong() -> None:
    fake = ways()
    fake.answers["flashinfer3"] = lambda load, answer: answer.flip(0)
    found = run(fake)
    assert found.grid.excluded["flashinfer3"].startswith("disagrees with the reference (cosine ")
    assert found.grid.excluded["flashinfer3"].endswith(" at 1 x 128")
    assert "flashinfer3" in fake.closed


def test_a_backend_that_raises_at_setting_up_or_while_it_is_timed_is_excluded() -> None:
    fake = ways()

    def failing(load: GridLoad, answer: torch.Tensor) -> torch.Tensor:
        raise ValueError("no kernel for this")

    def crashing() -> float:
        raise RuntimeError("misaligned address")

    fake.answers["flash_attention4"] = failing
    fake.samples["flashinfer3"] = crashing
    excluded = run(fake).excluded
    assert excluded == {
        "flash_attention4": "failed at 1 x 128: ValueError: no kernel for this",
        "flashinfer3": "failed at 1 x 128: RuntimeError: misaligned address",
    }


def test_too_large_for_the_memory_is_no_fault() -> None:
    fake = ways()

    def large(load: GridLoad, answer: torch.Tensor) -> torch.Tensor:
        if load.tokens > 60000:
            raise torch.OutOfMemoryError("no memory")
        return answer

    fake.answers["flashinfer3"] = large
    found = run(fake)
    assert found.excluded == {}
    assert "flashinfer3" not in found.grid.points[-1].us
    assert "flashinfer3" in found.grid.points[0].us


def test_without_the_reference_answers_are_still_checked_for_finite_numbers() -> None:
    fake = ways()
    fake.names = tuple(name for name in fake.names if name != "torch_sdpa")
    fake.answers["flashinfer3"] = lambda load, answer: answer * torch.inf
    found = run(fake)
    assert set(found.excluded) == {"flashinfer3"}
    assert len(found.grid.points) == len(LOADS)


def test_nobody_left_leaves_no_point() -> None:
    fake = FakeWays({"flashinfer3": lambda load: 1.0})
    fake.answers["flashinfer3"] = lambda load, answer: answer * torch.nan
    found = run(fake)
    assert found.grid.points == ()
    assert fake.closed == ["flashinfer3"]


def test_what_was_excluded_before_any_load_is_never_set_up() -> None:
    fake = ways()
    fake.excluded["flashinfer3"] = "wrong when run plainly"
    found = run(fake)
    assert "flashinfer3" not in {name for name, *_ in fake.prepared}
    assert found.grid.excluded == {"flashinfer3": "wrong when run plainly"}


def test_time_that_runs_out_leaves_the_last_loads_unmeasured() -> None:
    clock = Clock()
    fake = ways(clock)
    loads = [GridLoad((512,) * n) for n in (1, 4, 16, 64)]
    found = run(fake, loads, seconds=0.2, clock=clock)
    assert [m.load for m in found.measured] == loads[: len(found.measured)]
    assert 1 <= len(found.measured) < 4
    assert list(found.skipped) == loads[len(found.measured) :]
    assert len(found.grid.points) == len(found.measured)


def test_what_was_set_up_is_closed_even_if_it_is_interrupted() -> None:
    fake = ways()

    def interrupted() -> float:
        raise KeyboardInterrupt

    fake.samples["flash_attention4"] = interrupted
    with pytest.raises(KeyboardInterrupt):
        measure_load(fake, LOADS[1], {}, seed=1)
    assert sorted(fake.closed) == ["flash_attention4", "flashinfer3", "torch_sdpa"]


def test_wrong_sees_direction_length_shape_and_infinity() -> None:
    truth = torch.randn(3, 16)
    assert wrong(truth + 1e-3 * torch.randn(3, 16), truth) is None
    assert "lengths 10.0% apart" in (wrong(truth * 1.1, truth) or "")
    assert "cosine -1.0000" in (wrong(-truth, truth) or "")
    assert "gave (2, 16)" in (wrong(truth[:2], truth) or "")
    one_row = truth.clone()
    one_row[1, 3] = torch.inf
    assert wrong(one_row, None) == "gave what is not finite"


def test_the_grid_holds_what_is_published_first_and_needs_no_padding() -> None:
    loads = batches(16384, 32768)
    assert [load.name for load in loads[:3]] == ["1 x 128", "1 x 512", "1 x 4096"]
    assert len(set(loads)) == len(loads)
    assert sum(min(load.lengths) != max(load.lengths) for load in loads) == 6
    buckets = Buckets(inflection_tokens=32768, max_tokens=16384, max_sequences=512, fine_tokens=32768)
    for load in loads:
        key = buckets.key(load.lengths, ("dense",))
        assert (key.tokens, key.sequences, key.max_length) == (load.tokens, load.sequences, load.max_length), load.name
    assert max(load.tokens for load in batches(512, 4096)) <= 4096
    assert max(max(load.lengths) for load in batches(512, 4096)) == 512
    assert all(load.tokens <= 4096 and load.kind == "decode" for load in decodes(2048, 4096))

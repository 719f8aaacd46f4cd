"""A profile's points before the table: the nearest one, ties, reach, limits; and a backend that follows them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rose.attention_backends import AttentionSpec, auto
from rose.attention_backends.auto import AutoBackend
from rose.attention_backends.choose import ORDER, Load, best_overall, choose, nearest, rank, ranked
from rose.config.profile import Point

SHORT, FA4, FA3, FA2, SDPA = "triton_short", "flash_attention4", "flashinfer3", "flashinfer2", "torch_sdpa"


def point(sequences: int, length: int, **us: float) -> Point:
    return Point(tokens=sequences * length, sequences=sequences, max_length=max(64, length), us=us)


POINTS = (
    point(1, 128, triton_short=700, flash_attention4=900, flashinfer3=1100),
    point(1, 512, flash_attention4=1465, flashinfer3=1400),
    point(16, 512, flash_attention4=9000, flashinfer3=8000, flashinfer2=8040),
    point(1, 4096, flash_attention4=8400, flashinfer3=9300),
)


def chosen(load: Load, points=POINTS, left_out=()) -> str:
    choice = choose(64, load, dict.fromkeys(left_out, "gone"), points)
    assert choice is not None
    return choice.backend


def test_the_measured_point_decides_against_the_table() -> None:
    assert chosen(Load(512, 1, 512), ()) == FA4
    assert chosen(Load(512, 1, 512)) == FA3
    assert chosen(Load(4096, 1, 4096)) == FA4


def test_the_reason_has_the_times_of_all() -> None:
    choice = choose(64, Load(512, 1, 512), {}, POINTS)
    assert choice is not None
    assert choice.reason == "measured at 1 x 512: 1400 µs (flash_attention4 +5%)"


def test_within_a_hundredth_the_order_of_preference_decides() -> None:
    tie = (point(16, 512, flashinfer2=1000, flashinfer3=1009, flash_attention4=1011),)
    assert chosen(Load(8192, 16, 512), tie) == FA3
    assert "as fast as the fastest" in ranked(tie[0])[0].reason
    assert [choice.backend for choice in ranked(tie[0])] == [FA3, FA2, FA4]


def test_a_load_between_takes_the_nearest_in_octaves() -> None:
    assert chosen(Load(704, 2, 1024)) == FA3  # half an octave from 1 x 512, two and a half from 1 x 4096
    assert chosen(Load(3072, 2, 4096)) == FA4
    assert chosen(Load(6144, 12, 512)) == FA3


def test_beyond_an_octave_the_table_decides() -> None:
    assert nearest(POINTS, Load(16384, 1, 16384)) is None
    assert chosen(Load(16384, 1, 16384)) == FA4
    assert nearest(POINTS, Load(2048, 32, 64)) is None
    assert chosen(Load(2048, 32, 64)) == SHORT


def test_what_is_left_out_is_passed_over_with_the_reason() -> None:
    choice = choose(64, Load(512, 1, 512), {FA3: "wrong here"}, POINTS)
    assert choice is not None
    assert choice.backend == FA4
    assert "flashinfer3 would come before it but is left out: wrong here" in choice.reason
    assert chosen(Load(512, 1, 512), left_out=(FA3, FA4)) == FA2  # the table's fall-back follows


def test_the_short_one_is_never_chosen_for_more_than_it_serves() -> None:
    only_short = (point(1, 256, triton_short=1.0, flash_attention4=900),)
    assert chosen(Load(256, 1, 256), only_short) == SHORT
    assert chosen(Load(257, 1, 512), only_short) == FA4
    assert nearest(only_short, Load(257, 1, 512)) is None


def test_equally_near_points_are_settled_by_size_whatever_their_order() -> None:
    two = [point(1, 512, flashinfer3=1.0, flash_attention4=2.0), point(1, 2048, flashinfer3=2.0, flash_attention4=1.0)]
    for order in (two, two[::-1]):
        assert chosen(Load(1024, 1, 1024), order) == FA3


loads = st.builds(
    Load, tokens=st.integers(1, 1 << 17), sequences=st.integers(1, 1024), max_length=st.integers(1, 1 << 15)
)


@given(loads, st.integers(0, 1000), st.sets(st.sampled_from(ORDER[:-1])))
def test_every_load_is_served_the_same_in_any_order_of_points(load: Load, seed: int, missing: set[str]) -> None:
    shuffled = list(POINTS)
    random.Random(seed).shuffle(shuffled)
    left_out = dict.fromkeys(missing, "missing")
    first, second = choose(64, load, left_out, POINTS), choose(64, load, left_out, shuffled)
    assert first == second
    assert first is not None
    assert first.backend not in missing
    assert first.backend != SHORT or load.max_length <= 256
    names = [choice.backend for choice in rank(64, load, POINTS)]
    assert len(set(names)) == len(names)


def test_one_for_all_loads_is_the_least_behind_and_measured_everywhere() -> None:
    points = (
        point(1, 128, triton_paged=10.0, torch_paged=30.0, flashinfer_paged=9.0),
        point(64, 1024, triton_paged=100.0, torch_paged=900.0, flashinfer_paged=130.0),
        point(8, 512, triton_paged=20.0, torch_paged=50.0),
    )
    assert best_overall(points) == ("triton_paged", "torch_paged")
    assert best_overall(points[:2])[0] == "triton_paged"
    assert best_overall(()) == ()


class Named:
    def __init__(self, name: str, spec: AttentionSpec) -> None:
        self.name, self.spec = name, spec


def test_the_backend_of_an_engine_follows_the_points(monkeypatch: pytest.MonkeyPatch, cpu_spec: AttentionSpec) -> None:
    monkeypatch.setattr(auto, "try_backend", Named)
    spec = replace(cpu_spec, head_dim=64, dtype=torch.float32)
    plain, measured = AutoBackend(spec), AutoBackend(spec, {FA2: "wrong at 1 x 64"}, POINTS)
    assert plain.explain(Load(512, 1, 512)).backend == FA4
    assert measured.explain(Load(512, 1, 512)).backend == FA3
    assert FA2 not in measured.backends


def test_a_backend_this_version_does_not_know_is_passed_over(monkeypatch, cpu_spec: AttentionSpec) -> None:
    monkeypatch.setattr(auto, "try_backend", Named)
    strange = (point(1, 512, flash_attention9=1.0, flashinfer3=2.0),)
    backend = AutoBackend(cpu_spec, measured=strange)
    choice = backend.explain(Load(512, 1, 512))
    assert choice.backend == FA3
    assert (
        "flash_attention9 would come before it but is left out: there is no such backend in this version"
        in choice.reason
    )


def test_torch_is_chosen_by_time_only_where_nothing_else_has_one() -> None:
    """Quick where all sequences are equally long, five times as slow where they are not; a key does not say which."""
    even = point(64, 256, torch_sdpa=19009, flashinfer2=19505, triton_short=19629)
    assert [choice.backend for choice in ranked(even)] == [SHORT, FA2, SDPA]
    assert chosen(Load(14_000, 64, 256), (even,)) == SHORT
    assert ranked(point(64, 256, torch_sdpa=19009))[0].backend == SDPA

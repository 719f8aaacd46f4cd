"""What a new profile says otherwise than the one it replaces."""

from __future__ import annotations

from dataclasses import replace

from rose.config.profile import AttentionGrid, Machine, ModelNumbers, ModelShape, Point, Profile
from rose.engine.profiles import same_kind
from rose.select.told import changes, numbers_told
from tests.select.fakes import SHAPE

MODEL = ModelShape(hidden_size=64, num_layers=2, intermediate_size=128, attention=SHAPE)
NUMBERS = ModelNumbers(shape=MODEL, name="m", online_tokens=512, bulk_tokens=2048, num_threads=2)


def point(length: int, **us: float) -> Point:
    return Point(tokens=length, sequences=1, max_length=length, us=us)


def profile(**fields) -> Profile:
    return Profile(machine=Machine(device="A CPU, 2 logical CPUs"), source="test", **fields)


OLD = profile(
    models=(NUMBERS,), grids=(AttentionGrid(shape=SHAPE, points=(point(64, a=1.0, b=2.0), point(128, a=1.0, b=2.0))),)
)


def test_the_same_again_is_no_change() -> None:
    assert list(changes(OLD, OLD)) == []
    assert list(numbers_told(NUMBERS)) == [
        "tokens of a batch, online: 512",
        "tokens of a batch, bulk: 2048",
        "threads: 2",
    ]


def test_each_number_and_the_loads_that_another_backend_is_fastest_at() -> None:
    grid = AttentionGrid(shape=SHAPE, points=(point(64, a=3.0, b=2.0), point(128, a=1.0, b=2.0), point(256, b=1.0)))
    new = profile(models=(replace(NUMBERS, bulk_tokens=64, num_threads=None, fastest_dtype="bfloat16"),), grids=(grid,))
    assert list(changes(OLD, new)) == [
        "tokens of a batch, bulk: 2048 -> 64",
        "threads: 2 -> default",
        "faster dtype: default -> bfloat16",
        f"{SHAPE}: another backend is fastest at 1 of 2 loads",
    ]


def test_what_the_new_file_has_no_more_is_told() -> None:
    assert list(changes(OLD, profile())) == [
        "no longer in it: the numbers of m",
        f"no longer in it: the times of {SHAPE}",
    ]
    assert list(changes(profile(), OLD)) == []


def test_two_cpus_are_of_a_kind_and_two_gpus_are_not() -> None:
    cpu, other, gpu = (Machine(device=name) for name in ("X, 2 logical CPUs", "Y, 64 logical CPUs", "NVIDIA H200"))
    assert same_kind(cpu, other)
    assert same_kind(gpu, gpu)
    assert not same_kind(cpu, gpu)
    assert not same_kind(gpu, Machine(device="NVIDIA H100"))

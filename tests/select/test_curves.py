"""Budgets, inflection and padding out of curves with known answers."""

from __future__ import annotations

import pytest

from rose.engine.buckets import Buckets
from rose.select import curves
from rose.select.cpu import fewest, measure_cpu, thread_counts
from rose.select.numbers import BATCHES, even, measure_numbers, saturation_curve
from rose.select.session import Budget
from tests.select.fakes import Clock


def rate(tokens: int) -> float:
    """µs of a device that takes 200 µs for any batch and 1.5 µs a token on top."""
    return 200 + 1.5 * tokens


def test_saturation_is_where_the_rate_no_longer_grows() -> None:
    curve = [(tokens, rate(tokens)) for tokens in BATCHES]
    # tokens / (200 + 1.5 tokens) reaches 97 % of its value at 49152 from 3953 tokens on, and 95 % from 2403 on.
    assert curves.saturation(curve) == 4096
    assert curves.budgets(curve) == (4096, 4096)
    assert curves.saturation([]) is None
    assert curves.budgets([]) is None
    assert curves.saturation(list(reversed(curve))) == 4096


def test_a_rate_that_falls_again_does_not_raise_the_budget() -> None:
    assert curves.saturation([(512, 100.0), (1024, 150.0), (2048, 299.0), (4096, 900.0)]) == 1024


def test_graphs_end_where_they_gain_nothing() -> None:
    curve = [(512, 1500.0, 1700.0, 900.0), (4096, 1500.0, 5600.0, 5300.0), (8192, 1500.0, 10100.0, 10000.0)]
    assert curves.inflection(curve) == 4096
    assert curves.inflection(curve[2:]) == 8192  # the smallest measured: nothing is known below
    assert curves.inflection([(512, 2000.0, 905.0, 900.0), *curve[1:]]) == 4096
    assert curves.inflection([(512, 2000.0, 905.0, 900.0)]) == 512  # launching takes longer than the device
    assert curves.inflection([]) is None


def test_fine_padding_ends_where_it_saves_little() -> None:
    curve = [(0, 500.0, 700.0), (256, 800.0, 900.0), (512, 995.0, 1000.0), (1024, 1500.0, 1800.0)]
    assert curves.fine_padding(curve) == 512
    assert curves.fine_padding([(0, 1000.0, 1001.0)]) == 256
    assert curves.fine_padding([]) is None
    assert curves.padded_means([100.0, 120.0, 140.0, 160.0]) == (130.0, 160.0)


@pytest.mark.parametrize(
    ("fine", "expected"), [(256, [64, 128, 192, 256, 512]), (512, [64, 512, 768]), (2048, [1024, 1984, 2304])]
)
def test_buckets_follow_the_measured_padding(fine: int, expected: list[int]) -> None:
    buckets = Buckets(inflection_tokens=4096, max_tokens=4096, max_sequences=8, fine_tokens=fine)
    for tokens in expected:
        assert buckets.key([tokens], ()).tokens == tokens
    above = buckets.key([fine + 1], ()).tokens
    assert above == fine // 256 * 256 + 256


@pytest.mark.parametrize("tokens", [64, 320, 512, 576, 1088, 2112, 2304, 12288, 16384, 49152])
def test_even_batches_need_no_dummies(tokens: int) -> None:
    lengths = even(tokens, 512)
    assert sum(lengths) == tokens
    assert max(lengths) <= 512
    assert max(lengths) - min(lengths) <= 1
    buckets = Buckets(inflection_tokens=1 << 16, max_tokens=512, max_sequences=512, fine_tokens=1 << 16)
    key = buckets.key(lengths, ())
    assert (key.tokens, key.sequences) == (tokens, len(lengths))


def test_a_flat_curve_is_not_measured_to_its_end() -> None:
    asked: list[int] = []

    def prepare(lengths: tuple[int, ...]):
        asked.append(sum(lengths))
        return lambda: float(sum(lengths))  # the same rate everywhere

    curve = saturation_curve(prepare, BATCHES, 512, lambda: True)
    assert asked == [512, 1024, 2048]
    assert [tokens for tokens, _ in curve] == asked
    assert saturation_curve(prepare, BATCHES, 512, lambda: False) == ()


def test_a_batch_that_was_slow_by_chance_is_measured_again() -> None:
    """Once 4096 tokens took twice as long as they do, and so few were called a full batch."""
    asked: list[int] = []

    def prepare(lengths: tuple[int, ...]):
        asked.append(tokens := sum(lengths))
        return lambda: rate(tokens) * (2 if tokens == 4096 and asked.count(4096) == 1 else 1)

    curve = saturation_curve(prepare, BATCHES, 512, lambda: True)
    assert asked.count(4096) == 2
    assert dict(curve)[4096] == rate(4096)
    assert curves.saturation(curve) == 4096


class FakeBench:
    def __init__(self, graph: bool) -> None:
        self._graph = graph

    def inputs(self, lengths: tuple[int, ...], seed: int) -> list[int]:
        return list(lengths)

    def sample(self, sequences: list[int]) -> float:
        return rate(sum(sequences))

    timed = sample

    def warm(self, sequences: list[int]) -> None: ...

    def clear(self) -> None: ...

    def launch(self, sequences: list[int]) -> tuple[float, float]:
        return 3000.0, max(3000.0, rate(sum(sequences)))


def test_the_numbers_of_a_device() -> None:
    found = measure_numbers(
        lambda tokens: FakeBench(True),  # type: ignore[arg-type,return-value]
        lambda tokens: FakeBench(False),  # type: ignore[arg-type,return-value]
        max_tokens=8192,
        batch_tokens=32768,
        seed=1,
        budget=Budget(60, Clock()),
        progress=None,
    )
    assert dict(found.saturation)[4096] == rate(4096)
    assert found.launch[0] == (512, 3000.0, 3000.0, rate(512))
    assert curves.inflection(found.launch) == 1024
    assert found.padding[0] == (0, pytest.approx(rate(160)), rate(256))
    assert found.padding[-1][0] == 3072


def test_threads_dtype_and_tokens_of_a_cpu() -> None:
    """Four threads are as fast as eight, bf16 takes half the time, and 1024 tokens fill it."""

    def prepare(dtype: str, threads: int, lengths: tuple[int, ...]):
        us = (400 + 10 * sum(lengths)) / min(threads, 4) / (2 if dtype == "bfloat16" else 1)
        return lambda: us

    found = measure_cpu(prepare, dtypes=("float32", "bfloat16"), max_tokens=256, budget=Budget(60, Clock()), cpus=8)
    assert found.num_threads == 4
    assert found.fastest_dtype == "bfloat16"
    assert curves.saturation(found.saturation) == 2048
    assert ("float32", 1, 5520.0) in found.threads
    assert ("bfloat16", 4, 690.0) in found.threads


def test_a_dtype_that_gains_little_is_not_told_of_and_fewer_threads_win_ties() -> None:
    def prepare(dtype: str, threads: int, lengths: tuple[int, ...]):
        return lambda: 100.0 if dtype == "float32" else 95.0

    found = measure_cpu(prepare, dtypes=("float32", "bfloat16"), max_tokens=64, budget=Budget(9, Clock()), cpus=2)
    assert found.num_threads == 1
    assert found.fastest_dtype is None
    assert fewest({"4": 100.0, "2": 100.9, "1": 102.0}, ["1", "2", "4"]) == "2"
    assert thread_counts(1) == (1,)
    assert thread_counts(12) == (1, 2, 4, 6, 8, 12)

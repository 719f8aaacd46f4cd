"""Tokens of a batch on a CPU: the default stays where the curve is flat, whatever noise and neighbours make of it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from rose.config.serving import CPU_TOKENS
from rose.select.comparing import MIN_ROUNDS
from rose.select.cpu import BATCHES, ROUNDS, budgets, measure_cpu, rates
from rose.select.session import Budget
from tests.select.fakes import Clock

DEFAULT = (CPU_TOKENS["online_tokens"], CPU_TOKENS["bulk_tokens"])
Us = Callable[[int], float]


def flat(tokens: int) -> float:
    return 140.0 * tokens


def measured(us: Us, *, seed: int = 0, noise: float = 0.0, busy: float = 1.0, seconds: float = 170.0) -> dict:
    """Rates on a clock that batches move; `busy`: how much longer they take in every other second."""
    clock, generator = Clock(), random.Random(seed)
    clock.now = generator.random() * 2

    def prepare(lengths: tuple[int, ...]) -> Callable[[], float]:
        def sample() -> float:
            took = us(sum(lengths)) * (1 + generator.uniform(-noise, noise)) * (busy if clock.now % 2 < 1 else 1.0)
            clock.now += took * 1e-6
            return took

        return sample

    return rates(prepare, 64, Budget(seconds, clock).share(1))


@pytest.mark.parametrize(("noise", "busy"), [(0.0, 1.0), (0.03, 1.0), (0.10, 1.0), (0.03, 2.0)])
def test_a_flat_curve_keeps_the_default_in_every_run(noise: float, busy: float) -> None:
    for seed in range(40):
        times = measured(flat, seed=seed, noise=noise, busy=busy)
        assert {len(us) for us in times.values()} == {ROUNDS}
        assert max(times) >= DEFAULT[1]
        assert budgets(times) == DEFAULT


def test_a_size_that_is_clearly_faster_takes_its_place() -> None:
    # 2500 µs a batch on top: 2048 tokens reach 92 % of what 8192 do, 4096 reach 97 %; 512 reach 69 %, 1024 83 %.
    for seed in range(20):
        assert budgets(measured(lambda n: 2500 + 10 * n, seed=seed, noise=0.01)) == (1024, 4096)


def test_what_falls_out_of_the_caches_is_not_the_bulk_size() -> None:
    for seed in range(20):
        times = measured(lambda n: (100 if n <= 512 else 200) * n, seed=seed, noise=0.02)
        assert budgets(times) == (512, 512)


def test_one_short_text_is_no_bulk() -> None:
    times = measured(lambda n: (100 if n <= 64 else 200) * n, noise=0.02)
    assert budgets(times) == (64, DEFAULT[1])


def test_what_the_time_did_not_reach_is_left_to_the_defaults() -> None:
    times = measured(flat, seconds=0.2)  # to 64, 128, 256 and 512 tokens, and once over
    assert max(times) < DEFAULT[1]
    assert budgets(times) == (DEFAULT[0], None)
    assert budgets({}) == (None, None)


def test_too_few_rounds_change_nothing() -> None:
    times = {tokens: [100.0 if tokens > 2048 else 200.0] * (MIN_ROUNDS - 1) for tokens in BATCHES}
    assert budgets(times) == DEFAULT
    more = {tokens: [*us, us[0]] for tokens, us in times.items()}
    assert budgets(more) == (4096, 4096)


def test_they_are_in_what_is_measured_of_a_cpu() -> None:
    def prepare(dtype: str, threads: int, lengths: tuple[int, ...]) -> Callable[[], float]:
        return lambda: 2000.0 + 10 * sum(lengths)

    found = measure_cpu(prepare, dtypes=("float32",), max_tokens=256, budget=Budget(60, Clock()), cpus=1)
    assert (found.online_tokens, found.bulk_tokens) == (1024, 4096)
    assert dict(found.saturation)[4096] == 42960.0

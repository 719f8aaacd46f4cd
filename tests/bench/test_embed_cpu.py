"""The comparison's own arithmetic: fair turns, right rates, and no timing of wrong vectors."""

from __future__ import annotations

import numpy as np
import pytest

from rose.bench import embed_cpu
from rose.bench.texts import mixed_texts
from rose.errors import StartupError


class Fake:
    def __init__(self, name, vectors=None, calls=None):
        self.name, self.vectors, self.calls = name, vectors, calls

    def embed(self, texts):
        if self.calls is not None:
            self.calls.append(self.name)
        return np.stack([self.vectors[int(text)] for text in texts])

    def close(self):
        pass


def unit_vectors(count):
    rows = np.random.default_rng(0).standard_normal((count, 16)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def test_the_systems_take_turns_and_each_goes_first():
    calls: list[str] = []
    systems = [Fake(name, unit_vectors(1), calls) for name in "abc"]
    times = embed_cpu.rounds(systems, [["0"]], 3)
    assert "".join(calls) == "aabbcc" + "bbccaa" + "ccaabb"  # an untimed call first
    assert {name: len(found) for name, found in times.items()} == {"a": 3, "b": 3, "c": 3}


def test_rates_and_ratios_are_medians_over_rounds():
    times = {"rival": [[1.0, 1.0], [4.0, 4.0], [2.0, 2.0]], "rose": [[0.5, 0.5], [1.0, 1.0], [2.0, 2.0]]}
    found = embed_cpu.summary(times, 1000, "rival")["systems"]
    assert found["rival"]["tokens_per_s"] == 250  # median round: 4 s
    assert found["rose"]["tokens_per_s"] == 500
    assert found["rose"]["tokens_per_s_spread"] == [250, 1000]
    assert found["rose"]["speed_against_rival"] == 2.0  # rounds: 2, 4, 1
    assert found["rose"]["call_ms_p50"] == 1000.0


def test_agreement_is_the_least_cosine_of_any_row():
    a = unit_vectors(4)
    b = a.copy()
    b[2] = a[2] + np.float32(0.3) * a[1]
    expected = (a[2] @ b[2]) / (np.linalg.norm(a[2]) * np.linalg.norm(b[2]))
    assert embed_cpu.least_cosine(a, b) == pytest.approx(float(expected), abs=1e-6)


@pytest.mark.parametrize("fault", [0.01, np.nan])
@pytest.mark.parametrize("row", [0, 25])
def test_a_system_that_disagrees_is_never_timed(row, fault):
    expected, texts = unit_vectors(30), [str(i) for i in range(30)]
    wrong = expected.copy()
    wrong[row, 0] += fault
    with pytest.raises(StartupError, match="other disagrees with the reference"):
        embed_cpu.check(expected, Fake("other", wrong), texts)
    assert embed_cpu.check(expected, Fake("other", expected), texts) == 1.0


def test_texts_are_the_same_every_time_and_as_long_as_asked():
    count = lambda text: len(text.split())  # noqa: E731
    texts = mixed_texts(200, count, shortest=5, longest=60)
    assert texts == mixed_texts(200, count, shortest=5, longest=60)
    lengths = [count(text) for text in texts]
    assert min(lengths) >= 5
    assert max(lengths) <= 60
    assert len(set(lengths)) > 40
    assert len(set(texts)) == 200

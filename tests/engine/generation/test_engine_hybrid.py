"""A hybrid model behind the engine: rows of recurrent state come and go with the sequences, and no page is shared."""

from __future__ import annotations

import numpy as np
import pytest

from rose.config import read_model_folder
from tests.engine.generation.driving import Reference, build, generate, prompts, staggered
from tests.support.tiny_qwen3_5 import tiny_qwen3_5

LENGTHS = (1, 70, 5, 17, 130, 4, 33, 64)
NEW = 16


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    return read_model_folder(tiny_qwen3_5(tmp_path_factory.mktemp("lm") / "m", tied=False))


@pytest.fixture(scope="module")
def expected(hybrid):
    reference = Reference(hybrid)
    found = [(ids, reference.greedy(ids.tolist(), NEW)) for ids in prompts(LENGTHS)]
    assert min(len(set(tokens)) for _, tokens in found) >= 4
    return found


@pytest.mark.parametrize("graph_bytes", [0, 1 << 30], ids=["plain", "graphs"])
@pytest.mark.parametrize("prefill_tokens", [9, 33, 2048])
def test_any_chunking(device, hybrid, expected, prefill_tokens, graph_bytes):
    engine = build(hybrid, device, prefill_tokens=prefill_tokens, graph_bytes=graph_bytes)
    answers = generate(engine, [ids for ids, _ in expected], max_new_tokens=NEW)
    assert [answer.tokens for answer in answers] == [tokens for _, tokens in expected]
    assert (engine.counters()["graph_hits"] > 0) == (graph_bytes > 0)
    engine.close()


@pytest.mark.parametrize("seed", range(3))
def test_arrivals_and_aborts_at_any_time(device, hybrid, expected, seed):
    """More sequences than rows of state: each row is had by several, and begins anew each time."""
    engine = build(hybrid, device, prefill_tokens=24, max_running=3, pages=120)
    order = np.random.default_rng(seed).permutation(2 * len(expected)) % len(expected)
    work = [(expected[i][0], {"max_new_tokens": 2 + i * 2}) for i in order]
    for i, answer in zip(order, staggered(engine, work, seed), strict=True):
        assert answer.tokens == expected[i][1][: 2 + i * 2]
    engine.close()


def test_pages_run_out(device, hybrid, expected):
    """A sequence that loses its pages begins again from nothing, state and all."""
    engine = build(hybrid, device, pages=12, prefill_tokens=40)  # of the attending layer alone: 48 of 4 tokens
    answers = generate(engine, [ids for ids, _ in expected], max_new_tokens=NEW)
    assert [answer.tokens for answer in answers] == [tokens for _, tokens in expected]
    assert engine.counters()["preemptions"] > 0
    engine.close()


def test_beginnings_are_not_shared(device, hybrid):
    """A page holds keys and values of its tokens, and not what the recurrence had become by then."""
    engine = build(hybrid, device, prefix_cache=True)
    ids = prompts([40])[0]
    first, again = (generate(engine, [ids], max_new_tokens=4)[0] for _ in range(2))
    assert (first.tokens, first.cached) == (again.tokens, again.cached)
    assert again.cached == 0
    engine.close()

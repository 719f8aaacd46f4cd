"""A hybrid model behind the engine: rows of recurrent state come and go with the sequences, and pages are shared as far
as a state behind them was kept."""

from __future__ import annotations

import numpy as np
import pytest

from rose.config import read_model_folder
from rose.errors import NonFinite
from tests.engine.generation.driving import PAGE, Reference, build, generate, prompts, staggered
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


@pytest.fixture
def states_every_8(monkeypatch):
    monkeypatch.setattr("rose.engine.generation.build.STATE_TOKENS", 8)


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


@pytest.mark.usefixtures("states_every_8")
@pytest.mark.parametrize("reuse", [False, True])
def test_pages_run_out(device, hybrid, expected, reuse):
    """A sequence that loses its pages begins again from nothing, or from a state that was kept."""
    sharing = {"prefix_cache": reuse, "state_cache_bytes": 1 << 22 if reuse else 0}
    engine = build(hybrid, device, pages=12, prefill_tokens=40, **sharing)  # of the attending layer: 48 of 4 tokens
    answers = generate(engine, [ids for ids, _ in expected], max_new_tokens=NEW)
    assert [answer.tokens for answer in answers] == [tokens for _, tokens in expected]
    assert engine.counters()["preemptions"] > 0
    engine.close()


def test_beginnings_are_not_shared_without_states(device, hybrid):
    """A page holds keys and values of its tokens, and not what the recurrence had become by then."""
    engine = build(hybrid, device, prefix_cache=False)
    ids = prompts([300])[0]
    first, again = (generate(engine, [ids], max_new_tokens=4)[0] for _ in range(2))
    assert (first.tokens, first.cached) == (again.tokens, again.cached)
    assert again.cached == 0
    engine.close()


def build_sharing(hybrid, device, **limits):
    """With some dozens of states to be found, on a GPU too."""
    return build(hybrid, device, **{"prefix_cache": True, "state_cache_bytes": 1 << 22, **limits})


@pytest.mark.usefixtures("states_every_8")
@pytest.mark.parametrize("graph_bytes", [0, 1 << 30], ids=["plain", "graphs"])
@pytest.mark.parametrize("prefill_tokens", [9, 33, 2048])
def test_beginnings_are_computed_once(device, hybrid, expected, prefill_tokens, graph_bytes):
    """The second time every prompt goes on from less than 8 tokens before its last page, and says the same."""
    engine = build_sharing(hybrid, device, prefill_tokens=prefill_tokens, graph_bytes=graph_bytes)
    for again in (False, True):
        for ids, tokens in expected:
            (answer,) = generate(engine, [ids], max_new_tokens=NEW)
            assert answer.tokens == tokens
            if again:
                last = (len(ids) - 1) // PAGE * PAGE
                assert max(0, last - 8 + 1) <= answer.cached <= (last if last >= 8 else 0)
    answers = generate(engine, [ids for ids, _ in expected], max_new_tokens=NEW)
    assert [answer.tokens for answer in answers] == [tokens for _, tokens in expected]
    assert engine.counters()["pages_used"] == 0
    engine.close()


@pytest.mark.usefixtures("states_every_8")
def test_what_is_shared_ends_where_prompts_differ(device, hybrid):
    reference = Reference(hybrid)
    engine = build_sharing(hybrid, device, prefill_tokens=24)
    system, *rest = prompts([61, 20, 7, 33], seed=5)
    for ids in [np.concatenate([system, tail]) for tail in rest]:
        (answer,) = generate(engine, [ids], max_new_tokens=NEW)
        assert answer.tokens == reference.greedy(ids.tolist(), NEW)
        assert answer.cached == (0 if ids[61] == rest[0][0] else 48), "the last chunk of 24 that all have in common"
    engine.close()


@pytest.mark.usefixtures("states_every_8")
def test_a_conversation_goes_on_from_what_was_generated(device, hybrid):
    reference = Reference(hybrid)
    engine = build_sharing(hybrid, device)
    ids, known = prompts([13], seed=9)[0], 0
    for turn in range(4):
        (answer,) = generate(engine, [ids], max_new_tokens=30)
        assert answer.tokens == reference.greedy(ids.tolist(), 30)
        # Of the turn before: its answer but the last token, which was never computed, in whole pages, and less than 8.
        assert answer.cached > known - 1 - PAGE - 8
        known = len(ids) + 30
        ids = np.concatenate([ids, np.array(answer.tokens, np.int32), prompts([3 + turn], seed=turn)[0]])
    engine.close()


@pytest.mark.usefixtures("states_every_8")
@pytest.mark.parametrize("seed", range(3))
def test_few_states_few_pages_and_many_who_come_and_go(device, hybrid, expected, seed):
    engine = build_sharing(
        hybrid, device, prefill_tokens=24, max_running=3, pages=12, state_cache_bytes=1 << 17, graph_bytes=0
    )
    assert engine.limits.saved_states == 4
    order = np.random.default_rng(seed).permutation(3 * len(expected)) % len(expected)
    work = [(expected[i][0], {"max_new_tokens": 2 + i * 2}) for i in order]
    for i, answer in zip(order, staggered(engine, work, seed), strict=True):
        assert answer.tokens == expected[i][1][: 2 + i * 2]
    assert engine.counters()["prefix_hits"] > 0
    engine.close()


@pytest.mark.usefixtures("states_every_8")
def test_states_of_a_sequence_with_a_value_that_is_not_finite_are_found_by_nobody(device, hybrid):
    reference = Reference(hybrid)
    engine = build_sharing(hybrid, device, prefill_tokens=24, graph_bytes=0)
    ids = prompts([60], seed=3)[0]
    (first,) = generate(engine, [ids], max_new_tokens=NEW)
    assert first.error is None
    pools = engine._side.states
    saved = engine.counters()["states_saved"]
    assert saved > 0
    for pool in pools._all:
        pool[:, engine.limits.max_running + 1 :] = np.nan
    (spoilt,) = generate(engine, [ids], max_new_tokens=NEW)
    assert isinstance(spoilt.error, NonFinite)
    assert engine.counters()["states_saved"] < saved
    (again,) = generate(engine, [ids], max_new_tokens=NEW)
    assert (again.tokens, again.cached) == (reference.greedy(ids.tolist(), NEW), 0)
    engine.close()

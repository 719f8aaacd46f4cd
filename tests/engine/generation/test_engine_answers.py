"""Tokens of a real tiny model are those of transformers, whatever the chunks, the company, the pages and the graphs."""

from __future__ import annotations

import numpy as np
import pytest

from rose.attention_backends.base import WorkspaceReport
from rose.engine.generation.buckets import GREEDY, Draw
from rose.engine.generation.request import Finish
from tests.engine.generation.driving import build, generate, prompts, staggered

LENGTHS = (1, 40, 5, 17, 90, 4, 33, 16)
NEW = 20


@pytest.fixture(scope="module")
def expected(reference):
    """(prompt, its continuation), and not a dull one."""
    found = [(ids, reference.greedy(ids.tolist(), NEW)) for ids in prompts(LENGTHS)]
    assert min(len(set(tokens)) for _, tokens in found) >= 5
    return found


def test_the_reference_is_a_plain_argmax(reference, expected):
    """transformers' generate against its own whole-sequence logits."""
    ids, tokens = expected[3]
    whole = reference.logits([*ids.tolist(), *tokens])
    assert whole[len(ids) - 1 : -1].argmax(-1).tolist() == tokens


def test_memory_of_attention_plans_is_counted(device, folder, monkeypatch):
    engine = build(folder, device)
    backend = engine._side.backend
    monkeypatch.setattr(backend, "release", lambda key: None, raising=False)
    monkeypatch.setattr(backend, "workspace", lambda: WorkspaceReport(device_bytes=9, limit_bytes=20), raising=False)
    counters = engine.counters()
    assert (counters["attention_device_bytes"], counters["attention_limit_bytes"]) == (9, 20)
    assert counters["attention_keys"] == 0
    engine.close()


@pytest.mark.parametrize("graph_bytes", [0, 1 << 30], ids=["plain", "graphs"])
@pytest.mark.parametrize(("prefill_tokens", "page_size"), [(9, 1), (9, 16), (33, 4), (64, 5), (2048, 16)])
def test_any_chunking(device, folder, expected, prefill_tokens, page_size, graph_bytes):
    limits = {"prefill_tokens": prefill_tokens, "page_size": page_size, "graph_bytes": graph_bytes}
    engine = build(folder, device, **limits)
    answers = generate(engine, [ids for ids, _ in expected], max_new_tokens=NEW)
    assert [answer.tokens for answer in answers] == [tokens for _, tokens in expected]
    assert {answer.finish for answer in answers} == {Finish.LENGTH}
    counters = engine.counters()
    assert counters["generated_tokens"] == NEW * len(LENGTHS)
    assert counters["prefill_tokens"] == sum(LENGTHS)
    assert (counters["graph_hits"] > 0) == (graph_bytes > 0)
    assert counters["pages_used"] == counters["running"] == counters["waiting"] == 0
    engine.close()


def test_alone_and_together(device, folder, expected):
    engine = build(folder, device, prefix_cache=False)
    for ids, tokens in expected:
        assert generate(engine, [ids], max_new_tokens=NEW)[0].tokens == tokens
    pairs = [expected[i] for i in (4, 1)]
    assert [a.tokens for a in generate(engine, [ids for ids, _ in pairs], max_new_tokens=NEW)] == [t for _, t in pairs]
    engine.close()


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_arrivals_and_aborts_at_any_time(device, folder, expected, seed, prefix_cache):
    engine = build(folder, device, prefill_tokens=24, max_running=5, pages=60 + 30 * seed, prefix_cache=prefix_cache)
    order = np.random.default_rng(seed).permutation(2 * len(expected)) % len(expected)
    work = [(expected[i][0], {"max_new_tokens": 5 + i * 2}) for i in order]
    answers = staggered(engine, work, seed)
    for i, answer in zip(order, answers, strict=True):
        assert answer.tokens == expected[i][1][: 5 + i * 2]
    assert engine.counters()["aborted_requests"] > 0
    assert engine.counters()["pages_used"] == 0
    engine.close()


def test_shared_beginnings_are_computed_once(device, folder, reference):
    engine = build(folder, device)
    common, tails = prompts([30], 5)[0], prompts([3, 9, 1], 6)
    items = [np.concatenate([common, tail]) for tail in tails]
    first = generate(engine, items[:1], max_new_tokens=NEW)[0]
    rest = generate(engine, items[1:], max_new_tokens=NEW)
    for ids, answer in zip(items, [first, *rest], strict=True):
        assert answer.tokens == reference.greedy(ids.tolist(), NEW)
    assert [first.cached, *(answer.cached for answer in rest)] == [0, 28, 28]  # full pages of 4
    again = generate(engine, items[:1], max_new_tokens=NEW)[0]
    assert (again.tokens, again.cached) == (first.tokens, 32)
    counters = engine.counters()
    assert counters["prefix_hits"] == 3
    assert counters["prefill_tokens"] == sum(map(len, items)) + 33 - (28 + 28 + 32)
    engine.close()


def test_a_conversation_goes_on_from_what_was_generated(device, folder, reference):
    engine = build(folder, device)
    ids = prompts([10])[0]
    for _ in range(3):
        answer = generate(engine, [ids], max_new_tokens=9)[0]
        assert answer.tokens == reference.greedy(ids.tolist(), 9)
        ids = np.concatenate([ids, np.array(answer.tokens, np.int32), prompts([2], len(ids))[0]])
    assert answer.cached >= 24
    engine.close()


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("pages", [30, 37, 50])
def test_pages_run_out(device, folder, expected, pages, prefix_cache):
    """Sequences lose their pages, start again from what they have, and nobody sees a difference."""
    engine = build(folder, device, pages=pages, prefill_tokens=40, prefix_cache=prefix_cache)
    answers = generate(engine, [ids for ids, _ in expected], max_new_tokens=NEW)
    assert [answer.tokens for answer in answers] == [tokens for _, tokens in expected]
    counters = engine.counters()
    assert counters["preemptions"] > 0
    assert counters["pages_used"] == 0
    engine.close()


def test_the_longest_sequence(device, folder, reference):
    engine = build(folder, device)
    ids = prompts([folder.max_tokens - 7])[0]
    answer = generate(engine, [ids], max_new_tokens=7)[0]
    assert (answer.tokens, answer.finish) == (reference.greedy(ids.tolist(), 7), Finish.LENGTH)
    engine.close()


def test_a_cache_of_one_sequence(device, folder, reference):
    """Every page is in use, the last token needs none."""
    engine = build(folder, device, pages=9)
    assert engine.limits.longest == 33
    items = prompts([23, 23], 8)
    answers = generate(engine, items, max_new_tokens=10)
    assert [a.tokens for a in answers] == [reference.greedy(ids.tolist(), 10) for ids in items]
    engine.close()


def test_warm_up_leaves_nothing_behind(device, folder, expected):
    engine = build(folder, device, max_running=4, prefill_tokens=64)
    keys = engine.decode_keys(folder.max_tokens, [GREEDY, Draw(sampled=True)])
    engine.warmup(keys)
    metrics = engine.graphs.metrics
    assert (metrics.captures, metrics.failed) == (len(keys), 0)
    assert len(keys) == 3 * 2
    answers = generate(engine, [ids for ids, _ in expected], max_new_tokens=NEW)
    assert [answer.tokens for answer in answers] == [tokens for _, tokens in expected]
    assert metrics.captures == len(keys)
    assert engine.expected_end is None
    engine.close()

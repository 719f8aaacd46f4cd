"""Batches with chunks of prompts in graphs: whatever the sizes before, the company and the draw, nobody sees that a
batch was rounded up, or that it ran by what another batch of its key had captured.

On the CPU a replay runs the captured forward again, with the host's numbers of the batch that was captured: whatever
the model or its attention takes from there instead of from the device comes out wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from rose.config import read_model_folder
from rose.engine.generation.buckets import GREEDY, Draw
from tests.engine.generation.driving import Driver, Reference, build, generate, prompts, staggered
from tests.support.tiny_qwen3_5 import tiny_qwen3_5

NEW = 8
LENGTHS = (3, 60, 17, 130, 5, 90, 1, 33)


def build_graphs(folder, **limits):
    return build(folder, "cpu", backend="triton_paged", **{"prefix_cache": False, "pages": 600, **limits})


def poison(engine) -> None:
    """Pages as another sequence may have left them; page 0 is written by dummies only."""
    backend, side = engine._side.backend, engine._side
    for layer in backend._cache.layers:
        for part in backend._cache.layer(layer):
            part[1:] = torch.nan
    if side.states is not None:
        for layer in side.model.recurrent.layers:
            side.states.conv(layer)[1:] = torch.nan
            side.states.recurrent(layer)[1:] = torch.nan


@contextmanager
def uninitialised_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def captured(engine, *, beside: bool = False) -> list:
    """Keys of captured batches with chunks of prompts; `beside`: with decoding sequences too."""
    return [key for key in engine.graphs._held if key.sequences > key.decodes and (key.decodes > 0 or not beside)]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    return read_model_folder(tiny_qwen3_5(tmp_path_factory.mktemp("lm") / "m", tied=False))


@pytest.fixture(scope="module", params=["dense", "hybrid"])
def served(request, folder):
    """(folder, transformers on it)"""
    if request.param == "hybrid":
        folder = request.getfixturevalue("hybrid")
        return folder, Reference(folder)
    return folder, request.getfixturevalue("reference")


def test_small_and_large_and_small_again(served):
    """One prompt at a time: the same few keys, by lengths that differ from those captured, over poisoned pages."""
    folder, reference = served
    engine = build_graphs(folder)
    with uninitialised_is_nan():
        for turn, length in enumerate([20, 7, 64, 180, 150, 64, 1, 190, 63, 20]):
            poison(engine)
            ids = prompts([length], turn)[0]
            answer = generate(engine, [ids], max_new_tokens=NEW)[0]
            assert answer.tokens == reference.greedy(ids.tolist(), NEW)
    assert {(key.tokens, key.sequences) for key in captured(engine)} == {(64, 2), (64, 1), (192, 2)}
    metrics = engine.graphs.metrics
    assert (metrics.failed, metrics.captures) == (0, len(captured(engine)) + 1)
    assert metrics.plain == 3 + 1  # the first hit of each of three keys, and of decoding alone
    engine.close()


@pytest.mark.parametrize("prefill_tokens", [9, 40, 100, 2048])
def test_any_chunking_in_any_company(served, prefill_tokens):
    folder, reference = served
    engine = build_graphs(folder, prefill_tokens=prefill_tokens)
    items = prompts(LENGTHS, prefill_tokens)
    with uninitialised_is_nan():
        for turn in range(3):
            poison(engine)
            order = np.random.default_rng(turn).permutation(len(items))
            answers = generate(engine, [items[i] for i in order], max_new_tokens=NEW)
            for i, answer in zip(order, answers, strict=True):
                assert answer.tokens == reference.greedy(items[i].tolist(), NEW)
    assert captured(engine)
    assert captured(engine, beside=True) or prefill_tokens == 2048
    assert engine.graphs.metrics.failed == 0
    counters = engine.counters()
    assert counters["prefill_tokens"] == 3 * sum(LENGTHS)
    assert counters["graph_hits"] > counters["batches"] // 3
    engine.close()


@pytest.mark.parametrize("seed", range(4))
def test_arrivals_and_aborts_and_lost_pages(served, seed):
    folder, reference = served
    engine = build_graphs(folder, prefill_tokens=24, max_running=5, pages=75)
    order = np.random.default_rng(seed).permutation(3 * len(LENGTHS)) % len(LENGTHS)
    items = prompts(LENGTHS, 3)
    work = [(items[i], {"max_new_tokens": 4 + i}) for i in order]
    for i, answer in zip(order, staggered(engine, work, seed), strict=True):
        assert answer.tokens == reference.greedy(items[i].tolist(), 4 + int(i))
    assert captured(engine, beside=True)
    assert engine.graphs.metrics.failed == 0
    engine.close()


def test_shared_beginnings(folder, reference):
    """A prompt that goes on from cached pages has fewer tokens in its batch than keys."""
    engine = build_graphs(folder, prefix_cache=True)
    common = prompts([70], 5)[0]
    items = [np.concatenate([common, tail]) for tail in prompts([3, 9, 1, 30, 3], 6)]
    answers = [generate(engine, [ids], max_new_tokens=NEW)[0] for ids in items]
    assert [answer.tokens for answer in answers] == [reference.greedy(ids.tolist(), NEW) for ids in items]
    assert [answer.cached for answer in answers[1:]] == [68] * 4
    assert captured(engine)
    engine.close()


def test_each_row_is_drawn_its_own_way(folder, reference):
    """Dummies stand between decoding sequences and chunks, and settings must not slip by one of them."""
    engine = build_graphs(folder, prefill_tokens=40)
    items = prompts([21, 30, 12, 50, 9, 44])
    first = reference.greedy(items[2].tolist(), 1)[0]
    ways = [
        {"temperature": 0.9, "seed": 5, "top_p": 0.9},
        {"logprobs": 2},
        {"stop_ids": (first,), "min_new_tokens": 3},
        {"temperature": 1.1, "seed": 6, "top_k": 5, "logprobs": 1},
        {},
        {"temperature": 0.8, "seed": 1 << 63, "min_p": 0.02},
    ]
    alone = [generate(engine, [ids], max_new_tokens=12, **way)[0] for ids, way in zip(items, ways, strict=True)]
    assert first not in alone[2].tokens[:3]
    for turn in range(5):
        driver = Driver(engine)
        order = np.random.default_rng(turn).permutation(len(items))
        numbers = {int(i): 0 for i in order}
        for i in order:
            numbers[int(i)] = driver.add(items[i], max_new_tokens=12, **ways[i])
            driver.wait()
            driver.step()
        answers = driver.run()
        for i, one in enumerate(alone):
            answer = answers[numbers[i]]
            assert answer.tokens == one.tokens
            for mine, theirs in zip(answer.news, one.news, strict=True):
                assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
                assert [token for token, _ in mine.top or ()] == [token for token, _ in theirs.top or ()]
    assert captured(engine, beside=True)
    engine.close()


def test_plain_captured_and_replayed_runs_are_bitwise_equal(folder):
    """The prompt's batch is the first of each generation, so its numbers are in the first token."""
    engine = build_graphs(folder)
    ids, other = prompts([50, 41])
    runs = []
    for turn in range(4):
        answer = generate(engine, [ids], max_new_tokens=2, logprobs=4)[0]
        runs.append([(new.token, new.logprob, tuple(new.top)) for new in answer.news])
        generate(engine, [other], max_new_tokens=2, logprobs=4)
        assert len(captured(engine)) == 1
        assert engine.graphs.metrics.plain == 2, turn
    assert runs[1:] == runs[:-1]
    engine.close()


def test_a_token_that_is_not_finite_ends_its_own_request(folder, reference):
    """Beside it, in the same graph, others are answered."""
    engine = build_graphs(folder, prefill_tokens=64)
    with torch.no_grad():
        engine._side.model.backbone.embed_tokens.weight[3] = torch.nan
    healthy = prompts([9, 30])
    bad = np.array([7, 3, 8], np.int32)
    for _ in range(4):
        answers = generate(engine, [healthy[0], bad, healthy[1]], max_new_tokens=6)
        assert answers[1].error is not None
        assert [a.tokens for a in answers[::2]] == [reference.greedy(ids.tolist(), 6) for ids in healthy]
    assert captured(engine)
    engine.close()


def test_warm_up_of_prompts(folder, reference, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    engine = build_graphs(folder, max_running=4, prefill_tokens=200)
    keys = engine.prompt_keys(4096, 0, [GREEDY, Draw(sampled=True)])
    # 64, 128, 192 and the budget of 200, each exactly full and with a dummy; the model takes 256.
    assert sorted({(key.tokens, key.sequences) for key in keys}) == [
        (n, s) for n in (64, 128, 192, 200) for s in (1, 2)
    ]
    assert len(keys) == 2 * 8
    engine.warmup(keys)
    metrics = engine.graphs.metrics
    assert (metrics.captures, metrics.failed) == (len(keys), 0)
    for length in (64, 1, 150, 192, 199):
        ids = prompts([length], length)[0]
        before = metrics.hits, metrics.plain
        answer = generate(engine, [ids], max_new_tokens=1)[0]
        assert answer.tokens == reference.greedy(ids.tolist(), 1)
        assert (metrics.hits, metrics.plain) == (before[0] + 1, before[1])
    engine.close()


def test_warm_up_of_a_prompt_beside_others(folder, reference, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    engine = build_graphs(folder, max_running=4)
    keys = engine.prompt_keys(0, 128, [GREEDY]) + engine.decode_keys(folder.max_tokens, [GREEDY])
    mixed = [key[:4] for key in keys if key.sequences > key.decodes]
    assert mixed == [(n, d + 2, d, 256) for n in (64, 128) for d in (1, 4)]
    engine.warmup(keys)
    metrics = engine.graphs.metrics
    assert (metrics.captures, metrics.failed) == (len(keys), 0)
    first, second = prompts([9, 50])
    driver = Driver(engine)
    numbers = [driver.add(first, max_new_tokens=40)]
    while len(driver.answers[1].tokens) < 3:
        driver.wait()
        driver.step()
    plain = metrics.plain
    numbers.append(driver.add(second, max_new_tokens=4))
    answers = driver.run()
    assert [answers[n].tokens for n in numbers] == [
        reference.greedy(first.tolist(), 40),
        reference.greedy(second.tolist(), 4),
    ]
    assert metrics.plain == plain
    engine.close()


def test_nothing_is_promised_where_prompts_are_not_captured(folder):
    engine = build(folder, "cpu")
    assert engine.prompt_keys(4096, 4096, [GREEDY]) == []
    generate(engine, prompts([30]), max_new_tokens=2)
    assert not [key for key in engine.graphs._seen if key.sequences > key.decodes]
    engine.close()
    plain = build_graphs(folder, graph_bytes=0)
    assert plain.prompt_keys(4096, 4096, [GREEDY]) == []
    plain.close()

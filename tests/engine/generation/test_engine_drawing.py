"""How tokens are drawn by the whole engine: seeds, log probabilities, end tokens, ids nobody may draw."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from rose.convert import load_generative
from rose.engine.generation.request import Finish
from tests.engine.generation.driving import Driver, build, generate, prompts, staggered

SAMPLED = {"temperature": 0.9, "max_new_tokens": 16}


@pytest.fixture
def engine(device, folder):
    built = build(folder, device)
    yield built
    built.close()


def test_a_seed_draws_the_same_tokens_whatever_the_company(device, folder, engine):
    ids = prompts([21])[0]
    settings = [SAMPLED, {**SAMPLED, "top_p": 0.8}, {**SAMPLED, "top_k": 9, "min_p": 0.01}]
    alone = [generate(engine, [ids], seed=7, **s)[0].tokens for s in settings]
    assert len({tuple(tokens) for tokens in alone}) == 3
    assert min(len(set(tokens)) for tokens in alone) > 5
    small = build(folder, device, pages=25, prefill_tokens=12, max_running=5)
    for crowded, seed in ((engine, 1), (engine, 2), (small, 3)):
        work = [(ids, {"seed": 7, **s}) for s in settings]
        work += [(other, {**SAMPLED, "seed": 100 + n}) for n, other in enumerate(prompts([5, 30, 12, 21]))]
        work += [(ids, {"max_new_tokens": 16})]
        order = np.random.default_rng(seed).permutation(len(work))
        answers = staggered(crowded, [work[i] for i in order], seed)
        found = {int(i): answer.tokens for i, answer in zip(order, answers, strict=True)}
        assert [found[i] for i in range(3)] == alone
    assert small.counters()["preemptions"] > 0
    small.close()


def test_a_top_k_beyond_any_vocabulary_is_all_of_it(engine):
    """The message holds 32 bits without a sign; whoever shares its batch goes on."""
    ids = prompts([21])[0]
    everything = generate(engine, [ids], seed=7, **SAMPLED)[0].tokens
    driver = Driver(engine)
    bystander = driver.add(ids, max_new_tokens=16)
    for top_k in (1 << 31, (1 << 32) - 1):
        driver.add(ids, seed=7, top_k=top_k, **SAMPLED)
    answers = driver.run()
    assert [answer.tokens for id_, answer in answers.items() if id_ != bystander] == [everything] * 2
    assert len(answers[bystander].tokens) == 16


def test_seeds_differ_and_none_draws_its_own(engine):
    ids = prompts([21])[0]
    driver = Driver(engine)
    for seed in (*range(5), (1 << 64) - 1, 1 << 63, None, None, None):
        driver.add(ids, seed=seed, **SAMPLED)
    assert len({tuple(answer.tokens) for answer in driver.run().values()}) == 10


def test_greedy_beside_sampled(engine, reference):
    """One batch draws both ways."""
    items = prompts([9, 9, 30])
    driver = Driver(engine)
    for n, ids in enumerate(items):
        driver.add(ids, seed=n, **SAMPLED)
        driver.add(ids, max_new_tokens=16)
    answers = driver.run()
    assert [answers[2 * n + 2].tokens for n in range(3)] == [reference.greedy(ids.tolist(), 16) for ids in items]


def test_top_k_of_one_is_greedy(engine, reference):
    ids = prompts([13])[0]
    answer = generate(engine, [ids], seed=3, temperature=1.7, top_k=1, max_new_tokens=16)[0]
    assert answer.tokens == reference.greedy(ids.tolist(), 16)


def test_the_draws_follow_the_probabilities(engine, reference):
    """First tokens of 400 seeds against the softmax; chi-square over the likely ones, 1 - 1e-6."""
    ids = prompts([6])[0]
    driver = Driver(engine)
    for seed in range(400):
        driver.add(ids, seed=seed, temperature=0.7, max_new_tokens=1)
    first = [answer.tokens[0] for answer in driver.run().values()]
    chances = (reference.logits(ids.tolist())[-1] / 0.7).softmax(-1).double()
    likely = chances.topk(6).indices.tolist()
    expected = [400 * float(chances[i]) for i in likely]
    expected.append(400 - sum(expected))
    found = [first.count(i) for i in likely]
    found.append(400 - sum(found))
    assert min(expected) > 5
    assert sum((a - b) ** 2 / b for a, b in zip(found, expected, strict=True)) < 38.3


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 4}], ids=["greedy", "sampled"])
def test_logprobs_are_those_of_the_plain_softmax(engine, reference, sampling):
    items = prompts([9, 40, 3, 12])
    wanted = [0, 5, 20, None]
    driver = Driver(engine)
    for ids, logprobs in zip(items, wanted, strict=True):
        driver.add(ids, logprobs=logprobs, max_new_tokens=10, **sampling)
    answers = driver.run()
    for request_id, (ids, count) in enumerate(zip(items, wanted, strict=True), 1):
        answer = answers[request_id]
        truth = reference.logits([*ids.tolist(), *answer.tokens])[len(ids) - 1 : -1].log_softmax(-1)
        for row, new in zip(truth, answer.news, strict=True):
            if count is None:
                assert (new.logprob, new.top) == (None, ())
                continue
            assert new.logprob == pytest.approx(float(row[new.token]), abs=1e-4)
            best = row.topk(count)
            assert [i for i, _ in new.top] == best.indices.tolist()
            np.testing.assert_allclose([value for _, value in new.top], best.values, rtol=0, atol=1e-4)


def test_end_tokens(engine, reference):
    """Reported, and nothing comes behind them."""
    ids = prompts([17])[0]
    tokens = reference.greedy(ids.tolist(), 30)
    end = tokens[6]
    cut = tokens[: tokens.index(end) + 1]
    stopped = generate(engine, [ids], max_new_tokens=30, stop_ids=(end,), ignore_eos=True)[0]
    assert (stopped.tokens, stopped.finish) == (cut, Finish.STOP)
    # The batch behind it was launched before anybody knew, unless the first was done before the host, which may have to
    # wait for a core, launched the next. The count itself is tested without a clock, in test_scheduler_plans.py.
    assert engine.counters()["wasted_tokens"] in (0, 1)


def test_the_models_own_end_tokens(device, folder, reference):
    ids = prompts([17])[0]
    tokens = reference.greedy(ids.tolist(), 30)
    end = tokens[6]
    cut = tokens[: tokens.index(end) + 1]
    engine = build(folder, device, end_ids=(end,))
    heeded, ignored = (generate(engine, [ids], max_new_tokens=30, ignore_eos=i)[0] for i in (False, True))
    assert (heeded.tokens, heeded.finish) == (cut, Finish.STOP)
    assert (ignored.tokens, ignored.finish) == (tokens, Finish.LENGTH)
    engine.close()


@pytest.mark.parametrize("ends", [1, 3, 40])
def test_no_end_token_before_min_new_tokens(device, folder, reference, ends):
    """Banned by their logits, so that the others' chances are what they are: a greedy rerun without the banned ones."""
    ids = prompts([17])[0]
    free = reference.greedy(ids.tolist(), 30)
    banned = sorted(set(free[:5]) | set(range(ends)))
    context = ids.tolist()
    expected: list[int] = []
    for step in range(12):
        logits = reference.logits(context)[-1].clone()
        if step < 8:
            logits[banned] = -torch.inf
        expected.append(int(logits.argmax()))
        context.append(expected[-1])
        if step >= 8 and expected[-1] in banned:
            break
    engine = build(folder, device, end_ids=banned[:2])
    settings = {"max_new_tokens": 12, "min_new_tokens": 8, "stop_ids": tuple(banned[2:]), "ignore_eos": False}
    driver = Driver(engine)
    mine = driver.add(ids, logprobs=1, **settings)
    other = driver.add(ids, max_new_tokens=20)
    answers = driver.run()
    assert answers[mine].tokens == expected
    assert answers[other].tokens == free[:20]
    # What was banned has its own probability all the same.
    truth = reference.logits(ids.tolist())[-1].log_softmax(-1)
    assert answers[mine].news[0].top[0][0] == free[0]
    assert answers[mine].news[0].logprob == pytest.approx(float(truth[expected[0]]), abs=1e-4)
    engine.close()


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.5}, {"logprobs": 3}], ids=str)
def test_rows_past_the_tokenizers_vocabulary_are_never_drawn(device, folder, sampling):
    model = load_generative(folder, device, torch.float32)
    model.lm_head.weight.data[folder.generation.vocab_limit :] *= 100
    ids = prompts([9])[0]
    engine = build(folder, device, model=model)
    for answer in generate(engine, [ids] * 4, max_new_tokens=30, **sampling):
        assert max(answer.tokens) < folder.generation.vocab_limit
        assert all(i < folder.generation.vocab_limit for new in answer.news for i, _ in new.top)
    engine.close()
    everything = dataclasses.replace(folder.generation, vocab_limit=model.vocab_size)
    engine = build(dataclasses.replace(folder, generation=everything), device, model=model)
    assert max(generate(engine, [ids], max_new_tokens=30)[0].tokens) >= folder.generation.vocab_limit
    engine.close()

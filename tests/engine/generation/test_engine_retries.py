"""A forward that fails costs time: its sequences go on where they were, and only what fails alone is told so."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rose.config import read_model_folder
from rose.convert import load_generative
from rose.engine.generation.request import Finish
from rose.errors import InternalError
from tests.engine.generation.breaking import breaking, is_mixed, once, real_sequences
from tests.engine.generation.driving import Driver, Reference, build, generate, prompts, staggered
from tests.support.tiny_qwen3_5 import tiny_qwen3_5

LENGTHS = (9, 30, 17, 5)
NEW = 14
PLAIN_AND_GRAPHS = pytest.mark.parametrize("graph_bytes", [0, 1 << 30], ids=["plain", "graphs"])


@pytest.fixture(scope="module")
def device():
    """Graphs are stood for by their forward, run again: on a device, a replay would not ask the model."""
    return "cpu"


@pytest.fixture
def model(folder, device):
    return load_generative(folder, device, torch.float32)


@pytest.fixture
def expected(reference):
    return [(ids, reference.greedy(ids.tolist(), NEW)) for ids in prompts(LENGTHS)]


def found_alone(company: list[int]) -> bool:
    """All together, then the one at fault; each time perhaps with the batch that was launched behind it."""
    return company in ([4, 1], [4, 4, 1], [4, 1, 1], [4, 4, 1, 1])


def all_is_back(engine) -> bool:
    counters = engine.counters()
    return engine.idle and counters["pages_used"] == 0 and engine._scheduler._running.free_lanes == 8


@PLAIN_AND_GRAPHS
@pytest.mark.parametrize("call", [1, 2, 3, 6, 11])
def test_a_forward_that_fails_once_is_not_heard_of(device, folder, model, expected, call, graph_bytes):
    """Prompts, chunks beside decoding sequences, and a batch that was launched before the failure was known."""
    limits = {"prefill_tokens": 24, "graph_bytes": graph_bytes}
    engine, model = breaking(folder, device, model, lambda n, batch: n == call, **limits)
    answers = generate(engine, [ids for ids, _ in expected], max_new_tokens=NEW)
    assert [(answer.tokens, answer.error) for answer in answers] == [(tokens, None) for _, tokens in expected]
    counters = engine.counters()
    assert counters["failed_batches"] == model.broken == 1
    assert counters["retries"] == model.company[0]
    assert counters["non_finite_requests"] == counters["preemptions"] == 0
    assert all_is_back(engine)
    engine.close()


@pytest.mark.gpu
@pytest.mark.parametrize("call", [1, 6])
def test_on_a_device_too(folder, expected, call):
    """What the broken launch has queued writes NaN to pages and lanes that others have by then."""
    model = load_generative(folder, "cuda", torch.float32)
    engine, model = breaking(folder, "cuda", model, lambda n, batch: n == call, prefill_tokens=24, graph_bytes=0)
    answers = generate(engine, [ids for ids, _ in expected], max_new_tokens=NEW)
    assert [(answer.tokens, answer.error) for answer in answers] == [(tokens, None) for _, tokens in expected]
    assert engine.counters()["failed_batches"] == model.broken == 1
    assert all_is_back(engine)
    engine.close()


@PLAIN_AND_GRAPHS
def test_failures_at_any_time_beside_arrivals_and_aborts(device, folder, model, reference, graph_bytes):
    """Now and then a forward fails if it has company; few pages, so that some are preempted."""
    lengths = [9, 30, 17, 5, 1, 40, 22, 12]
    work = [(ids, {"max_new_tokens": 10}) for ids in prompts(lengths, 3)]
    for seed in range(3):
        limits = {"pages": 40, "prefill_tokens": 20, "max_running": 5, "graph_bytes": graph_bytes}
        engine, model = breaking(
            folder, device, model, lambda n, batch: n % 31 == 9 and real_sequences(batch) > 1, **limits
        )
        for (ids, _), answer in zip(work, staggered(engine, work, seed), strict=True):
            assert answer.error is None
            assert answer.tokens == reference.greedy(ids.tolist(), 10)
        assert model.broken > 0
        assert engine.counters()["pages_used"] == 0
        engine.close()
        model = model._model


@pytest.mark.parametrize("sampling", [{"temperature": 0.9}, {"temperature": 0.8, "top_p": 0.9, "logprobs": 2}], ids=str)
def test_seeds_draw_what_they_would_have_drawn(device, folder, model, sampling):
    items = prompts(LENGTHS)

    def run(engine):
        driver = Driver(engine)
        ids = [driver.add(item, seed=n, max_new_tokens=NEW, **sampling) for n, item in enumerate(items)]
        answers = driver.run()
        engine.close()
        return [answers[i] for i in ids]

    untouched = run(build(folder, device, model=model))
    engine, model = breaking(folder, device, model, lambda n, batch: n in (1, 8, 21) and real_sequences(batch) > 1)
    for answer, other in zip(run(engine), untouched, strict=True):
        assert answer.tokens == other.tokens
        assert len(set(answer.tokens)) > 5
        found, wanted = ([new.logprob for new in a.news if new.logprob is not None] for a in (answer, other))
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)
    assert model.broken >= 2


def unused_token(expected) -> int:
    used = {i for ids, tokens in expected for i in (*ids.tolist(), *tokens)}
    return next(i for i in range(5, 400) if i not in used)


@PLAIN_AND_GRAPHS
@pytest.mark.parametrize("prefill_tokens", [16, 200])
def test_a_prompt_that_always_fails_is_the_only_one_to_be_told(
    device, folder, model, expected, prefill_tokens, graph_bytes
):
    """Whichever chunk of it fails. Two of them, so that each is tried alone beside another that is at fault."""
    poison = unused_token(expected)
    limits = {"prefill_tokens": prefill_tokens, "graph_bytes": graph_bytes}
    engine, model = breaking(folder, device, model, lambda n, batch: bool((batch.ids == poison).any()), **limits)
    driver = Driver(engine)
    bad = np.concatenate([prompts([33], 5)[0], np.array([poison], np.int32), expected[0][0]])
    good = [driver.add(ids, max_new_tokens=NEW) for ids, _ in expected[:2]]
    bads = [driver.add(ids, max_new_tokens=NEW) for ids in (bad, bad[20:])]
    good += [driver.add(ids, max_new_tokens=NEW) for ids, _ in expected[2:]]
    answers = driver.run()
    assert [answers[i].tokens for i in good] == [tokens for _, tokens in expected]
    assert all(answers[i].error is None for i in good)
    for i in bads:
        assert isinstance(answers[i].error, InternalError)
        assert answers[i].error.message == "a forward failed: ArithmeticError: the forward broke"
        assert answers[i].tokens == []
    assert model.company.count(1) >= 2  # each alone once
    # With each failure a batch behind it may be on its way, of the same sequences.
    assert model.broken <= 8
    assert engine.counters()["failed_batches"] == model.broken
    assert all_is_back(engine)
    engine.close()


def test_a_token_that_always_fails_ends_its_request_behind_those_that_were_told(device, folder, model, expected):
    """It is drawn in the middle of an answer, when tokens of all of them have been handed out."""
    prompt, tokens = expected[2]
    others = {i for at, (ids, found) in enumerate(expected) if at != 2 for i in (*ids.tolist(), *found)}
    turn = next(t for n, t in enumerate(tokens[4:], 4) if t not in others and t not in (*prompt.tolist(), *tokens[:n]))
    engine, model = breaking(folder, device, model, lambda n, batch: bool((batch.ids == turn).any()))
    answers = generate(engine, [ids for ids, _ in expected], max_new_tokens=NEW)
    for at, (answer, (_, wanted)) in enumerate(zip(answers, expected, strict=True)):
        assert answer.tokens == (wanted[: tokens.index(turn) + 1] if at == 2 else wanted)
        assert (answer.error is None) == (at != 2)
    assert found_alone(model.company)
    assert engine.counters()["retries"] == 4
    assert all_is_back(engine)
    engine.close()


def test_a_request_that_only_fails_to_decode_is_found_too(device, folder, model, expected):
    """Its prompt is computed alone without a fault; the decoding step behind it is not."""

    def breaks(call, batch):
        decodes = batch.paged.decodes
        return bool((batch.paged.kv_lengths[:decodes] > 60).any()) and call > 4

    engine, model = breaking(folder, device, model, breaks, graph_bytes=0)
    long = prompts([61], 7)[0]
    answers = generate(engine, [ids for ids, _ in expected[:3]] + [long], max_new_tokens=NEW)
    assert [(a.tokens, a.error) for a in answers[:3]] == [(tokens, None) for _, tokens in expected[:3]]
    assert isinstance(answers[3].error, InternalError)
    wanted = Reference(folder).greedy(long.tolist(), NEW)
    assert 0 < len(answers[3].tokens) < NEW
    assert answers[3].tokens == wanted[: len(answers[3].tokens)]
    assert found_alone(model.company)
    engine.close()


@PLAIN_AND_GRAPHS
def test_a_mixed_batch(device, folder, model, expected, graph_bytes):
    limits = {"prefill_tokens": 24, "graph_bytes": graph_bytes, "backend": "torch_paged"}
    engine, model = breaking(folder, device, model, once(is_mixed), **limits)
    driver = Driver(engine)
    ids = [driver.add(expected[0][0], max_new_tokens=NEW)]
    while len(driver.answers[ids[0]].tokens) < 3:
        driver.wait()
        driver.step()
    ids += [driver.add(prompt, max_new_tokens=NEW) for prompt, _ in expected[1:]]
    answers = driver.run()
    assert model.broken == 1
    assert [(answers[i].tokens, answers[i].error) for i in ids] == [(tokens, None) for _, tokens in expected]
    engine.close()


def test_prefixes_are_shared_and_nothing_of_a_failed_batch_is(device, folder, model, reference):
    """What it computed is NaN here; pages that good batches filled before are found by the retry."""
    beginning = prompts([40], 2)[0]
    items = [np.concatenate([beginning, tail]) for tail in prompts([3, 8, 30])]
    engine, model = breaking(folder, device, model, lambda n, batch: n == 3, prefill_tokens=32)
    driver = Driver(engine)
    ids = [driver.add(item, max_new_tokens=NEW) for item in items]
    answers = driver.run()
    for i, item in zip(ids, items, strict=True):
        assert (answers[i].tokens, answers[i].error) == (reference.greedy(item.tolist(), NEW), None)
    assert model.broken == 1
    again = generate(engine, items, max_new_tokens=NEW)
    assert [answer.tokens for answer in again] == [reference.greedy(item.tolist(), NEW) for item in items]
    assert all(answer.cached >= 40 for answer in again)
    assert engine.counters()["recomputed_tokens"] > 0
    assert engine.counters()["prefix_tokens_reused"] > 3 * 40
    engine.close()


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    return read_model_folder(tiny_qwen3_5(tmp_path_factory.mktemp("lm") / "m", tied=False))


@pytest.fixture(scope="module")
def hybrid_expected(hybrid):
    reference = Reference(hybrid)
    return [(ids, reference.greedy(ids.tolist(), NEW)) for ids in prompts((1, 70, 5, 33))]


@PLAIN_AND_GRAPHS
@pytest.mark.parametrize("calls", [{1}, {3}, {8}, {2, 12, 24}], ids=str)
def test_recurrent_states_are_built_anew(device, hybrid, hybrid_expected, calls, graph_bytes):
    """Their rows are garbage after a failure; a hybrid begins at its first token again."""
    limits = {"prefill_tokens": 33, "graph_bytes": graph_bytes}
    model = load_generative(hybrid, device, torch.float32)

    def breaks(call, batch):
        return call in calls and (call < 9 or real_sequences(batch) > 1)

    engine, model = breaking(hybrid, device, model, breaks, **limits)
    answers = generate(engine, [ids for ids, _ in hybrid_expected], max_new_tokens=NEW)
    assert [(a.tokens, a.error) for a in answers] == [(tokens, None) for _, tokens in hybrid_expected]
    assert model.broken >= 1
    engine.close()


def test_what_fails_in_company_only_ends_after_some_tries(device, folder, model, reference):
    """Nobody is found guilty, and the engine does not go on computing prompts for ever."""
    engine, model = breaking(folder, device, model, lambda n, batch: real_sequences(batch) > 1)
    items = prompts([9, 30, 17])
    answers = generate(engine, items, max_new_tokens=60)
    assert engine.counters()["retries"] == 4 * 3
    assert 5 <= model.broken <= 10
    assert model.calls < 60
    for ids, answer in zip(items, answers, strict=True):
        assert isinstance(answer.error, InternalError)
        # Each time it was tried again it went on by two tokens.
        assert len(answer.tokens) == 8
        assert answer.tokens == reference.greedy(ids.tolist(), 8)
    assert all_is_back(engine)
    alone = generate(engine, items[:1], max_new_tokens=5)[0]
    assert (alone.tokens, alone.error) == (reference.greedy(items[0].tolist(), 5), None)
    engine.close()


def test_what_others_did_does_not_count(device, folder, model, reference):
    """More poisoned requests come by than anybody's own failures would be forgiven."""
    expected = [(ids, reference.greedy(ids.tolist(), 60)) for ids in prompts(LENGTHS)]
    poison = unused_token(expected)
    engine, model = breaking(folder, device, model, lambda n, batch: bool((batch.ids == poison).any()))
    driver = Driver(engine)
    mine = [driver.add(ids, max_new_tokens=60) for ids, _ in expected]
    for _ in range(7):
        bad = driver.add(np.array([poison], np.int32))
        while driver.answers[bad].error is None:
            driver.wait()
            driver.step()
    assert all(driver.answers[i].finish is Finish.NONE for i in mine)
    answers = driver.run()
    assert engine.counters()["retries"] == 7 * 5
    assert [(answers[i].tokens, answers[i].error) for i in mine] == [(tokens, None) for _, tokens in expected]
    engine.close()


def test_nor_what_others_did_who_are_gone_before_they_are_found(device, folder, model, reference):
    """Each client hangs up as soon as the batch of its request has failed, which is tried after all others."""
    ids = prompts([9])[0]
    expected = [(ids, reference.greedy(ids.tolist(), 60))]
    poison = unused_token(expected)
    engine, model = breaking(folder, device, model, lambda n, batch: bool((batch.ids == poison).any()))
    driver = Driver(engine)
    mine = driver.add(ids, max_new_tokens=60)
    for rounds in range(1, 8):
        while len(driver.answers[mine].tokens) < 4 * rounds:
            driver.wait()
            driver.step()
            assert driver.answers[mine].error is None
        bad = driver.add(np.array([poison, poison], np.int32))
        retries = engine.counters()["retries"]
        while engine.counters()["retries"] == retries:
            driver.wait()
            driver.step()
        assert engine.abort(bad)
    answer = driver.run()[mine]
    assert model.company.count(2) >= 7
    assert (answer.tokens, answer.error) == (expected[0][1], None)
    engine.close()


def test_an_engine_whose_every_forward_fails_comes_to_an_end(device, folder, model):
    engine, model = breaking(folder, device, model, lambda n, batch: True)
    driver = Driver(engine)
    ids = [driver.add(item) for item in prompts(LENGTHS)]
    answers = driver.run()
    assert all(isinstance(answers[i].error, InternalError) and not answers[i].tokens for i in ids)
    # All together, then each alone; behind each batch another may be on its way.
    assert 5 <= model.broken <= 10
    assert engine.counters()["retries"] == 4
    assert all_is_back(engine)
    engine.close()


def test_what_cannot_be_staged(folder, reference, monkeypatch, caplog):
    engine = build(folder, "cpu")
    write, calls = engine._staging.write, []

    def fails(slot, plan):
        calls.append(len(plan.chunks))
        if len(calls) in failing:
            raise ZeroDivisionError("no room")
        return write(slot, plan)

    monkeypatch.setattr(engine._staging, "write", fails)
    items = prompts([9, 12])
    failing = {1, 8}
    answers = generate(engine, items, max_new_tokens=5)
    assert [answer.tokens for answer in answers] == [reference.greedy(ids.tolist(), 5) for ids in items]
    assert "a batch of 2 sequences failed, 2 are tried again alone and 0 have failed: ZeroDivisionError" in caplog.text
    failing = set(range(100))
    answer = generate(engine, items[:1])[0]
    assert isinstance(answer.error, InternalError)
    failing = set()
    assert generate(engine, items[:1], max_new_tokens=5)[0].tokens == reference.greedy(items[0].tolist(), 5)
    engine.close()


def test_aborted_and_overdue_requests_leave_their_trial(device, folder, model, expected):
    engine, model = breaking(folder, device, model, lambda n, batch: n == 4)
    driver = Driver(engine)
    ids = [driver.add(prompt, max_new_tokens=NEW) for prompt, _ in expected]
    while not engine.counters()["retries"]:
        driver.wait()
        driver.step()
    before = {i: len(driver.answers[i].tokens) for i in ids}
    assert engine.abort(ids[0])
    assert engine.abort(ids[2])
    answers = driver.run()
    assert [len(answers[i].tokens) for i in (ids[0], ids[2])] == [before[ids[0]], before[ids[2]]]
    assert [answers[i].tokens for i in (ids[1], ids[3])] == [expected[1][1], expected[3][1]]
    assert all_is_back(engine)
    engine.close()


def test_a_step_tells_of_failed_batches(folder, model):
    """Whoever serves asks then whether the device lives, although no request has ended."""
    engine, _ = breaking(folder, "cpu", model, lambda n, batch: n == 1)
    driver = Driver(engine)
    for item in prompts([9, 12]):
        driver.add(item, max_new_tokens=3)
    steps = []
    while not engine.idle:
        driver.wait()
        steps.append(engine.step())
    assert [(step.failed_batches, step.retried) for step in steps if step.failed_batches] == [(1, 2)]
    assert not any(step.failed for step in steps)
    engine.close()

"""What goes wrong ends the requests it concerns and no others, and the engine goes on as if nothing had happened."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest
import torch

from rose.config import EngineConfig
from rose.convert import load_generative
from rose.engine.generation.build import build_generation_engine
from rose.engine.generation.engine import GenerationEngine
from rose.engine.generation.request import Finish, GenerateRequest, Sampling
from rose.engine.generation.states import StatePools
from rose.errors import DeadlineExceeded, InternalError, InvalidInput, NonFinite, StartupError
from rose.models.base import RecurrentSpec
from tests.engine.fake_model import ManualExecutor
from tests.engine.generation.driving import Driver, build, generate, prompts


def poisoned(folder, device, token):
    """The model with one token's embedding not a number."""
    model = load_generative(folder, device, torch.float32)
    with torch.no_grad():
        model.backbone.embed_tokens.weight[token] = torch.nan
    return model


@pytest.mark.parametrize("graph_bytes", [0, 1 << 30], ids=["plain", "graphs"])
def test_logits_that_are_not_finite_end_their_own_request(device, folder, reference, graph_bytes):
    """A prompt that starts as the bad one does is served all the same: pages are not offered before they are looked at,
    and within a chunk even what came before the bad token may be spoilt."""
    healthy = prompts([9, 30, 17, 5])
    used = {i for ids in healthy for i in (*ids.tolist(), *reference.greedy(ids.tolist(), 20))}
    poison = next(i for i in range(400) if i not in used)
    bad = np.concatenate([healthy[1], np.array([poison], np.int32), healthy[0]])
    # A small cache, so that pages full of NaN serve others at once.
    limits = {"pages": 45, "prefill_tokens": 48, "graph_bytes": graph_bytes}
    engine = build(folder, device, model=poisoned(folder, device, poison), **limits)
    for _ in range(3):
        driver = Driver(engine)
        for ids in healthy:
            driver.add(ids, max_new_tokens=20)
            driver.add(bad, max_new_tokens=20, logprobs=2)
        answers = driver.run()
        for n, ids in enumerate(healthy):
            assert answers[2 * n + 1].tokens == reference.greedy(ids.tolist(), 20)
            failed = answers[2 * n + 2]
            assert isinstance(failed.error, NonFinite)
            assert "new token 0 " in failed.error.message
            assert failed.tokens == []
    counters = engine.counters()
    assert counters["non_finite_requests"] == 12
    assert counters["pages_used"] == counters["failed_batches"] == 0
    engine.close()


def test_a_token_in_the_middle_that_gives_nan(device, folder, reference):
    """The sequence draws the poisoned id itself; what came before it was good, and was reported."""
    ids = prompts([17])[0]
    tokens = reference.greedy(ids.tolist(), 20)
    turn = tokens[8]
    assert turn not in ids
    count = tokens.index(turn) + 1
    engine = build(folder, device, model=poisoned(folder, device, turn))
    answer = generate(engine, [ids], max_new_tokens=20)[0]
    assert answer.tokens == tokens[:count]
    assert isinstance(answer.error, NonFinite)
    assert f"new token {count} " in answer.error.message
    engine.close()


def test_deadlines(device, folder, reference):
    engine = build(folder, device, max_running=1, prefill_tokens=64)
    items = prompts([9, 12, 5])
    driver = Driver(engine)
    begun = driver.add(items[0], max_new_tokens=100)
    never = driver.add(items[1], deadline=time.monotonic() - 1e-3)
    last = driver.add(items[2], max_new_tokens=5)
    while len(driver.answers[begun].tokens) < 5:
        driver.wait()
        driver.step()
    engine._scheduler._deadlines.push(_with_deadline(engine, begun))
    answers = driver.run()
    assert isinstance(answers[begun].error, DeadlineExceeded)
    assert 5 <= len(answers[begun].tokens) <= 7
    assert answers[begun].tokens == reference.greedy(items[0].tolist(), 100)[: len(answers[begun].tokens)]
    assert isinstance(answers[never].error, DeadlineExceeded)
    assert answers[never].tokens == []
    assert answers[last].tokens == reference.greedy(items[2].tolist(), 5)
    assert engine.metrics.expired_requests == 2
    engine.close()


def _with_deadline(engine, request_id):
    sequence = engine._scheduler._open[request_id]
    sequence.request = dataclasses.replace(sequence.request, deadline=time.monotonic())
    return sequence


def test_aborted_requests_are_never_heard_of_again(device, folder):
    engine = build(folder, device)
    driver = Driver(engine)
    ids = [driver.add(item, max_new_tokens=50) for item in prompts([9, 30, 4])]
    for _ in range(6):
        driver.wait()
        driver.step()
    before = {i: len(driver.answers[i].tokens) for i in ids}
    assert [engine.abort(i) for i in (ids[0], ids[0], 99)] == [True, False, False]
    driver.run()
    assert len(driver.answers[ids[0]].tokens) == before[ids[0]]
    assert len(driver.answers[ids[1]].tokens) == 50
    assert engine.metrics.aborted_requests == 1
    engine.close()


def test_bad_requests_are_refused_by_name(device, folder):
    engine = build(folder, device)
    ids = prompts([9])[0]
    cases = [
        (ids, {"max_new_tokens": folder.max_tokens}, "max_new_tokens"),
        (prompts([folder.max_tokens])[0], {}, "prompt"),
        (np.array([1, folder.architecture.vocab_size], np.int32), {}, "prompt"),
        (ids[:0], {}, "prompt"),
        (ids, {"temperature": -1.0}, "temperature"),
        (ids, {"top_p": 0.0}, "top_p"),
        (ids, {"seed": 1 << 64}, "seed"),
    ]
    for prompt, sampling, param in cases:
        settings = {"max_new_tokens": 4, "temperature": 0.0, **sampling}
        with pytest.raises(InvalidInput) as caught:
            engine.add(GenerateRequest(1, prompt, Sampling(**settings)))
        assert caught.value.param == param
    assert engine.idle
    engine.close()


class TestTwoInFlight:
    """On an executor that runs when it is told to."""

    @pytest.fixture
    def engine(self, folder):
        built = build(folder, "cpu", graph_bytes=0)
        built.executor.close()
        return GenerationEngine(built._side, built.limits, ManualExecutor())

    def test_a_batch_is_launched_before_the_tokens_of_the_one_before_it(self, engine, reference):
        ids = prompts([17])[0]
        engine.add(GenerateRequest(1, ids, Sampling(max_new_tokens=3, temperature=0.0)))
        assert (engine.queued_tokens, engine.queued_requests, engine.in_flight) == (17, 1, 0)
        assert engine.wake_at() == -np.inf
        first = engine.step()
        assert (first.launched, list(first.started), first.tokens) == (True, [1], [])
        assert (engine.queued_tokens, engine.queued_requests, engine.in_flight) == (0, 0, 1)
        assert engine.step().launched
        assert engine.in_flight == 2
        assert engine.wake_at() is None
        assert not engine.step().launched
        assert not engine.ready()
        tokens: list[int] = []
        with torch.inference_mode():
            while not engine.idle:
                engine.executor.run_one()
                assert engine.ready()
                step = engine.step()
                assert engine.in_flight_seconds >= 0
                tokens += [new.token for new in step.tokens]
                assert len(step.tokens) == 1
        assert tokens == reference.greedy(ids.tolist(), 3)
        assert step.tokens[0].finish is Finish.LENGTH
        assert engine.metrics.batches == 3  # max_new_tokens is known beforehand: not one too many
        assert (engine.expected_end, engine.wake_at()) == (None, None)

    def test_the_second_waits_for_the_first_to_be_about_to_end(self, engine):
        """Once its time is known: whoever arrives meanwhile is in the next batch."""
        engine.add(GenerateRequest(1, prompts([17])[0], Sampling(max_new_tokens=50, temperature=0.0)))
        with torch.inference_mode():
            for _ in range(4):
                engine.step()
                engine.executor.run_one(seconds=5.0)
            engine.step()
        assert engine.in_flight == 1
        end = engine.expected_end
        assert end is not None
        assert 3 < end - time.monotonic() <= 5
        assert engine.wake_at() == pytest.approx(end - 1.25)
        assert not engine.step().launched
        engine.add(GenerateRequest(2, prompts([17])[0], Sampling(max_new_tokens=5), time.monotonic() + 1))
        assert engine.wake_at() < end - 1.25

    def test_a_prompt_waits_for_nothing_but_the_next_batch(self, engine):
        """Alone it is launched by the step after its arrival, whatever was learned before; beside others it is in the
        very next batch."""
        with torch.inference_mode():
            for turn in range(3):
                engine.add(GenerateRequest(10 + turn, prompts([17])[0], Sampling(max_new_tokens=1)))
                assert engine.wake_at() == -np.inf
                step = engine.step()
                assert (step.launched, step.started) == (True, [10 + turn])
                engine.executor.run_one(seconds=5.0)
                assert engine.step().tokens[0].finish is Finish.LENGTH
            assert engine.idle
            engine.add(GenerateRequest(1, prompts([17])[0], Sampling(max_new_tokens=50)))
            for _ in range(4):
                engine.step()
                engine.executor.run_one(seconds=5.0)
            engine.step()
            assert engine.in_flight == 1
            engine.add(GenerateRequest(2, prompts([9])[0], Sampling(max_new_tokens=5)))
            # One is running, with seconds to go. It ends early, and the prompt is launched with the same step.
            assert not engine.step().launched
            engine.executor.run_one(seconds=1.0)
            step = engine.step()
            assert (step.launched, step.started) == (True, [2])
            assert len(step.tokens) == 1


class TestBuilding:
    def build(self, folder, model=None, **changes):
        config = EngineConfig(**{"max_tokens": folder.max_tokens, "kv_cache_bytes": 1 << 20, **changes})
        return build_generation_engine(model or load_generative(folder), config)

    def test_the_cache_is_as_large_as_it_was_asked_to_be_and_no_larger_than_useful(self, folder):
        page = 2 * 2 * 16 * 2 * 32 * 4
        engine = self.build(folder)
        assert engine.limits.num_pages == (1 << 20) // page
        engine.close()
        engine = self.build(folder, kv_cache_bytes=0, max_running=2, prefill_tokens=64)
        assert engine.limits.num_pages == 1 + 2 * 2 * folder.max_tokens // 16
        assert engine.backend_names == ("torch_paged",)
        engine.close()

    def test_a_cache_shorter_than_the_model_says_so(self, folder, caplog):
        engine = self.build(folder, kv_cache_bytes=5 * 16384)
        assert engine.limits.longest == 4 * 16 + 1
        assert "the cache holds 65 tokens, and no sequence can be longer; the model takes 256" in caplog.text
        with pytest.raises(InvalidInput, match="need 5 pages of 16 tokens; the whole cache has 4"):
            engine.add(GenerateRequest(1, prompts([60])[0], Sampling(max_new_tokens=6)))
        engine.close()

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"kv_cache_bytes": 30000}, "one page of 16 tokens takes 16384 bytes of this model"),
            ({"max_running": 0}, "max_running must be at least 1"),
            ({"page_size": 0}, "page_size must be at least 1"),
            ({"prefill_tokens": 64}, "must be more than max_running"),
        ],
    )
    def test_numbers_that_cannot_work(self, folder, changes, message):
        with pytest.raises(StartupError, match=message):
            self.build(folder, **changes)

    def test_a_backend_without_pages(self, folder):
        model = load_generative(folder)
        with pytest.raises(StartupError, match="torch_sdpa"):
            build_generation_engine(model, EngineConfig(max_tokens=64), backend="torch_sdpa")
        with pytest.raises(StartupError, match="no executor for device meta"):
            build_generation_engine(model, EngineConfig(max_tokens=64), "meta")


SPEC = RecurrentSpec(layers=(0, 2), conv_channels=6, conv_width=4, value_heads=2, key_dim=3, value_dim=5)


def test_state_pools():
    pools = StatePools(SPEC, 9, torch.bfloat16, "cpu")
    assert (pools.conv(0).shape, pools.conv(2).dtype) == ((9, 6, 3), torch.bfloat16)
    assert (pools.recurrent(2).shape, pools.recurrent(0).dtype) == ((9, 2, 3, 5), torch.float32)
    assert pools.conv(0).data_ptr() != pools.conv(2).data_ptr()
    assert pools.nbytes == 9 * StatePools.row_bytes(SPEC, torch.bfloat16)
    for layer in SPEC.layers:
        pools.conv(layer)[5], pools.recurrent(layer)[5] = layer + 1, layer + 2
    pools.copy(5, 8)
    for layer in SPEC.layers:
        assert (pools.conv(layer)[8].unique().tolist(), pools.recurrent(layer)[8].unique().tolist()) == (
            [layer + 1],
            [layer + 2],
        )
        assert not pools.conv(layer)[6:8].any()
        assert not pools.recurrent(layer)[6:8].any()
    with pytest.raises(InternalError, match=r"layer 1 keeps no recurrent state; layers \(0, 2\) do"):
        pools.conv(1)


class Counting:
    """Layers without pages: a state that counts the tokens of its sequence, which decides the next one."""

    recurrent = SPEC

    def __init__(self, model) -> None:
        self._model = model

    def __getattr__(self, name: str):
        return getattr(self._model, name)

    def __call__(self, batch, rows):
        lanes, counts = batch.paged.states.long(), batch.states.recurrent(2)
        starts = batch.paged.kv_lengths == torch.tensor(batch.lengths)
        before = torch.where(starts, 0, counts[lanes, 0, 0, 0])
        counts[lanes, 0, 0, 0] = before + torch.tensor(batch.lengths)
        rows = torch.arange(len(batch.ids)) if rows is None else rows
        sequence = torch.searchsorted(batch.cu_seqlens[1:], rows, right=True)
        drawn = (3 * counts[lanes[sequence], 0, 0, 0]).long()
        return torch.nn.functional.one_hot(drawn, self.vocab_size).float()


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("graph_bytes", [0, 1 << 30], ids=["plain", "graphs"])
def test_recurrent_states_follow_their_sequences(folder, graph_bytes, reuse, monkeypatch):
    """In any company, lanes used again, set back for want of pages, from their beginning or from a state."""
    model = Counting(load_generative(folder))
    monkeypatch.setattr("rose.engine.generation.build.STATE_TOKENS", 4)
    limits = {"pages": 24, "prefill_tokens": 9, "max_running": 5, "graph_bytes": graph_bytes, "prefix_cache": reuse}
    engine = build(folder, "cpu", model=model, **limits)
    lengths = [9, 30, 17, 5, 1, 30, 2]
    answers = generate(engine, prompts(lengths), max_new_tokens=20)
    for length, answer in zip(lengths, answers, strict=True):
        assert answer.tokens == [3 * (length + n) for n in range(20)]
    assert engine.counters()["preemptions"] > 0
    assert (engine.counters()["prefix_hits"] > 0) == reuse
    engine.close()


def test_states_to_be_found_again_have_their_own_memory(folder):
    model = Counting(load_generative(folder))
    row = StatePools.row_bytes(SPEC, torch.float32)
    limits = build(folder, "cpu", model=model, state_cache_bytes=3 * row + row // 2).limits
    assert (limits.saved_states, limits.prefix_cache) == (3, True)
    limits = build(folder, "cpu", model=model, max_running=5, state_cache_bytes=1 << 30).limits
    assert limits.saved_states == 2 * 5, "no more than could ever be of use: a state in 256 tokens of each sequence"
    assert build(folder, "cpu", model=model, prefix_cache=False).limits.saved_states == 0
    with pytest.raises(StartupError, match="state_cache_bytes: without the prefix cache no state is found again"):
        build(folder, "cpu", model=model, prefix_cache=False, state_cache_bytes=1 << 30)
    for asked in (row - 1, -(1 << 30)):
        with pytest.raises(StartupError, match=f"of {asked}: one state of this model takes {row} bytes"):
            build(folder, "cpu", model=model, state_cache_bytes=asked)
    with pytest.raises(StartupError, match="state_cache_bytes: this model keeps no recurrent state"):
        build(folder, "cpu", state_cache_bytes=row)

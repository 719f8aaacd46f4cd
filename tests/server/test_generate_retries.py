"""A forward that fails under a real engine, over the socket: who hears of it, what is counted, and a lost device."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from rose.client import Client
from rose.convert import load_generative
from rose.errors import InternalError, RoseError
from tests.engine.generation.breaking import breaking, real_sequences
from tests.engine.generation.driving import make_folder
from tests.support.running_generation import serving_generation

NEW = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("lm"))


def served(folder, breaks):
    """An engine whose forward breaks when it is told to, with what the fake one says about itself."""
    engine, model = breaking(folder, "cpu", load_generative(folder, "cpu", torch.float32), breaks, graph_bytes=0)
    limits = engine.limits
    engine.max_running, engine.page_size, engine.pages_total = (
        limits.max_running,
        limits.page_size,
        limits.num_pages - 1,
    )
    return engine, model


def ask_all(address: str, prompts: list[list[int]], **fields) -> list[list[int] | RoseError]:
    """Each from a connection of its own, at once."""
    answers: list[list[int] | RoseError] = [[] for _ in prompts]

    def one(n: int) -> None:
        with Client(address) as client:
            try:
                chunks = client.generate(prompts[n], max_new_tokens=NEW, ignore_eos=True, **fields)
                answers[n] = [token for chunk in chunks for token in chunk.tokens]
            except RoseError as error:
                answers[n] = error

    threads = [threading.Thread(target=one, args=(n,)) for n in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return answers


PROMPTS = [np.random.default_rng(n).integers(5, 400, 9 + 7 * n).tolist() for n in range(4)]


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.8, "seed": 11}], ids=str)
def test_nobody_hears_of_a_forward_that_fails_once(folder, sampling):
    answers = []
    for failing in ([], [2, 14, 26]):
        count = len(failing)

        def breaks(call, batch, failing=failing):
            """Soon after each of those calls, in company: whoever fails alone would be at fault."""
            return bool(failing) and call >= failing[0] and real_sequences(batch) > 1 and failing.pop(0) > 0

        engine, model = served(folder, breaks)
        size = {"vocab_size": engine.limits.vocab_size, "max_tokens": folder.max_tokens}
        with serving_generation(engine, **size) as server:
            answers.append(ask_all(server.address, PROMPTS, **sampling))
            with Client(server.address) as client:
                stats = client.stats()
        assert (stats.answered_total, dict(stats.errors_total)) == (4, {})
        assert stats.failed_batches_total == model.broken == count
        assert (stats.retried_items_total > 1) == (count > 0)
        assert stats.engine_counters["retries"] == stats.retried_items_total
    assert answers[0] == answers[1]
    assert all(len(tokens) == NEW for tokens in answers[0])


def test_the_one_at_fault_hears_of_it(folder):
    poison = 460
    assert all(poison not in prompt for prompt in PROMPTS)
    engine, _ = served(folder, lambda call, batch: bool((batch.ids == poison).any()))
    size = {"vocab_size": engine.limits.vocab_size, "max_tokens": folder.max_tokens}
    with serving_generation(engine, **size) as server:
        *answers, bad = ask_all(server.address, [*PROMPTS, [7, 8, poison]], temperature=0.0)
        with Client(server.address) as client:
            stats = client.stats()
    assert isinstance(bad, InternalError)
    assert "ArithmeticError: the forward broke" in bad.message
    assert all(len(tokens) == NEW and poison not in tokens for tokens in answers)
    assert (stats.answered_total, dict(stats.errors_total)) == (4, {"internal_error": 1})


def test_a_lost_device_is_noticed_by_the_first_failure(folder):
    """Although no request has ended by it: every retry would fail too."""
    engine, model = served(folder, lambda call, batch: True)
    size = {"vocab_size": engine.limits.vocab_size, "max_tokens": folder.max_tokens}
    with serving_generation(engine, device_alive=lambda: False, **size) as server:
        (answer,) = ask_all(server.address, PROMPTS[:1], temperature=0.0)
        assert server.join(10) == 70
    assert isinstance(answer, RoseError)
    # Two were in flight, and the step that learns of them has launched the first retry if both were done by then.
    assert model.broken <= 3

"""Every refused request names its field, its value and the limit."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from rose.config import EngineConfig
from rose.convert import load_generative
from rose.engine.generation.build import build_generation_engine
from rose.engine.generation.limits import GenerationLimits, check_limits
from rose.engine.generation.request import GenerateRequest, Sampling
from rose.engine.generation.validation import MAX_SEED, MAX_STOP_IDS, check_generate, check_sampling, new_tokens_left
from rose.errors import InvalidInput, StartupError

LIMITS = GenerationLimits(vocab_size=100, max_tokens=64, page_size=4, num_pages=100)


def request(ids, **sampling) -> GenerateRequest:
    array = ids if isinstance(ids, np.ndarray) else np.array(ids, dtype=np.int32)
    return GenerateRequest(1, array, Sampling(**{"max_new_tokens": 4, **sampling}))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_new_tokens", 0, "max_new_tokens must be at least 1, not 0"),
        ("temperature", -0.1, "temperature must be a number, 0 or more, not -0.1"),
        ("temperature", math.nan, "temperature must be a number, 0 or more, not nan"),
        ("temperature", math.inf, "temperature must be a number, 0 or more, not inf"),
        ("top_k", -1, "top_k must be 0 (all) or more, not -1"),
        ("top_p", 0.0, "top_p must be more than 0 and at most 1, not 0.0"),
        ("top_p", 1.01, "top_p must be more than 0 and at most 1, not 1.01"),
        ("top_p", math.nan, "top_p must be more than 0 and at most 1, not nan"),
        ("min_p", -0.1, "min_p must be between 0 and 1, not -0.1"),
        ("min_p", 1.1, "min_p must be between 0 and 1, not 1.1"),
        ("min_p", math.nan, "min_p must be between 0 and 1, not nan"),
        ("seed", -1, f"seed must be between 0 and {MAX_SEED}, not -1"),
        ("seed", MAX_SEED + 1, f"seed must be between 0 and {MAX_SEED}, not {MAX_SEED + 1}"),
        ("min_new_tokens", 5, "min_new_tokens must be between 0 and max_new_tokens (4), not 5"),
        ("min_new_tokens", -1, "min_new_tokens must be between 0 and max_new_tokens (4), not -1"),
        ("logprobs", 21, "logprobs must be between 0 and 20, not 21"),
        ("logprobs", -1, "logprobs must be between 0 and 20, not -1"),
        ("stop_ids", (1,) * (MAX_STOP_IDS + 1), "stop_ids must be at most 128 ids, not 129 ids"),
        ("stop_ids", (5, 100), "stop id 100 is outside the vocabulary of 100"),
        ("stop_ids", (-1,), "stop id -1 is outside the vocabulary of 100"),
    ],
)
def test_a_bad_sampling_value_is_named(field, value, message):
    with pytest.raises(InvalidInput) as refused:
        check_generate(request([1], **{field: value}), LIMITS)
    assert (refused.value.message, refused.value.param) == (message, field)


def test_the_stop_id_at_fault_is_named_by_its_index():
    with pytest.raises(InvalidInput) as refused:
        check_sampling(Sampling(max_new_tokens=1, stop_ids=(1, 2, 300)), 100)
    assert refused.value.index == 2


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 100.0},
        {"top_k": 1_000_000},
        {"top_p": 1.0, "min_p": 1.0},
        {"top_p": 1e-6, "min_p": 0.0},
        {"seed": 0},
        {"seed": MAX_SEED},
        {"min_new_tokens": 4},
        {"logprobs": 0},
        {"logprobs": 20},
        {"stop_ids": (0, 99)},
    ],
)
def test_values_at_their_limits_are_served(sampling):
    check_generate(request([0, 99], **sampling), LIMITS)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "the prompt has no tokens"),
        ([1, 100], "token id 100 at position 1 is outside the vocabulary of 100"),
        ([-1], "token id -1 at position 0 is outside the vocabulary of 100"),
        (np.array([1], dtype=np.int64), "token ids must be a flat int32 array, not int64 of shape (1,)"),
        (np.array([[1]], dtype=np.int32), "token ids must be a flat int32 array, not int32 of shape (1, 1)"),
        ([1] * 64, "the prompt has 64 tokens; this model takes at most 64, of which one must be new"),
    ],
)
def test_a_bad_prompt_is_named(ids, message):
    with pytest.raises(InvalidInput) as refused:
        check_generate(request(ids), LIMITS)
    assert (refused.value.message, refused.value.param) == (message, "prompt")


def test_ids_in_a_strided_view_are_checked_too():
    wide = np.array([1, 500, 2, 500, 3, 500], dtype=np.int32)
    check_generate(request(wide[::2]), LIMITS)
    with pytest.raises(InvalidInput, match="token id 500 at position 0"):
        check_generate(request(wide[1::2]), LIMITS)


def test_too_many_new_tokens_are_refused_not_cut():
    check_generate(request([1] * 60), LIMITS)
    with pytest.raises(InvalidInput) as refused:
        check_generate(request([1] * 61), LIMITS)
    assert refused.value.message == "61 prompt tokens and max_new_tokens 4 make 65; this model takes at most 64"
    assert refused.value.param == "max_new_tokens"


def test_a_sequence_larger_than_the_cache_is_refused_with_its_pages():
    small = replace(LIMITS, num_pages=6)
    assert small.longest == 21
    check_generate(request([1] * 17), small)
    with pytest.raises(InvalidInput) as refused:
        check_generate(request([1] * 18), small)
    assert refused.value.message == (
        "18 prompt tokens and max_new_tokens 4 need 6 pages of 4 tokens; the whole cache has 5"
    )
    assert refused.value.param == "max_new_tokens"
    with pytest.raises(InvalidInput) as refused:
        check_generate(request([1] * 21, max_new_tokens=1), small)
    assert refused.value.param == "prompt"


def test_as_many_new_tokens_as_fit():
    assert new_tokens_left(10, LIMITS) == 54
    assert new_tokens_left(63, LIMITS) == 1
    assert new_tokens_left(10, replace(LIMITS, num_pages=6)) == 11
    with pytest.raises(InvalidInput, match="the prompt has 64 tokens"):
        new_tokens_left(64, LIMITS)
    with pytest.raises(InvalidInput, match="the whole cache has 5"):
        new_tokens_left(21, replace(LIMITS, num_pages=6))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("vocab_size", 0, "vocab_size must be at least 1, not 0"),
        ("max_tokens", 1, "max_tokens must be at least 2, not 1"),
        ("page_size", 0, "page_size must be at least 1, not 0"),
        ("num_pages", 1, "num_pages must be at least 2, not 1"),
        ("max_running", 0, "max_running must be at least 1, not 0"),
        ("batch_tokens", 1, "batch_tokens must be at least 2, not 1"),
        ("max_running", 2048, "batch_tokens (2048) must be more than max_running (2048)"),
    ],
)
def test_limits_that_cannot_work(name, value, message):
    check_limits(LIMITS)
    with pytest.raises(StartupError) as refused:
        check_limits(replace(LIMITS, **{name: value}))
    assert refused.value.message.startswith(message)


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ({"max_in_flight": 0}, "max_in_flight must be at least 1, not 0"),
        ({"max_in_flight": 3}, "max_in_flight is at most 2, not 3"),
        ({"page_size": 0, "kv_cache_bytes": 1 << 20}, "page_size must be at least 1, not 0"),
        ({"max_running": 0}, "max_running must be at least 1, not 0"),
        ({"kv_cache_bytes": 1}, "kv_cache_bytes of 1: one page"),
    ],
)
def test_budgets_that_cannot_work_are_refused_at_start(folder, budget, message):
    config = EngineConfig(**{"max_tokens": folder.max_tokens, "graph_bytes": 0, **budget})
    with pytest.raises(StartupError, match=message):
        build_generation_engine(load_generative(folder, "cpu", torch.float32), config)

"""The front and the engine each check how tokens are drawn: they take the same numbers, and refuse the same ones."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.engine.generation import validation
from rose.engine.generation.lanes import MOST_K
from rose.engine.generation.limits import GenerationLimits
from rose.errors import InvalidInput
from rose.gateway import sampling as front
from rose.gateway.sampling import SamplingOptions
from rose.proto import rose_pb2 as pb
from rose.proto.convert import tokens_to_proto
from rose.server.validate_generate import GenerateLimits, validate_generate

VOCABULARY, LONGEST, PROMPT = 300, 64, 3
LIMITS = GenerateLimits(
    served_name="tiny",
    engine=GenerationLimits(vocab_size=VOCABULARY, max_tokens=LONGEST, page_size=4, num_pages=100),
    max_request_tokens=1000,
)
UINT32 = (1 << 32) - 1


def refused_by_front(options: SamplingOptions) -> str | None:
    try:
        options.check(VOCABULARY)
    except InvalidInput as error:
        return error.param
    return None


def refused_by_engine(options: SamplingOptions) -> str | None:
    ids = np.arange(PROMPT, dtype=np.int32)
    message = pb.GenerateRequest(tokens=tokens_to_proto([ids]), sampling=options.message(options.max_new_tokens))
    try:
        validate_generate(pb.GenerateRequest.FromString(message.SerializeToString()), LIMITS)
    except InvalidInput as error:
        return error.param
    return None


def test_the_constants_are_one():
    for name in ("MAX_LOGPROBS", "MAX_STOP_IDS", "MAX_SEED"):
        assert getattr(front, name) == getattr(validation, name), name


EDGES = [
    ("temperature", 0.0, True),
    ("temperature", 1e-40, True),
    ("temperature", 3.4e38, True),
    ("temperature", -1e-30, False),
    ("top_k", 0, True),
    ("top_k", MOST_K, True),
    ("top_k", MOST_K + 1, True),
    ("top_k", UINT32, True),
    ("top_p", 1.0, True),
    ("top_p", 1e-40, True),
    ("top_p", 1e-46, False),
    ("top_p", 0.0, False),
    ("top_p", 1.0000002, False),
    ("min_p", 0.0, True),
    ("min_p", 1.0, True),
    ("min_p", 1.0000002, False),
    ("min_p", -0.1, False),
    ("seed", 0, True),
    ("seed", (1 << 64) - 1, True),
    ("stop_ids", (VOCABULARY - 1,) * 128, True),
    ("stop_ids", (0,) * 129, False),
    ("stop_ids", (VOCABULARY,), False),
    ("min_new_tokens", LONGEST - PROMPT, True),
    ("min_new_tokens", LONGEST - PROMPT + 1, False),
    ("logprobs", 0, True),
    ("logprobs", 20, True),
    ("logprobs", 21, False),
]


@pytest.mark.parametrize(("name", "value", "good"), EDGES)
def test_both_agree_at_every_edge(name, value, good):
    options = SamplingOptions(**{"max_new_tokens": LONGEST - PROMPT, name: value})
    expected = None if good else name
    assert (refused_by_front(options), refused_by_engine(options)) == (expected, expected)


NO_FIELD_HOLDS = [
    ("temperature", math.inf),
    ("temperature", math.nan),
    ("temperature", 1e39),
    ("top_p", math.nan),
    ("min_p", math.nan),
    ("top_k", UINT32 + 1),
    ("top_k", -1),
    ("seed", -1),
    ("seed", 1 << 64),
    ("logprobs", -1),
]


@pytest.mark.parametrize(("name", "value"), NO_FIELD_HOLDS)
def test_what_no_message_carries_is_refused_before_it_is_one(name, value):
    assert refused_by_front(SamplingOptions(max_new_tokens=4, **{name: value})) == name


def fields(width: int) -> dict[str, st.SearchStrategy]:
    return {
        "temperature": st.floats(min_value=-1, max_value=2.0**100, width=width),
        "top_k": st.integers(0, UINT32),
        "top_p": st.floats(min_value=-0.5, max_value=1.5, width=width),
        "min_p": st.floats(min_value=-0.5, max_value=1.5, width=width),
        "logprobs": st.none() | st.integers(0, 40),
        "min_new_tokens": st.integers(0, 80),
        "stop_ids": st.lists(st.integers(0, VOCABULARY + 5), max_size=140),
    }


@settings(max_examples=200, deadline=None)
@given(**fields(32))
def test_both_agree_on_what_the_message_carries_exactly(**asked):
    options = SamplingOptions(max_new_tokens=LONGEST - PROMPT, **asked)
    assert refused_by_front(options) == refused_by_engine(options)


@settings(max_examples=200, deadline=None)
@given(**fields(64))
def test_what_the_front_takes_the_engine_takes(**asked):
    """Rounding to 32 bits may make a number good that was not, never the other way round."""
    options = SamplingOptions(max_new_tokens=LONGEST - PROMPT, **asked)
    assert refused_by_front(options) is not None or refused_by_engine(options) is None

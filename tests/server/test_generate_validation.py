"""The one validator of generate requests: what is refused, with which field and which words."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.engine.generation.limits import GenerationLimits
from rose.engine.request import Priority
from rose.errors import InvalidInput, PayloadTooLarge, RoseError, UnknownModel, Unsupported
from rose.proto import rose_pb2 as pb
from rose.proto.convert import tokens_to_proto
from rose.server.validate_generate import GenerateLimits, validate_generate

LIMITS = GenerateLimits(
    served_name="served",
    engine=GenerationLimits(vocab_size=100, max_tokens=64, page_size=8, num_pages=6),
    max_request_tokens=1000,
)


def request(ids=(1, 2, 3), **fields) -> pb.GenerateRequest:
    sampling = fields.pop("sampling", {})
    return pb.GenerateRequest(
        tokens=tokens_to_proto([np.asarray(ids, dtype=np.int32)]), sampling=pb.Sampling(**sampling), **fields
    )


def refused(message: pb.GenerateRequest, limits: GenerateLimits = LIMITS) -> RoseError:
    with pytest.raises(RoseError) as caught:
        validate_generate(message, limits)
    return caught.value


def test_unset_fields_take_the_schemas_defaults():
    work = validate_generate(request(), LIMITS)
    assert work.ids.tolist() == [1, 2, 3]
    assert work.ids.dtype == np.int32
    s = work.sampling
    assert (s.temperature, s.top_k, s.top_p, s.min_p, s.seed, s.logprobs) == (1.0, 0, 1.0, 0.0, None, None)
    assert (s.stop_ids, s.ignore_eos, s.min_new_tokens) == ((), False, 0)
    assert work.priority is Priority.ONLINE


def test_set_fields_arrive_also_where_they_are_zero():
    sampling = {
        "max_new_tokens": 7,
        "temperature": 0.0,
        "top_k": 3,
        "top_p": 0.5,
        "min_p": 0.25,
        "seed": 0,
        "stop_ids": [5, 6],
        "ignore_eos": True,
        "min_new_tokens": 2,
        "logprobs": 0,
    }
    work = validate_generate(request(model="served", priority=pb.BULK, sampling=sampling), LIMITS)
    s = work.sampling
    assert (s.max_new_tokens, s.temperature, s.top_k, s.top_p, s.min_p, s.seed) == (7, 0.0, 3, 0.5, 0.25, 0)
    assert (s.stop_ids, s.ignore_eos, s.min_new_tokens, s.logprobs) == ((5, 6), True, 2, 0)
    assert work.priority is Priority.BULK


@pytest.mark.parametrize(("prompt", "left"), [(1, 40), (40, 1)])
def test_no_max_new_tokens_means_what_is_left(prompt, left):
    # Five usable pages of eight tokens, and one more token that need not be stored.
    work = validate_generate(request(np.ones(prompt)), LIMITS)
    assert work.sampling.max_new_tokens == left


@pytest.mark.parametrize("sampling", [{}, {"max_new_tokens": 1}])
def test_a_prompt_that_leaves_no_room_is_refused(sampling):
    error = refused(request(np.ones(64), sampling=sampling))
    assert isinstance(error, InvalidInput)
    assert error.param == "prompt"
    assert "64 tokens" in error.message


def test_too_many_new_tokens_are_refused_and_not_clipped():
    error = refused(request(np.ones(10), sampling={"max_new_tokens": 55}))
    assert (type(error), error.param) == (InvalidInput, "max_new_tokens")
    assert "65" in error.message
    assert "64" in error.message
    error = refused(request(np.ones(10), sampling={"max_new_tokens": 40}))
    assert (type(error), error.param) == (InvalidInput, "max_new_tokens")
    assert "pages" in error.message


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"min_p": -0.5}, "min_p"),
        ({"min_p": 2.0}, "min_p"),
        ({"min_new_tokens": 5, "max_new_tokens": 4}, "min_new_tokens"),
        ({"logprobs": 1000}, "logprobs"),
        ({"stop_ids": [100]}, "stop_ids"),
        ({"stop_ids": [1] * 5000}, "stop_ids"),
    ],
)
def test_sampling_out_of_range_names_its_field(sampling, param):
    error = refused(request(sampling=sampling))
    assert (type(error), error.param) == (InvalidInput, param)


@pytest.mark.parametrize("bad", [-1, 100, 2**31 - 1])
def test_ids_outside_the_vocabulary(bad):
    """Report C60 (vllm#11375): another tokenizer's ids ended the process."""
    error = refused(request([0, bad, 5]))
    assert (type(error), error.param) == (InvalidInput, "prompt")
    assert str(bad) in error.message
    assert "position 1" in error.message


def test_what_only_a_front_can_do_is_refused_by_name():
    for message, param, words in (
        (pb.GenerateRequest(text="hello"), "prompt", "gateway"),
        (pb.GenerateRequest(messages=pb.Messages(items=[pb.Message(role="user")])), "prompt", "gateway"),
        (request(sampling={"stop": ["\n\n"]}), "stop", "stop_ids"),
    ):
        error = refused(message)
        assert (type(error), error.param) == (Unsupported, param)
        assert words in error.message


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (pb.Tokens(), "exactly one sequence of token ids, got 0"),
        (tokens_to_proto([np.ones(2, np.int32)] * 2), "got 2"),
        (pb.Tokens(ids=b"", lengths=[0]), "no tokens"),
        (pb.Tokens(ids=b"123", lengths=[1]), "holds 3 bytes"),
        (pb.Tokens(ids=b"12345678", lengths=[1]), "holds 8 bytes"),
    ],
)
def test_exactly_one_sequence(tokens, words):
    error = refused(pb.GenerateRequest(tokens=tokens))
    assert (type(error), error.param) == (InvalidInput, "prompt")
    assert words in error.message


def test_the_rest():
    assert isinstance(refused(pb.GenerateRequest()), InvalidInput)
    assert (type(error := refused(request(model="other"))), error.param) == (UnknownModel, "model")
    unknown = request()
    unknown.priority = 7
    assert refused(unknown).param == "priority"
    small = GenerateLimits(served_name="served", engine=LIMITS.engine, max_request_tokens=4)
    assert isinstance(refused(request([1] * 5), small), PayloadTooLarge)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_work_or_a_named_error(payload):
    try:
        message = pb.GenerateRequest.FromString(payload)
    except DecodeError:
        return
    with contextlib.suppress(RoseError):
        work = validate_generate(message, LIMITS)
        assert len(work.ids) + work.sampling.max_new_tokens <= LIMITS.engine.longest


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(-5, 105), max_size=70),
    st.fixed_dictionaries(
        {},
        optional={
            "max_new_tokens": st.integers(0, 70),
            "temperature": st.floats(width=32),
            "top_p": st.floats(width=32),
            "min_p": st.floats(width=32),
            "top_k": st.integers(0, 2**32 - 1),
            "seed": st.integers(0, 2**64 - 1),
            "min_new_tokens": st.integers(0, 70),
            "logprobs": st.integers(0, 30),
            "stop_ids": st.lists(st.integers(0, 110), max_size=4),
        },
    ),
)
def test_any_sampling_is_work_within_the_limits_or_a_named_error(ids, sampling):
    params = []
    try:
        work = validate_generate(request(ids, sampling=sampling), LIMITS)
    except InvalidInput as error:
        params.append(error.param)
    else:
        assert len(work.ids) + work.sampling.max_new_tokens <= LIMITS.engine.longest
        assert 0 < work.sampling.top_p <= 1
    assert set(params) <= {"prompt", *sampling}

"""Messages to arrays and errors, and back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.errors import WIRE_ERRORS, InternalError, InvalidInput, from_kind
from rose.proto import rose_pb2 as pb
from rose.proto.convert import (
    check_token_ids,
    error_from_proto,
    error_to_proto,
    sequence_from_proto,
    tensor_from_proto,
    tensor_to_proto,
    tokens_from_proto,
    tokens_to_proto,
)

id_lists = st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=20), min_size=1, max_size=10)


@given(id_lists)
def test_tokens_round_trip(lists):
    message = pb.Tokens.FromString(
        tokens_to_proto([np.array(ids, dtype=np.int32) for ids in lists]).SerializeToString()
    )
    assert [ids.tolist() for ids in tokens_from_proto(message)] == lists


@pytest.mark.parametrize(
    ("message", "index"),
    [
        (pb.Tokens(), None),
        (pb.Tokens(ids=b"\0" * 4, lengths=[1, 0]), 1),
        (pb.Tokens(ids=b"\0" * 8, lengths=[1]), None),
        (pb.Tokens(ids=b"\0" * 3, lengths=[1]), None),
        (pb.Tokens(ids=b"", lengths=[2**32 - 1, 2**32 - 1]), None),
    ],
)
def test_tokens_that_do_not_fill_their_lengths(message, index):
    with pytest.raises(InvalidInput) as caught:
        tokens_from_proto(message)
    assert caught.value.param == "input"
    assert caught.value.index == index


@given(st.binary(max_size=64), st.lists(st.integers(0, 2**32 - 1), max_size=8))
def test_tokens_of_garbage_give_arrays_or_a_named_error(ids, lengths):
    try:
        arrays = tokens_from_proto(pb.Tokens(ids=ids, lengths=lengths))
    except InvalidInput:
        return
    assert [len(array) for array in arrays] == lengths


@pytest.mark.parametrize("bad", [-1, 100, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("alone", [True, False])
def test_ids_outside_the_vocabulary_are_named(bad, alone):
    """Report C60 (vllm#11375, langchain#27266): an id outside the vocabulary ends the process."""
    sequences = [np.array([0, 99], dtype=np.int32), np.array([5, 6, bad, 7], dtype=np.int32)][alone:]
    with pytest.raises(InvalidInput, match=f"token id {bad} at position 2 is outside the vocabulary 0..99") as caught:
        check_token_ids(sequences, 100)
    assert caught.value.index == len(sequences) - 1


def test_first_and_last_id_of_the_vocabulary_pass():
    check_token_ids([np.array([0, 99], dtype=np.int32)], 100)
    check_token_ids([np.array([99], dtype=np.int32), np.array([0], dtype=np.int32)], 100)


@pytest.mark.parametrize("dtype", [np.float32, np.int8, np.uint8, np.int32])
@pytest.mark.parametrize("shape", [(3, 4), (0, 4), (5,)])
def test_tensors_round_trip(dtype, shape):
    array = (np.arange(np.prod(shape)).reshape(shape) - 3).astype(dtype)
    back = tensor_from_proto(pb.Tensor.FromString(tensor_to_proto(array).SerializeToString()))
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


def test_tensors_are_little_endian_on_the_wire():
    assert tensor_to_proto(np.array([1.0], dtype=">f4")).data == b"\x00\x00\x80\x3f"
    assert tensor_to_proto(np.array([[1, 2]], dtype=np.float32)[:, ::-1]).data == b"\x00\x00\x00\x40\x00\x00\x80\x3f"


@pytest.mark.parametrize(
    "message", [pb.Tensor(dtype=0, shape=[1], data=b"\0" * 4), pb.Tensor(dtype=pb.FLOAT32, shape=[2], data=b"\0" * 4)]
)
def test_tensors_that_contradict_themselves(message):
    with pytest.raises(InvalidInput):
        tensor_from_proto(message)


@pytest.mark.parametrize("kind", WIRE_ERRORS)
def test_every_error_survives_the_wire(kind):
    sent = kind("what is wrong", param="input", index=0, retry_after_s=1.5)
    got = error_from_proto(pb.Error.FromString(error_to_proto(sent).SerializeToString()))
    assert type(got) is kind
    assert (got.message, got.param, got.index, got.retry_after_s) == ("what is wrong", "input", 0, 1.5)


def test_an_error_without_details_stays_without():
    got = error_from_proto(error_to_proto(InternalError("broken")))
    assert (got.param, got.index, got.retry_after_s) == (None, None, None)


def test_an_error_of_a_newer_peer_is_ours():
    assert type(from_kind("out_of_coffee", "no beans")) is InternalError
    assert from_kind("out_of_coffee", "no beans").message == "out_of_coffee: no beans"


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=50))
def test_the_only_sequence_of_a_field(ids):
    message = pb.Tokens.FromString(tokens_to_proto([np.array(ids, dtype=np.int32)]).SerializeToString())
    sequence = sequence_from_proto(message, "prompt")
    assert sequence.tolist() == ids
    assert sequence.dtype == np.int32


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (pb.Tokens(), "exactly one sequence of token ids, got 0"),
        (pb.Tokens(ids=b"\0" * 8, lengths=[1, 1]), "got 2"),
        (pb.Tokens(ids=b"", lengths=[0]), "no tokens"),
        (pb.Tokens(ids=b"\0" * 3, lengths=[1]), "holds 3 bytes"),
        (pb.Tokens(ids=b"\0" * 8, lengths=[1]), "holds 8 bytes"),
        (pb.Tokens(ids=b"", lengths=[2**32 - 1]), "holds 0 bytes"),
    ],
)
def test_a_field_of_one_sequence_takes_one(message, words):
    with pytest.raises(InvalidInput, match=words) as caught:
        sequence_from_proto(message, "prompt")
    assert caught.value.param == "prompt"

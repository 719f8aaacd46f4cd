"""Token types and spans survive the wire; what does not fit is refused by name."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.errors import InvalidInput
from rose.proto import rose_pb2 as pb
from rose.proto.annotations import (
    check_spans,
    check_token_types,
    spans_from_proto,
    spans_to_proto,
    token_types_from_bytes,
    token_types_to_bytes,
)


def int32(values) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@given(st.lists(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=5), min_size=1, max_size=5))
def test_spans_survive(pairs):
    spans = [int32(each).reshape(-1, 2) for each in pairs]
    message = pb.Spans.FromString(spans_to_proto(spans).SerializeToString())
    back = spans_from_proto(message, len(spans))
    assert [bounds.tolist() for bounds in back] == [bounds.tolist() for bounds in spans]
    assert all(bounds.dtype == np.int32 and bounds.shape[1:] == (2,) for bounds in back)


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=5))
def test_token_types_survive(values):
    types = [int32(each) for each in values]
    back = token_types_from_bytes(token_types_to_bytes(types), [len(each) for each in values])
    assert back is not None
    assert [array.tolist() for array in back] == values


def test_no_token_types_are_none():
    assert token_types_from_bytes(b"", [3, 4]) is None


def test_bytes_that_do_not_fit():
    with pytest.raises(InvalidInput, match=r"hold 8 bytes, expected 4 for each of 3 ids") as raised:
        token_types_from_bytes(bytes(8), [1, 2])
    assert raised.value.param == "token_types"
    with pytest.raises(InvalidInput, match="counts for 1 items, the request has 2"):
        spans_from_proto(pb.Spans(counts=[0]), 2)
    with pytest.raises(InvalidInput, match="add up to 3 spans, the message holds 16 bytes"):
        spans_from_proto(pb.Spans(counts=[1, 2], bounds=bytes(16)), 2)


def test_the_edges_of_a_sequence_are_inside_it():
    check_spans([int32([[0, 4], [4, 4], [0, 0]]), int32([]).reshape(0, 2)], [4, 1])
    with pytest.raises(InvalidInput, match=r"span 1 of item 0 is 4\.\.5: expected 0 <= start <= end <= 4") as raised:
        check_spans([int32([[0, 4], [4, 5]])], [4])
    assert (raised.value.param, raised.value.index) == ("spans", 0)


@pytest.mark.parametrize("size", [0, 1, 2])
def test_a_model_without_token_types_takes_zeros_only(size):
    check_token_types([int32([0, max(size, 1) - 1])], [2], size)
    with pytest.raises(InvalidInput, match=rf"token type {max(size, 1)} at position 1 is outside .* 0\.\.") as raised:
        check_token_types([int32([0, max(size, 1)])], [2], size)
    assert (raised.value.param, raised.value.index) == ("token_types", 0)
    with pytest.raises(InvalidInput, match="for 1 of 2 sequences"):
        check_token_types([int32([0])], [1, 1], size)

"""Cutting and joining lose nothing and change no order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.client import EmbedResult, Timing
from rose.errors import InternalError, InvalidInput, NonFinite, Overloaded
from rose.gateway.parts import at_item, check_answer, cut_parts, join


def ids(length, value=1):
    return np.full(length, value, dtype=np.int32)


def result(rows, splits=None, name="dense", tokens=1):
    return EmbedResult(
        outputs={name: np.asarray(rows, dtype=np.float32)},
        splits={} if splits is None else {name: tuple(splits)},
        prompt_tokens=tokens,
        timing=Timing(0.5, 0.25, 1),
    )


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=60),
    max_tokens=st.integers(1, 120),
    max_items=st.integers(1, 10),
)
def test_parts_hold_every_item_once_in_order_within_both_limits(lengths, max_tokens, max_items):
    sequences = [ids(length, i) for i, length in enumerate(lengths)]
    parts = cut_parts(sequences, max_tokens, max_items)
    assert [int(one[0]) for part in parts for one in part.sequences] == list(range(len(lengths)))
    for part in parts:
        assert part.start == int(part.sequences[0][0])
        assert part.tokens == sum(map(len, part.sequences))
        assert len(part.sequences) <= max_items
        assert part.tokens <= max_tokens or len(part.sequences) == 1


def test_a_request_that_fits_is_not_copied():
    sequences = [ids(3), ids(4)]
    (part,) = cut_parts(sequences, 7, 2)
    assert part.sequences is sequences


def test_answers_are_joined_in_order_with_their_splits():
    joined = join([result([[1], [2]], [0, 2], tokens=2), result([[3], [4], [5]], [0, 1, 3], tokens=3)])
    assert joined.outputs["dense"].tolist() == [[1], [2], [3], [4], [5]]
    assert joined.splits["dense"] == (0, 2, 3, 5)
    assert joined.prompt_tokens == 5
    assert joined.timing == Timing(0.5, 0.25, 2)
    assert joined.item("dense", 2).tolist() == [[4], [5]]


def test_an_error_names_the_item_of_the_request_not_of_the_part():
    moved = at_item(InvalidInput("bad", param="input", index=3), 100)
    assert (type(moved), moved.index, moved.param, moved.message) == (InvalidInput, 103, "input", "bad")
    whole = Overloaded("full", retry_after_s=2.0)
    assert at_item(whole, 100) is whole


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_non_finite_number_is_an_error_that_names_the_item(value):
    """Report C26 (vllm#19661): NaN passes through base64 and protobuf without a word, so it is looked for."""
    (part,) = cut_parts([ids(2), ids(3)], 10, 10)
    with pytest.raises(NonFinite) as dense:
        check_answer(part, result([[1.0, 2.0], [1.0, value]]))
    assert dense.value.index == 1
    with pytest.raises(NonFinite) as per_token:
        check_answer(part, result([[1.0]] * 4 + [[value]], [0, 2, 5]))
    assert per_token.value.index == 1


def test_an_answer_of_another_length_is_an_error():
    (part,) = cut_parts([ids(2), ids(3)], 10, 10)
    check_answer(part, result([[1.0], [2.0]]))
    with pytest.raises(InternalError, match="1 rows of dense where 2 were due"):
        check_answer(part, result([[1.0]]))
    with pytest.raises(InternalError, match="2 rows of dense where 3 were due"):
        check_answer(part, result([[1.0], [2.0]], [0, 2]))

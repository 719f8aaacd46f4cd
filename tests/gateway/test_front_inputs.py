"""What `input` may hold: every shape a client sends, and a named refusal for every other."""

from __future__ import annotations

import numpy as np
import pytest

from rose.errors import InvalidInput, PayloadTooLarge
from rose.gateway.inputs import Texts, Tokens, parse_input

VOCABULARY = 400


def parse(value, max_items=8):
    return parse_input(value, vocab_size=VOCABULARY, max_items=max_items, max_ids=1 << 20)


def test_a_text_and_a_list_of_texts():
    assert parse("a") == Texts(["a"])
    assert parse(["a", " b\n"]) == Texts(["a", " b\n"])


def test_ids_and_lists_of_ids():
    one, many = parse([1, 2, 399]), parse([[0], [399, 1]])
    assert isinstance(one, Tokens)
    assert isinstance(many, Tokens)
    assert [ids.tolist() for ids in one.items] == [[1, 2, 399]]
    assert [ids.tolist() for ids in many.items] == [[0], [399, 1]]
    assert all(ids.dtype == np.int32 for ids in [*one.items, *many.items])


@pytest.mark.parametrize(
    ("value", "index", "words"),
    [
        ("", 0, "empty"),
        ([], None, "empty"),
        ([""], 0, "empty"),
        (["a", "b", ""], 2, "empty"),
        ([[]], 0, "empty"),
        ([[1], []], 1, "empty"),
        (None, None, "null"),
        (7, None, "the number 7"),
        (True, None, "the boolean true"),
        ({"text": "a"}, None, "an object"),
        ([None], 0, "null"),
        ([{"text": "a"}], 0, "an object"),
        (["a", 1], 1, "the number 1"),
        (["a", ["b"]], 1, "a list"),
        ([["a"]], 0, "a text at position 0"),
        ([[1], "a"], 1, "a text"),
        ([[1], 2], 1, "the number 2"),
        ([[[1]]], 0, "a list at position 0"),
        ([1, "a"], 0, "a text at position 1"),
        ([1.0], 0, "the number 1.0 at position 0"),
        ([1, 2.5], 0, "the number 2.5 at position 1"),
        ([True], 0, "the boolean true at position 0"),
        ([[1, False]], 0, "the boolean false at position 1"),
        ([-1], 0, "token id -1 at position 0 is outside the vocabulary 0..399"),
        ([[5], [1, 400]], 1, "token id 400 at position 1"),
        ([2**31], 0, f"token id {2**31} at position 0"),
        ([2**63], 0, f"token id {2**63} at position 0"),
        ([-(2**63)], 0, f"token id {-(2**63)} at position 0"),
        ([10**3000], 0, "token id an integer of 9966 bits at position 0"),
        ([100257], 0, "token id 100257"),
    ],
)
def test_everything_else_is_refused_by_name(value, index, words):
    """Reports C20 (sglang#4988), C22 (text-generation-inference#1485), C60 (vllm#11375) and C63 (vllm#26797)."""
    with pytest.raises(InvalidInput, match=words.replace("(", r"\(")) as refused:
        parse(value)
    assert refused.value.param == "input"
    assert refused.value.index == index


@pytest.mark.parametrize("value", [["a"] * 9, [[1]] * 9])
def test_too_many_items_are_refused_with_the_limit(value):
    """Report C73 (a denial of service through fan-out): every shape of input is counted."""
    with pytest.raises(PayloadTooLarge, match="9 items in one request, the limit is 8"):
        parse(value)


def test_a_list_of_ids_is_one_item_however_long():
    assert len(parse([1] * 100).items) == 1

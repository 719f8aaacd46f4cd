"""Stop strings in texts that come in pieces: what is found does not depend on the pieces."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.gateway.stop_strings import StopStrings


def run(stops, pieces):
    """(text given out, what was found), with nothing held back longer than it could still be a stop string."""
    search = StopStrings(stops)
    given_out, come = "", ""
    for piece in pieces:
        given_out += search.add(piece)
        come += piece
        if search.found is not None:
            return given_out, search.found
        held = come[len(given_out) :]
        assert come.startswith(given_out)
        assert held == "" or any(stop.startswith(held) and len(held) < len(stop) for stop in stops)
        longest = min(len(come), max(map(len, stops), default=1) - 1)
        for more in range(len(held) + 1, longest + 1):  # no longer one could have begun
            assert not any(stop.startswith(come[-more:]) for stop in stops)
    return given_out + search.finish(), None


def expected(stops, text):
    """Character by character: the first to be complete, and of those the longest."""
    for end in range(1, len(text) + 1):
        there = [stop for stop in stops if text[:end].endswith(stop)]
        if there:
            longest = max(there, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=4),
    st.lists(st.text("ab\n", max_size=5), max_size=8),
)
@settings(max_examples=400, deadline=None)
def test_any_cut_into_pieces_gives_the_same(stops, pieces):
    assert run(stops, pieces) == expected(stops, "".join(pieces))


@pytest.mark.parametrize(
    ("stops", "pieces", "text", "found"),
    [
        (["\nUser:"], ["Yes", ".\n", "Us", "er", ": no"], "Yes.", "\nUser:"),
        (["\nUser:"], ["a\nUs", "ed"], "a\nUsed", None),
        (["stop"], ["st", "stop"], "st", "stop"),
        (["aab"], ["aa", "ab"], "a", "aab"),
        (["</s>"], ["</s"], "</s", None),
        ([], ["any", "thing"], "anything", None),
        (["猫"], ["ein 猫"], "ein ", "猫"),
        (["b", "abc"], ["abc"], "a", "b"),
        (["bc", "abc"], ["abc"], "", "abc"),
    ],
)
def test_examples(stops, pieces, text, found):
    assert run(stops, pieces) == (text, found)


def test_nothing_is_given_out_behind_a_stop():
    search = StopStrings(["x"])
    assert search.add("axb") == "a"
    assert search.add("more") == ""
    assert search.finish() == ""

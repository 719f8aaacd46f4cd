"""Rounding to graph keys, and the dummies that fill them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.engine.buckets import Buckets, GraphKey, dummy_lengths

BUCKETS = Buckets(inflection_tokens=4096, max_tokens=512, max_sequences=256)


def shape(lengths: list[int]) -> tuple[int, int, int, bool]:
    key = BUCKETS.key(lengths, ("e",))
    return key.tokens, key.sequences, key.max_length, key.padded


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([128], (128, 1, 128, True)),  # fits exactly: no dummy
        ([100], (128, 2, 128, True)),  # 28 tokens of padding are one dummy
        ([1], (64, 2, 64, True)),
        ([127, 1], (128, 2, 128, True)),
        ([64, 63], (128, 3, 64, True)),
        ([16] * 8, (128, 8, 64, True)),
        ([16] * 7, (128, 8, 64, True)),
        ([14] * 8 + [16], (192, 12, 64, True)),  # all 128 tokens are taken, but 9 sequences are no step: next tokens
        ([129], (192, 2, 256, True)),
        ([512], (512, 1, 512, True)),
        ([512] * 8, (4096, 8, 512, True)),
        ([512] * 8 + [1], (4097, 9, 512, False)),  # above the inflection point: its own shape
    ],
)
def test_rounding(lengths, expected):
    assert shape(lengths) == expected


def test_tokens_round_in_steps_of_64_to_1024_and_of_256_above():
    seen = sorted({BUCKETS.key([n % 512 + 1] * (n // 512 + 1), ("e",)).tokens for n in range(0, 3600, 7)})
    assert set(seen) <= {*range(64, 1025, 64), *range(1280, 4097, 256)}
    assert {64, 128, 960, 1024, 1280, 2048} <= set(seen)


def test_the_length_bound_is_a_power_of_two_up_to_the_models_limit():
    bounds = {n: Buckets(inflection_tokens=4096, max_tokens=514, max_sequences=4).key([n], ()).max_length for n in
              (1, 64, 65, 128, 129, 256, 257, 512, 513, 514)}  # fmt: skip
    assert bounds == {1: 64, 64: 64, 65: 128, 128: 128, 129: 256, 256: 256, 257: 512, 512: 512, 513: 514, 514: 514}
    assert Buckets(inflection_tokens=0, max_tokens=32, max_sequences=4).key([30], ()).max_length == 32


def test_outputs_and_token_types_are_part_of_the_key():
    keys = {
        BUCKETS.key([5], outputs, token_types=types) for outputs in (("a",), ("b",), ("a", "b")) for types in (0, 1)
    }
    assert len(keys) == 6


def test_without_an_inflection_point_nothing_is_padded():
    buckets = Buckets(inflection_tokens=0, max_tokens=512, max_sequences=8)
    assert buckets.key([100, 3], ("e",)) == GraphKey(103, 2, 128, ("e",))


@given(st.lists(st.integers(1, 512), min_size=1, max_size=256))
def test_padding_always_makes_dummies_that_every_kernel_can_take(lengths):
    """At least one token each, none longer than the bound the kernels were launched with; none in a full bucket."""
    key = BUCKETS.key(lengths, ("e",))
    tokens, sequences = sum(lengths), len(lengths)
    dummies = dummy_lengths(key, tokens, sequences)
    assert key.tokens == tokens + sum(dummies)
    assert key.sequences == sequences + len(dummies)
    assert all(1 <= length <= key.max_length for length in dummies)
    assert max(lengths) <= key.max_length
    assert max(dummies, default=0) - min(dummies, default=0) <= 1
    if not key.padded:
        assert not dummies
        # Outside of the buckets only where no bucket would do.
        assert tokens > 4096 - 512
    elif tokens <= 1024:
        assert key.tokens - tokens < 2 * 64 + 256


@given(st.lists(st.integers(1, 64), min_size=1, max_size=32), st.randoms())
def test_the_order_of_the_sequences_does_not_matter(lengths, random):
    key = BUCKETS.key(lengths, ("e",))
    random.shuffle(lengths)
    assert BUCKETS.key(lengths, ("e",)) == key

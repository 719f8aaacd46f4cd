"""Batches of every bucket of tokens, with and without dummies: what graphs have to serve."""

from __future__ import annotations

MOST = 16384
LONGEST = 512
# Budgets that leave each of them in one batch, whatever came before.
ONE_BATCH = {"online_tokens": MOST, "bulk_tokens": MOST, "shared_tokens": MOST}
BUCKETS = (*range(64, 1025, 64), *range(1280, MOST + 1, 256))


# Enough for the dummies that the most sequences are rounded up by.
SHORT = 16


def lengths_in(tokens: int) -> list[int]:
    """Sequences of up to 512 tokens that fill a bucket of `tokens` but for 16, which become dummies."""
    left = tokens - SHORT
    return [*[LONGEST] * (left // LONGEST), *([left % LONGEST] if left % LONGEST else [])]

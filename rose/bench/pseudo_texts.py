"""Seeded words of no language, and texts made of them that have exactly so many tokens.

Words are syllables in a row, so that a tokenizer made for them (made_tokenizers.py) has common ones whole and cuts rare
ones into pieces, as a trained one does with a language. Knows words and counts; knows neither models nor servers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import product

CONSONANTS, VOWELS = "bdfghjklmnprstvz", "aeiou"
SYLLABLES = tuple(c + v for c, v in product(CONSONANTS, VOWELS))
# Of a text's words, those that are not among the common ones.
_RARE = 0.2
_COMMON = 4_000
# Ways to fill up to the exact count that are tried before a text is given up and another begun.
_TRIES = 40


def common_words(count: int) -> Iterator[str]:
    """The first `count` words, shortest first, always the same."""
    made = 0
    for syllables in (1, 2, 3, 4):
        for parts in product(SYLLABLES, repeat=syllables):
            if made == count:
                return
            made += 1
            yield "".join(parts)


def words(seed: int) -> Iterator[str]:
    """Endless words: common ones, the commonest most often, and rare ones of three to five syllables."""
    choose = random.Random(seed)
    common = list(common_words(_COMMON))
    while True:
        if choose.random() < _RARE:
            yield "".join(choose.choices(SYLLABLES, k=choose.randint(3, 5)))
        else:
            yield common[int(len(common) ** choose.random()) - 1]


def exact_texts(tokens: int, count: int, count_tokens: Callable[[str], int], source: Iterator[str]) -> list[str]:
    """`count` texts of exactly `tokens` tokens each.

    Args:
        count_tokens: tokens of a text, special tokens included.
        source: words, endless.

    Raises:
        ValueError: no text of that many tokens can be put together from these words.
    """
    found: list[str] = []
    for _ in range(_TRIES * count):
        text = _exact(tokens, count_tokens, source)
        if text is not None:
            found.append(text)
            if len(found) == count:
                return found
    raise ValueError(f"no {count} texts of exactly {tokens} tokens come of these words")


def _exact(tokens: int, count_tokens: Callable[[str], int], source: Iterator[str]) -> str | None:
    parts: list[str] = []
    while count_tokens(" ".join(parts)) < tokens:
        parts += [next(source) for _ in range(max(1, tokens // 4))]
    kept = _longest(parts, tokens, count_tokens)
    for _ in range(_TRIES):
        missing = tokens - count_tokens(" ".join(kept))
        if missing == 0:
            return " ".join(kept)
        longer = [*kept, next(source)]
        if count_tokens(" ".join(longer)) <= tokens:
            kept = longer
        elif missing > 0 and len(kept) > 1 and _ % 4 == 3:
            kept = kept[:-1]
    return None


def _longest(parts: Sequence[str], tokens: int, count_tokens: Callable[[str], int]) -> list[str]:
    """As many leading words as have at most `tokens` tokens."""
    low, high = 0, len(parts)
    while low < high:
        middle = (low + high + 1) // 2
        if count_tokens(" ".join(parts[:middle])) <= tokens:
            low = middle
        else:
            high = middle - 1
    return list(parts[:low])

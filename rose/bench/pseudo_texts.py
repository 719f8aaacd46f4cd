"""Seeded words of no language, and texts made of them that have exactly so many tokens.

Words are syllables in a row, so that a tokenizer made for them (made_tokenizers.py) has common ones whole and cuts rare
ones into pieces, as a trained one does with a language. Knows words and counts; knows neither models nor servers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, product

CONSONANTS, VOWELS = "bdfghjklmnprstvz", "aeiou"
SYLLABLES = tuple(c + v for c, v in product(CONSONANTS, VOWELS))
# Of a text's words, those that are not among the common ones.
_RARE = 0.2
_COMMON = 4_000
# Words tried for the last place of a text before it is given up, and rounds of making up for texts given up.
_TRIES, _ROUNDS = 40, 40
_AT_A_TIME = 4096


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


def exact_texts(
    tokens: int, count: int, count_tokens: Callable[[Sequence[str]], Sequence[int]], source: Iterator[str]
) -> list[str]:
    """`count` texts of exactly `tokens` tokens each.

    Each word is counted once, behind another word, and a text is put together by adding; then texts are counted whole,
    and one that is off, where a tokenizer does not just add up, is made again for as many fewer or more.

    Args:
        count_tokens: tokens of each text, special tokens included.
        source: words, endless.

    Raises:
        ValueError: no text of that many tokens can be put together from these words.
    """
    counted_words = _Counted(count_tokens, source)
    found: list[str] = []
    wanted = [tokens] * count  # by adding, of each text that is missing
    for _ in range(_ROUNDS):
        made = [(by_sum, text) for by_sum in wanted if (text := _put_together(by_sum, counted_words))]
        counted = count_tokens([text for _, text in made]) if made else []
        found += [text for (_, text), n in zip(made, counted, strict=True) if n == tokens]
        wanted = [by_sum + tokens - n for (by_sum, _), n in zip(made, counted, strict=True) if n != tokens]
        wanted += [tokens] * (count - len(found) - len(wanted))
        if not wanted:
            return found
    raise ValueError(f"no {count} texts of exactly {tokens} tokens come of these words")


class _Counted:
    """Words with the tokens that each adds to a text: endless (word, tokens).

    Attributes:
        special: tokens that a text has besides.
    """

    def __init__(self, count_tokens: Callable[[Sequence[str]], Sequence[int]], source: Iterator[str]) -> None:
        self._count_tokens = count_tokens
        self._known: dict[str, int] = {}
        self._source = source
        self._first = next(source)
        (self._alone,) = count_tokens([self._first])
        self._stream = self._counted()
        self.special = self._alone - self._cost([self._first])[0]

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return self._stream

    def _counted(self) -> Iterator[tuple[str, int]]:
        while True:  # many at a time: each call of a tokenizer sets threads to work
            some = list(islice(self._source, _AT_A_TIME))
            yield from zip(some, self._cost(some), strict=True)

    def _cost(self, some: Sequence[str]) -> list[int]:
        new = [word for word in dict.fromkeys(some) if word not in self._known]
        if new:
            counted = self._count_tokens([f"{self._first} {word}" for word in new])
            self._known |= {word: n - self._alone for word, n in zip(new, counted, strict=True)}
        return [self._known[word] for word in some]


def _put_together(tokens: int, words: _Counted) -> str:
    """Words that come to `tokens` by adding, those left out that would be too many; "" if none fits in the end."""
    parts: list[str] = []
    missing, left_out = tokens - words.special, 0
    for word, cost in words:
        if 0 < cost <= missing:
            parts.append(word)
            missing -= cost
        else:
            left_out += 1
        if missing <= 0 or left_out == _TRIES:
            break
    return "" if missing else " ".join(parts)

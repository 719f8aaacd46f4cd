"""How much of a text is tokenised: no more characters than its tokens can need, and of a text to be cut only a prefix.

A tokenizer takes about a hundred bytes of memory and up to a microsecond for every character, whether or not the model
could take the result. Knows characters and counts of tokens; knows no tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rose.errors import InvalidInput
from rose.proto.convert import IntArray

# Prose has three to six characters a token, in any script; runs of blanks and long words have more.
CHARS_PER_TOKEN = 64
# However few tokens a model takes, texts up to this are counted in tokens; however many, none beyond the other is read.
LEAST_CHARS, MOST_CHARS = 1 << 16, 1 << 21
# What a cut at a place of no meaning can change behind it: WordPiece reads words of up to 100 characters as a whole.
MARGIN_TOKENS = 256
# The first prefix, and by how much the next is longer.
PREFIX_CHARS_PER_TOKEN, GROWTH = 8, 4
FIELD = "input"


@dataclass(frozen=True, slots=True)
class Bounds:
    """What may be left out of the ids of a list of texts, and what is refused.

    Attributes:
        longest: tokens a text may have, special tokens included; None where nothing says.
        cut_to: of the texts from `cut_from` on, the ids behind this many are not wanted; None: all are.
    """

    longest: int | None = None
    cut_to: int | None = None
    cut_from: int = 0

    def kept(self, index: int) -> int | None:
        """How many leading ids of a text are wanted; None for all."""
        return self.cut_to if index >= self.cut_from else None

    def check(self, texts: Sequence[str]) -> None:
        """Raises InvalidInput for a text, by its index, that is too long whatever its tokens are."""
        most = most_chars(self.longest)
        for index, text in enumerate(texts):
            if len(text) > most and self.kept(index) is None:
                limit = "" if self.longest is None else f", since the model takes {self.longest} tokens"
                raise InvalidInput(
                    f"the text has {len(text)} characters, any prompt included; the limit is {most} characters{limit}",
                    param=FIELD,
                    index=index,
                )


ANY = Bounds()


def most_chars(tokens: int | None) -> int:
    """Characters that are read for so many tokens."""
    return MOST_CHARS if tokens is None else min(max(tokens * CHARS_PER_TOKEN, LEAST_CHARS), MOST_CHARS)


def has_prefix(text: str, kept: int) -> bool:
    """Whether a prefix may do for a text of which so many ids are wanted."""
    return len(text) > _first_prefix(kept)


def encode_prefix(encode: Callable[[str], IntArray], text: str, kept: int, index: int) -> IntArray:
    """Ids that begin with the first `kept` of the whole text's, from as short a prefix as gives them.

    Raises:
        InvalidInput: a text, by its index, of which even a very long prefix gives too few.
    """
    most = most_chars(kept)
    size = _first_prefix(kept)
    while size < min(len(text), most):
        ids = encode(text[:size])
        if len(ids) >= kept + MARGIN_TOKENS:
            return ids
        size *= GROWTH
    ids = encode(text[:most])
    if len(text) > most and len(ids) < kept + MARGIN_TOKENS:
        raise InvalidInput(
            f"the text has {len(text)} characters, and its first {most} give only {len(ids)} tokens: too few to cut "
            f"it to {kept}; no more characters are read for that",
            param=FIELD,
            index=index,
        )
    return ids


def groups(texts: Sequence[str], bounds: Bounds, chars: int) -> Iterator[range]:
    """Runs of consecutive texts that take about as long to encode as so many characters; a longer text goes alone."""
    start = held = 0
    for index, text in enumerate(texts):
        kept = bounds.kept(index)
        cost = min(len(text), MOST_CHARS if kept is None else most_chars(kept))
        if index > start and held + cost > chars:
            yield range(start, index)
            start, held = index, 0
        held += cost
    if start < len(texts):
        yield range(start, len(texts))


def _first_prefix(kept: int) -> int:
    return (kept + MARGIN_TOKENS) * PREFIX_CHARS_PER_TOKEN

"""English texts of wanted lengths for benchmarks: our own sentence fragments, joined by a seeded generator.

Knows words and token counts; knows neither models nor servers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

_OPENINGS = (
    "In the second week of March",
    "According to the harbour log",
    "When the spreadsheet finally opened",
    "On the upper floor of the library",
    "Despite three warnings from the supplier",
    "After the firmware update",
    "Between Ljubljana and the coast",
    "To everyone's surprise",
    "As the minutes of the meeting show",
    "Long before the bridge was rebuilt",
    "If the sensor reads below 4.2 volts",
    "Under clause 17(b) of the lease",
)
_SUBJECTS = (
    "the night-shift electrician",
    "a visiting cellist",
    "our smallest customer",
    "the parish council",
    "every third sample",
    "the postgraduate who keeps bees",
    "an unsigned invoice",
    "the regional railway",
    "a flock of starlings",
    "the backup generator",
    "her younger brother",
    "the paediatric ward",
    "version 2.9 of the parser",
    "the ferry's second engine",
)
_VERBS = (
    "replaced",
    "quietly ignored",
    "had to photograph",
    "overestimated",
    "re-indexed",
    "borrowed",
    "could not explain",
    "returned",
    "translated into Welsh",
    "measured twice",
    "apologised for",
    "auctioned off",
)
_OBJECTS = (
    "the copper gutters along the north wall",
    "forty-one boxes of unlabelled slides",
    "a recipe for pickled walnuts",
    "the quarterly electricity bill (€18,430)",
    "two chapters about glacial lakes",
    "the missing half of the contract",
    "an e-mail addressed to nobody in particular",
    "the vaccination records of the whole village",
    "a queue of 1,200 pending requests",
    "the last functioning typewriter",
    "most of the footnotes",
    "the warranty on the heat pump",
)
_TAILS = (
    "because the forecast had promised frost",
    "although nobody had asked for it",
    "which cost less than a train ticket",
    "and the neighbours applauded",
    "so the audit was postponed until autumn",
    "while the kettle was still boiling",
    "before the museum closed at 17:30",
    "as if it were the most ordinary thing",
    "and then wrote to the ombudsman",
    "unless the pressure drops again",
)


def sentence(choose: random.Random) -> str:
    parts = [choose.choice(_SUBJECTS), choose.choice(_VERBS), choose.choice(_OBJECTS)]
    if choose.random() < 0.5:
        parts.insert(0, choose.choice(_OPENINGS) + ",")
    if choose.random() < 0.6:
        parts.append(choose.choice(_TAILS))
    text = " ".join(parts)
    return text[0].upper() + text[1:] + "."


def mixed_texts(
    count: int, count_tokens: Callable[[str], int], *, shortest: int = 5, longest: int = 250, seed: int = 7
) -> list[str]:
    """Texts whose token counts are spread evenly over `shortest` .. `longest`, in random order.

    Args:
        count_tokens: tokens of a text, special tokens included.
    """
    choose = random.Random(seed)
    return [_text_of(choose.randint(shortest, longest), shortest, choose, count_tokens) for _ in range(count)]


def _text_of(tokens: int, shortest: int, choose: random.Random, count_tokens: Callable[[str], int]) -> str:
    """A text of at most `tokens` tokens, as close to it as whole words allow, but not under `shortest`."""
    words: list[str] = []
    while count_tokens(" ".join(words)) < tokens:
        words += sentence(choose).split()
    low, high = 1, len(words)
    while low < high:
        middle = (low + high + 1) // 2
        if count_tokens(" ".join(words[:middle])) <= tokens:
            low = middle
        else:
            high = middle - 1
    while count_tokens(" ".join(words[:low])) < shortest:
        low += 1
    return " ".join(words[:low])


def english_words(seed: int) -> Iterator[str]:
    """The words of one sentence after another, endless."""
    choose = random.Random(seed)
    while True:
        yield from sentence(choose).split()

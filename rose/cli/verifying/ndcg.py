"""nDCG@10 of texts ranked by the cosine of their vectors to a query's, against judgements from a file.

    {"query": "where does the river end", "relevant": [3, 17]}
    {"query": "...", "relevant": {"3": 2, "17": 1}}

Numbers are those of the texts, from 0; a list grades all of them 1. Source: Järvelin and Kekäläinen, TOIS 20 (2002),
with gain 2 ** grade - 1. Knows judgements and vectors; knows no model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rose.errors import InvalidInput

_DEPTH = 10
_MOST_LINES = 100_000


@dataclass(frozen=True, slots=True)
class Judgement:
    """`grades`: number of a text -> how relevant it is, at least 1."""

    query: str
    grades: Mapping[int, int]


def read_judgements(path: Path, texts: int) -> list[Judgement]:
    """
    Args:
        texts: how many there are.

    Raises:
        InvalidInput: a line that is none, by its number, or a number past the texts.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path} cannot be read: {error}") from error
    found = [_judgement(path, at, line, texts) for at, line in enumerate(lines, 1) if line.strip()]
    if not found or len(lines) > _MOST_LINES:
        raise InvalidInput(f"{path} has {len(found)} judgements; 1 to {_MOST_LINES} are taken")
    return found


def _judgement(path: Path, at: int, line: str, texts: int) -> Judgement:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise InvalidInput(f"{path}:{at} is no JSON: {error}") from error
    query, relevant = (row.get("query"), row.get("relevant")) if isinstance(row, dict) else (None, None)
    if not isinstance(query, str) or not query or not isinstance(relevant, list | dict) or not relevant:
        raise InvalidInput(f'{path}:{at} is not {{"query": text, "relevant": numbers of texts}}')
    graded: dict[Any, Any] = relevant if isinstance(relevant, dict) else dict.fromkeys(relevant, 1)
    grades: dict[int, int] = {}
    for number, grade in graded.items():
        text = int(number) if str(number).isdecimal() and not isinstance(number, bool) else -1
        if not 0 <= text < texts:
            raise InvalidInput(f"{path}:{at}: text {number!r} is not one of 0 to {texts - 1}")
        if isinstance(grade, bool) or not isinstance(grade, int) or not 1 <= grade <= 10:
            raise InvalidInput(f"{path}:{at}: grade {grade!r} is not a whole number of 1 to 10")
        grades[text] = grade
    return Judgement(query, grades)


def ndcg_at_10(queries: NDArray[np.float64], texts: NDArray[np.float64], judgements: Sequence[Judgement]) -> float:
    """Mean over the queries. queries: [Q, D], texts: [N, D]; equal cosines keep the order of the texts."""
    units = [x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-300) for x in (queries, texts)]
    order = np.argsort(-(units[0] @ units[1].T), axis=1, kind="stable")[:, :_DEPTH]
    discount = 1 / np.log2(np.arange(2, _DEPTH + 2))
    scores = []
    for own, ranked in zip(judgements, order.tolist(), strict=True):
        gains = np.array([2.0 ** own.grades.get(text, 0) - 1 for text in ranked])
        best = np.sort([2.0**grade - 1 for grade in own.grades.values()])[::-1][:_DEPTH]
        scores.append((gains * discount[: len(gains)]).sum() / (best * discount[: len(best)]).sum())
    return float(np.mean(scores))

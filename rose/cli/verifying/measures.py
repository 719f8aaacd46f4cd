"""How alike two sets of answers are. Everything is computed in fp64.

Knows arrays; knows neither models nor texts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
NEIGHBOURS = 10
_RANKED = 512  # texts whose rankings are compared; a ranking costs the square of their number


def measure(kind: str, a: Array, b: Array) -> dict[str, float]:
    """All that is said of two answers of one kind.

    Args:
        kind: of rose.cli.verifying.answers.Answers.
    """
    if kind == "vectors":
        own = cosines(a, b)
        return {
            "min_cosine": float(own.min()),
            "mean_cosine": float(own.mean()),
            "recall_at_10": neighbour_overlap(a, b),
            "kendall_tau": ranking_agreement(a, b),
        }
    if kind == "tokens":
        return of_tokens(a, b)
    taus = [kendall_tau(x, y) for x, y in zip(a, b, strict=True)]
    return {"max_score_difference": float(np.abs(a - b).max()), "kendall_tau": float(np.mean(taus))}


def of_tokens(a: Array, b: Array) -> dict[str, float]:
    """Of [tokens, 2]: what each token cost in nats, and the id that was likeliest in its place."""
    first, second = float(np.exp(a[:, 0].mean())), float(np.exp(b[:, 0].mean()))
    return {
        "perplexity_a": first,
        "perplexity_b": second,
        "perplexity_ratio": second / first,
        "mean_cost_change": float(np.abs(a[:, 0] - b[:, 0]).mean()),
        "likeliest_same": float((a[:, 1] == b[:, 1]).mean()),
    }


def cosines(a: Array, b: Array) -> Array:
    """Of each row with the same row of the other: [N]."""
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        result: Array = (a * b).sum(axis=1) / lengths
    return result


def neighbour_overlap(a: Array, b: Array, k: int = NEIGHBOURS) -> float:
    """Mean share of each text's k nearest others (or all of them, where there are fewer) that both sides have."""
    k = min(k, len(a) - 1)
    first, second = (_nearest(_similarities(x), k) for x in (a, b))
    shared = [len(set(x) & set(y)) for x, y in zip(first.tolist(), second.tolist(), strict=True)]
    return float(np.mean(shared)) / k


def ranking_agreement(a: Array, b: Array) -> float:
    """Mean Kendall tau-b of the orders in which each text ranks the others, over the first 512 texts."""
    a, b = _similarities(a[:_RANKED]), _similarities(b[:_RANKED])
    others = ~np.eye(len(a), dtype=bool)
    return float(np.mean([kendall_tau(a[i, others[i]], b[i, others[i]]) for i in range(len(a))]))


def kendall_tau(a: Array, b: Array) -> float:
    """Kendall's tau-b of two lists of scores [N]: 1 for the same order, ties taken into account.

    Source: Kendall, Biometrika 33 (1945). Nothing to order (one score, or all the same on both sides) counts as 1.
    """
    upper = np.triu_indices(len(a), 1)
    first, second = (np.sign(x[:, None] - x[None, :])[upper] for x in (a, b))
    ranked_a, ranked_b = np.count_nonzero(first), np.count_nonzero(second)
    if ranked_a == 0 or ranked_b == 0:
        return 1.0 if ranked_a == ranked_b else 0.0
    return float((first * second).sum() / np.sqrt(float(ranked_a) * float(ranked_b)))


def _similarities(x: Array) -> Array:
    unit = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), np.finfo(np.float64).tiny)
    similar: Array = unit @ unit.T
    return similar


def _nearest(similar: Array, k: int) -> NDArray[np.intp]:
    """The k largest of each row without itself; among equals the first."""
    own = similar.copy()
    np.fill_diagonal(own, -np.inf)
    return np.argsort(-own, axis=1, kind="stable")[:, :k]

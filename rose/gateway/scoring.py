"""Scores from what a model gives: logits of a cross-encoder, or vectors, lexical weights and token vectors compared.

    cross    one label: its logit. Several: log-odds of the named one, z - log sum exp(others), whose sigmoid is the
             softmax probability. Ranking never saturates, however sure the model is
    dense    cosine
    sparse   sum over shared token ids of the product of their weights
    colbert  mean over the query's token vectors of the best dot product with any of the document's
    combined weighted mean of dense, sparse and colbert

From float32 input and, but for the products of token vectors, in float64: a softmax or sigmoid in less ties documents
that are not equal, while those products are most of the work and are unit vectors' (the error is below 1e-6). Knows
arrays; knows neither texts nor requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rose.errors import InternalError
from rose.proto.convert import AnyArray, IntArray

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Lexical:
    """Lexical weights of one text.

    Attributes:
        ids: [n] distinct token ids, ascending.
        weights: [n] float32, all above zero.
    """

    ids: IntArray
    weights: npt.NDArray[np.float32]


def lexical(ids: IntArray, weights: AnyArray, left_out: IntArray) -> Lexical:
    """Per-token weights as lexical weights of the text: the largest of each token, only what is above zero.

    Args:
        ids, weights: [tokens] each.
        left_out: ids that are no words: all special tokens.
    """
    kept = (weights > 0) & ~np.isin(ids, left_out)
    distinct, places = np.unique(ids[kept], return_inverse=True)
    largest = np.zeros(len(distinct), dtype=np.float32)
    np.maximum.at(largest, places, weights[kept])
    return Lexical(distinct.astype(np.int32, copy=False), largest)


def lexical_items(
    weights: Sequence[AnyArray], sequences: Sequence[IntArray], skipped: int, control_ids: IntArray
) -> list[Lexical]:
    """Lexical weights of every text, from the weights of its tokens.

    Args:
        skipped: leading tokens of a text that have no weight.

    Raises:
        InternalError: another number of weights than of tokens.
    """
    found = []
    for rows, ids in zip(weights, sequences, strict=True):
        if rows.size != len(ids) - skipped:
            raise InternalError(f"a replica answered {rows.size} lexical weights for {len(ids)} tokens")
        found.append(lexical(ids[skipped:], rows.reshape(-1), control_ids))
    return found


def log_odds(logits: AnyArray, label: int) -> Floats:
    """[N, labels] raw logits as [N] log-odds of one label; with one label, the logit itself."""
    values = logits.astype(np.float64)
    if values.shape[1] == 1:
        return values[:, 0]
    others = np.delete(values, label, axis=1)
    top = others.max(axis=1)
    rest: Floats = values[:, label] - top - np.log(np.exp(others - top[:, None]).sum(axis=1))
    return rest


def sigmoid(values: Floats) -> Floats:
    """Of any size without overflow: small results keep their digits instead of becoming 1 - (1 - x)."""
    small = np.exp(-np.abs(values))
    shown: Floats = np.where(values >= 0, 1.0, small) / (1.0 + small)
    return shown


def cosine(queries: AnyArray, documents: AnyArray) -> Floats:
    """[N, D] and [N, D] to [N] in -1 to 1, row by row; 0 where one has no direction."""
    left, right = queries.astype(np.float64), documents.astype(np.float64)
    lengths = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    dots: Floats = (left * right).sum(axis=1)
    cosines: Floats = np.divide(dots, lengths, out=np.zeros_like(dots), where=lengths > 0)
    # Rounding makes 1.0000000000000002 of a text and itself, of which an arc cosine is no number.
    return np.clip(cosines, -1.0, 1.0)


def sparse_dot(query: Lexical, document: Lexical) -> float:
    _, left, right = np.intersect1d(query.ids, document.ids, assume_unique=True, return_indices=True)
    return float(query.weights[left].astype(np.float64) @ document.weights[right].astype(np.float64))


def max_sim(query: AnyArray, document: AnyArray) -> float:
    """[query tokens, D] and [document tokens, D]; the divisor is the tokens that were summed over. 0 without any."""
    if not len(query) or not len(document):
        return 0.0
    best = (query.astype(np.float32, copy=False) @ document.astype(np.float32, copy=False).T).max(axis=1)
    return float(best.mean(dtype=np.float64))


def combine(scores: Mapping[str, Floats], weights: Mapping[str, float]) -> Floats:
    """[N] weighted mean of the methods that `weights` names."""
    total: Floats = np.sum([scores[name] * weight for name, weight in weights.items()], axis=0)
    return total / sum(weights.values())

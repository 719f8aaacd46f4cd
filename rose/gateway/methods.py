"""How a model can score a query against a document, from what its card and its folder say.

    cross     one pass over both, by a classifier or a language model's yes or no
    dense, sparse, colbert, combined    each text by itself, then compared (scoring.py)

Knows outputs and labels; knows neither texts nor arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rose.errors import InvalidInput
from rose.gateway.inputs import show
from rose.gateway.outputs import SCORE, VECTOR, WEIGHTS, kind_of
from rose.proto import rose_pb2 as pb

CROSS, DENSE, SPARSE, COLBERT, COMBINED = "cross", "dense", "sparse", "colbert", "combined"
METHODS = (CROSS, DENSE, SPARSE, COLBERT, COMBINED)
COMPARED = (DENSE, SPARSE, COLBERT)
# Of `combined`, where the request has none: the three scores count alike, as in FlagEmbedding's compute_score.
WEIGHTS_BY_DEFAULT = dict.fromkeys(COMPARED, 1.0)
_NEED = {
    CROSS: "a head that scores pairs",
    DENSE: "one float vector a text",
    SPARSE: "lexical weights",
    COLBERT: "a vector a token",
}


@dataclass(frozen=True, slots=True)
class Method:
    """One way of scoring, settled.

    Attributes:
        name: as the caller may ask for it.
        outputs: method -> the output of the model it reads; more than one for "combined".
        weights: of each, for "combined".
    """

    name: str
    outputs: Mapping[str, str]
    weights: Mapping[str, float] = field(default_factory=dict)


def choose_method(card: pb.ModelCard, asked: str | None, weights: Mapping[str, float] | None) -> Method:
    """
    Args:
        asked: None: cross where the model scores pairs, else dense, sparse or colbert, whichever there is first.

    Raises:
        InvalidInput: a method that there is not or that this model cannot give, with the reason; bad weights.
    """
    if weights is not None and asked != COMBINED:
        raise InvalidInput(f"weights go with method {COMBINED!r}", param="weights")
    if asked is None:
        return _default(card)
    if asked not in METHODS:
        raise InvalidInput(f"method {asked!r}: expected one of {', '.join(METHODS)}", param="method")
    if asked == COMBINED:
        kept = _check_weights(WEIGHTS_BY_DEFAULT if weights is None else weights)
        return Method(asked, {name: _required(card, name) for name in kept}, kept)
    return Method(asked, {asked: _required(card, asked)})


def label_index(label: str | int | None, labels: tuple[str, ...], count: int) -> int:
    """The column of a score. Raises InvalidInput for several labels and none named, or for one there is not."""
    known = labels if len(labels) == count else tuple(f"LABEL_{i}" for i in range(count))
    if label is None and count == 1:
        return 0
    listed = ", ".join(known[:20]) + (", ..." if count > 20 else "")
    if label is None:
        raise InvalidInput(
            f"the model gives {count} labels, not one relevance: name the label to rank by ({listed})", param="label"
        )
    if isinstance(label, str) and label in known:
        return known.index(label)
    if isinstance(label, int) and 0 <= label < count:
        return label
    shown = repr(label) if isinstance(label, str) else show(label)
    raise InvalidInput(f"the model has no label {shown}; it has: {listed}, or 0..{count - 1}", param="label")


def _default(card: pb.ModelCard) -> Method:
    if any(kind_of(output) == SCORE for output in card.outputs):
        return Method(CROSS, {CROSS: _required(card, CROSS)})
    for name in COMPARED:
        found = _find(card, name)
        if found is not None and not found.unavailable:
            return Method(name, {name: found.name})
    raise InvalidInput(f"the model {card.model!r} gives nothing that two texts could be scored by", param="model")


def _required(card: pb.ModelCard, method: str) -> str:
    found = _find(card, method)
    if found is None:
        raise InvalidInput(f"method {method!r} needs {_NEED[method]}, which {card.model!r} has not", param="method")
    if found.unavailable:
        raise InvalidInput(f"method {method!r} cannot be had: {found.unavailable}", param="method")
    return found.name


def _find(card: pb.ModelCard, method: str) -> pb.OutputCard | None:
    """The output a method reads; among several, the model's default one."""
    fitting = [output for output in card.outputs if _fits(output, method)]
    return next((one for one in fitting if one.name == card.default_output), fitting[0] if fitting else None)


def _fits(output: pb.OutputCard, method: str) -> bool:
    kind = kind_of(output)
    if method == CROSS:
        return kind == SCORE
    if method == SPARSE:
        return kind == WEIGHTS
    # Quantised vectors compare worse than the ones they were made from.
    return kind == VECTOR and output.dtype == pb.FLOAT32 and output.per_token == (method == COLBERT)


def _check_weights(weights: Mapping[str, float]) -> dict[str, float]:
    """Those above zero, the largest as 1: only their ratios count, and none is too large to be added up."""
    for name, weight in weights.items():
        if name not in COMPARED:
            raise InvalidInput(f"weights name {name!r}: expected some of {', '.join(COMPARED)}", param="weights")
        if not 0 <= weight < float("inf"):
            raise InvalidInput(f"the weight of {name} is {weight!r}: expected 0 or more", param="weights")
    largest = max(weights.values(), default=0.0)
    if not largest:
        raise InvalidInput("no weight is above zero", param="weights")
    return {name: weight / largest for name, weight in weights.items() if weight > 0}

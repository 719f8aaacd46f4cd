"""What a caller wants scored, and what comes of it.

Knows pairs of texts and scores; knows neither the model nor how it scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from rose.client import Timing
from rose.gateway.methods import CROSS
from rose.gateway.scoring import Floats, sigmoid
from rose.proto import rose_pb2 as pb

Activation = Literal["sigmoid", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJob:
    """What a caller wants scored.

    Attributes:
        queries, documents: the same number of both, none empty.
        names: what the caller calls them.
        query_index: whether each pair has a query of its own, which errors then number.
        method, weights, label: see methods.py.
        instruction: for models with a template; None for their own.
        truncate: cut documents that are too long.
        cut_field: how the caller could ask for that, as errors say it; "" where there is no way.
        document_tokens: cut every document to this many tokens first.
        split_special_tokens: take control tokens written in a text apart; None: yes.
        query_prompt_name, document_prompt_name: of the card, for compared texts; None: the model's own choice.
        deadline: loop.time() after which nobody wants the answer.
    """

    queries: Sequence[str]
    documents: Sequence[str]
    names: tuple[str, str] = ("query", "documents")
    query_index: bool = False
    method: str | None = None
    weights: Mapping[str, float] | None = None
    label: str | int | None = None
    instruction: str | None = None
    truncate: bool = False
    cut_field: str = ""
    document_tokens: int | None = None
    split_special_tokens: bool | None = None
    query_prompt_name: str | None = None
    document_prompt_name: str | None = None
    priority: pb.Priority.ValueType = pb.ONLINE
    deadline: float


@dataclass(frozen=True, slots=True)
class Ranked:
    """The answer, and where the time went.

    Attributes:
        raw: [pairs] float64, in the order of the pairs; ranking goes by these.
        method: what they are.
        activation: what the model applies to them to be shown, "sigmoid" or "none".
        label: the label they are of, for a model with several.
        prompts: what was put before the texts: of {"query": name, "document": name}.
        tokens: of the request as the model saw it.
    """

    raw: Floats
    method: str
    activation: Activation
    tokens: int
    tokenize_s: float
    timing: Timing
    label: int | None = None
    prompts: dict[str, str] = field(default_factory=dict)

    def shown(self, raw_scores: bool | None) -> tuple[Floats, Activation]:
        """The scores, and what was applied to them.

        Args:
            raw_scores: True: nothing. False: the sigmoid, for scores that are logits. None: what the model says.
        """
        if self.method != CROSS or raw_scores or (raw_scores is None and self.activation == "none"):
            return self.raw, "none"
        return sigmoid(self.raw), "sigmoid"

    def order(self) -> list[int]:
        """Pairs from the best to the worst; equal ones as they came."""
        best_first: list[int] = np.argsort(-self.raw, kind="stable").tolist()
        return best_first

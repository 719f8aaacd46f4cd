"""What goes into the engine and what comes out of a step.

Plain values; free of policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rose.errors import RoseError

if TYPE_CHECKING:
    from rose.engine.lazy_tensor import LazyTensor


class Priority(IntEnum):
    ONLINE = 0
    BULK = 1


@dataclass(slots=True)
class Request:
    """Sequences to run, already tokenised and validated.

    Attributes:
        id: unique among the engine's open requests.
        sequences: int32 id arrays, none empty.
        outputs: names of the model's outputs to compute.
        deadline: time.monotonic() after which nobody wants the answer, or None.
        alone: run each sequence in a batch of its own (used to repeat the company of a non-finite row).
        token_types: token type ids beside `sequences` (BERT pairs), or None for all zero.
        spans: [n, 2] int32 beside each of `sequences`, or None: first token and end of each part that is pooled by
            itself (late chunking), counted from the sequence's own first token; n may be 0.
        checked: every id is known to be in the model's vocabulary: whoever made the request has looked.
    """

    id: int
    sequences: list[npt.NDArray[np.int32]]
    outputs: tuple[str, ...] = ()
    deadline: float | None = None
    priority: Priority = Priority.ONLINE
    alone: bool = False
    token_types: list[npt.NDArray[np.int32]] | None = None
    spans: list[npt.NDArray[np.int32]] | None = None
    checked: bool = False


# Never changed: hashed like a value, but not frozen, which would double what making one costs.
@dataclass(slots=True, unsafe_hash=True)
class Item:
    """One sequence of one request: `request.sequences[index]`."""

    request_id: int
    index: int


# Not frozen, though never changed: one is made in every step, and freezing triples what that costs.
@dataclass(slots=True)
class StepResult:
    """One launched batch, or requests that were dropped before any launch.

    Attributes:
        items: the batch's sequences, in batch order.
        outputs: per output name, a lazy host tensor. Pooled outputs have one row an item; per-token outputs have
            rows splits[i] .. splits[i + 1] for item i.
        splits: row boundaries of the per-token outputs: 0, then the end of each item.
        span_splits: row boundaries of the pooled outputs of requests with spans: 0, then the end of each item; empty
            where the batch has none, and each item one row.
        tokens: tokens of the batch, padding left out.
        dropped: requests that ended without an answer, by id (expired before they were batched).
    """

    items: tuple[Item, ...] = ()
    outputs: Mapping[str, LazyTensor] = field(default_factory=dict)
    splits: tuple[int, ...] = (0,)
    span_splits: tuple[int, ...] = ()
    tokens: int = 0
    dropped: Mapping[int, RoseError] = field(default_factory=dict)

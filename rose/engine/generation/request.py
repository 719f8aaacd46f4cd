"""What goes into a generating engine and what comes out of its steps.

Plain values; free of policy and of torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from rose.engine.request import Priority
from rose.errors import RoseError


class Finish(IntEnum):
    """Why a sequence ended. Numbers are those of the schema's FinishReason."""

    NONE = 0
    STOP = 1
    LENGTH = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is drawn.

    Attributes:
        max_new_tokens: most tokens to generate.
        temperature: 0 is greedy.
        top_k: draw among the k most likely; 0 for all.
        top_p: draw among the fewest tokens whose probability adds up to top_p; 1 for all.
        min_p: leave out tokens less likely than min_p times the most likely one; 0 for none.
        seed: the same seed draws the same tokens for the same logits, whatever the company; None draws one for itself.
        stop_ids: a token that ends the sequence; the model's own end tokens come on top of them.
        ignore_eos: the model's own end tokens do not end it.
        min_new_tokens: before so many tokens no end token is drawn.
        logprobs: None for none; else for each token its log probability and those of as many alternatives (0: only the
            token's own). Of the plain softmax of the logits, whatever the temperature.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_new_tokens: int = 0
    logprobs: int | None = None


@dataclass(slots=True)
class GenerateRequest:
    """One prompt to continue, tokenised and validated.

    Attributes:
        id: unique among the engine's open requests.
        ids: int32, the prompt.
        deadline: time.monotonic() after which nobody wants more tokens, or None.
    """

    id: int
    ids: npt.NDArray[np.int32]
    sampling: Sampling
    deadline: float | None = None
    priority: Priority = Priority.ONLINE


@dataclass(slots=True)
class NewToken:
    """One token of one request, on the host.

    Attributes:
        token: its id. An end token is reported too, with `finish` STOP.
        logprob: natural logarithm, where asked for.
        top: (id, logprob) of the most likely alternatives, best first, where asked for.
        finish: NONE while more will come.
        cached_tokens: of the prompt, found in the cache; stated with the first token.
    """

    request_id: int
    token: int
    logprob: float | None = None
    top: Sequence[tuple[int, float]] = ()
    finish: Finish = Finish.NONE
    cached_tokens: int = 0


@dataclass(slots=True)
class GenerationStep:
    """What one step brought.

    Attributes:
        tokens: that arrived on the host since the last step, in the order they were drawn; at most one a request and
            batch.
        failed: requests that ended with an error (deadline, logits that are not finite, a forward that failed with the
            request alone), by id.
        launched: whether a batch was launched.
        started: requests whose first tokens are in that batch, by id; a request that was preempted is told of once.
        failed_batches: batches whose staging or forward raised; the device may be lost.
        retried: their sequences that are tried again.
    """

    tokens: list[NewToken] = field(default_factory=list)
    failed: Mapping[int, RoseError] = field(default_factory=dict)
    launched: bool = False
    started: Sequence[int] = ()
    failed_batches: int = 0
    retried: int = 0

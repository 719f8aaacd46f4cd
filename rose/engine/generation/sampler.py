"""From logits to the next tokens on the device, and from one small int32 matrix to them on the host.

A row of that matrix: the id, or NOT_FINITE where no token can be told from the logits; and where log probabilities are
wanted, that of the drawn token, then the ids and log probabilities of the likeliest ones. Fractions travel by their
bits, so that one copy brings everything. Knows logits and how rows are drawn; knows neither requests nor models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rose.engine.generation.buckets import Draw
from rose.kernels.sample import greedy, logprobs, sample


def draw_tokens(logits: Tensor, parts: Mapping[str, Tensor], draw: Draw, vocab_limit: int) -> Tensor:
    """
    Args:
        logits: [S, V] fp32.
        parts: of the batch's layout, on the device of the logits.
        vocab_limit: only ids below it are drawn.

    Returns:
        [S, 1], or [S, 2 + 2 k] int32 where log probabilities are wanted.
    """
    open_logits = logits
    if draw.banned:
        # Adding nothing to id 0 is what filled-up rows do.
        open_logits = logits.scatter_add(1, parts["banned"].long(), parts["penalties"])
    if draw.sampled:
        kept = (parts["top_k"], parts["top_p"], parts["min_p"])
        ids = sample(open_logits, parts["temperature"], *kept, parts["seeds"], parts["steps"], vocab_limit)
    else:
        ids = greedy(open_logits, vocab_limit)
    if draw.logprobs < 0:
        return ids[:, None]
    # Of the logits as the model gave them: what was banned has its own probability.
    own, top_ids, top = logprobs(logits, ids, draw.logprobs, vocab_limit)
    return torch.cat([ids[:, None], own.view(torch.int32)[:, None], top_ids, top.view(torch.int32)], dim=1)


class Drawn(NamedTuple):
    """What one batch drew, on the host.

    Attributes:
        ids: of each row.
        logprobs: of each row; empty where none are wanted.
        top_ids, top_logprobs: of each row the likeliest tokens, best first.
    """

    ids: list[int]
    logprobs: Sequence[float] = ()
    top_ids: Sequence[Sequence[int]] = ()
    top_logprobs: Sequence[Sequence[float]] = ()


def read_drawn(rows: npt.NDArray[np.int32]) -> Drawn:
    """
    Args:
        rows: [S, 1] or [S, 2 + 2 k], as `draw_tokens` gives it.
    """
    ids = rows[:, 0].tolist()
    if rows.shape[1] == 1:
        return Drawn(ids)
    fractions = rows.view(np.float32)
    top = 2 + (rows.shape[1] - 2) // 2
    return Drawn(ids, fractions[:, 1].tolist(), rows[:, 2:top].tolist(), fractions[:, top:].tolist())

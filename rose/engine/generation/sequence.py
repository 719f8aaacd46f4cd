"""A running sequence and its share of a batch: what the scheduler hands to whoever stages and launches it.

Plain Python; knows neither devices nor models.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rose.engine.generation.request import GenerateRequest


@dataclass(slots=True, eq=False)
class Sequence:
    """One request while it runs.

    Attributes:
        ids: [room] int32, prompt and generated tokens; only the first `known` are on the host.
        known: tokens whose ids the host knows: the prompt, and what came back so far.
        drawn: tokens of the sequence including those drawn on the device and not yet here (known <= drawn).
        computed: tokens whose keys and values are, or will be after the launched batches, in the cache.
        pages: ids of its pages, in order.
        lane: row of the device's buffer where its latest drawn token lies, and of the recurrent-state pools; taken when
            it starts, 1 or higher (0 belongs to dummies).
        prompt_length: tokens of the prompt.
        cached_tokens: of the prompt, taken from the cache when it first started.
        finished: it has ended, and tokens still on their way are to be ignored.
        preemptions: how often its pages were taken from it.
    """

    request: GenerateRequest
    ids: npt.NDArray[np.int32]
    known: int
    prompt_length: int
    serial: int = 0
    drawn: int = 0
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    lane: int = 0
    cached_tokens: int = 0
    finished: bool = False
    preemptions: int = 0


@dataclass(slots=True)
class Chunk:
    """The tokens of one sequence that one batch computes.

    Attributes:
        start: position of the first of them.
        length: how many; 1 for a decoding sequence.
        samples: the sequence's next token is drawn after the last of them.
        from_device: its only token is the latest drawn one, whose id lies on the device, not on the host.
    """

    sequence: Sequence
    start: int
    length: int
    samples: bool
    from_device: bool = False


@dataclass(slots=True)
class BatchPlan:
    """One batch: decoding sequences (one token each) first, then chunks of prompts."""

    chunks: list[Chunk]
    decodes: int

    @property
    def tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

"""A running sequence and its share of a batch: what the scheduler hands to whoever stages and launches it.

Plain Python; knows neither devices nor models.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from rose.engine.generation.request import GenerateRequest


class State(IntEnum):
    """Where a sequence stands.

    WAITING: it has neither lane nor pages, because it never had or because they were taken from it.
    PREFILL: tokens that the host knows are not computed yet.
    DECODE: its next token follows from the latest drawn one.
    DRAINED: all its tokens are drawn, and some are still on their way to the host.
    """

    WAITING = 0
    PREFILL = 1
    DECODE = 2
    DRAINED = 3


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
        serial: order of arrival, never reused.
        max_length: tokens of the prompt and the most new ones, together.
        rank: 0 is served before 1; class BULK starts with 1.
        capacity: tokens that its pages hold.
        in_flight: chunks of it in batches that are planned and neither committed nor failed.
        void: of them, those that followed a batch which failed: what they draw means nothing.
        unexplained: how often a batch of it failed though nobody in it was found guilty or ended before that was known.
        digests: of its leading full pages, as far as anybody asked.
        kept: leading pages whose content is offered to others already.
        resumes: row of a saved recurrent state that its next chunk goes on from; 0 for none.
        saved: its tokens behind which a state of it was last saved, or found.
        latest_state: digest of the state that was saved last while it decoded.
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
    max_length: int = 0
    rank: int = 0
    state: State = State.WAITING
    capacity: int = 0
    in_flight: int = 0
    void: int = 0
    unexplained: int = 0
    digests: list[bytes] = field(default_factory=list)
    kept: int = 0
    resumes: int = 0
    saved: int = 0
    latest_state: bytes | None = None


@dataclass(slots=True)
class Chunk:
    """The tokens of one sequence that one batch computes.

    A drawn token's position is `start + length`, so it is new token number `start + length - prompt_length`, from 0.

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
class StateSave:
    """The state a sequence has once a batch is done, to be kept.

    Attributes:
        row: it is copied to.
        lane: it is copied from.
        tokens: of the sequence, that lead to it; whole pages.
        decoded: the last of them was drawn, not read in a prompt.
    """

    sequence: Sequence
    row: int
    lane: int
    tokens: int
    decoded: bool


@dataclass(slots=True)
class BatchPlan:
    """One batch: decoding sequences (one token each) first, then chunks of prompts.

    A decoding sequence has the same Chunk in every plan, with another start: stage a plan before the next is made.

    Attributes:
        started: ids of the requests whose first chunk this is.
        resumes: (row, lane): states to copy before the batch, for sequences that go on from what is found.
        saves: states to copy after it.
    """

    chunks: list[Chunk]
    decodes: int
    started: list[int] = field(default_factory=list)
    resumes: list[tuple[int, int]] = field(default_factory=list)
    saves: list[StateSave] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return self.decodes + sum(chunk.length for chunk in self.chunks[self.decodes :])

    @property
    def draws(self) -> int:
        """Tokens it draws: one for each chunk that samples."""
        return self.decodes + sum(chunk.samples for chunk in self.chunks[self.decodes :])


Copies = list[tuple[int, int]]


def state_copies(plan: BatchPlan | None) -> tuple[Copies, Copies]:
    """(from row, to row) of the recurrent states that are copied before a batch, and after it."""
    return ([], []) if plan is None else (plan.resumes, [(save.lane, save.row) for save in plan.saves])

"""A device that remembers token ids instead of keys and values, and whose next token is a checksum of what it reads.

Batches run in the order they were launched, whenever the test says so. Every token it draws depends on every token of
the sequence as found through its pages (or its row of recurrent state), so a page that is lost, shared wrongly or
written too early changes what comes out.
"""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass

import numpy as np

from rose.engine.generation.limits import GenerationLimits
from rose.engine.generation.request import GenerateRequest
from rose.engine.generation.sequence import BatchPlan, Copies, Sequence, state_copies

VOCAB = 40
END = 0
GARBAGE = -9


def next_token(context: list[int]) -> int:
    return zlib.crc32(np.array(context, dtype=np.int32).tobytes()) % VOCAB


def expected_tokens(request: GenerateRequest, end_ids: frozenset[int] = frozenset({END})) -> list[int]:
    """What the request must be answered with, worked out alone."""
    context, sampling = request.ids.tolist(), request.sampling
    tokens: list[int] = []
    while len(tokens) < sampling.max_new_tokens:
        token = next_token(context)
        tokens.append(token)
        context.append(token)
        ends = token in sampling.stop_ids or (token in end_ids and not sampling.ignore_eos)
        if ends and len(tokens) > sampling.min_new_tokens:
            break
    return tokens


@dataclass
class Staged:
    """What a chunk was when its batch was staged; sequences and chunks change afterwards."""

    sequence: Sequence
    ids: list[int]
    rows: list[int]
    fresh: list[int]
    lane: int
    start: int
    samples: bool


class PretendDevice:
    """
    Args:
        recurrent: what a sequence has read is kept in its lane's row, not found through its pages.
    """

    def __init__(self, limits: GenerationLimits, *, recurrent: bool = False) -> None:
        self._page_size = limits.page_size
        self._lanes = limits.max_running
        self._recurrent = recurrent
        self.rows = [GARBAGE] * (limits.num_pages * limits.page_size)
        self.latest = [GARBAGE] * (limits.max_running + 1)
        self.states: list[list[int]] = [[GARBAGE] for _ in range(limits.max_running + 1 + limits.saved_states)]
        self.launched: deque[tuple[BatchPlan, list[Staged]]] = deque()
        self._copies: deque[tuple[Copies, Copies]] = deque()

    def launch(self, plan: BatchPlan) -> None:
        staged = []
        for index, chunk in enumerate(plan.chunks):
            sequence, end = chunk.sequence, chunk.start + chunk.length
            assert 1 <= sequence.lane <= self._lanes
            assert chunk.length >= 1
            assert not sequence.finished
            if index < plan.decodes:
                assert chunk.length == 1
                assert chunk.from_device
                assert chunk.samples
                ids = [-1 - sequence.lane]
            else:
                assert not chunk.from_device
                assert end <= sequence.known, "ids that the host does not know yet"
                ids = sequence.ids[chunk.start : end].tolist()
            size = self._page_size
            rows = [sequence.pages[p // size] * size + p % size for p in range(end)]
            assert min(rows) >= size, "page 0 is nobody's"
            staged.append(Staged(sequence, ids, rows, rows[chunk.start :], sequence.lane, chunk.start, chunk.samples))
        written = [row for part in staged for row in part.fresh]
        assert len(set(written)) == len(written), "two sequences write to one row in one batch"
        read = {row for part in staged for row in part.rows[: part.start]}
        assert not read & set(written), "a batch reads what another sequence writes in it"
        lanes = [part.lane for part in staged]
        assert len(set(lanes)) == len(lanes), "two sequences have one lane in one batch"
        resumes, saves = state_copies(plan)
        assert {lane for _, lane in resumes} <= set(lanes), "a state for nobody in the batch"
        assert {lane for lane, _ in saves} <= set(lanes)
        written = [row for _, row in saves]
        assert len(set(written)) == len(written), "two states are saved to one row"
        assert min([*written, *(row for row, _ in resumes), self._lanes + 1]) > self._lanes
        self._copies.append((resumes, saves))
        self.launched.append((plan, staged))

    def run(self) -> tuple[BatchPlan, list[int]]:
        """Run the oldest batch: everything is stored, then read, then drawn."""
        plan, staged = self.launched.popleft()
        resumes, saves = self._copies.popleft()
        for row, lane in resumes:
            self.states[lane] = self.states[row]
        for part in staged:
            ids = [self.latest[-1 - token] if token < 0 else token for token in part.ids]
            for row, token in zip(part.fresh, ids, strict=True):
                self.rows[row] = token
            before = [] if part.start == 0 else self.states[part.lane]
            self.states[part.lane] = before + ids
        tokens = []
        for part in staged:
            if part.samples:
                read = self.states[part.lane] if self._recurrent else [self.rows[row] for row in part.rows]
                tokens.append(next_token(read))
                self.latest[part.lane] = tokens[-1]
        for lane, row in saves:
            self.states[row] = self.states[lane]
        return plan, tokens

    def break_down(self) -> BatchPlan:
        """The oldest batch fails half way: everything it touches is garbage."""
        plan, staged = self.launched.popleft()
        _, saves = self._copies.popleft()
        for _, row in saves:
            self.states[row] = [GARBAGE]
        for part in staged:
            for row in part.fresh:
                self.rows[row] = GARBAGE
            self.latest[part.lane] = GARBAGE
            self.states[part.lane] = [GARBAGE]
        return plan

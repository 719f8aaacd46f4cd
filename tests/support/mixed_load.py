"""Mixed requests through an engine: every kind, cancelled and expired at random, and every answer checked.

    python -m tests.support.mixed_load --requests 100000

Each request must end exactly once: answered, with the rows of all its sequences in order and right; or cancelled; or
expired. The clock is the pretended device's, so a run is the same every time.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rose.config import EngineConfig
from rose.engine import Engine, Priority, Request, StepResult
from rose.engine.graphs import LazyGraphs
from rose.engine.lazy_tensor import LazyTensor
from rose.engine.open_request import OpenRequest
from rose.errors import DeadlineExceeded
from tests.support.virtual_device import (
    MAX_TOKENS,
    VOCAB,
    Capturer,
    EchoModel,
    NoAttention,
    VirtualClock,
    VirtualExecutor,
    echoed,
)

# Requests that may be open: what a server's queue limit does.
MOST_OPEN = 192
_OUTPUTS = ((), ("pooled",), ("tokens",), ("tokens", "pooled"))
# The engine's own types of which one is made a request or a batch.
_TRANSIENT = (OpenRequest, LazyTensor, StepResult, Request)


@dataclass(slots=True)
class Known:
    """What the test knows of one open request."""

    sequences: list[np.ndarray]
    outputs: tuple[str, ...]
    launched: int = 0
    answered: int = 0
    ended: str = ""


@dataclass(slots=True)
class Report:
    ended: Counter[str] = field(default_factory=Counter)
    sequences: int = 0
    tokens: int = 0
    batches: int = 0
    virtual_seconds: float = 0.0
    wall_seconds: float = 0.0
    kept_objects: int = 0
    memory_growth: int = 0
    padding_share: float = 0.0
    graph_hits: int = 0


class MixedLoad:
    """One engine under a seeded load of `count` requests."""

    def __init__(self, count: int, *, seed: int = 0, graphs: bool = True) -> None:
        self._rng = np.random.default_rng(seed)
        self.clock = VirtualClock()
        model = EchoModel()
        self.executor = VirtualExecutor(self.clock, model, seed=seed)
        config = EngineConfig(max_tokens=MAX_TOKENS)
        place = LazyGraphs(self.executor.device, capturer=Capturer() if graphs else None, max_bytes=1 << 17)
        self.engine = Engine(
            model, config, self.executor, NoAttention(), graphs=place, inflection_tokens=16384, clock=self.clock
        )
        self._pool = self._rng.integers(0, VOCAB, 1 << 21, dtype=np.int32)
        self._count = count
        self._added = 0
        self._known: dict[int, Known] = {}
        self._cancels: list[tuple[float, int]] = []
        self._flights: list[StepResult] = []
        self.report = Report()

    def run(self) -> Report:
        started, report = time.perf_counter(), self.report
        settled = 0
        next_arrival = 0.0
        while self._added < self._count or self._known:
            if self._added < self._count and self.clock.now >= next_arrival and len(self._known) < MOST_OPEN:
                self._add()
                # Bursts and pauses; the mean asks a little more of the device than it can give.
                next_arrival = self.clock.now + self._rng.exponential(1.2e-3) * self._rng.choice([0.05, 0.5, 3.0])
                if self._added == self._count // 2:
                    settled = resident_bytes()
                continue
            while self._step():
                pass
            self._advance(next_arrival)
        report.memory_growth = resident_bytes() - settled
        self._check_end()
        metrics = self.engine.metrics
        report.batches, report.sequences, report.tokens = metrics.batches, metrics.sequences, metrics.tokens
        report.padding_share = metrics.padding_tokens / (metrics.padding_tokens + metrics.tokens)
        report.graph_hits = self.engine.graphs.metrics.hits
        report.virtual_seconds, report.wall_seconds = float(self.clock.now), time.perf_counter() - started
        return report

    def _add(self) -> None:
        rng, number = self._rng, self._added + 1
        self._added = number
        kind = rng.random()
        longest, count = MAX_TOKENS, 1
        if kind > 0.97:
            longest, count = 256, int(rng.integers(100, 400))
        elif kind > 0.75:
            longest, count = 1024, int(rng.integers(2, 24))
        lengths = np.exp(rng.uniform(0, np.log(longest), count)).astype(int)
        starts = rng.integers(0, len(self._pool) - MAX_TOKENS, count)
        sequences = [self._pool[s : s + n] for s, n in zip(starts, lengths, strict=True)]
        deadline = None
        if rng.random() < 0.25:
            deadline = self.clock.now + rng.exponential(0.004 if rng.random() < 0.5 else 0.5)
        outputs = _OUTPUTS[rng.choice(4, p=(0.5, 0.3, 0.1, 0.1))]
        priority = Priority.BULK if rng.random() < 0.15 else Priority.ONLINE
        alone = bool(rng.random() < 0.02)
        self.engine.add(Request(number, sequences, outputs, deadline, priority, alone))
        self._known[number] = Known(sequences, outputs or ("pooled",))
        if rng.random() < 0.15:
            heapq.heappush(self._cancels, (self.clock.now + rng.exponential(0.01), number))

    def _advance(self, next_arrival: float) -> None:
        """To the next thing that happens."""
        times = [self.executor.next_end, self.engine.wake_at()]
        if self._cancels:
            times.append(self._cancels[0][0])
        if self._added < self._count and len(self._known) < MOST_OPEN:
            times.append(next_arrival)
        due = [at for at in times if at is not None and at > self.clock.now]
        assert due, "requests wait and nothing will ever happen"
        self.clock.now = min(due)
        self.executor.settle()
        self._collect()
        while self._cancels and self._cancels[0][0] <= self.clock.now:
            _, number = heapq.heappop(self._cancels)
            waited = self.engine.abort(number)
            known = self._known.get(number)
            if waited:
                assert known is not None, "a request that had ended was still in the queue"
                assert not known.ended
                known.ended = "cancelled"
                self._forget(number, known)

    def _step(self) -> bool:
        results = self.engine.step()
        for result in results:
            for number, error in result.dropped.items():
                known = self._known[number]
                assert isinstance(error, DeadlineExceeded)
                assert not known.ended, "it ended twice"
                known.ended = "expired"
                self._forget(number, known)
            for item in result.items:
                known = self._known[item.request_id]
                assert not known.ended, "launched after its end"
                assert item.index == known.launched, "a sequence was lost, doubled or put out of order"
                known.launched += 1
            if result.items:
                self._flights.append(result)
        return bool(results)

    def _collect(self) -> None:
        while self._flights and all(output.ready() for output in self._flights[0].outputs.values()):
            result = self._flights.pop(0)
            outputs = {name: output.result() for name, output in result.outputs.items()}
            for row, item in enumerate(result.items):
                known = self._known[item.request_id]
                assert item.index == known.answered
                assert set(outputs) == set(known.outputs)
                ids = known.sequences[item.index]
                if "pooled" in outputs:
                    np.testing.assert_array_equal(outputs["pooled"][row], echoed(ids))
                if "tokens" in outputs:
                    rows = outputs["tokens"][result.splits[row] : result.splits[row + 1]]
                    np.testing.assert_array_equal(rows[:, 0], ids)
                    np.testing.assert_array_equal(rows[:, 1], np.arange(len(ids)))
                known.answered += 1
                self._forget(item.request_id, known)

    def _forget(self, number: int, known: Known) -> None:
        """Once nothing of it is under way."""
        if not known.ended and known.answered == len(known.sequences):
            known.ended = "answered"
        if known.ended and known.answered == known.launched:
            self.report.ended[known.ended] += 1
            del self._known[number]

    def _check_end(self) -> None:
        assert sum(self.report.ended.values()) == self._count, "a request is missing"
        assert self.engine.idle
        assert (self.engine.queued_tokens, self.engine.queued_requests) == (0, 0)
        assert self.engine.failed_batches == 0
        np.testing.assert_allclose(self.engine.device_seconds, self.executor.busy_seconds)
        gc.collect()
        self.report.kept_objects = sum(type(one) in _TRANSIENT for one in gc.get_objects())


def resident_bytes() -> int:
    """Memory of this process, after everything unreachable is gone."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for graphs in (False, True):
        report = MixedLoad(arguments.requests, seed=arguments.seed, graphs=graphs).run()
        print(f"{'graphs' if graphs else 'plain'}: {report}", flush=True)


if __name__ == "__main__":
    main()

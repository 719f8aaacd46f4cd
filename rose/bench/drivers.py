"""The ways of carriers.py, and one more: the engine in this process.

Knows the engine's surface; knows neither loads nor tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rose.bench.carriers import Driver, GrpcDriver, HttpDriver, Ids, LinkDriver, Vectors
from rose.engine.engine import Engine
from rose.engine.request import Request

__all__ = ["Driver", "EngineDriver", "GrpcDriver", "HttpDriver", "Ids", "LinkDriver"]


class EngineDriver:
    """The engine in this process: add, step, result."""

    via = "engine"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._next = 0
        # As the server's thread does: stream and inference mode are kept, not entered for every batch.
        self._owner = engine.executor.owner()
        self._owner.__enter__()

    def prepare(self, sequences: Sequence[Ids]) -> list[Ids]:
        return list(sequences)

    def send(self, prepared: list[Ids]) -> Vectors:
        self._next += 1
        self._engine.add(Request(self._next, prepared))
        rows: list[tuple[list[int], Any]] = []
        while self._engine.queued_requests:
            results = self._engine.step()
            rows += [([item.index for item in r.items], r.outputs) for r in results if r.items]
            if not results:
                # Two batches are under way: wait for the older one.
                next(iter(rows[-2 if len(rows) > 1 else -1][1].values())).result()
        found = [(order, next(iter(outputs.values())).result()) for order, outputs in rows]
        if len(found) == 1:
            only: Vectors = found[0][1]
            return only
        joined = np.empty((len(prepared), found[0][1].shape[1]), dtype=found[0][1].dtype)
        for order, block in found:
            joined[order] = block
        return joined

    def vectors(self, answer: Vectors) -> Vectors:
        return answer.astype(np.float32)

    def counters(self) -> tuple[int, int]:
        metrics = self._engine.graphs.metrics
        return metrics.hits, metrics.plain + metrics.captures

    def close(self) -> None:
        self._owner.__exit__(None, None, None)
        self._engine.close()

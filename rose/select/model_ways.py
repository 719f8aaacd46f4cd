"""Whole models: one engine a backend over the same weights, so that what is timed is what serves.

A sample is one batch through the engine with the device idle before it: its time starts before attention is planned and
ends after the last kernel, so that planning counts. Large batches follow each other, as under load: the next one is
planned while one runs, and only what that does not hide counts. Knows engines; knows no statistics.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from rose.attention_backends.auto import spec_for
from rose.attention_backends.base import backend_names, try_backend
from rose.attention_backends.check import check_backend
from rose.attention_backends.choose import LAST_RESORT, LONGEST
from rose.config import EngineConfig
from rose.config.profile import AttentionShape, ModelNumbers, ModelShape
from rose.config.profile_files import Found
from rose.engine import Engine, Request, build_engine
from rose.engine.profiles import attention_shape
from rose.engine.request import StepResult
from rose.errors import StartupError
from rose.models.base import ServedModel
from rose.select.grid import GridLoad
from rose.select.ways import Ready, attention_ways

MAX_SEQUENCES = 512
GRAPH_BYTES = 8 << 30
# A capture needs three runs: plain, captured, replayed; a few more where another graph has to go first.
WARM_RUNS, MOST_WARM_RUNS = 4, 8
# Batches of so many tokens come one after another where they come at all: FlashInfer 3's plan costs a lone one of
# 16 x 512 tokens 0.7 ms, and in a row of them its kernels save 3.5 % of BGE-M3's time (H200).
FOLLOWED = 4096


class Bench:
    """One engine, asked for one batch at a time."""

    def __init__(self, engine: Engine, vocab_size: int) -> None:
        self.engine = engine
        self._vocab = vocab_size
        self._ids = itertools.count(1)

    def inputs(self, lengths: tuple[int, ...], seed: int) -> list[np.ndarray]:
        random = np.random.default_rng(seed)
        low = min(5, self._vocab - 1)  # below lie special tokens
        return [random.integers(low, self._vocab, n, dtype=np.int32) for n in lengths]

    def answer(self, sequences: list[np.ndarray]) -> Tensor:
        """[B, ...] fp32, in the sequences' order."""
        rows: dict[int, np.ndarray] = {}
        self.engine.add(Request(next(self._ids), list(sequences)))
        while self.engine.queued_requests or self.engine.in_flight:
            for result in self.engine.step():
                for error in result.dropped.values():
                    raise error
                (block,) = (output.result() for output in result.outputs.values())
                rows |= {item.index: np.array(row) for item, row in zip(result.items, block, strict=True)}
        return torch.from_numpy(np.stack([rows[i] for i in range(len(sequences))])).float()

    def sample(self, sequences: list[np.ndarray]) -> float:
        """µs of the device for one batch, from before its attention is planned."""
        before = self.engine.device_seconds
        self._run(sequences)
        return (self.engine.device_seconds - before) * 1e6

    def warm(self, sequences: list[np.ndarray]) -> None:
        """Run until it is a graph that runs, or will not be one."""
        for run in range(MOST_WARM_RUNS):
            hits = self.engine.graphs.metrics.hits
            self._run(sequences)
            if run + 1 >= WARM_RUNS and (not self.engine.graphs.captures or self.engine.graphs.metrics.hits > hits):
                return

    def timed(self, sequences: list[np.ndarray]) -> float:
        """µs of one batch: of a small one alone, of a large one behind another."""
        large = sum(map(len, sequences)) >= FOLLOWED and self.engine.executor.device.type == "cuda"
        return self.follow(sequences) if large else self.sample(sequences)

    def follow(self, sequences: list[np.ndarray]) -> float:
        """µs from the end of one batch to the end of the next, which was staged and planned meanwhile."""
        results: list[StepResult] = []
        launched = 0  # of the first request; one beyond the budget comes in several batches
        for _ in range(2):
            launched = len(results)
            self.engine.add(Request(next(self._ids), list(sequences)))
            while self.engine.queued_requests:  # launched before the other is added, or they would share a batch
                results += self.engine.step()
        ends = []
        for result in results:
            for error in result.dropped.values():
                raise error
            for output in result.outputs.values():
                output.result()
            ends.append(time.perf_counter())
        return (ends[-1] - ends[launched - 1]) * 1e6

    def clear(self) -> None:
        """Let go of the graphs: those of one load are of no use to the next, and large ones fill their budget."""
        self.engine.graphs.clear()
        if self.engine.executor.device.type == "cuda":
            torch.cuda.empty_cache()  # their pool's memory, which no other pool can use

    def launch(self, sequences: list[np.ndarray]) -> tuple[float, float]:
        """(µs of this thread to stage and launch one batch, µs of the device for it)."""
        before = self.engine.device_seconds
        self.engine.add(Request(next(self._ids), list(sequences)))
        start = time.perf_counter()
        results = self.engine.step()
        launched = (time.perf_counter() - start) * 1e6
        for result in results:
            for output in result.outputs.values():
                output.result()
        return launched, (self.engine.device_seconds - before) * 1e6

    def _run(self, sequences: list[np.ndarray]) -> None:
        self.engine.add(Request(next(self._ids), list(sequences)))
        while self.engine.queued_requests or self.engine.in_flight:
            for result in self.engine.step():
                for output in result.outputs.values():
                    output.result()


class ModelWays:
    """The attention backends of one embedder or reranker, in engines of their own.

    Attributes: see `Ways`.
    """

    of = "model"
    reference = "torch_sdpa"

    def __init__(
        self, model: ServedModel, device: torch.device, dtype: torch.dtype, *, max_tokens: int, batch_tokens: int
    ) -> None:
        """
        Args:
            max_tokens: longest sequence.
            batch_tokens: most tokens of a batch.
        """
        self._model, self._device, self._dtype = model, device, dtype
        self._spec = model.attention_spec(device, dtype)
        self._limits = EngineConfig(
            online_tokens=batch_tokens,
            bulk_tokens=batch_tokens,
            max_sequences=MAX_SEQUENCES,
            max_tokens=max_tokens,
            max_in_flight=2,
            graph_bytes=GRAPH_BYTES if device.type == "cuda" else 0,
            profile="none",
        )
        self._engines: dict[tuple[str, bool], Bench] = {}
        self.shape: AttentionShape = attention_shape(self._spec)
        self.missing: Mapping[str, str]
        self.excluded: Mapping[str, str]
        self.missing, self.excluded = attention_ways(backend_names(), lambda name: check_backend(name, self._spec))
        self.names = tuple(n for n in backend_names() if n not in self.missing and n not in self.excluded)

    def serves(self, name: str, load: GridLoad) -> bool:
        return load.max_length <= LONGEST.get(name, load.max_length)

    def prepare(self, name: str, load: GridLoad, seed: int) -> Ready:
        bench = self.bench(name)
        sequences = bench.inputs(load.lengths, seed)
        if self._device.type == "cuda" and name != LAST_RESORT:  # which has no graph, and rarely a time
            bench.warm(sequences)
        return Ready(answer=bench.answer(sequences), sample=lambda: bench.timed(sequences), close=bench.clear)

    def bench(self, name: str, *, graphs: bool = True) -> Bench:
        """The engine of one backend, built on first use."""
        found = self._engines.get((name, graphs))
        if found is None:
            found = self._engines[name, graphs] = Bench(self._engine(name, graphs), self._model.vocab_size)
        return found

    def _engine(self, name: str, graphs: bool) -> Engine:
        backend = try_backend(name, spec_for(name, self._spec))
        if isinstance(backend, str):
            raise StartupError(f"attention backend {name}: {backend}")
        limits = self._limits if graphs else replace(self._limits, graph_bytes=0)
        everywhere = Found(numbers=graphs_everywhere(self.shape, limits.bulk_tokens))
        engine = build_engine(self._model, limits, self._device, self._dtype, backend=backend, profile=everywhere)
        if self._device.type == "cuda":
            engine.warmup([])  # compiles the backend's kernels
        return engine

    def close(self) -> None:
        for bench in self._engines.values():
            with contextlib.suppress(Exception):
                bench.engine.close()
        self._engines.clear()


def graphs_everywhere(shape: AttentionShape, tokens: int) -> ModelNumbers:
    """Numbers that let graphs go up to the largest batch: whether they gain anything there is to be measured."""
    return ModelNumbers(
        shape=ModelShape(hidden_size=1, num_layers=1, intermediate_size=1, attention=shape),
        name="while measuring",
        inflection_tokens=tokens,
        fine_tokens=max(256, tokens // 256 * 256),
    )

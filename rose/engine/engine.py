"""The engine: schedule, stage, launch, and hand out results that are still on their way.

`add` puts requests in, `step` launches at most one batch and never waits for the device; answers are LazyTensors.
One thread owns an engine. Knows token ids and budgets; knows neither text nor carriers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rose.attention_backends.base import AttentionBackend, KeepsPlans, WarmsUp
from rose.config import EngineConfig
from rose.engine.buckets import FINE_TOKENS, Buckets, GraphKey, dummy_lengths
from rose.engine.execution import DoneTicket, Executor, Ticket
from rose.engine.forward import BatchForward, to_host
from rose.engine.graphs import LazyGraphs
from rose.engine.lazy_tensor import HostArray, LazyTensor
from rose.engine.open_request import Run, Work
from rose.engine.pipeline import Pipeline
from rose.engine.request import Request, StepResult
from rose.engine.scheduler import Scheduler
from rose.engine.staging import Staging
from rose.engine.validation import check_engine_config, resolve_outputs
from rose.models.base import ServedModel

HostOutputs = Mapping[str, HostArray]

# Ways to ask for outputs that are remembered; a model has few outputs, but they can be asked for in any order.
MAX_RESOLVED = 256


@dataclass(slots=True)
class EngineMetrics:
    """Counters since start."""

    batches: int = 0
    sequences: int = 0
    tokens: int = 0
    padding_tokens: int = 0
    expired_requests: int = 0
    aborted_requests: int = 0


class Engine:
    """One model on one device.

    Attributes:
        metrics: counters of batches; `graphs.metrics` has those of graphs.
    """

    def __init__(
        self,
        model: ServedModel,
        config: EngineConfig,
        executor: Executor,
        backend: AttentionBackend,
        *,
        graphs: LazyGraphs | None = None,
        inflection_tokens: int = 0,
        fine_tokens: int = FINE_TOKENS,
        type_vocab_size: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            executor: runs the forwards; the engine closes it.
            backend: plans the attention of every batch.
            graphs: where graphs are captured; None captures none.
            inflection_tokens: tokens above which a batch takes the device longer than its launches take the CPU.
            fine_tokens: tokens up to which batches are padded to steps of 64, above it to steps of 256.
            type_vocab_size: token types the model has; None where nobody knows, and then any is accepted.
            clock: what deadlines and estimates are measured by.

        Raises:
            StartupError: a number of `config` that cannot work.
        """
        check_engine_config(config)
        self._model = model
        self._config = config
        self._executor = executor
        self._backend = backend
        self._clock = clock
        self.graphs = graphs or LazyGraphs(executor.device)
        if isinstance(backend, KeepsPlans):
            self.graphs.on_release(backend.release)
        self._buckets = Buckets(
            inflection_tokens=inflection_tokens if self.graphs.captures else 0,
            max_tokens=config.max_tokens,
            max_sequences=config.max_sequences,
            fine_tokens=fine_tokens,
        )
        self._scheduler = Scheduler(config, model.vocab_size, type_vocab_size)
        self._staging = Staging(pin=executor.device.type == "cuda", slots=config.max_in_flight)
        self._pipeline = Pipeline(config.max_in_flight, clock)
        self._slot = 0
        self._resolved: dict[tuple[str, ...], tuple[str, ...]] = {}
        self.metrics = EngineMetrics()

    def add(self, request: Request) -> None:
        """Queue a request; it is launched by later calls of `step`.

        Raises:
            InvalidInput, Unsupported: naming the field, the item and the limit. Nothing is queued then.
        """
        outputs = self._resolved.get(request.outputs)
        if outputs is None:
            outputs = resolve_outputs(request.outputs, self._model.outputs, self._model.default_output)
            if len(self._resolved) < MAX_RESOLVED:
                self._resolved[request.outputs] = outputs
        self._scheduler.at(self._clock())
        self._scheduler.add(request, outputs)

    def abort(self, request_id: int) -> bool:
        """Drop what is not launched yet of a request, without a result; whether there was any.

        A launched batch cannot be cancelled: its results still come and are to be ignored.
        """
        aborted = self._scheduler.abort(request_id)
        self.metrics.aborted_requests += aborted
        return aborted

    def step(self) -> list[StepResult]:
        """Drop what has expired and launch at most one batch. Never waits for the device.

        Returns:
            The launched batch, and the requests dropped before any launch; items of a dropped request may be in
            flight already and are to be ignored. Empty: nothing to do now, see `wake_at`.
        """
        now = self._clock()
        self._scheduler.at(now)
        results: list[StepResult] = []
        if dropped := self._scheduler.expire(now):
            self.metrics.expired_requests += len(dropped)
            results.append(StepResult(dropped=dropped))
        if now >= self._launch_at() and (work := self._scheduler.next_batch()) is not None:
            results.append(self._launched(work))
        return results

    @property
    def executor(self) -> Executor:
        return self._executor

    @property
    def backend(self) -> AttentionBackend:
        return self._backend

    @property
    def backend_names(self) -> tuple[str, ...]:
        """The attention backends in use; several where each batch goes to the best for its shape."""
        return tuple(getattr(self._backend, "backends", ())) or (self._backend.name,)

    @property
    def queued_tokens(self) -> int:
        """Tokens added and neither launched nor dropped."""
        return self._scheduler.queued_tokens

    @property
    def queued_requests(self) -> int:
        """Requests with at least one such sequence."""
        return self._scheduler.queued_requests

    @property
    def in_flight(self) -> int:
        """Batches launched and not finished."""
        return len(self._pipeline)

    @property
    def failed_batches(self) -> int:
        """Batches, since start, whose staging or forward raised."""
        self._pipeline.retire()
        return self._pipeline.failed

    @property
    def device_seconds(self) -> float:
        """Of the device's time, since start, that batches which ended took; over the clock's, how busy it was."""
        self._pipeline.retire()
        return self._pipeline.device_seconds

    @property
    def in_flight_seconds(self) -> float:
        """Age of the oldest batch in flight; one that only grows is a stuck device. 0 if there is none."""
        return self._pipeline.oldest_seconds

    @property
    def expected_end(self) -> float | None:
        """Clock time at which the oldest batch in flight should end.

        None if nothing runs, or nothing of its size has run before.
        """
        return self._pipeline.expected_end

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing runs."""
        return self.queued_requests == 0 and self.in_flight == 0

    def wake_at(self) -> float | None:
        """Clock time from which on `step` has something to do although nothing new happened.

        None: only a new request or a finished batch can give it something. A time that has passed: call it again now
        (a step launches one batch only).
        """
        # Whoever asks is about to wait: the time to learn from what has ended.
        self._pipeline.retire()
        if self.queued_requests == 0:
            return None
        due = [self._launch_at()]
        if (deadline := self._scheduler.next_deadline()) is not None:
            due.append(deadline)
        return None if min(due) == math.inf else min(due)

    def key_for(self, lengths: Sequence[int], outputs: tuple[str, ...] = (), *, token_types: bool = False) -> GraphKey:
        """The key a batch of sequences of these lengths would run under, for `warmup`."""
        names = resolve_outputs(outputs, self._model.outputs, self._model.default_output)
        return self._buckets.key(lengths, names, token_types=token_types)

    def warmup(self, keys: Iterable[GraphKey]) -> None:
        """Run every key until its graph is captured and timed; largest first, so that they share one memory pool well.

        Waits for the device; meant for the time before serving.

        Raises:
            RuntimeError: requests wait or run.
            whatever the forward raises.
        """
        if not self.idle:
            raise RuntimeError("warm up before serving: requests wait or run")
        if isinstance(self._backend, WarmsUp):
            self._backend.warm_up(self._config.max_sequences)
        for key in sorted(keys, key=lambda key: key.tokens, reverse=True):
            work = _synthetic(key)
            # Plain, capture, and one more that is a plain replay, whose time is what the estimate should learn.
            for _ in range(3 if key.padded else 1):
                self._launch(work, key).result()

    def close(self) -> None:
        """Let what is in flight finish, and stop the executor. What waits is forgotten: drain first."""
        self._executor.close()

    def _launch_at(self) -> float:
        if not len(self._pipeline):
            return -math.inf
        return self._pipeline.launch_at(full=self._scheduler.full, single_waits=self._scheduler.single_waits)

    def _launched(self, work: Work) -> StepResult:
        key = self._buckets.key(work.lengths, work.outputs, token_types=work.token_types, spans=bool(work.span_splits))
        ticket = self._launch(work, key)
        metrics, tokens = self.metrics, work.tokens
        metrics.batches += 1
        metrics.sequences += work.sequences
        metrics.tokens += tokens
        metrics.padding_tokens += key.tokens - tokens
        return StepResult(
            items=work.items,
            outputs={name: LazyTensor(ticket, name) for name in work.outputs},
            splits=work.splits,
            span_splits=work.span_splits,
            tokens=tokens,
        )

    def _launch(self, work: Work, key: GraphKey) -> Ticket[HostOutputs]:
        slot = self._slot
        self._slot = (slot + 1) % self._config.max_in_flight
        try:
            staged = self._staging.write(slot, work, key)
            forward = BatchForward(self._model, self._backend, staged)

            def run() -> HostOutputs:
                return to_host(self.graphs.run(key, staged.packed, forward), self._model.outputs, staged)

            ticket = self._executor.launch(run, expected_seconds=self._pipeline.expect(key))
        except Exception as error:  # noqa: BLE001  the requests of this batch must hear of it, and no others
            self._pipeline.failed += 1
            return DoneTicket.failed(error)
        self._staging.fence(slot, ticket)
        self._pipeline.push(ticket, key)
        return ticket


def _synthetic(key: GraphKey) -> Work:
    """A batch that fills `key` exactly, of sequences as even as can be."""
    lengths = dummy_lengths(key, 0, 0)
    if not 1 <= min(lengths) <= max(lengths) <= key.max_length:
        raise ValueError(f"no batch fills {key}")
    zeros = np.zeros(key.tokens, dtype=np.int32)
    run = Run(-1, 0, lengths, zeros, zeros if key.token_types else None)
    return Work([run], key.outputs)

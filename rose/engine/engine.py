"""The engine: schedule, stage, launch, and hand out results that are still on their way.

`add` puts requests in, `step` launches at most one batch and never waits for the device; answers are LazyTensors.
One thread owns an engine. Knows token ids and budgets; knows neither text nor carriers.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from rose.attention_backends.base import AttentionBackend, KeepsPlans, WarmsUp
from rose.config import EngineConfig
from rose.engine.buckets import Buckets, GraphKey, dummy_lengths
from rose.engine.estimate import Durations
from rose.engine.execution import DoneTicket, Executor, Ticket
from rose.engine.forward import BatchForward, to_host
from rose.engine.graphs import LazyGraphs
from rose.engine.lazy_tensor import HostArray, LazyTensor
from rose.engine.open_request import Run, Work
from rose.engine.request import Request, StepResult
from rose.engine.scheduler import Scheduler
from rose.engine.staging import Staging
from rose.engine.validation import check_engine_config, resolve_outputs
from rose.models.base import ServedModel

# The second batch is launched this long before the first should end: staging and launching take about 0.1 ms, and an
# estimate is off by a few percent.
LEAD_SECONDS = 0.3e-3
LEAD_FRACTION = 0.1

HostOutputs = Mapping[str, HostArray]


@dataclass(slots=True)
class EngineMetrics:
    """Counters since start."""

    batches: int = 0
    sequences: int = 0
    tokens: int = 0
    padding_tokens: int = 0
    expired_requests: int = 0
    aborted_requests: int = 0
    failed_batches: int = 0


@dataclass(frozen=True, slots=True)
class _InFlight:
    ticket: Ticket[HostOutputs]
    key: GraphKey
    launched_at: float


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            executor: runs the forwards; the engine closes it.
            backend: plans the attention of every batch.
            graphs: where graphs are captured; None captures none.
            inflection_tokens: tokens above which a batch takes the device longer than its launches take the CPU.
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
        )
        self._scheduler = Scheduler(config, model.vocab_size)
        self._staging = Staging(pin=executor.device.type == "cuda", slots=config.max_in_flight)
        self._durations = Durations()
        self._in_flight: deque[_InFlight] = deque()
        self._slot = 0
        self.metrics = EngineMetrics()

    def add(self, request: Request) -> None:
        """Queue a request; it is launched by later calls of `step`.

        Raises:
            InvalidInput, Unsupported: naming the field, the item and the limit. Nothing is queued then.
        """
        outputs = resolve_outputs(request.outputs, self._model.outputs, self._model.default_output)
        self._scheduler.add(request if outputs == request.outputs else replace(request, outputs=outputs))

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
        self._retire()
        results = []
        if dropped := self._scheduler.expire(now):
            self.metrics.expired_requests += len(dropped)
            results.append(StepResult(dropped=dropped))
        if now >= self._launch_at() and (work := self._scheduler.next_batch()) is not None:
            results.append(self._launched(work, now))
        return results

    @property
    def executor(self) -> Executor:
        return self._executor

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
        self._retire()
        return len(self._in_flight)

    @property
    def in_flight_seconds(self) -> float:
        """Age of the oldest batch in flight; one that only grows is a stuck device. 0 if there is none."""
        self._retire()
        return self._clock() - self._in_flight[0].launched_at if self._in_flight else 0.0

    @property
    def expected_end(self) -> float | None:
        """Clock time at which the oldest batch in flight should end; None if nothing runs or nothing alike ran before."""
        self._retire()
        return self._in_flight[0].ticket.expected_end if self._in_flight else None

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing runs."""
        return self.queued_requests == 0 and self.in_flight == 0

    def wake_at(self) -> float | None:
        """Clock time from which on `step` has something to do although nothing new happened.

        None: only a new request or a finished batch can give it something. A time that has passed: call it again now
        (a step launches one batch only).
        """
        if self.queued_requests == 0:
            return None
        self._retire()
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
                self._launch(work, key, self._clock()).wait()
            self._in_flight[-1].ticket.result()
            self._retire()

    def close(self) -> None:
        """Let what is in flight finish, and stop the executor. What waits is forgotten: drain first."""
        self._executor.close()

    def _launch_at(self) -> float:
        """Clock time from which on the next batch may be launched; -inf: at once, inf: not before one has finished."""
        if not self._in_flight:
            return -math.inf
        if len(self._in_flight) >= self._config.max_in_flight:
            return math.inf
        ticket, key = self._in_flight[0].ticket, self._in_flight[0].key
        # A full batch of single queries cannot get any better. One of bulk work waits until the device needs it: a
        # query that arrives meanwhile still goes before it.
        if self._scheduler.full and (self._scheduler.single_waits or ticket.expected_end is None):
            return -math.inf
        if ticket.expected_end is None:
            return math.inf
        return ticket.expected_end - max(LEAD_SECONDS, LEAD_FRACTION * (self._durations.expect(key) or 0.0))

    def _retire(self) -> None:
        while self._in_flight and self._in_flight[0].ticket.ready():
            ended = self._in_flight.popleft()
            seconds = ended.ticket.seconds()
            if seconds is None:
                self.metrics.failed_batches += 1
            else:
                self._durations.observe(ended.key, seconds)

    def _launched(self, work: Work, now: float) -> StepResult:
        token_types = any(run.token_types is not None for run in work.runs)
        key = self._buckets.key(work.lengths, work.outputs, token_types=token_types)
        ticket = self._launch(work, key, now)
        self.metrics.batches += 1
        self.metrics.sequences += work.sequences
        self.metrics.tokens += work.tokens
        self.metrics.padding_tokens += key.tokens - work.tokens
        return StepResult(
            items=work.items,
            outputs={name: LazyTensor(ticket, name) for name in work.outputs},
            splits=tuple(accumulate(work.lengths, initial=0)),
            tokens=work.tokens,
        )

    def _launch(self, work: Work, key: GraphKey, now: float) -> Ticket[HostOutputs]:
        slot = self._slot
        self._slot = (slot + 1) % self._config.max_in_flight
        try:
            staged = self._staging.write(slot, work, key)
            forward = BatchForward(self._model, self._backend, staged)
        except Exception as error:  # noqa: BLE001  the requests of this batch must hear of it, and no others
            self.metrics.failed_batches += 1
            return DoneTicket.failed(error)

        def run() -> HostOutputs:
            return to_host(self.graphs.run(key, staged.packed, forward), self._model.outputs, staged)

        ticket = self._executor.launch(run, expected_seconds=self._durations.expect(key))
        self._staging.fence(slot, ticket)
        self._in_flight.append(_InFlight(ticket, key, now))
        return ticket


def _synthetic(key: GraphKey) -> Work:
    """A batch that fills `key` exactly, of sequences as even as can be."""
    lengths = dummy_lengths(key, 0, 0)
    if not 1 <= min(lengths) <= max(lengths) <= key.max_length:
        raise ValueError(f"no batch fills {key}")
    zeros = np.zeros(key.tokens, dtype=np.int32)
    run = Run(-1, 0, lengths, zeros, zeros if key.token_types else None)
    return Work([run], key.outputs, key.tokens, key.sequences)

"""The generating engine: take the tokens that have arrived, plan the next batch, stage it, launch it.

`add` puts prompts in, `step` brings tokens and launches at most one batch; it never waits for the device. A batch is
launched before the tokens of the one before it are on the host: it finds them in a buffer on the device. One thread
owns an engine. Knows token ids and budgets; knows neither text nor carriers.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rose.attention_backends.base import KeepsPlans, WarmsUp, captures_prompts, workspace_of
from rose.engine.execution import DoneTicket, Executor, Ticket
from rose.engine.generation.buckets import Draw, GenerationBuckets, GenerationKey
from rose.engine.generation.forward import DRAWN, DeviceSide, GenerationForward, HostRows
from rose.engine.generation.lanes import Lanes
from rose.engine.generation.limits import GenerationLimits
from rose.engine.generation.metrics import GenerationMetrics
from rose.engine.generation.request import GenerateRequest, GenerationStep, NewToken
from rose.engine.generation.sampler import Drawn, read_drawn
from rose.engine.generation.scheduler import GenerationScheduler
from rose.engine.generation.sequence import BatchPlan, Chunk, state_copies
from rose.engine.generation.staging import GenerationStaging, Staged
from rose.engine.graphs import LazyGraphs
from rose.engine.pipeline import Pipeline
from rose.errors import InternalError, NonFinite, RoseError
from rose.kernels.sample import warm_up_sampling

_log = logging.getLogger(__name__)

# The second batch is launched this long before the first should end, or this share of its time: planning, staging and
# launching take some 0.3 ms, and a prompt's chunk is harder to foresee than a batch of an embedder. Not earlier, so
# that a prompt that arrives meanwhile is in it.
LEAD_SECONDS = 1e-3
LEAD_FRACTION = 0.25
MAX_IN_FLIGHT = 2

Rows = npt.NDArray[np.int32]


class _Flight(NamedTuple):
    """A launched batch whose tokens nobody has taken yet."""

    ticket: Ticket[Rows]
    plan: BatchPlan
    seconds: float | None
    launched_at: float


class GenerationEngine:
    """One generating model on one device.

    Attributes:
        limits: what is served: vocabulary, longest sequence, pages, sequences that run at a time.
        metrics: counters of batches and requests; `counters()` has everybody's.
    """

    def __init__(
        self,
        side: DeviceSide,
        limits: GenerationLimits,
        executor: Executor,
        *,
        graphs: LazyGraphs | None = None,
        end_ids: Iterable[int] = (),
        max_in_flight: int = MAX_IN_FLIGHT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            side: the model, its backend with the cache bound to it, and buffers for `limits.max_running` lanes and the
                dummies' one.
            executor: runs the forwards; the engine closes it.
            graphs: where graphs are captured; None captures none.
            end_ids: tokens that end a sequence by the model's own word.
            max_in_flight: batches launched and not yet finished, at most; 1 or 2.
            clock: what deadlines and estimates are measured by.

        Raises:
            StartupError: a number of `limits` that cannot work.
        """
        self.limits = limits
        self.metrics = GenerationMetrics()
        self.graphs = graphs or LazyGraphs(executor.device)
        if isinstance(side.backend, KeepsPlans):
            self.graphs.on_release(side.backend.release)
        self._side = side
        self._executor = executor
        self._depth = max_in_flight
        self._clock = clock
        ends = tuple(end_ids)
        self._scheduler = GenerationScheduler(limits, ends)
        self._buckets = GenerationBuckets(
            captures=self.graphs.captures,
            max_running=limits.max_running,
            max_tokens=limits.longest,
            prompts=captures_prompts(side.backend),
            batch_tokens=limits.batch_tokens,
        )
        lanes = Lanes(limits.max_running + 1, limits.pages_for(limits.longest), ends)
        pin = executor.device.type == "cuda"
        self._staging = GenerationStaging(lanes, self._buckets, limits.page_size, pin=pin, slots=max_in_flight)
        self._host_rows = HostRows(pin=pin, slots=max_in_flight)
        self._pipeline = Pipeline(max_in_flight, clock)
        self._flights: deque[_Flight] = deque()
        self._slot = 0
        self._random = random.SystemRandom()

    def add(self, request: GenerateRequest) -> None:
        """Queue a prompt; it starts in later calls of `step`.

        Raises:
            InvalidInput: naming the field and the limit. Nothing is queued then.
        """
        sampling = request.sampling
        if sampling.seed is None:
            # Kept with the request: a sequence that lost its pages goes on with the same random numbers.
            request = replace(request, sampling=replace(sampling, seed=self._random.getrandbits(63)))
        self._scheduler.add(request)

    def abort(self, request_id: int) -> bool:
        """Forget a request and free its pages; its tokens on the way are never reported. Whether it was open."""
        aborted = self._scheduler.abort(request_id)
        self.metrics.aborted_requests += aborted
        return aborted

    def step(self) -> GenerationStep:
        """Bring the tokens that have arrived, drop what has expired and launch at most one batch.

        Never waits for the device.
        """
        tokens: list[NewToken] = []
        failed: dict[int, RoseError] = {}
        step = GenerationStep(tokens, failed)
        while self.ready():
            self._land(self._flights.popleft(), tokens, failed, step)
        now = self._clock()
        if expired := self._scheduler.expire(now):
            self.metrics.expired_requests += len(expired)
            failed.update(expired)
        plan = None
        if self._scheduler.has_work and now >= self._launch_at():
            plan = self._scheduler.next_batch()
        if plan is not None:
            self._launch_plan(plan, now)
            step.launched, step.started = True, plan.started
        return step

    def ready(self) -> bool:
        """Whether the oldest batch in flight has finished, so that `step` has tokens to bring."""
        return bool(self._flights) and self._flights[0].ticket.ready()

    def wake_at(self) -> float | None:
        """Clock time from which on `step` has something to do although nothing new happened.

        None: only a new request or a finished batch can give it something. A time that has passed: call it again now.
        """
        due = self._launch_at() if self._scheduler.has_work else math.inf
        deadline = self._scheduler.next_deadline()
        if deadline is not None and deadline < due:
            due = deadline
        return None if due == math.inf else due

    @property
    def executor(self) -> Executor:
        return self._executor

    @property
    def backend_names(self) -> tuple[str, ...]:
        return (self._side.backend.name,)

    @property
    def queued_tokens(self) -> int:
        """Tokens that are known and that no batch computes yet."""
        return self._scheduler.queued_tokens

    @property
    def queued_requests(self) -> int:
        """Requests that have no pages: not started, or set back for want of them."""
        return self._scheduler.queued_requests

    @property
    def open_requests(self) -> int:
        return self._scheduler.open_requests

    @property
    def in_flight(self) -> int:
        """Batches launched whose tokens `step` has not brought yet."""
        return len(self._flights)

    @property
    def in_flight_seconds(self) -> float:
        """Age of the oldest of them; one that only grows is a stuck device. 0 if there is none."""
        return self._clock() - self._flights[0].launched_at if self._flights else 0.0

    @property
    def expected_end(self) -> float | None:
        """Clock time at which the oldest of them should end; None if nothing like it has run before."""
        return self._flights[0].ticket.expected_end if self._flights else None

    @property
    def idle(self) -> bool:
        """Nothing waits, nothing runs, and nothing is in flight."""
        return not self._flights and not self._scheduler.open_requests

    def counters(self) -> dict[str, int]:
        """Counters since start, and how much waits, runs and is in use now."""
        scheduler, pages, states = self._scheduler, self._scheduler.pages, self._scheduler.states
        return {
            **asdict(self.metrics),
            **asdict(scheduler.metrics),
            **{f"prefix_{name}": value for name, value in asdict(pages.metrics).items()},
            **{f"graph_{name}": value for name, value in asdict(self.graphs.metrics).items()},
            **{f"attention_{name}": value for name, value in asdict(workspace_of(self._side.backend)).items()},
            "device_us": round(self._pipeline.device_seconds * 1e6),
            "running": scheduler.running,
            "waiting": scheduler.queued_requests,
            "pages_used": pages.total - pages.available,
            "pages_cached": pages.cached,
            "pages_total": pages.total,
            "states_saved": len(states),
            "states_total": states.count,
        }

    def decode_keys(self, longest: int, draws: Iterable[Draw]) -> list[GenerationKey]:
        """The keys of decoding batches of every size whose longest sequence has up to `longest` tokens, for `warmup`.

        None where nothing is captured.
        """
        if not self.graphs.captures:
            return []
        bounds = [bound for bound in self._buckets.bounds if bound == self._buckets.bounds[0] or bound <= longest]
        shapes = [(size, bound) for size in self._buckets.sequences for bound in bounds]
        return [self._buckets.decode_key(size, bound, draw) for draw in draws for size, bound in shapes]

    def prompt_keys(self, alone: int, beside: int, draws: Iterable[Draw]) -> list[GenerationKey]:
        """The keys of batches of one prompt, for `warmup`; others are captured when they come a second time.

        None where nothing is captured, or no chunks of prompts.

        Args:
            alone: tokens of the longest prompt alone. beside: those of the largest batch of one prompt beside decoding
                sequences, their own included.
        """
        most = self.limits.batch_tokens
        return [key for draw in draws for key in self._buckets.prompt_keys(min(alone, most), min(beside, most), draw)]

    def warmup(self, keys: Iterable[GenerationKey]) -> None:
        """Run every key until its graph is captured and timed; largest first, so that they share one memory pool well.

        Waits for the device; meant for the time before serving.

        Raises:
            RuntimeError: requests wait or run.
            whatever the forward raises.
        """
        if not self.idle:
            raise RuntimeError("warm up before serving: requests wait or run")
        if isinstance(self._side.backend, WarmsUp):
            self._side.backend.warm_up(self.limits.max_running)
        side = self._side
        warm_up_sampling(side.model.vocab_size, side.vocab_limit, side.latest.device)
        for key in sorted(keys, key=lambda key: (key.tokens, key.sequences, key.kv_bound), reverse=True):
            # Plain, capture, and one more that is a plain replay, whose time is what the estimate should learn.
            for _ in range(3):
                self._launch(self._staging.write_dummies(self._next_slot(), key)).result()

    def close(self) -> None:
        """Let what is in flight finish, and stop the executor. What waits is forgotten: drain first."""
        self._executor.close()

    def _launch_at(self) -> float:
        if not self._flights:
            return -math.inf
        if len(self._flights) >= self._depth:
            return math.inf
        first = self._flights[0]
        end = first.ticket.expected_end
        if end is None:
            return -math.inf
        return end - max(LEAD_SECONDS, LEAD_FRACTION * (first.seconds or 0.0))

    def _launch_plan(self, plan: BatchPlan, now: float) -> None:
        try:
            staged = self._staging.write(self._next_slot(), plan)
            seconds = self._pipeline.expect(staged.key)
            ticket = self._launch(staged, seconds, plan)
        except Exception as error:  # noqa: BLE001  it concerns this batch only, and is dealt with when its turn comes
            seconds, ticket = None, DoneTicket.failed(error)
        else:
            self._count(plan, staged)
        self._flights.append(_Flight(ticket, plan, seconds, now))

    def _launch(self, staged: Staged, seconds: float | None = None, plan: BatchPlan | None = None) -> Ticket[Rows]:
        forward = GenerationForward(self._side, staged)
        resumes, saves = state_copies(plan)

        def run() -> Rows:
            # On the batch's stream, outside its graph: rows differ from batch to batch.
            self._side.copy_states(resumes)
            outputs = self.graphs.run(staged.key, staged.packed, forward)
            self._side.copy_states(saves)
            return self._host_rows.copy(staged.slot, outputs[DRAWN], staged.rows)

        ticket = self._executor.launch(run, expected_seconds=seconds)
        self._staging.fence(staged.slot, ticket)
        self._pipeline.push(ticket, staged.key)
        return ticket

    def _next_slot(self) -> int:
        self._slot = (self._slot + 1) % self._depth
        return self._slot

    def _count(self, plan: BatchPlan, staged: Staged) -> None:
        metrics, prefill = self.metrics, plan.tokens - plan.decodes
        metrics.batches += 1
        metrics.decode_batches += not prefill
        metrics.decode_tokens += plan.decodes
        metrics.prefill_tokens += prefill
        metrics.padding_tokens += staged.key.tokens - plan.decodes - prefill

    def _land(
        self, flight: _Flight, tokens: list[NewToken], failed: dict[int, RoseError], step: GenerationStep
    ) -> None:
        """Take a finished batch's tokens, or what it failed with."""
        self._pipeline.retire()
        plan = flight.plan
        try:
            drawn = read_drawn(flight.ticket.result())
        except Exception as error:  # noqa: BLE001  a forward may raise anything; it concerns this batch only
            failed.update(self._fail_batch(plan, error, step))
            return
        chunks, ids = plan.chunks, drawn.ids
        if min(ids) < 0:
            ids = self._end_non_finite(chunks, ids, failed)
        if plan.decodes < len(chunks):
            ids = [token for token, chunk in zip(ids, chunks, strict=True) if chunk.samples]
        news = self._scheduler.commit(plan, ids)
        if drawn.logprobs:
            _attach_logprobs(news, chunks, drawn)
        arrived = [new for new in news if new is not None]
        self.metrics.generated_tokens += len(arrived)
        tokens += arrived

    def _fail_batch(self, plan: BatchPlan, error: Exception, step: GenerationStep) -> dict[int, RoseError]:
        """Its sequences are tried again alone; the requests that end with the error, if one of them is at fault."""
        self.metrics.failed_batches += 1
        before = self._scheduler.metrics.retries
        ended = dict.fromkeys(self._scheduler.fail_batch(plan), _as_rose_error(error))
        retried = self._scheduler.metrics.retries - before
        step.failed_batches += 1
        step.retried += retried
        # What was queued before it failed may still read its buffer.
        self._staging.renew()
        _log.error(
            "a batch of %d sequences failed, %d are tried again alone and %d have failed: %s: %s",
            len(plan.chunks),
            retried,
            len(ended),
            type(error).__name__,
            error,
            exc_info=error,
        )
        return ended

    def _end_non_finite(self, chunks: list[Chunk], ids: list[int], failed: dict[int, RoseError]) -> list[int]:
        """Chunks that draw nothing are looked at too, before their pages are offered to others: where one token is not
        finite, the last of its chunk is not.
        """
        for chunk, token in zip(chunks, ids, strict=True):
            sequence = chunk.sequence
            if token < 0 and self._scheduler.fail(sequence):
                new = sequence.known - sequence.prompt_length
                self.metrics.non_finite_requests += 1
                failed[sequence.request.id] = NonFinite(f"the logits of new token {new} are not finite")
        return [max(token, 0) for token in ids]


def _attach_logprobs(news: list[NewToken | None], chunks: list[Chunk], drawn: Drawn) -> None:
    rows = (row for row, chunk in enumerate(chunks) if chunk.samples)
    for new, row in zip(news, rows, strict=True):
        wanted = chunks[row].sequence.request.sampling.logprobs
        if new is not None and wanted is not None:
            new.logprob = drawn.logprobs[row]
            new.top = list(zip(drawn.top_ids[row][:wanted], drawn.top_logprobs[row][:wanted], strict=True))


def _as_rose_error(error: Exception) -> RoseError:
    return (
        error if isinstance(error, RoseError) else InternalError(f"a forward failed: {type(error).__name__}: {error}")
    )

"""A generating engine whose tokens can be worked out by hand, and whose batches finish when a test says so.

What it draws depends on nothing but the sequence so far: `drawn(prompt, count)` says what must come. Ids with a
meaning: NAN in a prompt gives logits that are not finite, POISON a forward that fails; neither harms its company.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rose.engine.generation.request import Finish, GenerateRequest, GenerationStep, NewToken
from rose.errors import DeadlineExceeded, InternalError, NonFinite, RoseError

VOCAB = 1000
END = 2
NAN, POISON = 667, 666
MAX_TOKENS = 256

NextToken = Callable[[Sequence[int]], int]


def next_token(ids: Sequence[int]) -> int:
    """Never END; a function of the last id and of the length."""
    return 10 + (ids[-1] * 7 + len(ids)) % 600


def drawn(prompt: Sequence[int], count: int, rule: NextToken = next_token) -> list[int]:
    """The first `count` tokens that continue a prompt."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(rule(ids))
    return ids[len(prompt) :]


def scripted(tokens: Sequence[int], prompt_length: int) -> NextToken:
    """A rule that draws `tokens` one after another after a prompt of that length, then END."""
    return lambda ids: tokens[len(ids) - prompt_length] if len(ids) - prompt_length < len(tokens) else END


class FakeExecutor:
    """With a descriptor, as the CPU's, or without, as CUDA's."""

    def __init__(self, *, watched: bool) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK) if watched else None

    def fileno(self) -> int | None:
        return self._fd

    def acknowledge(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def notify(self) -> None:
        if self._fd is not None:
            os.eventfd_write(self._fd, 1)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


@dataclass
class _Running:
    request: GenerateRequest
    ids: list[int]
    pages: int
    cached: int
    over: bool = False


@dataclass
class _Batch:
    tokens: list[NewToken]
    failed: dict[int, RoseError]
    expected_end: float | None
    launched: float = field(default_factory=time.monotonic)
    done: threading.Event = field(default_factory=threading.Event)


class FakeGenerationEngine:
    """First come, first served; every running sequence draws a token in every batch, at most two batches in flight.

    Args:
        max_running: sequences that run at a time.
        pages, page_size: of the cache. A sequence takes pages for its prompt and all it may draw when it starts.
        held: batches finish when `finish` is called, not at once.
        batch_seconds: each batch takes this long, on a thread of its own.
        watched: whether the executor has a descriptor.
        timed: whether batches of `batch_seconds` say when they should end.
        rule: draws the next token; END ends a sequence.
    """

    def __init__(
        self,
        *,
        max_running: int = 8,
        pages: int = 256,
        page_size: int = 16,
        held: bool = False,
        batch_seconds: float | None = None,
        watched: bool = True,
        timed: bool = True,
        rule: NextToken = next_token,
    ) -> None:
        self.executor = FakeExecutor(watched=watched)
        self.max_running = max_running
        self.pages_total, self.page_size = pages, page_size
        self.added: list[GenerateRequest] = []
        self.aborted: list[int] = []
        self.batches = 0
        self.generated = 0
        self.step_error: Exception | None = None
        self.add_error: Exception | None = None
        self._held = held
        self._batch_seconds = batch_seconds
        self._timed = timed
        self._rule = rule
        self._waiting: dict[int, GenerateRequest] = {}
        self._running: dict[int, _Running] = {}
        self._in_flight: deque[_Batch] = deque()
        self._seen: set[tuple[int, ...]] = set()

    @property
    def queued_tokens(self) -> int:
        return sum(len(request.ids) for request in self._waiting.values())

    @property
    def queued_requests(self) -> int:
        return len(self._waiting)

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def in_flight_seconds(self) -> float:
        return time.monotonic() - self._in_flight[0].launched if self._in_flight else 0.0

    @property
    def expected_end(self) -> float | None:
        return self._in_flight[0].expected_end if self._in_flight else None

    @property
    def idle(self) -> bool:
        return not (self._waiting or self._running or self._in_flight)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def pages_used(self) -> int:
        return sum(each.pages for each in self._running.values())

    def counters(self) -> dict[str, int]:
        return {
            "generated_tokens": self.generated,
            "running": len(self._running),
            "waiting": len(self._waiting),
            "pages_used": self.pages_used,
            "pages_total": self.pages_total,
        }

    def add(self, request: GenerateRequest) -> None:
        if self.add_error is not None:
            error, self.add_error = self.add_error, None
            raise error
        assert request.id not in self._waiting
        assert request.id not in self._running
        assert len(request.ids)
        self.added.append(request)
        self._waiting[request.id] = request

    def abort(self, request_id: int) -> bool:
        self.aborted.append(request_id)
        waited = self._waiting.pop(request_id, None) is not None
        return self._running.pop(request_id, None) is not None or waited

    def ready(self) -> bool:
        return bool(self._in_flight) and self._in_flight[0].done.is_set()

    def wake_at(self) -> float | None:
        can_launch = len(self._in_flight) < 2 and (self._drawing() or self._can_start())
        if can_launch:
            return time.monotonic()
        return min((r.deadline for r in self._waiting.values() if r.deadline is not None), default=None)

    def step(self) -> GenerationStep:
        if self.step_error is not None:
            error, self.step_error = self.step_error, None
            raise error
        tokens: list[NewToken] = []
        failed = self._expire()
        failed_batches = 0
        while self.ready():
            batch = self._in_flight.popleft()
            failed_batches += any(type(error) is InternalError for error in batch.failed.values())
            for token in batch.tokens:
                if token.request_id in self._running:
                    tokens.append(token)
                    if token.finish is not Finish.NONE:
                        del self._running[token.request_id]
            for request_id, error in batch.failed.items():
                if self._running.pop(request_id, None) is not None:
                    failed[request_id] = error
        self.generated += len(tokens)
        started: list[int] = []
        launched = len(self._in_flight) < 2 and self._launch(started)
        return GenerationStep(tokens, failed, launched, started, failed_batches)

    def finish(self, count: int = 1) -> None:
        """Let the oldest batches in flight finish; from any thread. Each frees the engine to launch another."""
        for _ in range(count):
            end = time.monotonic() + 5
            while not (batch := next((b for b in list(self._in_flight) if not b.done.is_set()), None)):
                assert time.monotonic() < end, "no batch is in flight"
                time.sleep(0.001)
            self._end(batch)

    def release(self) -> None:
        """Hold no batch back any more."""
        self._held = False
        for batch in list(self._in_flight):
            self._end(batch)

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
        end = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.002)

    def _end(self, batch: _Batch) -> None:
        batch.done.set()
        self.executor.notify()

    def _expire(self) -> dict[int, RoseError]:
        now = time.monotonic()
        late = [r for r in self._waiting.values() if r.deadline is not None and r.deadline <= now]
        for request in late:
            del self._waiting[request.id]
        return {request.id: DeadlineExceeded("the deadline passed in the queue") for request in late}

    def _drawing(self) -> list[_Running]:
        return [each for each in self._running.values() if not each.over]

    def _pages_for(self, request: GenerateRequest) -> int:
        return -(-(len(request.ids) + request.sampling.max_new_tokens) // self.page_size)

    def _can_start(self) -> bool:
        request = next(iter(self._waiting.values()), None)
        return (
            request is not None
            and len(self._running) < self.max_running
            and self.pages_used + self._pages_for(request) <= self.pages_total
        )

    def _launch(self, started: list[int]) -> bool:
        while self._can_start():
            request = self._waiting.pop(next(iter(self._waiting)))
            ids = request.ids.tolist()
            cached = len(ids) // self.page_size * self.page_size if tuple(ids) in self._seen else 0
            self._seen.add(tuple(ids))
            started.append(request.id)
            self._running[request.id] = _Running(request, ids, self._pages_for(request), cached)
        drawing = self._drawing()
        if not drawing:
            return False
        seconds = self._batch_seconds
        expected = time.monotonic() + seconds if seconds is not None and self._timed else None
        batch = _Batch([], {}, expected)
        for each in drawing:
            self._draw(each, batch)
        self._in_flight.append(batch)
        self.batches += 1
        if seconds is not None:
            threading.Timer(seconds, self._end, [batch]).start()
        elif not self._held:
            self._end(batch)
        return True

    def _draw(self, each: _Running, batch: _Batch) -> None:
        request, prompt = each.request, len(each.request.ids)
        if (request.ids == NAN).any() or (request.ids == POISON).any():
            each.over = True
            nan = (request.ids == NAN).any()
            batch.failed[request.id] = NonFinite("logits are not finite") if nan else InternalError("a forward failed")
            return
        sampling = request.sampling
        token = self._rule(each.ids)
        each.ids.append(token)
        count = len(each.ids) - prompt
        finish = Finish.NONE
        if token in sampling.stop_ids or (token == END and not sampling.ignore_eos):
            finish = Finish.STOP
        elif count == sampling.max_new_tokens:
            finish = Finish.LENGTH
        each.over = finish is not Finish.NONE
        new = NewToken(request.id, token, finish=finish, cached_tokens=each.cached if count == 1 else 0)
        if sampling.logprobs is not None:
            new.logprob = -0.25 * count
            new.top = [(token + i, -0.25 * count - i) for i in range(sampling.logprobs)]
        batch.tokens.append(new)

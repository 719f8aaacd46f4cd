"""A pretended device with a clock of its own: batches take the time they take on an H200, nobody waits for it, and runs
of a test are the same to the microsecond.

The model's answers encode the ids it was given, so that an answer tells which sequence it belongs to.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rose.attention_backends.base import AttentionSpec
from rose.batch import Batch
from rose.models.base import OutputSpec

VOCAB = 1 << 20  # an id is exact as fp32
MAX_TOKENS = 8192
_WEIGHTS = np.random.default_rng(11).integers(1, 1 << 20, MAX_TOKENS, dtype=np.int64)
_MASK = (1 << 24) - 1
# BGE-M3 on one H200: 128 tokens 0.77 ms, 2,560 4.0, 12,800 17.8, 16,384 22.7.
BATCH_SECONDS, TOKEN_SECONDS = 0.6e-3, 1.35e-6


class VirtualClock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class EchoModel:
    """`pooled` is (first id, last id, length, checksum over ids and places) of each sequence, `tokens` (id, place)."""

    outputs: Mapping[str, OutputSpec] = {
        "pooled": OutputSpec(dtype="float32", dimension=4),
        "tokens": OutputSpec(dtype="float32", dimension=2, per_token=True),
    }
    default_output = "pooled"
    vocab_size = VOCAB
    num_layers = 1

    def __init__(self) -> None:
        self.last_tokens = 0
        self._weights = torch.from_numpy(_WEIGHTS)

    def attention_spec(self, device: torch.device, dtype: torch.dtype) -> AttentionSpec:
        raise NotImplementedError("nothing attends here")

    def __call__(self, batch: Batch, outputs: Sequence[str]) -> dict[str, torch.Tensor]:
        self.last_tokens = batch.num_tokens
        found = {}
        if "pooled" in outputs:
            starts, ends = batch.cu_seqlens[:-1].long(), batch.cu_seqlens[1:].long()
            sums = torch.zeros(batch.num_tokens + 1, dtype=torch.int64)
            torch.cumsum(batch.ids.long() * self._weights[batch.positions.long()], 0, out=sums[1:])
            checksum = (sums[ends] - sums[starts]) & _MASK
            rows = [batch.ids[starts].long(), batch.ids[ends - 1].long(), ends - starts, checksum]
            found["pooled"] = torch.stack(rows, dim=1).float()
        if "tokens" in outputs:
            found["tokens"] = torch.stack([batch.ids, batch.positions], dim=1).float()
        return found


def echoed(ids: np.ndarray) -> np.ndarray:
    """What `pooled` must be for one sequence."""
    checksum = int(ids.astype(np.int64) @ _WEIGHTS[: len(ids)]) & _MASK
    return np.array([ids[0], ids[-1], len(ids), checksum], dtype=np.float32)


@dataclass(slots=True, eq=False)
class VirtualTicket:
    """Ready when the clock says so."""

    clock: VirtualClock
    value: object
    start: float
    end: float
    expected_end: float | None

    def ready(self) -> bool:
        return self.clock.now >= self.end

    def wait(self) -> None:
        assert self.ready(), "somebody waits for the device"

    def result(self) -> object:
        self.wait()
        return self.value

    def seconds(self) -> float | None:
        return self.end - self.start if self.ready() else None

    def on_done(self, callback: Callable[[], None]) -> None:
        raise NotImplementedError


class VirtualExecutor:
    """Batches one after another, each as long as its tokens take; now and then one is run again at its end, to see
    that nobody overwrote its input meanwhile.
    """

    device = torch.device("cpu")

    def __init__(self, clock: VirtualClock, model: EchoModel, *, seed: int = 0, jitter: float = 0.03) -> None:
        self._clock = clock
        self._model = model
        self._random = random.Random(seed)
        self._jitter = jitter
        self._running: deque[tuple[VirtualTicket, Callable[[], object] | None]] = deque()
        self.last_end = 0.0
        self.busy_seconds = 0.0

    def launch(self, fn, *, expected_seconds=None) -> VirtualTicket:
        now = self._clock.now
        value = fn()
        seconds = BATCH_SECONDS + TOKEN_SECONDS * self._model.last_tokens
        seconds *= 1 + self._jitter * self._random.uniform(-1, 1)
        start = max(now, self.last_end)
        expected = None if expected_seconds is None else start + expected_seconds
        ticket = VirtualTicket(self._clock, value, start, start + seconds, expected)
        self._running.append((ticket, fn if self._random.random() < 0.06 else None))
        self.last_end = ticket.end
        self.busy_seconds += seconds
        return ticket

    @property
    def next_end(self) -> float | None:
        return self._running[0][0].end if self._running else None

    def settle(self) -> None:
        """Look after those that have ended."""
        while self._running and self._running[0][0].ready():
            ticket, again = self._running.popleft()
            if again is not None:
                for name, rows in again().items():
                    np.testing.assert_array_equal(rows, ticket.value[name], "the input changed under a batch")

    def fileno(self) -> int | None:
        return None

    def acknowledge(self) -> None:
        pass

    def close(self) -> None:
        pass


class NoAttention:
    name = "none"
    capturable = True

    def supports(self, spec: AttentionSpec) -> str | None:
        return None

    def plan(self, batch: Batch, slot: int = 0) -> NoAttention:
        return self

    def run(self, q, k, v, layer):
        return v


class RunAgain:
    """A captured forward: runs it again on the key's buffers, into outputs that stay where they are."""

    bytes = 1000

    def __init__(self, fn) -> None:
        self._fn = fn
        self.outputs = {name: torch.empty_like(value) for name, value in fn().items()}

    def replay(self) -> None:
        for name, value in self._fn().items():
            self.outputs[name].copy_(value)

    def release(self) -> None:
        self.outputs = {}


class Capturer:
    def capture(self, key, fn) -> RunAgain:
        return RunAgain(fn)

"""The place where graphs are captured lazily: plain on the first hit of a key, captured on the second, then replayed.

Policy only: a `Capturer` knows how to capture on its device; without one everything runs plain through the same door.
The device buffers a graph reads belong to its key and die with it. Captured bytes are counted against a budget, least
recently used graphs make room. A key whose capture or replay fails starts over, since the error may have been a
passing one; after its second it stays plain, as one does at once that no memory is left for. The engine serves on.
Runs in the executor's thread only. Knows neither requests nor models.
"""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rose.attention_backends.workspace import WorkspaceFull
from rose.engine.buckets import BatchKey

_log = logging.getLogger(__name__)

Outputs = Mapping[str, Tensor]

# Runs after which an unused graph may make room for another. Without it, more busy keys than the budget holds would
# evict each other for ever, at 6 to 20 ms a capture; so the surplus keys run plain instead.
COLD_AFTER = 256
# Keys whose hits are remembered; a key forgotten merely runs plain once more.
MAX_COUNTED = 1 << 16


class CapturedGraph(Protocol):
    """One captured forward.

    Attributes:
        outputs: where a replay leaves its results.
        bytes: device memory it takes, private pools and driver included.
    """

    outputs: Outputs
    bytes: int

    def replay(self) -> None: ...

    def release(self) -> None:
        """Free its memory. Never called while a replay is in flight that the device's order does not cover."""
        ...


class Capturer(Protocol):
    """Captures forwards on one device."""

    def capture(self, key: BatchKey, fn: Callable[[], Outputs]) -> CapturedGraph:
        """Record what `fn` launches, without running it. The same key has run plain before.

        Raises:
            torch.OutOfMemoryError: no memory for it; nothing is left behind.
        """
        ...


class Forward(Protocol):
    """A forward that can be pointed at input buffers.

    One whose plan is the same for every batch of its key says so with an attribute `fixed`: it is not loaded again
    before each replay.
    """

    def load(self, packed: Tensor, graph_key: BatchKey | None, like: Forward | None = None) -> None:
        """Make the batch out of the packed buffer and plan its attention; not captured, repeated before each replay.

        Args:
            graph_key: the key whose plan and buffers to use, or None for a batch that no graph will replay.
            like: a forward of this key that was loaded from the same buffer: its views of it serve again.

        Raises:
            WorkspaceFull: no memory for the plan of one more key.
        """
        ...

    @property
    def capturable(self) -> bool:
        """Whether what was loaded may be captured and replayed after later loads of the same key."""
        ...

    def run(self) -> Outputs:
        """Launch the model on what was loaded."""
        ...


@dataclass(slots=True)
class GraphMetrics:
    """Counters since start, and bytes held now.

    Attributes:
        new_keys: of the plain runs, those of keys that had not run before: they may compile kernels, for seconds.
    """

    plain: int = 0
    new_keys: int = 0
    captures: int = 0
    hits: int = 0
    evicted: int = 0
    failed: int = 0
    bytes: int = 0


@dataclass(slots=True)
class _Held:
    packed: Tensor
    forward: Forward  # what was captured still reads its plan's buffers
    graph: CapturedGraph
    last_used: int
    fixed: bool

    @property
    def bytes(self) -> int:
        return self.graph.bytes + self.packed.nbytes


class LazyGraphs:
    """The graphs of one engine.

    Attributes:
        metrics: read by anyone; written here.
    """

    def __init__(self, device: torch.device, *, capturer: Capturer | None = None, max_bytes: int = 0) -> None:
        self._device = device
        self._capturer = capturer if max_bytes > 0 else None
        self._max_bytes = max_bytes
        self._held: OrderedDict[BatchKey, _Held] = OrderedDict()
        self._seen: OrderedDict[BatchKey, None] = OrderedDict()
        # Beside `_seen`: also those that are never captured, and those whose graph had to go.
        self._known: OrderedDict[BatchKey, None] = OrderedDict()
        self._refused: set[BatchKey] = set()
        self._erred: set[BatchKey] = set()
        self._runs = 0
        self._released: Callable[[BatchKey], None] = lambda key: None
        self.metrics = GraphMetrics()

    @property
    def captures(self) -> bool:
        """Whether padded keys are worth it."""
        return self._capturer is not None

    @property
    def capturer(self) -> Capturer | None:
        """Who captures, or None where nothing is captured."""
        return self._capturer

    def __contains__(self, key: BatchKey) -> bool:
        return key in self._held

    def on_release(self, released: Callable[[BatchKey], None]) -> None:
        """`released` is told of every key whose graph is gone or will never be: plans made for it are free."""
        self._released = released

    def run(self, key: BatchKey, inputs: Tensor, forward: Forward) -> Outputs:
        """Run `forward` on `inputs` in the way this key has earned.

        Args:
            inputs: the packed host buffer; read by a copy queued here.

        Returns:
            name -> tensor, valid in stream order until this key runs again.
        """
        held = self._held.get(key)
        if held is not None:
            try:
                held.packed.copy_(inputs, non_blocking=True)
                if not held.fixed:
                    forward.load(held.packed, key, held.forward)
                held.graph.replay()
            except Exception as error:
                # The batch fails, and is tried again by whoever launched it: not by this graph.
                self._give_up(key, error)
                raise
            # The books are kept beside the device.
            self._runs += 1
            self.metrics.hits += 1
            held.last_used = self._runs
            self._held.move_to_end(key)
            return held.graph.outputs
        self._runs += 1
        if not self._may_capture(key):
            first = self._capturable(key) and key not in self._seen
            return self._run_plain(key, inputs, forward, first)
        held = self._capture(key, inputs, forward)
        if held is None:
            # Not as a first hit, be it to start over: what has just failed under the key may fail again.
            return self._run_plain(key, inputs, forward, first=False)
        try:
            held.graph.replay()
        except Exception as error:
            self._give_up(key, error)
            raise
        return held.graph.outputs

    def _run_plain(self, key: BatchKey, inputs: Tensor, forward: Forward, first: bool) -> Outputs:
        self.metrics.plain += 1
        self._count_new(key)
        packed = self._to_device(inputs)
        if first:
            # The first hit plans as the graph's replays will, so that they give the same bits.
            self._see(key)
            try:
                forward.load(packed, key)
                return forward.run()
            except WorkspaceFull:
                self._refuse(key, "no memory for its attention plan")
        forward.load(packed, None)
        return forward.run()

    def _to_device(self, inputs: Tensor) -> Tensor:
        packed = torch.empty_like(inputs, device=self._device, pin_memory=False)
        return packed.copy_(inputs, non_blocking=True)

    def _capturable(self, key: BatchKey) -> bool:
        return self._capturer is not None and self._max_bytes > 0 and key.padded and key not in self._refused

    def _see(self, key: BatchKey) -> None:
        self._seen[key] = None
        if len(self._seen) > MAX_COUNTED:
            oldest, _ = self._seen.popitem(last=False)
            if oldest not in self._held:
                self._released(oldest)

    def _count_new(self, key: BatchKey) -> None:
        if key in self._known:
            return
        self.metrics.new_keys += 1
        self._known[key] = None
        if len(self._known) > MAX_COUNTED:
            self._known.popitem(last=False)

    def _may_capture(self, key: BatchKey) -> bool:
        if not self._capturable(key) or key not in self._seen:
            return False
        if self.metrics.bytes + self._typical_bytes <= self._max_bytes:
            return True
        coldest = next(iter(self._held.values()))
        return self._runs - coldest.last_used >= COLD_AFTER

    @property
    def _typical_bytes(self) -> int:
        return self.metrics.bytes // len(self._held) if self._held else 0

    def _capture(self, key: BatchKey, inputs: Tensor, forward: Forward) -> _Held | None:
        """Capture and hold, or None if this key has to stay plain."""
        assert self._capturer is not None
        # Before, so that the device never holds more than the budget; what it really takes is known only after.
        self._make_room(self._typical_bytes)
        try:
            packed = self._to_device(inputs)
            forward.load(packed, key)
            if not forward.capturable:
                self._refuse(key, "its attention is bound to one split")
                return None
            graph = self._capturer.capture(key, forward.run)
            held = _Held(packed, forward, graph, self._runs, bool(getattr(forward, "fixed", False)))
        except torch.OutOfMemoryError:
            # What is held now is what fits; from here on a new graph needs a cold one's place.
            self._max_bytes = self.metrics.bytes
            self._refuse(key, "out of memory")
            return None
        except Exception as error:  # noqa: BLE001  what cannot be captured still runs plain
            self._fail(key, f"its capture failed: {type(error).__name__}: {error}")
            return None
        self._make_room(held.bytes)
        if held.bytes > self._max_bytes:
            held.graph.release()
            self._refuse(key, f"{held.bytes} bytes are more than the whole budget of {self._max_bytes}")
            return None
        self._held[key] = held
        self.metrics.captures += 1
        self.metrics.bytes += held.bytes
        return held

    def _make_room(self, wanted: int) -> None:
        while self._held and self.metrics.bytes + wanted > self._max_bytes >= wanted:
            key, coldest = self._held.popitem(last=False)
            coldest.graph.release()
            self._forget(key)
            self.metrics.bytes -= coldest.bytes
            self.metrics.evicted += 1

    def clear(self) -> None:
        """Let go of every graph, with nothing in flight; each key earns its graph anew."""
        while self._held:
            key, held = self._held.popitem()
            held.graph.release()
            self._forget(key)
            self.metrics.bytes -= held.bytes

    def _forget(self, key: BatchKey) -> None:
        """As if never seen: its plan is gone, and the next hit makes a new one outside of any capture."""
        self._released(key)
        self._seen.pop(key, None)

    def _give_up(self, key: BatchKey, error: Exception) -> None:
        held = self._held.pop(key)
        self.metrics.bytes -= held.bytes
        with contextlib.suppress(RuntimeError):  # the device may be lost; the first error is the one to tell
            held.graph.release()
        self._fail(key, f"its replay failed: {type(error).__name__}: {error}")

    def _fail(self, key: BatchKey, reason: str) -> None:
        if key in self._erred:
            self._refuse(key, f"for the second time {reason}")
            return
        self._erred.add(key)
        self._forget(key)
        self.metrics.failed += 1
        _log.warning("no graph for %d tokens in %d sequences for now: %s", key.tokens, key.sequences, reason)

    def _refuse(self, key: BatchKey, reason: str) -> None:
        self._refused.add(key)
        self._released(key)
        self.metrics.failed += 1
        _log.warning("no graph for %d tokens in %d sequences, it runs plain: %s", key.tokens, key.sequences, reason)

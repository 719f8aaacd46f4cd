"""Where forwards run on a CUDA device: queued inline on one stream, timed by events, captured into graphs.

Launching only queues kernels, so it happens in the thread that owns the engine; whoever waits polls an event
(polling costs nothing, a blocking event 80 to 400 µs, a waiter thread 25 µs: measured on an H200).
Knows streams, events and graphs; knows neither batches nor models.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import torch

from rose.engine.buckets import BatchKey
from rose.engine.execution import DoneTicket, Ticket, expected_end_after
from rose.engine.graphs import Outputs

_log = logging.getLogger(__name__)

T = TypeVar("T")


class _Waiter:
    """One thread that waits for events in their order and calls back: for awaiting callers outside of a reactor."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._queue: SimpleQueue[tuple[torch.cuda.Event, Callable[[], None]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def call_after(self, event: torch.cuda.Event, callback: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="rose-waiter", daemon=True)
            self._thread.start()
        self._queue.put((event, callback))

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()

    def _work(self) -> None:
        torch.cuda.set_device(self._device)
        while (entry := self._queue.get()) is not None:
            event, callback = entry
            try:
                event.synchronize()
                callback()
            except Exception:  # noqa: BLE001  the waiter must live on
                _log.exception("a callback of a finished batch raised")


class _Events:
    """Events to record and to give back: making two for every batch costs more than recording them."""

    def __init__(self) -> None:
        self._free: list[torch.cuda.Event] = []

    def take(self) -> torch.cuda.Event:
        return self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)

    def give(self, *events: torch.cuda.Event) -> None:
        self._free.extend(events)


class CudaTicket(Generic[T]):
    """What was queued between two events of one stream.

    The events go back once the time between them was asked for: from then on the ticket answers from memory. Who waits
    in another thread at that moment may see them recorded anew, and waits for a later batch of the same stream then.
    """

    __slots__ = ("_end", "_events", "_ready", "_seconds", "_start", "_value", "_waiter", "expected_end")

    def __init__(
        self,
        value: T,
        start: torch.cuda.Event,
        end: torch.cuda.Event,
        waiter: _Waiter,
        events: _Events,
        expected_end: float | None,
    ) -> None:
        self._value = value
        self._start = start
        self._end = end
        self._waiter = waiter
        self._events: _Events | None = events
        self._ready = False
        self._seconds: float | None = None
        self.expected_end = expected_end

    def ready(self) -> bool:
        if not self._ready:
            self._ready = self._end.query()
        return self._ready

    def wait(self) -> None:
        if not self._ready:
            self._end.synchronize()
            self._ready = True

    def result(self) -> T:
        self.wait()
        return self._value

    def seconds(self) -> float | None:
        if self._seconds is None and self.ready():
            self._seconds = self._start.elapsed_time(self._end) * 1e-3
            if self._events is not None:
                self._events.give(self._start, self._end)
        return self._seconds

    def on_done(self, callback: Callable[[], None]) -> None:
        if self.ready():
            callback()
        else:
            self._events = None  # the waiter's thread holds the end from now on
            self._waiter.call_after(self._end, callback)


class CudaExecutor:
    """Queues launched functions on one stream of `device`, under torch.inference_mode."""

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self.device = torch.device(device)
        if "index" not in repr(self.device):  # "cuda" means the current one
            self.device = torch.device("cuda", torch.cuda.current_device())
        # A high priority lets a query's kernels go before those of other streams on a shared device.
        self.stream = torch.cuda.Stream(self.device, priority=-1)
        self._waiter = _Waiter(self.device)
        self._events = _Events()
        self._last: Ticket[object] | None = None
        self._closed = False
        self._owner: int | None = None

    def launch(self, fn: Callable[[], T], *, expected_seconds: float | None = None) -> Ticket[T]:
        if self._closed:
            raise RuntimeError("this executor is closed")
        # Before anything is queued: the device's time counts from the first event on, whatever the launches take.
        expected_end = expected_end_after(self._last, expected_seconds)
        if self._owner == threading.get_ident() and torch.is_inference_mode_enabled():
            return self._queue(fn, expected_end)
        with self.owner():
            return self._queue(fn, expected_end)

    def _queue(self, fn: Callable[[], T], expected_end: float | None) -> Ticket[T]:
        start = self._events.take()
        start.record(self.stream)
        try:
            value = fn()
        except BaseException as error:  # noqa: BLE001  it concerns this batch only
            return DoneTicket.failed(error)
        end = self._events.take()
        end.record(self.stream)
        ticket = CudaTicket(value, start, end, self._waiter, self._events, expected_end)
        self._last = ticket
        return ticket

    @contextlib.contextmanager
    def owner(self) -> Iterator[None]:
        """Whoever is inside stays on this stream: launches there do not ask torch for it."""
        outer, self._owner = self._owner, threading.get_ident()
        try:
            with torch.cuda.stream(self.stream), torch.inference_mode():
                yield
        finally:
            self._owner = outer

    def fileno(self) -> int | None:
        return None

    def acknowledge(self) -> None:
        pass

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.stream.synchronize()
            self._waiter.close()


class CudaGraphCapture:
    """One captured forward, replayed on the current stream.

    Attributes:
        outputs: tensors in the pool that all graphs share: to be copied away before any other graph replays.
        bytes: what the device had less after its capture than before.
    """

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        outputs: Outputs,
        nbytes: int,
        seconds: float,
        released: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            released: called once, when the graph is gone.
        """
        self._graph: torch.cuda.CUDAGraph | None = graph
        self.outputs = outputs
        self.bytes = nbytes
        self.seconds = seconds
        self._released = released

    def replay(self) -> None:
        assert self._graph is not None
        self._graph.replay()

    def release(self) -> None:
        if self._graph is not None:
            # A graph still queued may not be destroyed.
            torch.cuda.current_stream().synchronize()
            self._graph.reset()
            self._graph = None
            self.outputs = {}
            self._released()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device had no memory left, whoever says so.

    Only torch's allocator raises OutOfMemoryError. Instantiating a graph takes memory of the driver's own, loading a
    kernel too: they fail with plain RuntimeErrors ("CUDA error: out of memory", "Triton Error [CUDA]: out of memory"),
    and cuBLAS with a status.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and ("out of memory" in str(error) or "ALLOC_FAILED" in str(error))


class CudaCapturer:
    """Captures forwards on the current stream into one memory pool.

    torch.cuda.graph empties the caches and synchronises for every capture, which thousands of captures cannot afford;
    this does neither. Errors of other threads' calls cannot spoil a capture: it is thread local.

    Attributes:
        seconds: of the latest captures, for the books.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._live = 0
        self.seconds: deque[float] = deque(maxlen=1024)

    def capture(self, key: BatchKey, fn: Callable[[], Outputs]) -> CudaGraphCapture:
        del key
        begin = time.perf_counter()
        free_before, _ = torch.cuda.mem_get_info(self._device)
        if self._live == 0:
            # A pool that no graph holds is dead: torch takes its handle for no further capture.
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        collecting = gc.isenabled()
        gc.disable()  # a collected event or graph would call the driver in the middle of the capture
        try:
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outputs = fn()
            except BaseException:
                # Ending an invalid capture raises too; the first error is the one to tell.
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        except RuntimeError as error:
            if is_out_of_memory(error) and not isinstance(error, torch.OutOfMemoryError):
                raise torch.OutOfMemoryError(str(error)) from error
            raise
        finally:
            if collecting:
                gc.enable()
        free_after, _ = torch.cuda.mem_get_info(self._device)
        self.seconds.append(time.perf_counter() - begin)
        self._live += 1
        return CudaGraphCapture(graph, outputs, max(0, free_before - free_after), self.seconds[-1], self._one_less)

    def _one_less(self) -> None:
        self._live -= 1

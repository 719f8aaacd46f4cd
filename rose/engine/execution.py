"""Where forwards run: an `Executor` takes a function and gives back a `Ticket`.

On the CPU one worker thread runs them, so that the thread that owns sockets never computes. On CUDA the function itself
only queues kernels, so an executor there runs it inline on its stream and records an event; it has no file descriptor,
and its owner sleeps until shortly before `Ticket.expected_end` and polls.
Tickets of one executor finish in the order of their launches. Knows threads; knows neither batches nor models.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from queue import SimpleQueue
from typing import Generic, Protocol, TypeVar

import torch

from rose.errors import StartupError

_log = logging.getLogger(__name__)

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Ticket(Protocol[T_co]):
    """One launched function.

    Attributes:
        expected_end: time.monotonic() at which it should be done, if the launch came with an estimate.
    """

    expected_end: float | None

    def ready(self) -> bool:
        """Whether it has finished or failed. Never waits."""
        ...

    def wait(self) -> None:
        """Block until `ready()`."""
        ...

    def result(self) -> T_co:
        """Wait, then return what the function returned, or raise what it raised."""
        ...

    def seconds(self) -> float | None:
        """Seconds of the device's time it took; None until `ready()`, and for ever if it failed."""
        ...

    def on_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` once it is ready: at once, or later from another thread. It must be short and not raise."""
        ...


class Executor(Protocol):
    """Runs launched functions one after another on one device."""

    device: torch.device

    def launch(self, fn: Callable[[], T], *, expected_seconds: float | None = None) -> Ticket[T]:
        """Start `fn` and return at once. What `fn` raises surfaces in the ticket only.

        Args:
            expected_seconds: how long the device is thought to take, counted from the end of what was launched before.
        """
        ...

    def owner(self) -> AbstractContextManager[None]:
        """Inside, the calling thread is set up for launches, which need not switch to their stream and back each."""
        ...

    def fileno(self) -> int | None:
        """A descriptor that is readable when a ticket became ready since `acknowledge()`; None: poll the tickets."""
        ...

    def acknowledge(self) -> None:
        """Make `fileno()` unreadable again. Call it before looking at tickets, or a finish in between is missed."""
        ...

    def close(self) -> None:
        """Finish what was launched, then free threads and descriptors. Further launches are refused."""
        ...


def expected_end_after(previous: Ticket[object] | None, seconds: float | None) -> float | None:
    """time.monotonic() at which work of `seconds` should end that starts when `previous` has ended."""
    if seconds is None:
        return None
    start = time.monotonic()
    if previous is not None and not previous.ready() and previous.expected_end is not None:
        start = max(start, previous.expected_end)
    return start + seconds


class DoneTicket(Generic[T]):
    """A ticket that is settled by hand: the CPU worker's, and of launches that failed before they started."""

    __slots__ = ("_callbacks", "_done", "_error", "_lock", "_pending", "_seconds", "_value", "expected_end")

    def __init__(self, expected_end: float | None = None) -> None:
        self.expected_end = expected_end
        # A lock that is held until the end: threading.Event does the same at three times the price, for every batch.
        self._pending = threading.Lock()
        self._pending.acquire()
        self._done = False
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self._value: T
        self._error: BaseException | None = None
        self._seconds: float | None = None

    @staticmethod
    def failed(error: BaseException) -> DoneTicket[T]:
        ticket: DoneTicket[T] = DoneTicket()
        ticket.fail(error)
        return ticket

    def settle(self, value: T, seconds: float | None = None) -> None:
        self._value = value
        self._finish(seconds)

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._finish(None)

    def _finish(self, seconds: float | None) -> None:
        self._seconds = seconds
        with self._lock:
            self._done = True
        self._pending.release()
        for callback in self._callbacks:
            try:
                callback()
            except Exception:  # noqa: BLE001  the thread that finishes tickets must live on
                _log.exception("a callback of a finished ticket raised")
        self._callbacks.clear()

    def ready(self) -> bool:
        return self._done

    def wait(self) -> None:
        if not self._done:
            with self._pending:
                pass

    def result(self) -> T:
        self.wait()
        if self._error is not None:
            raise self._error
        return self._value

    def seconds(self) -> float | None:
        return self._seconds

    def on_done(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if not self._done:
                self._callbacks.append(callback)
                return
        callback()


class WakeUp:
    """A descriptor that one thread makes readable for another: an eventfd, or a pipe where there is none."""

    def __init__(self) -> None:
        if hasattr(os, "eventfd"):
            self._read = self._write = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        else:
            self._read, self._write = os.pipe()
            os.set_blocking(self._read, False)
            os.set_blocking(self._write, False)

    def fileno(self) -> int:
        return self._read

    def set(self) -> None:
        # A full pipe is readable already.
        with contextlib.suppress(BlockingIOError):
            os.write(self._write, (1).to_bytes(8, "little"))

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self._read, 4096)) == 4096:
                pass

    def close(self) -> None:
        for descriptor in {self._read, self._write}:
            os.close(descriptor)


class CpuExecutor:
    """One worker thread that runs launched functions in order, under torch.inference_mode."""

    device = torch.device("cpu")

    def __init__(self, *, num_threads: int | None = None) -> None:
        """
        Args:
            num_threads: threads of torch's operators inside the worker, or None for torch's own choice.

        Raises:
            StartupError: fewer than one thread.
        """
        if num_threads is not None and num_threads < 1:
            raise StartupError(f"num_threads of {num_threads}: torch's operators need at least one thread")
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._wake_up = WakeUp()
        self._last: Ticket[object] | None = None
        self._closed = False
        self._worker = threading.Thread(target=self._work, args=(num_threads,), name="rose-forward", daemon=True)
        self._worker.start()

    def launch(self, fn: Callable[[], T], *, expected_seconds: float | None = None) -> DoneTicket[T]:
        if self._closed:
            raise RuntimeError("this executor is closed")
        ticket: DoneTicket[T] = DoneTicket(expected_end_after(self._last, expected_seconds))
        self._last = ticket

        def job() -> None:
            start = time.monotonic()
            try:
                value = fn()
            except BaseException as error:  # noqa: BLE001  a failing forward must never end the worker
                ticket.fail(error)
            else:
                ticket.settle(value, time.monotonic() - start)
            self._wake_up.set()

        self._queue.put(job)
        return ticket

    def owner(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def fileno(self) -> int:
        return self._wake_up.fileno()

    def acknowledge(self) -> None:
        self._wake_up.clear()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            self._worker.join()
            self._wake_up.close()

    def _work(self, num_threads: int | None) -> None:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        with torch.inference_mode():
            while (job := self._queue.get()) is not None:
                job()

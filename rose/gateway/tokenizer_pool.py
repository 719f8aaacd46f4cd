"""Threads for long texts, shared fairly: every request has one short piece of work in them at a time.

A request's next piece queues behind the pieces of all others, and is not queued at all once its caller has left. Texts
so long that one of them is a second's work have a thread of their own, which also keeps them from filling the memory
side by side. Knows work in pieces; knows neither texts nor tokenizers.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from rose.errors import Overloaded

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Piece(Generic[T]):
    """What one thread does in one go; `long` where that may take more than a tenth of a second."""

    work: Callable[[], T]
    long: bool = False


class TokenizerPool:
    """
    Args:
        threads: for pieces that are not long.
        queue: requests that may wait for the pool or run in it; more are refused.
    """

    def __init__(self, threads: int, queue: int) -> None:
        self._short = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="tokenize-long")
        self._queue = queue
        self._depth = 0
        self._lock = threading.Lock()

    @property
    def depth(self) -> int:
        """Requests that wait for the pool or run in it; one whose caller left counts until its piece has ended."""
        return self._depth

    async def run(self, pieces: Iterable[Piece[T]]) -> list[T]:
        """What the pieces give, in order. Raises Overloaded where too many requests wait already."""
        self._enter()
        running: Future[T] | None = None
        done: list[T] = []
        try:
            for piece in pieces:
                running = (self._long if piece.long else self._short).submit(piece.work)
                done.append(await asyncio.wrap_future(running))
        finally:
            if running is None:
                self._leave()
            else:  # at once where it is done, or was cancelled before it began
                running.add_done_callback(lambda _: self._leave())
        return done

    def close(self) -> None:
        for pool in (self._short, self._long):
            pool.shutdown(wait=False, cancel_futures=True)

    def _enter(self) -> None:
        with self._lock:
            if self._depth >= self._queue:
                raise Overloaded(
                    f"{self._depth} requests wait to be tokenised, the limit is {self._queue}", retry_after_s=1.0
                )
            self._depth += 1

    def _leave(self) -> None:
        with self._lock:
            self._depth -= 1

"""A clock that tests move."""

from __future__ import annotations


class Clock:
    """Seconds; whoever sleeps moves it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

"""How many bytes of request bodies the front holds at a time, over all connections.

Knows numbers; knows neither requests nor sockets.
"""

from __future__ import annotations

from rose.errors import Overloaded

# Room comes back when requests are answered, which takes about as long as a large one takes.
RETRY_AFTER_S = 1.0


class BodyBudget:
    """
    Attributes:
        limit: most bytes held.
        used: bytes held now.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0


class Held:
    """What one request holds: `add` as it comes, `release` when it is answered."""

    __slots__ = ("_budget", "_bytes")

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._bytes = 0

    def add(self, count: int) -> bool:
        """Whether there was room for so many more bytes."""
        if self._budget.used + count > self._budget.limit:
            return False
        self._budget.used += count
        self._bytes += count
        return True

    def release(self) -> None:
        self._budget.used -= self._bytes
        self._bytes = 0

    def refusal(self) -> Overloaded:
        return Overloaded(
            f"the requests that are being read or answered hold {self._budget.used} bytes, the limit is "
            f"{self._budget.limit} bytes for all of them",
            retry_after_s=RETRY_AFTER_S,
        )

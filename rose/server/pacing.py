"""How many tokens a second come through, and so when a refused request should come back.

Knows clocks and counts; knows neither the engine nor sockets.
"""

from __future__ import annotations

# Weight of the newest measurement: about the last ten count.
BLEND = 0.1


class TokenRate:
    """Tokens a second while the engine is busy."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def measured(self, tokens: int, seconds: float) -> None:
        """One finished batch and the time it occupied the device alone."""
        keep = 1 - BLEND
        self._tokens = self._tokens * keep + tokens
        self._seconds = self._seconds * keep + max(seconds, 1e-6)

    @property
    def per_second(self) -> float:
        """0 while nothing has been measured."""
        return self._tokens / self._seconds if self._seconds else 0.0

    def seconds_for(self, tokens: int) -> float:
        """How long `tokens` take, between 50 ms and a minute; a second while nothing has been measured."""
        rate = self.per_second
        return min(max(tokens / rate, 0.05), 60.0) if rate else 1.0

"""How long a batch will take, learned from those that ran.

The engine times its second launch by it and the server its sleep. Knows keys and seconds only.
"""

from __future__ import annotations

from rose.engine.buckets import BatchKey

# Weight of the newest batch: a slower clock is followed within about ten batches, one outlier moves it by a fifth.
NEWEST = 0.2
# A batch this much faster than the average is believed at once: the average then stems from a first run that compiled.
DROP = 0.5


class Durations:
    """Moving averages of device seconds by key, and by power of two of tokens for keys not seen yet."""

    def __init__(self) -> None:
        self._by_key: dict[BatchKey, float] = {}
        self._by_size: dict[int, float] = {}

    def observe(self, key: BatchKey, seconds: float) -> None:
        # Batches outside of buckets have shapes of their own, seldom seen twice: only their size is remembered.
        if key.padded:
            self._by_key[key] = _moved(self._by_key.get(key), seconds)
        size = key.tokens.bit_length()
        self._by_size[size] = _moved(self._by_size.get(size), seconds / key.tokens)

    def expect(self, key: BatchKey) -> float | None:
        """Seconds, or None if nothing of that size has run yet."""
        if (seconds := self._by_key.get(key)) is not None:
            return seconds
        per_token = self._by_size.get(key.tokens.bit_length())
        return None if per_token is None else per_token * key.tokens


def _moved(average: float | None, newest: float) -> float:
    if average is None or newest < DROP * average:
        return newest
    return average + NEWEST * (newest - average)

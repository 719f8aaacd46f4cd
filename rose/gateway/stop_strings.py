"""Stop strings in a text that comes in pieces: found wherever they begin and end, held back no longer than needed.

Which one is found, and where, depends on the text alone, not on how it was cut into pieces: the first to be complete
counts, and of several that are complete at the same character the longest. Knows text; knows no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """One text's search. `add` its pieces; then `finish`.

    Attributes:
        found: the stop string that ended the text, or None.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.found: str | None = None
        self._stops = stops
        self._held = ""

    def add(self, piece: str) -> str:
        """What of the text can be given out now: up to the stop string, or to where one may have begun."""
        if not self._stops or self.found is not None:
            return "" if self.found is not None else piece
        text = self._held + piece
        start, stop = self._first(text)
        if stop is not None:
            self.found, self._held = stop, ""
            return text[:start]
        keep = self._beginning(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back, once nothing more comes."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str) -> tuple[int, str | None]:
        """Where the stop string begins that is complete first, and which it is."""
        there = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        return min(there)[1:] if there else (0, None)

    def _beginning(self, text: str) -> int:
        """How many characters at the end of a text may be the beginning of a stop string."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:size]):
                    longest = size
                    break
        return longest

"""One choice of a conversion: what was settled, and which file, flag or default settled it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Choice:
    """
    Attributes:
        source: the file and key, the flag, or "default of ...".
    """

    name: str
    value: str
    source: str


def flag(name: str) -> str:
    """How a flag is named as a source."""
    return f"the flag --{name}"

"""What the process counts about itself. Plain numbers; knows nothing of where they come from."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Stats:
    """Totals since the start; field names follow ServerStats of rose.proto."""

    requests: int = 0
    answered: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    batches: int = 0
    failed_batches: int = 0
    tokens: int = 0
    items: int = 0
    retried_items: int = 0

"""What a load leaves out, in words for the log.

Knows rules and names; knows neither files nor models.
"""

from __future__ import annotations

from collections.abc import Sequence

from rose.convert.rules import Drop, Family, match


def left_out(dropped: Sequence[str], family: Family, prefix: str) -> list[str]:
    """A line for each rule that left tensors out, with how many and why; in the order of the names.

    Args:
        dropped: names in the checkpoint. prefix: of the backbone's names.
    """
    groups: dict[str, list[str]] = {}
    for name in dropped:
        groups.setdefault(_why(name, family, prefix), []).append(name)
    return [_line(names, why) for why, names in groups.items()]


def _why(name: str, family: Family, prefix: str) -> str:
    for rule in (*family.outside, *family.rules):
        if isinstance(rule, Drop) and any(
            match(rule.source, full) is not None for full in (name, name.removeprefix(prefix))
        ):
            return rule.why
    return "no rule says why"


def _line(names: list[str], why: str) -> str:
    if len(names) == 1:
        return f"{names[0]} left out: {why}"
    return f"{len(names)} tensors left out ({min(names)} ...): {why}"

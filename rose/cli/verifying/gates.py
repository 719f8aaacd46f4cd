"""What two answers must reach to count as the same: one JSON file, a gate for each precision.

    {"bfloat16": {"min_cosine": {"at_least": 0.998}, ...}, ...}

Knows bounds; knows nothing of how the numbers were measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rose.config.json_file import JsonFile

GATES = Path(__file__).with_name("gates.json")
_COARSENESS = ("float32", "bfloat16", "float8")
_SAME = {"float16": "bfloat16", "float64": "float32"}


@dataclass(frozen=True, slots=True)
class Check:
    """One bound. `passed` is false for a value that is not a number, too."""

    measure: str
    value: float
    rule: str
    bound: float
    passed: bool


def gate_for(dtypes: set[str]) -> str:
    """The gate of the coarsest of the dtypes."""
    known = {"float8" if dtype.startswith("float8") else _SAME.get(dtype, dtype) for dtype in dtypes}
    return max((dtype for dtype in known if dtype in _COARSENESS), key=_COARSENESS.index, default="float32")


def check(measures: Mapping[str, float], gate: str, path: Path = GATES) -> list[Check]:
    """Every bound of the gate on something that was measured.

    Raises:
        CheckpointError: no such gate in the file, or a bound that is none.
    """
    file = JsonFile.read(path)
    if gate not in file:
        raise file.error(f"there is no gate {gate!r}; there are {', '.join(file.data)}")
    checks: list[Check] = []
    bounds = file.child(gate)
    for measure in bounds.data:
        rules = bounds.child(measure)
        unknown = sorted(set(rules.data) - {"at_least", "at_most"})
        if unknown or not rules.data:
            raise file.error(f"{gate}.{measure} has no bound but {unknown}; there are at_least, at_most")
        if measure not in measures:
            continue
        value = measures[measure]
        for rule in rules.data:
            bound = rules.number(rule)
            checks.append(Check(measure, value, rule, bound, value >= bound if rule == "at_least" else value <= bound))
    return checks

"""The table of docs/calibrating.md is what benchmarks/results/calibration.jsonl has; rows are whole."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "benchmarks" / "calibration.py"))


def rows():
    return [json.loads(line) for line in SCRIPT["RESULTS"].read_text(encoding="utf-8").splitlines()]


def test_the_table_is_the_rows():
    assert SCRIPT["table"]() in (ROOT / "docs" / "calibrating.md").read_text(encoding="utf-8")


def test_every_model_has_every_scheme():
    wanted = {(model, scheme) for model in SCRIPT["MODELS"] for scheme in SCRIPT["SCHEME_NAMES"]}
    assert {(row["model"], row["scheme"]) for row in rows()} == wanted


def test_rows_that_passed_hold_the_gates_of_the_repository():
    gates = json.loads((ROOT / "rose" / "cli" / "verifying" / "gates.json").read_text(encoding="utf-8"))["float8"]
    for row in rows():
        for measures in (row["held_out"], row.get("all_texts", {})):
            if not row["passed"]:
                continue
            for name, bound in gates.items():
                if name.startswith("ndcg"):  # told, and no part of what calibration is held to
                    continue
                assert measures.get(name, bound.get("at_least", 0)) >= bound.get("at_least", 0), (row["model"], name)
                assert measures.get(name, 0) <= bound.get("at_most", 2.0), (row["model"], name)

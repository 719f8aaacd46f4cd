"""Every public bug report that the first path has to answer is a test.

A test answers a report when its own docstring says "Report C01 (tei#882)" or "Reports C20, C22" and the like; the list
is what other servers got wrong on this path, and a report that loses its test is found here.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

REPORTS = {
    "C01": "causal mask lost when all sequences of a batch have the same length",
    "C05": "bidirectional model causal when it runs alone",
    "C12": "vectors right but in the wrong order",
    "C20": "an empty text kills the server",
    "C26": "NaN breaks the answer instead of naming the item",
    "C28": "lone surrogate in JSON",
    "C42": "a text longer than the token budget blocks the queue for ever",
    "C60": "ids outside the vocabulary kill the device",
    "C69": "dimensions refused, or equal to hidden refused",
    "C80": "RoBERTa positions wrong in packed batches",
    "C83": "mean pooling guessed for a CLS model",
    "C90": "tied weights left unset",
    "C145": "one tokenizer shared by threads with different limits",
    "C153": "answers beyond gRPC's default message size",
}
_TAG = re.compile(r"\bC\d+\b")


def answered() -> dict[str, list[str]]:
    """Report -> the test functions whose docstrings name it."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                docstring = ast.get_docstring(node) or ""
                for tag in _TAG.findall(docstring) if "Report" in docstring else ():
                    found[tag].append(f"{path.relative_to(TESTS)}::{node.name}")
    return found


@pytest.mark.parametrize("tag", REPORTS)
def test_each_report_is_a_test(tag):
    assert answered()[tag], f"no test names Report {tag} in its docstring: {REPORTS[tag]}"

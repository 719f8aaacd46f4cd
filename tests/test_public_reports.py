"""Every public bug report that the served paths have to answer is a test.

A test answers a report when its own docstring says "Report C01 (tei#882)" or "Reports C20, C22" and the like; the list
is what other servers got wrong on these paths, and a report that loses its test is found here.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

REPORTS = {
    "C01": "causal mask lost when all sequences of a batch have the same length",
    "C05": "bidirectional model causal when it runs alone",
    "C06": "is_causal ignored beside a padding mask",
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
    "C02": "wrong causal flag, padding side and last token",
    "C04": "a prompt applied on one side only",
    "C09": "CLS taken from the padding",
    "C11": "an encoder without a mask depends on its company",
    "C14": "quantised vectors that depend on their company",
    "C24": "short words come back as nulls",
    "C25": "a numeric string in fp16 comes back as nulls",
    "C27": "a zero vector normalised to NaN",
    "C33": "control tokens typed by users",
    "C44": "truncation to exactly the limit",
    "C47": "mean of unit chunk vectors not unit",
    "C48": "positions past the table",
    "C52": "tokenising superlinear in length",
    "C71": "Dense module left out",
    "C81": "position offset missed in rerankers",
    "C84": "no modules.json, pooling guessed",
    "C85": "end token not appended, or the wrong one",
    "C86": "the meaning of a causal flag flipped",
    "C87": "the reference itself was causal by mistake",
    "C88": "head dim taken as hidden over heads",
    "C89": "int8 grid destroyed by normalising",
    "C91": "an untied head that is missing, or silently tied",
    "C93": "a shared tensor lost on the way from .bin",
    "C95": "only one name of the weights' file looked for",
    "C96": "other prefixes, unmatched tensors",
    "C97": "a merged adapter that is the base",
    "C99": "no score.weight in a yes/no reranker",
    "C100": "untied head not loaded, every score one half",
    "C101": "a model without a scoring head asked to rerank",
    "C102": "reranker without its template",
    "C104": "half-precision softmax makes ties",
    "C106": "softmax over one logit",
    "C108": "sparse and ColBERT scores by several definitions",
    "C109": "sparse head of batch x length x vocabulary",
    "C110": "lexical weights from a head that was not loaded",
    "C145": "one tokenizer shared by threads with different limits",
    "C153": "answers beyond gRPC's default message size",
    "C03": "two clusters of answers, by company",
    "C08": "batched half-precision vectors drift",
    "C15": "NaN of padding rows in real rows",
    "C16": "a padded tail that nobody wrote",
    "C17": "graphs of several sizes in one pool read stale values",
    "C120": "ragged attention at 16,384 tokens",
    "C123": "the second short sequence all zeros",
    "C124": "plans that change between capture and replay",
    "C126": "a page-locked buffer overwritten before its copy",
    "C128": "empty sequences hang a kernel",
    "C129": "a backend wrong on one architecture",
    "C132": "out of memory at capture",
}
_TAG = re.compile(r"\bC\d+\b")


@functools.cache
def answered() -> dict[str, list[str]]:
    """Report -> the test functions whose docstrings name it; read once, for it takes 1.5 s."""
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

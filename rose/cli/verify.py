"""`rose verify`: whether two folders give the same answers, or one gives those that were stored.

Knows options and what to print; the work is that of `rose.cli.verifying`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from rose.cli.bulk.source import Source
from rose.cli.shared import Commands, add_command
from rose.cli.verifying.answers import Answers, answers_of, digest, load_golden, save_golden
from rose.cli.verifying.gates import GATES, check, gate_for
from rose.cli.verifying.measures import cosines, kendall_tau, neighbour_overlap, ranking_agreement
from rose.errors import InvalidInput
from rose.hub import Bars, resolve

_EXAMPLES = (
    "rose verify ./my-llm-embedder ./my-llm-embedder-bf16 --data texts.txt",
    "rose verify minilm --data texts.txt --save-golden minilm.npz",
    "rose verify ./minilm-converted minilm.npz --data texts.txt --json",
)


def add_verify(commands: Commands) -> None:
    parser = add_command(commands, "verify", _verify, "compare two models, or one with stored answers", _EXAMPLES)
    parser.add_argument("a", metavar="A", help="short name, folder, hub id, or golden file (.npz)")
    parser.add_argument(
        "b", metavar="B", nargs="?", help="what is compared with it; may be left out with --save-golden"
    )
    parser.add_argument("--data", required=True, metavar="FILE", help="texts: one a line, JSON lines or Parquet")
    parser.add_argument("--from", dest="in_form", choices=("lines", "jsonl", "parquet"), help="how FILE is written")
    parser.add_argument("--field", default="text", help="key or column of the text (default: %(default)s)")
    parser.add_argument("--limit", type=int, default=1000, help="texts that are read (default: %(default)s)")
    parser.add_argument("--save-golden", type=Path, metavar="FILE.npz", help="keep A's answers")
    parser.add_argument("--gate", help="float32, bfloat16 or float8 (default: by the coarser side's dtype)")
    parser.add_argument("--gates", type=Path, default=GATES, help="file of the gates (default: ROSE's own)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda:N (default: %(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="that B runs in")
    parser.add_argument("--cache", type=Path, help="where pulled models are kept (default: $ROSE_CACHE, ~/.cache/rose)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _verify(options: argparse.Namespace) -> int:
    if options.b is None and options.save_golden is None:
        raise InvalidInput("name B, or keep A's answers with --save-golden")
    texts = _texts(options)
    a = _answers(options.a, texts, options, dtype="float32")
    if options.save_golden is not None:
        save_golden(a, options.save_golden)
    if options.b is None:
        print(f"{len(texts)} texts: {options.save_golden}")
        return 0
    b = _answers(options.b, texts, options, dtype=options.dtype)
    report = compare(a, b, texts, gate=options.gate, gates=options.gates)
    print(json.dumps(report, ensure_ascii=False) if options.json else _told(report))
    return 0 if report["passed"] else 1


def compare(
    a: Answers, b: Answers, texts: list[str], *, gate: str | None = None, gates: Path = GATES
) -> dict[str, Any]:
    """The report: measures, checks, and whether all passed.

    Raises:
        InvalidInput: answers that cannot be compared: other texts, other kinds, other dimensions.
    """
    for side in (a, b):
        if side.texts != digest(texts):
            raise InvalidInput(f"{side.name} answered other texts than those of --data")
    if a.kind != b.kind or a.values.shape[-1] != b.values.shape[-1]:
        raise InvalidInput(
            f"{a.name} gives {a.kind} of {a.values.shape[-1]}, and {b.name} {b.kind} of {b.values.shape[-1]}: "
            "they cannot be compared"
        )
    differing = [i for i, (x, y) in enumerate(zip(a.ids, b.ids, strict=True)) if x != y]
    measures, worst = _vectors(a, b) if a.kind == "vectors" else _scores(a, b)
    stored = {a.stored, b.stored} if a.stored != b.stored else set()
    name = gate or gate_for({a.ran, b.ran} | stored)
    checks = check(measures, name, gates)
    return {
        "a": a.name,
        "b": b.name,
        "texts": len(texts),
        "gate": name,
        "token_ids_equal": not differing,
        "token_ids_differ_at": differing[:10],
        "measures": measures,
        "worst": worst,
        "checks": [asdict(one) for one in checks],
        "passed": not differing and bool(checks) and all(one.passed for one in checks),
    }


def _vectors(a: Answers, b: Answers) -> tuple[dict[str, float], dict[str, Any]]:
    own = cosines(a.values, b.values)
    at = int(np.argmin(np.nan_to_num(own, nan=-2.0)))
    measures = {
        "min_cosine": float(own.min()),
        "mean_cosine": float(own.mean()),
        "recall_at_10": neighbour_overlap(a.values, b.values),
        "kendall_tau": ranking_agreement(a.values, b.values),
    }
    return measures, {"index": at, "cosine": float(own[at])}


def _scores(a: Answers, b: Answers) -> tuple[dict[str, float], dict[str, Any]]:
    off = np.abs(a.values - b.values)
    query, document = np.unravel_index(int(np.argmax(np.nan_to_num(off, nan=np.inf))), off.shape)
    taus = [kendall_tau(x, y) for x, y in zip(a.values, b.values, strict=True)]
    measures = {"max_score_difference": float(off.max()), "kendall_tau": float(np.mean(taus))}
    return measures, {"query": int(query), "document": int(document), "difference": float(off[query, document])}


def _told(report: dict[str, Any]) -> str:
    bounds = {one["measure"]: one for one in report["checks"]}
    lines = [f"{report['a']} and {report['b']}, {report['texts']} texts, gate {report['gate']}"]
    same = "equal" if report["token_ids_equal"] else f"differ at {report['token_ids_differ_at']}: FAILED"
    lines.append(f"{'token ids':<22}{same}")
    for name, value in report["measures"].items():
        bound = bounds.get(name)
        verdict = "" if bound is None else f"  {bound['rule'].replace('_', ' ')} {bound['bound']}: "
        verdict += "" if bound is None else ("ok" if bound["passed"] else "FAILED")
        lines.append(f"{name:<22}{value:.7f}{verdict}")
    lines.append(f"{'worst':<22}" + ", ".join(f"{key} {value}" for key, value in report["worst"].items()))
    lines.append("passed" if report["passed"] else "FAILED")
    return "\n".join(lines)


def _texts(options: argparse.Namespace) -> list[str]:
    if options.limit < 2:
        raise InvalidInput(f"--limit is {options.limit}, and must be at least 2")
    texts: list[str] = []
    for item in Source(options.data, options.in_form, options.field).items():
        texts.append(item.text)
        if len(texts) == options.limit:
            break
    if len(texts) < 2:
        raise InvalidInput(f"{options.data} has {len(texts)} texts, and neighbours need at least 2")
    return texts


def _answers(name: str, texts: list[str], options: argparse.Namespace, *, dtype: str | None) -> Answers:
    if name.endswith(".npz"):
        return load_golden(Path(name))
    folder = resolve(name, cache=options.cache, progress=Bars())
    return answers_of(folder, texts, device=options.device, dtype=dtype)

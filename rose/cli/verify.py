"""`rose verify`: whether two folders give the same answers, or one gives those that were stored.

Knows options and what to print; the work is that of `rose.cli.verifying`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from rose.cli.bulk.source import Source
from rose.cli.shared import Bar, Commands, add_command, find_model
from rose.cli.verifying.answers import Answers, answers_of, digest, kind_of, load_golden, save_golden
from rose.cli.verifying.gates import GATES, check, gate_for
from rose.cli.verifying.measures import cosines, measure
from rose.cli.verifying.ndcg import Judgement, ndcg_at_10, read_judgements
from rose.config import ModelFolder, read_model_folder
from rose.errors import InvalidInput

_EXAMPLES = (
    "rose verify ./my-llm-embedder ./my-llm-embedder-bf16 --data texts.txt",
    "rose verify minilm --data texts.txt --save-golden minilm.npz",
    "rose verify ./minilm-converted minilm.npz --data texts.txt --json",
    "rose verify e5-small ./e5-small-fp8 --data passages.txt --judgements queries.jsonl",
    "rose verify smollm2 ./smollm2-int8 --data texts.txt",
)
_GIVES = {"vectors": "vectors", "scores": "scores of pairs", "tokens": "the costs of tokens"}


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
    parser.add_argument(
        "--judgements",
        type=Path,
        metavar="FILE",
        help='nDCG@10 too; a line: {"query": ..., "relevant": [numbers of texts]}',
    )
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
    if options.save_golden is not None and not options.save_golden.parent.is_dir():
        raise InvalidInput(f"{options.save_golden} cannot be written: {options.save_golden.parent} is no folder")
    texts = _texts(options)
    check({}, options.gate or gate_for(set()), options.gates)
    first = _open(options.a, texts, options)
    second = None if options.b is None else _open(options.b, texts, options)
    if second is not None:
        _check_comparable(first, second)
    judgements = None if second is None else _judgements(first, second, texts, options)
    a = _answers(first, texts, options, dtype="float32")
    if options.save_golden is not None:
        save_golden(a, options.save_golden)
    if second is None:
        print(f"{len(texts)} texts: {options.save_golden}")
        return 0
    b = _answers(second, texts, options, dtype=options.dtype)
    more = {} if judgements is None else _ndcg((first, a), (second, b), judgements, options)
    report = compare(a, b, texts, gate=options.gate, gates=options.gates, more=more)
    print(json.dumps(report, ensure_ascii=False) if options.json else _told(report))
    return 0 if report["passed"] else 1


def _open(name: str, texts: list[str], options: argparse.Namespace) -> Answers | ModelFolder:
    """A side as far as it can be read without running it.

    All that can be refused is refused by this and `_check_comparable`, before either side runs: that takes minutes.
    """
    if not name.endswith(".npz"):
        return read_model_folder(find_model(name, options.cache))
    stored = load_golden(Path(name))
    _check_texts(stored, texts)
    return stored


def _check_texts(side: Answers, texts: list[str]) -> None:
    if side.texts != digest(texts):
        raise InvalidInput(f"{side.name} answered other texts than those of --data")


def _check_comparable(a: Answers | ModelFolder, b: Answers | ModelFolder) -> None:
    """
    Raises:
        InvalidInput: sides of two kinds, or vectors of two lengths.
    """
    first, second = (_told_of(side) for side in (a, b))
    if first[1:] != second[1:]:
        told = ", and ".join(
            f"{name} gives {_GIVES[kind]}{f' of {width}' if width else ''}" for name, kind, width in (first, second)
        )
        raise InvalidInput(f"{told}: they cannot be compared")


def _told_of(side: Answers | ModelFolder) -> tuple[str, str, int]:
    """Name, kind, and the length of its vectors (0 where it gives none)."""
    if isinstance(side, Answers):
        return side.name, side.kind, side.values.shape[-1] if side.kind == "vectors" else 0
    kind = kind_of(side)
    return str(side.path), kind, side.dimension if kind == "vectors" else 0


def compare(
    a: Answers,
    b: Answers,
    texts: list[str],
    *,
    gate: str | None = None,
    gates: Path = GATES,
    more: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """The report: measures, checks, and whether all passed.

    Args:
        more: further measures.

    Raises:
        InvalidInput: answers that cannot be compared: other texts, other kinds, other dimensions.
    """
    for side in (a, b):
        _check_texts(side, texts)
    _check_comparable(a, b)
    differing = [i for i, (x, y) in enumerate(zip(a.ids, b.ids, strict=True)) if x != y]
    if a.values.shape != b.values.shape:
        raise InvalidInput(f"{a.name} and {b.name} make different tokens of the texts, from text {differing[0]} on")
    measures = measure(a.kind, a.values, b.values) | dict(more or {})
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
        "worst": _worst(a, b),
        "checks": [asdict(one) for one in checks],
        "passed": not differing and bool(checks) and all(one.passed for one in checks),
    }


def _worst(a: Answers, b: Answers) -> dict[str, Any]:
    if a.kind == "vectors":
        own = cosines(a.values, b.values)
        at = int(np.argmin(np.nan_to_num(own, nan=-2.0)))
        return {"index": at, "cosine": float(own[at])}
    off = np.abs(a.values - b.values)
    if a.kind == "tokens":
        token = int(np.argmax(np.nan_to_num(off[:, 0], nan=np.inf)))
        ends = np.cumsum([len(ids) - 1 for ids in a.ids])
        text = int(np.searchsorted(ends, token, side="right"))
        return {"index": text, "nats": float(off[token, 0])}
    query, document = np.unravel_index(int(np.argmax(np.nan_to_num(off, nan=np.inf))), off.shape)
    return {"query": int(query), "document": int(document), "difference": float(off[query, document])}


def _judgements(
    a: Answers | ModelFolder, b: Answers | ModelFolder, texts: list[str], options: argparse.Namespace
) -> list[Judgement] | None:
    if options.judgements is None:
        return None
    if any(isinstance(side, Answers) or kind_of(side) != "vectors" for side in (a, b)):
        raise InvalidInput("--judgements needs two models that make vectors: queries are run on both")
    return read_judgements(options.judgements, len(texts))


def _ndcg(
    a: tuple[Answers | ModelFolder, Answers],
    b: tuple[Answers | ModelFolder, Answers],
    judgements: list[Judgement],
    options: argparse.Namespace,
) -> dict[str, float]:
    """Of each side and its answers to the texts. Queries are put behind the prompt `query` where a model has one."""
    queries, scores = [one.query for one in judgements], []
    for (side, answers), dtype in ((a, "float32"), (b, options.dtype)):
        own = _answers(side, queries, options, dtype=dtype, prompt="query")
        scores.append(ndcg_at_10(own.values, answers.values, judgements))
    return {"ndcg_at_10_a": scores[0], "ndcg_at_10_b": scores[1], "ndcg_at_10_change": abs(scores[1] - scores[0])}


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


def _answers(
    side: Answers | ModelFolder,
    texts: list[str],
    options: argparse.Namespace,
    *,
    dtype: str | None,
    prompt: str | None = None,
) -> Answers:
    if isinstance(side, Answers):
        return side
    own = prompt if prompt in side.prompts else None
    bars: list[Bar] = []

    def show(done: int, total: int) -> None:
        if not bars:
            bars.append(Bar(side.path.name, total))
        bars[0](done)

    try:
        return answers_of(side, texts, device=options.device, dtype=dtype, prompt=own, progress=show)
    finally:
        for bar in bars:
            bar.close()

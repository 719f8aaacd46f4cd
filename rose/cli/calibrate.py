"""`rose calibrate`: a plain folder becomes one whose products run on 8-bit codes, if its answers hold.

Knows options, texts and gates; the convert room does the work.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rose.cli.bulk.source import Source
from rose.cli.shared import Bar, Commands, add_command, add_reading, find_model, reading
from rose.cli.verifying.gates import GATES, check
from rose.cli.verifying.measures import measure
from rose.cli.verifying.tokens import tokens_of
from rose.config import ModelFolder, read_model_folder
from rose.errors import CheckpointError, InvalidInput

if TYPE_CHECKING:
    from rose.convert.calibrate import Outcome, Subject, Verdict
    from rose.convert.calibrate.subject import Array

SCHEME_NAMES = ("fp8-tensor", "fp8-channel", "fp8-block", "int8")
_EXAMPLES = (
    "rose calibrate minilm --data texts.txt --scheme fp8-tensor -o ./minilm-fp8",
    "rose calibrate e5-small --data texts.jsonl --scheme int8 -o ./e5-small-int8 --plot layers.svg",
    "rose calibrate smollm2 --data texts.txt --scheme fp8-channel -o ./smollm2-fp8 --keep 'layers.0.*'",
    "rose calibrate smollm2 --data texts.txt --scheme fp8-tensor --kv-cache -o ./smollm2-fp8",
    "rose calibrate ./my-embedder --data texts.txt --scheme fp8-block -o ./my-embedder-fp8 --dry-run --json",
)
_SHOWN = 8
# Held-out texts below which a gate that holds is told with a warning: the least of so few cosines is no bound.
_FEW_HELD_OUT = 25


def add_calibrate(commands: Commands) -> None:
    parser = add_command(
        commands, "calibrate", _calibrate, "make a folder with 8-bit weights and inputs, if its answers hold", _EXAMPLES
    )
    parser.add_argument("model", help="short name, folder or hub id of a plain model")
    parser.add_argument("--data", required=True, metavar="FILE", help="real texts: one a line, JSON lines or Parquet")
    parser.add_argument("--scheme", required=True, choices=SCHEME_NAMES)
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder that is made")
    parser.add_argument("--dry-run", action="store_true", help="measure and report, and write nothing")
    parser.add_argument("--force", action="store_true", help="replace an output that is there already")
    parser.add_argument("--from", dest="in_form", choices=("lines", "jsonl", "parquet"), help="how FILE is written")
    parser.add_argument("--field", default="text", help="key or column of the text (default: %(default)s)")
    parser.add_argument("--limit", type=int, default=512, help="texts that are read (default: %(default)s)")
    parser.add_argument("--longest", type=int, default=512, help="tokens of a text (default: %(default)s)")
    parser.add_argument(
        "--probe-tokens", type=int, default=4096, help="on which layers are tried one by one (default: %(default)s)"
    )
    parser.add_argument(
        "--percentile", type=float, default=100.0, help="of inputs that a static scale holds (default: all)"
    )
    parser.add_argument(
        "--keep", action="append", default=[], metavar="PATTERN", help="layers that stay plain whatever the gate says"
    )
    parser.add_argument(
        "--kv-cache",
        action="store_true",
        help="of a language model: scales of 8-bit keys and values too, for engines that keep them so",
    )
    parser.add_argument("--gate", default="float8", help="name of the gate (default: %(default)s)")
    parser.add_argument("--gates", type=Path, default=GATES, help="file of the gates (default: ROSE's own)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda:N (default: %(default)s)")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="what each layer does to the answers, drawn")
    parser.add_argument("--shard-mb", type=int, default=5000, help="largest file of weights (default: %(default)s)")
    parser.add_argument("--cache", type=Path, help="where pulled models are kept (default: $ROSE_CACHE, ~/.cache/rose)")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    add_reading(parser)


def _calibrate(options: argparse.Namespace) -> int:
    texts = _texts(options)  # before anything is loaded for them
    from rose.convert.calibrate import Settings, calibrate, open_subject
    from rose.convert.calibrate.cache import check_keeps_cache
    from rose.convert.calibrate.run import check_plain, check_settings, split
    from rose.convert.offline.source import find_source
    from rose.convert.offline.write import check_target

    settings = Settings(
        scheme=options.scheme,
        percentile=options.percentile,
        probe_tokens=_positive("--probe-tokens", options.probe_tokens),
        keep=tuple(options.keep),
        kv_cache=options.kv_cache,
        shard_bytes=_positive("--shard-mb", options.shard_mb) * 1_000_000,
        facts={"gate": options.gate},
    )
    check_settings(settings)
    check({}, options.gate, options.gates)
    path = find_model(options.model, options.cache)
    check_target(options.output, find_source(path), force=options.force or options.dry_run)
    folder = read_model_folder(path, **reading(options))
    check_plain(folder.backbone_path)
    if options.kv_cache:
        check_keeps_cache(folder)
    tokens = tokens_of(folder, texts, longest=_positive("--longest", options.longest))
    split(len(tokens.ids))
    subject = open_subject(folder, tokens.ids, tokens.types, device=options.device)
    shown: list[Bar] = []

    def stage(name: str, total: int) -> Callable[[int], None]:
        shown.append(Bar(name, total))
        return shown[-1]

    try:
        outcome = calibrate(
            subject,
            settings,
            partial(_judge, subject, options),
            None if options.dry_run else options.output,
            read=lambda made: read_model_folder(made, **_read_again(options, folder)),
            force=options.force,
            stage=stage,
        )
    finally:
        for bar in shown:
            bar.close()
    if options.plot is not None:
        _plot(outcome.report, options.plot)
    print(json.dumps(outcome.report, ensure_ascii=False) if options.json else _told(outcome))
    return 0 if outcome.report["passed"] else 1


def _judge(subject: Subject, options: argparse.Namespace, plain: Array, other: Array) -> Verdict:
    from rose.convert.calibrate import Verdict

    if subject.kind == "scores":
        reranker = subject.folder.reranker
        if reranker is not None and reranker.activation == "sigmoid":
            plain, other = 1 / (1 + np.exp(-plain)), 1 / (1 + np.exp(-other))
        plain, other = plain[:, :1].T, other[:, :1].T
    measures = measure(subject.kind, plain, other)
    checks = check(measures, options.gate, options.gates)
    return Verdict(bool(checks) and all(one.passed for one in checks), measures)


def _read_again(options: argparse.Namespace, folder: ModelFolder) -> dict[str, Any]:
    """The same reading, whatever the folder's name says: it has another one while it is made."""
    kind = "generate" if folder.generation is not None else "rerank" if folder.reranker is not None else "embed"
    return reading(options) | {"task": kind}


def _texts(options: argparse.Namespace) -> list[str]:
    limit = _positive("--limit", options.limit)
    source = Source(options.data, options.in_form, options.field)
    texts = [item.text for item in islice(source.items(), limit)]
    if not texts:
        raise source.empty()
    return texts


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise InvalidInput(f"{name} is {value}, and must be at least 1")
    return value


def _plot(report: dict[str, Any], path: Path) -> None:
    from rose.convert.calibrate.report import plot_report

    try:
        drawn = plot_report(report, path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be drawn: {error}") from error
    if not drawn:
        raise InvalidInput("--plot needs the Python module matplotlib, which is not installed here")


def _value(report: dict[str, Any], name: str) -> str:
    """On the texts that were held out, and over all."""
    held_out, over_all = report["measures"][name], report["over_all_texts"]
    return f"{held_out:.7f}" + ("" if over_all is None else f"  over all texts {over_all[name]:.7f}")


def _told(outcome: Outcome) -> str:
    report = outcome.report
    layers = report["layers"]
    count = f"{report['layers_quantised']} of {len(layers)} layers quantised"
    lines = [
        f"{report['source']}, {report['scheme']}: {count}; {report['texts']['held_out']} texts held out",
        f"gate {report['gate']}",
        *(f"{name:<24}{_value(report, name)}" for name in report["measures"]),
        f"layers that hurt most ({report['damage_is']}):",
    ]
    for layer in sorted(layers, key=lambda layer: -layer["damage"])[:_SHOWN]:
        kept = "  kept plain" if layer["kept"] else ""
        lines.append(f"  {layer['damage']:.3e}  {layer['name']}{kept}")
    if "kv_cache" in report:
        lines.append(f"keys and values of {len(report['kv_cache'])} layers in e4m3: {report['kv_cache_damage']:.3e}")
    if report["always_kept"]:
        lines.append(f"kept plain as asked or by rule: {', '.join(report['always_kept'][:_SHOWN])}")
    if report["passed"] and report["texts"]["held_out"] < _FEW_HELD_OUT:
        lines.append(
            f"few texts: the gate held on {report['texts']['held_out']}, which says little of others; "
            f"--data with {4 * _FEW_HELD_OUT} or more of the kind that will be served says more"
        )
    lines.append("passed" if report["passed"] else "FAILED: nothing was written")
    return "\n".join(lines + ([str(outcome.folder)] if outcome.folder is not None else []))

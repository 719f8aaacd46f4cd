"""The tables of README.md from the committed rows, so that no figure in it was typed.

    python benchmarks/tables.py            prints the blocks
    python benchmarks/tables.py --write    replaces what stands between the markers in README.md

A block stands between `<!-- NAME -->` and `<!-- end of NAME -->`.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ROWS = ROOT / "benchmarks" / "results" / "h200" / "loads.jsonl"
NAMES = {
    "bge-m3": "BGE-M3",
    "pplx-embed-0.6b": "pplx-embed 0.6b",
    "pplx-embed-4b": "pplx-embed 4b",
    "qwen3-0.6b": "Qwen3-0.6B",
    "qwen3-8b": "Qwen3-8B",
    "qwen3.5-4b": "Qwen3.5-4B",
}
WAYS = ("engine", "link", "grpc", "http")
Row = Mapping[str, Any]


def read_rows(path: Path = ROWS) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def chosen(rows: Iterable[Row], **wanted: object) -> Row | None:
    """The row of a load: of several backends the one that serving would choose, not the best."""
    found = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    found.sort(key=lambda row: ("--backend" in row["command"], -row["n"]))
    return found[0] if found else None


def table(heads: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    heads = list(heads)
    rows = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join([*rows, *("| " + " | ".join(line) + " |" for line in lines)])


def sources(rows: Iterable[Row]) -> str:
    """Which commits the rows are of."""
    dates = sorted({(row["date"], commit(row)) for row in rows})
    return ", ".join(f"commit {name} of {date}" for date, name in dates)


def commit(row: Row) -> str:
    """Short where it is a hash alone; in full where it says what else was there."""
    name: str = row["commit"]
    return name[:7] if re.fullmatch("[0-9a-f]+", name) else name


def latency(rows: list[Row]) -> str:
    """One request at a time, and scoring: p50 / p99."""
    lines, used = [], []
    for model in ("bge-m3", "pplx-embed-0.6b"):
        sizes = [("latency", tokens, 1) for tokens in (128, 512, 4096)] + [("scoring", 512, n) for n in (5, 25, 50)]
        for load, tokens, batch in sizes:
            cells = []
            for via in WAYS:
                row = chosen(rows, load=load, model=model, tokens=tokens, batch=batch, via=via, dtype="bfloat16")
                cells.append("" if row is None else f"{row['p50_ms']:.2f} / {row['p99_ms']:.2f}")
                used += [] if row is None else [row]
            lines.append([f"{NAMES[model]}, {batch} × {tokens}", *cells])
    heads = ("load, p50 / p99 in ms", "in process", "light link", "gRPC", "HTTP")
    return f"{table(heads, lines)}\n\n{sources(used).capitalize()}."


def dtype(row: Row) -> str:
    return {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(row["dtype"], row["dtype"])


def rates(rows: list[Row]) -> str:
    """Many requests at once: throughput over the link, and texts over HTTP."""
    lines, used = [], []
    for row in sorted(rows, key=lambda r: (r["model"], -r["batch"], r["tokens"], r["in_flight"])):
        if row["load"].startswith("throughput"):
            what = f"{row['in_flight']} clients × {row['batch']} texts of {row['tokens']}"
            told = f"{row['per_s']:.0f} emb/s"
        elif row["load"].startswith("concurrency"):
            what = f"{row['in_flight']} texts of {row['tokens']} in flight"
            what += f", {row['fronts']} fronts" if row.get("fronts") else ""
            told = f"{row['p50_ms']:.1f} / {row['p99_ms']:.1f} ms, {row['per_s']:.0f} emb/s"
        else:
            continue
        used.append(row)
        floor = "" if row.get("floor_share") is None else f"{100 * row['floor_share']:.0f} %"
        lines.append([NAMES.get(row["model"], row["model"]), dtype(row), what, row["via"], told, floor])
    if not used:
        return "Not measured yet."
    heads = ("model", "dtype", "load", "via", "p50 / p99, rate", "of the floor's rate")
    return f"{table(heads, lines)}\n\n{sources(used).capitalize()}."


def decode(rows: list[Row]) -> str:
    """Generating: time to the first token and for each further one."""
    lines = []
    for row in sorted(rows, key=lambda r: (r["model"], r["tokens"], r["via"], r["batch"])):
        if row["load"] == "decode":
            each = f"{row['ttft_ms']:.1f}", f"{row['tpot_ms']:.2f} / {row['tpot_p99_ms']:.2f}"
            share = "" if row.get("floor_share") is None else f"{100 * row['floor_share']:.0f} %"
            size = f"{row['batch']} × {row['tokens']} + {row['new_tokens']}"
            same = "not compared" if row.get("agreement") is None else f"{100 * row['agreement']:.0f} %"
            name = NAMES.get(row["model"], row["model"])
            lines.append([name, dtype(row), size, row["via"], *each, share, same, commit(row)])
    if not lines:
        return "Not measured yet."
    heads = (
        "model",
        "dtype",
        "prompts × tokens + new",
        "via",
        "first token, ms",
        "each further one, p50 / p99 ms",
        "of the floor",
        "clear places as transformers'",
        "commit",
    )
    return table(heads, lines)


BLOCKS = {"latency": latency, "rates": rates, "decode": decode}


def filled(text: str, rows: list[Row]) -> str:
    """`text` with every block made anew.

    Raises:
        ValueError: a block is missing.
    """
    for name, make in BLOCKS.items():
        begin, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"README.md has no block {name}")
        block = begin + make(rows) + end
        text = pattern.sub(lambda match, block=block: block, text)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="into README.md")
    arguments = parser.parse_args()
    rows = read_rows()
    if arguments.write:
        readme = ROOT / "README.md"
        readme.write_text(filled(readme.read_text(), rows))
        return
    for name, make in BLOCKS.items():
        print(f"## {name}\n\n{make(rows)}\n")


if __name__ == "__main__":
    main()

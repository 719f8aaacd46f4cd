"""ROSE and sentence-transformers on the same weights, the same texts, in the same run, on the CPU.

    python -m rose.bench.embed_cpu

Two loads: many texts of mixed length in one call, and one text at a time. The systems take turns within every round, so
that a machine that slows down slows all of them; medians over the rounds are compared. Vectors are compared before
anything is timed: a quick wrong answer is not a result. Knows rounds and tables; knows neither models nor servers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rose.bench.machine import provenance
from rose.bench.systems import RoseHttp, RoseInProcess, SentenceTransformers, System, Vectors
from rose.bench.texts import mixed_texts
from rose.config.ending import GATEWAY, ended, require
from rose.errors import RoseError, StartupError

MIN_COSINE = 0.99999
Times = dict[str, list[list[float]]]
BATCH_SIZES = (8, 16, 32, 64, 128)  # the rival runs at the quickest of these
VERSIONS = ("rose-serving", "torch", "sentence-transformers", "transformers", "tokenizers", "numpy")


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parse(given)
    require(("sentence_transformers", "transformers", *GATEWAY), "bench")
    head = provenance("rose.bench.embed_cpu", given, VERSIONS)
    try:
        result = head | measure(options)
    except RoseError as error:
        print(f"embed_cpu: {error.message}", file=sys.stderr)
        return 1
    for line in table(result):
        print(line)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        print(f"\nwritten to {options.out}")
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m rose.bench.embed_cpu", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="minilm", help="what `rose serve` takes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--threads", type=int, default=1, help="threads of torch's operators, the same for every system"
    )
    parser.add_argument("--texts", type=int, default=500, help="texts of 5 to 250 tokens in the mixed load")
    parser.add_argument("--singles", type=int, default=200, help="texts sent one at a time")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> dict[str, object]:
    import torch

    from rose.gateway.tokenizer import TextTokenizer
    from rose.hub import Bars, resolve

    torch.set_num_threads(options.threads)
    folder = resolve(options.model, progress=Bars())
    tokenizer = TextTokenizer(folder)
    texts = mixed_texts(options.texts, lambda text: len(tokenizer.encode([text])[0]))
    tokens = [len(ids) for ids in tokenizer.encode(texts)]
    rival = SentenceTransformers(folder)
    systems: list[System] = [rival]
    try:
        systems.append(RoseInProcess(folder, options.threads))
        systems.append(RoseHttp(folder, options.threads))
        agreement = {system.name: check(rival.embed(texts), system, texts) for system in systems[1:]}
        sizes = rival.choose_batch_size(texts, BATCH_SIZES)
        singles = [[text] for text in texts[: options.singles]]
        mixed = rounds(systems, [texts], options.rounds)
        single = rounds(systems, singles, options.rounds)
    finally:
        for system in systems:
            system.close()
        tokenizer.close()
    return {
        "model": options.model,
        "threads": options.threads,
        "rounds": options.rounds,
        "rival_batch_size": rival.batch_size,
        "rival_batch_size_trials_s": {str(size): round(seconds, 3) for size, seconds in sizes.items()},
        "least_cosine_with_rival": agreement,
        "mixed": {"texts": len(texts), "tokens": sum(tokens), **summary(mixed, sum(tokens), rival.name)},
        "one_at_a_time": {
            "texts": len(singles),
            "tokens": sum(tokens[: len(singles)]),
            **summary(single, sum(tokens[: len(singles)]), rival.name),
        },
    }


def table(result: Mapping[str, Any]) -> Iterator[str]:
    """The result as a Markdown table."""
    yield "| load | system | tokens/s (least to most) | ms a call, p50 / p90 | against sentence-transformers |"
    yield "|---|---|---|---|---|"
    for load, title in (("mixed", "{texts} mixed texts in one call"), ("one_at_a_time", "{texts} texts one at a time")):
        for name, found in result[load]["systems"].items():
            low, high = found["tokens_per_s_spread"]
            rate = f"{found['tokens_per_s']:,} ({low:,} to {high:,})"
            call = f"{found['call_ms_p50']:,.1f} / {found['call_ms_p90']:,.1f}"
            yield f"| {title.format(**result[load])} | {name} | {rate} | {call} | {found['speed_against_rival']:.2f}x |"


def check(expected: Vectors, system: System, texts: Sequence[str]) -> float:
    """The least cosine between the rival's vectors and `system`'s, sent together and one at a time.

    Raises:
        StartupError: it is under MIN_COSINE; there is nothing to time then.
    """
    alone = np.concatenate([system.embed([text]) for text in texts[:20]])
    together = least_cosine(expected, system.embed(texts))
    least = float(np.minimum(together, least_cosine(expected[:20], alone)))  # NaN stays NaN
    if not least >= MIN_COSINE:
        raise StartupError(f"{system.name} disagrees with the reference: least cosine {least:.7f} < {MIN_COSINE}")
    return round(least, 8)


def least_cosine(a: Vectors, b: Vectors) -> float:
    """Over the rows of two [N, D] arrays; fp64, so that the sum itself loses nothing."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    cosines = (x * y).sum(1) / (np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1))
    return float(cosines.min())


def timed(system: System, calls: Sequence[Sequence[str]]) -> list[float]:
    """Seconds of each call."""
    seconds = []
    for texts in calls:
        started = time.perf_counter()
        system.embed(texts)
        seconds.append(time.perf_counter() - started)
    return seconds


def rounds(systems: Sequence[System], calls: Sequence[Sequence[str]], count: int) -> Times:
    """Per system and round, the seconds of each call; who goes first changes from round to round."""
    times: Times = {system.name: [] for system in systems}
    for number in range(count):
        first = number % len(systems)
        for system in (*systems[first:], *systems[:first]):
            system.embed(calls[0][:1])  # untimed: a connection that idled away is made again, caches are its own
            times[system.name].append(timed(system, calls))
    return times


def summary(times: Times, tokens: int, rival: str) -> dict[str, object]:
    """Rates and ratios of one load.

    Args:
        times: as `rounds` returns them.
        tokens: of all calls of a round together.
        rival: name of the system the others are compared with, round by round.
    """
    totals = {name: [sum(calls) for calls in found] for name, found in times.items()}
    return {
        "systems": {
            name: {
                "tokens_per_s": round(tokens / statistics.median(totals[name])),
                "tokens_per_s_spread": [round(tokens / max(totals[name])), round(tokens / min(totals[name]))],
                "call_ms_p50": round(1e3 * float(np.percentile(np.concatenate(found), 50)), 3),
                "call_ms_p90": round(1e3 * float(np.percentile(np.concatenate(found), 90)), 3),
                "speed_against_rival": round(
                    statistics.median(b / a for a, b in zip(totals[name], totals[rival], strict=True)), 3
                ),
                "round_s": [round(total, 4) for total in totals[name]],
            }
            for name, found in times.items()
        }
    }


if __name__ == "__main__":
    sys.exit(ended(main, "embed_cpu"))

"""R@1 of served models between English and other languages.

    python -m examples.lora_embedder.measure untrained=FOLDER trained=FOLDER --data eval.jsonl --out results.json

Every folder is served by `rose serve` and asked over HTTP. Each of the articles 21 to 30, on which nothing was trained,
is looked for among all thirty of the other language; English looks for the language's and the language for the
English. Knows servers and counts; knows neither training nor tables.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from examples.lora_embedder.texts import MEASURED, PIVOT, TRAINED_ARTICLES, UNSEEN, Text, read
from rose.bench.machine import provenance
from rose.bench.systems import RoseHttp, System

PACKAGES = ("torch", "transformers", "peft", "tokenizers", "numpy")
Vectors = NDArray[np.float32]


def recall_at_1(queries: Vectors, documents: Vectors, asked: Sequence[int]) -> float:
    """The share of the rows `asked` of `queries` whose nearest row of `documents` is the one of the same number.

    Args:
        queries, documents: [N, D], unit vectors.
    """
    rows = list(asked)
    nearest = (queries[rows] @ documents.T).argmax(axis=1)
    return float((nearest == rows).mean())


def recalls(english: Vectors, other: Vectors, trained_articles: int) -> dict[str, float]:
    """Both directions of one language, and their means over the articles that were trained on and that were not."""
    held_out, seen = range(trained_articles, len(english)), range(trained_articles)
    there, back = recall_at_1(english, other, held_out), recall_at_1(other, english, held_out)
    ten = (english[trained_articles:], other[trained_articles:])
    alone = (recall_at_1(*ten, range(len(ten[0]))) + recall_at_1(*ten[::-1], range(len(ten[0])))) / 2
    seen_both = (recall_at_1(english, other, seen) + recall_at_1(other, english, seen)) / 2
    found = {"from_english": there, "to_english": back, "r_at_1": (there + back) / 2}
    found |= {"among_held_out_only": alone, "articles_trained_on": seen_both}
    return {name: round(value, 4) for name, value in found.items()}


def measure(system: System, texts: Sequence[Text]) -> dict[str, dict[str, float]]:
    """Language -> its recalls; a request a language."""
    by_language: dict[str, list[Text]] = {}
    for text in texts:
        by_language.setdefault(text.language, []).append(text)
    vectors: dict[str, Vectors] = {}
    for language, own in by_language.items():
        own.sort(key=lambda text: text.group)
        vectors[language] = system.embed([text.text for text in own])
    english = vectors.pop(PIVOT)
    return {language: recalls(english, other, TRAINED_ARTICLES) for language, other in vectors.items()}


def means(languages: Mapping[str, Mapping[str, float]], chosen: Sequence[str]) -> dict[str, float]:
    names = next(iter(languages.values())).keys()
    return {name: round(float(np.mean([languages[own][name] for own in chosen])), 4) for name in names}


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("systems", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--data", type=Path, required=True, help="JSON lines of examples.lora_embedder.texts")
    parser.add_argument("--training", type=Path, help="training.json of the adapter, kept with the results")
    parser.add_argument("--verified", type=Path, help="JSON of rose verify, likewise")
    parser.add_argument("--calibration", type=Path, help="JSON of rose calibrate, likewise, without its layers")
    parser.add_argument("--threads", type=int, default=1, help="of the engine (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(given)
    texts = read(options.data)
    results: dict[str, Any] = dict(provenance("examples.lora_embedder.measure", given, PACKAGES))
    for name in ("training", "verified", "calibration"):
        if (path := getattr(options, name)) is not None:
            results[name] = json.loads(path.read_text(encoding="utf-8"))
            results[name].pop("layers", None)
    results["languages"] = {"trained": list(MEASURED), "unseen": list(UNSEEN)}
    results["systems"] = {}
    for name, folder in (system.split("=", 1) for system in options.systems):
        system = RoseHttp(Path(folder), options.threads)
        try:
            found = measure(system, texts)
        finally:
            system.close()
        summary = {kind: means(found, own) for kind, own in results["languages"].items()}
        results["systems"][name] = {"means": summary, "by_language": found}
        print(name, json.dumps({kind: own["r_at_1"] for kind, own in summary.items()}), flush=True)
    options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

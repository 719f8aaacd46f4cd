"""The Universal Declaration's articles, split so that what is measured was not trained on.

    python -m examples.lora_embedder.texts --out .out/lora_embedder

writes train.jsonl (articles 1 to 20 in English and the trained languages), eval.jsonl (all articles in all languages),
verify.txt and calibrate.txt (one text a line; the latter of what is trained on). Knows where the texts come from; knows
no model. Another data set takes part by writing the same fields.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.support.corpora import udhr_articles

PIVOT = "eng"
# Latin script, since the tokenizer writes other scripts byte by byte. Those of the pretraining first: they join in this
# order. MEASURED of them have their own rows in the tables.
TRAINED = (
    "fra", "spa", "por_BR", "deu_1996", "nld", "swe", "ind", "pol",
    "ast", "nob", "oci_4", "vec", "slk", "nno", "fur", "hrv", "est", "isl", "cos", "lat",
    "azj_latn", "fri", "fao", "src", "slv", "ltz", "krl", "crh", "xho", "zul",
    "epo", "lld", "vep", "uzn_latn", "kin", "tgl", "hsb", "lit", "tuk_latn", "sna",
)  # fmt: skip
MEASURED = TRAINED[:8]
# Chosen before anything was trained: relatives of MEASURED first, then Swahili, Finnish and Turkish, without any there.
UNSEEN = ("ita", "cat", "glg", "ron_2006", "dan", "afr", "ces", "swh", "fin", "tur")
TRAINED_ARTICLES = 20


@dataclass(frozen=True, slots=True)
class Text:
    """
    Attributes:
        group: texts of one group say the same thing, and no two groups do; the article's number from 1.
    """

    group: int
    language: str
    text: str


def articles(language: str) -> list[Text]:
    """The thirty articles of a language."""
    return [Text(group, language, text) for group, text in enumerate(udhr_articles(language), 1)]


def training_texts(languages: Sequence[str] = TRAINED) -> list[Text]:
    """Articles 1 to 20 in English and `languages`, in their order."""
    return [text for language in (PIVOT, *languages) for text in articles(language) if text.group <= TRAINED_ARTICLES]


def write(path: Path, texts: Iterable[Text]) -> None:
    lines = (json.dumps(asdict(text), ensure_ascii=False) + "\n" for text in texts)
    path.write_text("".join(lines), encoding="utf-8")


def read(path: Path) -> list[Text]:
    return [Text(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines() if line]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the files")
    out: Path = parser.parse_args(arguments).out
    out.mkdir(parents=True, exist_ok=True)
    trained = training_texts()
    every = [text for language in (PIVOT, *MEASURED, *UNSEEN) for text in articles(language)]
    write(out / "train.jsonl", trained)
    write(out / "eval.jsonl", every)
    sample = [text.text for text in every if text.group % 5 == 0]
    (out / "verify.txt").write_text("\n".join(sample) + "\n", encoding="utf-8")
    # One of each language, each article twice: the next language's next article.
    watched = [text.text for text in trained[:: TRAINED_ARTICLES + 1]]
    (out / "calibrate.txt").write_text("\n".join(watched) + "\n", encoding="utf-8")
    print(f"{len(trained)} texts to train on, {len(every)} to measure with, {len(sample)} to verify with: {out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

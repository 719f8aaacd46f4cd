"""The table of docs/worked_example.md and its picture, from the committed results.

    python -m examples.lora_embedder.report            writes both; with --check, says whether the page is up to date

Knows the results file; measures nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "cpu" / "worked_example.json"
PAGE = ROOT / "docs" / "worked_example.md"
PICTURE = ROOT / "docs" / "images" / "worked_example.svg"
BEGIN, END = "<!-- begin: examples/lora_embedder/report.py -->\n", "<!-- end: examples/lora_embedder/report.py -->\n"
NAMES = {
    "fra": "French", "spa": "Spanish", "por_BR": "Portuguese", "deu_1996": "German", "nld": "Dutch", "swe": "Swedish",
    "ind": "Indonesian", "pol": "Polish", "ita": "Italian", "cat": "Catalan", "glg": "Galician", "ron_2006": "Romanian",
    "dan": "Danish", "afr": "Afrikaans", "ces": "Czech", "swh": "Swahili", "fin": "Finnish", "tur": "Turkish",
}  # fmt: skip
KINDS = {"trained": "trained", "unseen": "not trained"}
MEASURES = {
    "r_at_1": "articles 21–30 among all thirty",
    "among_held_out_only": "articles 21–30 among these ten",
    "articles_trained_on": "articles 1–20 among all thirty",
}


def tables(results: Mapping[str, Any]) -> str:
    """What stands between the page's marks: the means, each language, and where and how they were measured."""
    before, after, coded = (results["systems"][name] for name in ("untrained", "trained", "calibrated"))
    lines = ["| R@1, mean of both directions | languages | untrained | trained | gain | trained, 8-bit |"]
    lines.append("|---|---|---|---|---|---|")
    for measure, label in MEASURES.items():
        for kind, own in KINDS.items():
            row = _row(f"{label} | {own}", before["means"][kind][measure], after["means"][kind][measure])
            lines.append(f"{row} {coded['means'][kind][measure]:.2f} |")
    lines += ["", f"| {MEASURES['r_at_1']} | in training | untrained | trained | gain |", "|---|---|---|---|---|"]
    for kind in KINDS:
        for language in results["languages"][kind]:
            pair = (system["by_language"][language]["r_at_1"] for system in (before, after))
            lines.append(_row(f"{NAMES[language]} | {'yes' if kind == 'trained' else 'no'}", *pair))
    return "\n".join([*lines, "", *_about(results)]) + "\n"


def _row(label: str, before: float, after: float) -> str:
    return f"| {label} | {before:.2f} | {after:.2f} | {after - before:+.2f} |"


def _about(results: Mapping[str, Any]) -> list[str]:
    training, verified = results["training"], results["verified"]
    recipe, versions = training["recipe"], results["versions"]
    drawn = f"{recipe['texts']} articles or passages in {recipe['languages']} of {training['languages']} languages"
    trained = (
        f"Training: {recipe['steps']} steps of {drawn} in {training['seconds'] / 60:.0f} minutes with "
        f"{training['threads']} thread; loss {_mean(training['losses'][:10]):.2f} in the first ten steps, "
        f"{_mean(training['losses'][-10:]):.2f} in the last ten. Largest difference of a component between the forward "
        f"that is trained and ROSE's, before training: {training['difference']:.0e}."
    )
    merged = (
        f"`rose verify`, ROSE's merged folder against PEFT's unmerged answers over {verified['texts']} texts: smallest "
        f"cosine {verified['measures']['min_cosine']:.7f}, {'passed' if verified['passed'] else 'FAILED'}."
    )
    calibration = results["calibration"]
    share = calibration["parameters_quantised"] / calibration["parameters_of_layers"]
    held_out, measures = calibration["texts"]["held_out"], calibration["measures"]
    coded = (
        f"`rose calibrate`, {calibration['scheme']}: {share:.0%} of the linear layers' weights in 8 bits, the rest "
        f"kept plain so that the gate {calibration['gate']} holds; on {held_out} texts held out, smallest cosine with "
        f"the trained model {measures['min_cosine']:.4f}, mean {measures['mean_cosine']:.4f}."
    )
    where = (
        f"Measured {results['date']} at commit {results['commit']} on {results['logical_cpus']} logical CPUs "
        f"({results['cpu']}), load average {results['load_average_1min']}, torch {versions['torch']}, "
        f"transformers {versions['transformers']}, peft {versions['peft']}:"
    )
    return [trained, "", merged, "", coded, "", where, "", f"    {results['command']}"]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def page(old: str, results: Mapping[str, Any]) -> str:
    before, _, rest = old.partition(BEGIN)
    return f"{before}{BEGIN}{tables(results)}{END}{rest.partition(END)[2]}"


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Bars of R@1 before and after, a pair a language."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "worked example"
    import matplotlib.pyplot as plt

    languages = [language for kind in KINDS for language in results["languages"][kind]]
    figure, axes = plt.subplots(figsize=(10, 4), layout="constrained")
    for shift, (system, color) in zip((-0.2, 0.2), (("untrained", "#b0b0b0"), ("trained", "#1b6ca8")), strict=True):
        values = [results["systems"][system]["by_language"][language]["r_at_1"] for language in languages]
        axes.bar([i + shift for i in range(len(languages))], values, 0.4, color=color, label=system)
    border = len(results["languages"]["trained"]) - 0.5
    axes.axvline(border, color="black", linewidth=0.8)
    axes.axhline(1 / 30, color="gray", linestyle="--", linewidth=0.8, label="guessing")
    axes.text(border - 0.1, 1.01, "languages of the training", ha="right", va="bottom", fontsize=8)
    axes.text(border + 0.1, 1.01, "languages it never saw", ha="left", va="bottom", fontsize=8)
    axes.set(ylim=(0, 1), ylabel="R@1, articles 21–30 among all thirty")
    axes.set_xticks(range(len(languages)), [NAMES[language] for language in languages], rotation=40, ha="right")
    axes.legend(fontsize=8, loc="upper right")
    axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page differs")
    options = parser.parse_args(arguments)
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    old = PAGE.read_text(encoding="utf-8")
    new = page(old, results)
    if options.check:
        return int(new != old)
    PAGE.write_text(new, encoding="utf-8")
    draw(results, PICTURE)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""What was done and what it cost: one JSON object, the same as a table, and a plot.

Knows numbers; settles nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rose
from rose.convert.calibrate.layers import Layer
from rose.convert.calibrate.observe import Observer
from rose.convert.calibrate.search import Found, Trial


def report_of(
    found: Found,
    layers: Sequence[Layer],
    observers: Mapping[str, Observer],
    *,
    scheme: str,
    kind: str,
    facts: Mapping[str, Any],
    always_kept: Sequence[str],
) -> dict[str, Any]:
    return {
        "made_by": f"rose {rose.__version__}",
        "scheme": scheme,
        **facts,
        "passed": found.trial.passed,
        "measures": dict(found.trial.verdict.measures),
        "over_all_texts": None if found.trial.over_all is None else dict(found.trial.over_all.measures),
        "damage_is": {
            "vectors": "1 - mean cosine to fp32",
            "scores": "mean difference of scores to fp32",
            "tokens": "mean difference of a token's cost to fp32, in nats",
        }[kind],
        "layers_quantised": len(layers) - len(found.kept),
        "kept": [*found.kept],
        "always_kept": [*always_kept],
        "trials": [{"kept": trial.kept, "passed": trial.passed, **_measures(trial)} for trial in found.trials],
        "layers": [_layer(layer, found, observers.get(layer.name)) for layer in layers],
    }


def _measures(trial: Trial) -> dict[str, Any]:
    over_all = None if trial.over_all is None else dict(trial.over_all.measures)
    return {**trial.verdict.measures, "over_all_texts": over_all}


def _layer(layer: Layer, found: Found, seen: Observer | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": layer.name,
        "kept": layer.name in found.kept,
        "damage": found.damages[layer.name],
        "weight_error": round(layer.error, 6),
        "parameters": layer.parameters,
    }
    if seen is not None:
        row |= {"input_largest": seen.largest, "input_99_99": seen.percentile(99.99)}
    if layer.input_scale is not None:
        scale = float(layer.input_scale)
        row |= {"input_scale": scale, "input_clamped": 0.0 if seen is None else seen.beyond(scale * 448.0)}
    return row


def plot_report(report: Mapping[str, Any], path: Path) -> bool:
    """A bar a layer, as an SVG or PNG by the file's name; False where matplotlib is not installed."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return False
    layers = report["layers"]
    figure, axes = pyplot.subplots(figsize=(8, 0.18 * len(layers) + 1.5))
    colours = ["#b5402c" if layer["kept"] else "#3f6f8f" for layer in layers]
    axes.barh([layer["name"] for layer in layers], [max(layer["damage"], 1e-12) for layer in layers], color=colours)
    axes.set_xscale("log")
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=6)
    axes.set_xlabel(f"{report['damage_is']}, each layer quantised alone (red: kept plain)")
    axes.set_title(f"{report['source']}, {report['scheme']}: {report['layers_quantised']} of {len(layers)} quantised")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return True

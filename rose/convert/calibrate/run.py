"""Calibration from its first to its last step: watch, settle, try, search, write, read again.

Knows the order of things; each step is another file's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from rose.config import ModelFolder, read_model_folder
from rose.config.architecture import quantized_by
from rose.config.json_file import JsonFile
from rose.convert.calibrate.cache import CacheScales
from rose.convert.calibrate.layers import Layer, find_layers, observed, quantized, settle_inputs
from rose.convert.calibrate.report import report_of
from rose.convert.calibrate.search import Found, search
from rose.convert.calibrate.subject import Judge, Subject, open_subject
from rose.convert.calibrate.targets import SCHEMES
from rose.convert.calibrate.write import Sources, write_folder
from rose.errors import CheckpointError, InvalidInput

_HELD_OUT = 4  # every fourth text
Stage = Callable[[str, int], Callable[[int], None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """
    Attributes:
        scheme: a key of SCHEMES.
        percentile: of the magnitudes of a layer's inputs that a static scale must hold; 100: all.
        probe_tokens: on which layers are tried one by one, at most (and one text at least).
        keep: patterns of layers that stay plain whatever the gate says.
        kv_cache: scales for e4m3 keys and values too; the gate is held with both rounded.
        facts: written into the report as they are.
    """

    scheme: str
    percentile: float = 100.0
    probe_tokens: int = 4096
    keep: tuple[str, ...] = ()
    kv_cache: bool = False
    shard_bytes: int = 5_000_000_000
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """`report` as written; `folder` None after a dry run, or where nothing was written since the gate failed."""

    report: dict[str, Any]
    folder: Path | None


def check_plain(folder: Path) -> None:
    """
    Raises:
        CheckpointError: weights that are quantised already.
    """
    method = quantized_by(JsonFile.read(folder / "config.json"))
    if method is not None or (folder / "hf_quant_config.json").exists():
        raise CheckpointError(f"{folder} is quantised already ({method or 'modelopt'}); calibrate the plain checkpoint")


def calibrate(
    subject: Subject,
    settings: Settings,
    judge: Judge,
    target: Path | None,
    *,
    read: Callable[[Path], ModelFolder] = read_model_folder,
    force: bool = False,
    stage: Stage = lambda name, total: lambda done: None,
) -> Outcome:
    """
    Args:
        subject: of a plain folder, in fp32; left as it was.
        judge: says of (plain answers, quantised answers) whether they are near enough.
        target: folder that is made; None for a dry run.
        force: replace a target that is there.
        read: reads the folder that was made, the way the source was read.
        stage: is told the name and length of a step, and gives what is told how far it has come.

    Raises:
        InvalidInput: too few texts, or a setting that has no meaning.
        CheckpointError: a checkpoint that cannot be calibrated, or a target that cannot be written.
    """
    check_settings(settings)
    check_plain(subject.folder.backbone_path)
    if target is not None and target.exists() and not force:
        raise CheckpointError(f"{target} is there already; --force replaces it")
    watched, held_out = split(len(subject.ids))
    to = SCHEMES[settings.scheme]
    layers, always_kept = find_layers(subject.folder, subject.backbone, settings.keep)
    if not layers:
        raise InvalidInput("every layer is kept: nothing is left to quantise")
    cache = CacheScales(subject) if settings.kv_cache else None
    show = stage("watching", len(watched))
    with observed(subject.backbone, layers) as observers, nullcontext() if cache is None else cache.watched(subject):
        for at in range(0, len(watched), 32):
            subject.answers(watched[at : at + 32])
            show(min(at + 32, len(watched)))
    if to.scheme.activations == "static":
        settle_inputs(layers, observers, settings.percentile)
    if cache is not None:
        cache.settle()
    made: dict[str, nn.Module] = {layer.name: layer.quantized(to.scheme) for layer in layers}
    probe = _probe(subject, watched, settings.probe_tokens)
    show = stage("trying layers", len(layers))
    found = search(subject, layers, made, probe, held_out, watched, judge, show, cache=cache)
    sizes = _sizes(layers, found)
    report = report_of(
        found,
        layers,
        observers,
        scheme=settings.scheme,
        kind=subject.kind,
        facts={
            "source": subject.folder.path.resolve().name,
            "percentile": settings.percentile if to.scheme.activations == "static" else None,
            "texts": {"watched": len(watched), "tried": len(probe), "held_out": len(held_out)},
            "tokens": {name: _tokens(subject, own) for name, own in (("watched", watched), ("held_out", held_out))},
            **sizes,
            **({} if cache is None else {"kv_cache": cache.report(), "kv_cache_damage": found.cache_damage}),
            **settings.facts,
        },
        always_kept=always_kept,
    )
    if target is None or not found.trial.passed:
        return Outcome(report, None)
    chosen = [layer for layer in layers if layer.name not in found.kept]
    with quantized(subject.backbone, chosen, made):
        expected = subject.answers(probe)
    coded = {source: layer.input_scale for layer in chosen for source in layer.coded_sources}

    def check(folder: Path) -> None:
        again = open_subject(read(folder), subject.ids, subject.types, device=subject.device)
        if not np.array_equal(again.answers(probe), expected):
            raise CheckpointError("the written folder does not answer as the calibrated model did")

    write_folder(
        subject.folder,
        target,
        to,
        Sources(coded, {} if cache is None else cache.tensors()),
        report,
        check=check,
        shard_bytes=settings.shard_bytes,
        advance=stage("writing", _bytes(subject.folder)),
    )
    return Outcome(report, target)


def quantise_all(subject: Subject, scheme: str, target: Path) -> Path:
    """Every layer quantised and written, nothing judged: for folders of random weights, whose speed alone matters.

    Raises:
        CheckpointError: as `calibrate`.
    """
    check_plain(subject.folder.backbone_path)
    to = SCHEMES[scheme]
    layers, _ = find_layers(subject.folder, subject.backbone)
    if to.scheme.activations == "static":
        with observed(subject.backbone, layers) as observers:
            subject.answers(range(len(subject.ids)))
        settle_inputs(layers, observers, 100.0)
    coded = {source: layer.input_scale for layer in layers for source in layer.coded_sources}
    return write_folder(subject.folder, target, to, Sources(coded), {"scheme": scheme, "judged": False})


def check_settings(settings: Settings) -> None:
    if settings.scheme not in SCHEMES:
        raise InvalidInput(f"--scheme {settings.scheme!r} is not one of {', '.join(SCHEMES)}")
    if not 90.0 <= settings.percentile <= 100.0:
        raise InvalidInput(f"--percentile is {settings.percentile}, and must be 90 to 100")


def split(texts: int) -> tuple[list[int], list[int]]:
    """(texts that are watched, texts that are held out): every fourth is.

    Raises:
        InvalidInput: fewer than eight.
    """
    if texts < 2 * _HELD_OUT:
        raise InvalidInput(f"{texts} texts are too few to calibrate with and to judge by; at least {2 * _HELD_OUT} are")
    held = [i for i in range(texts) if i % _HELD_OUT == _HELD_OUT - 1]
    return [i for i in range(texts) if i % _HELD_OUT != _HELD_OUT - 1], held


def _probe(subject: Subject, watched: Sequence[int], most: int) -> list[int]:
    chosen: list[int] = []
    for i in watched:
        if chosen and sum(len(subject.ids[j]) for j in chosen) + len(subject.ids[i]) > most:
            break
        chosen.append(i)
    return chosen


def _tokens(subject: Subject, which: Sequence[int]) -> int:
    return sum(len(subject.ids[i]) for i in which)


def _bytes(folder: ModelFolder) -> int:
    """At most: of all files of weights."""
    return sum(
        path.stat().st_size for path in folder.backbone_path.glob("*") if path.suffix in (".safetensors", ".bin")
    )


def _sizes(layers: Sequence[Layer], found: Found) -> dict[str, int]:
    chosen = [layer.parameters for layer in layers if layer.name not in found.kept]
    return {"parameters_quantised": sum(chosen), "parameters_of_layers": sum(layer.parameters for layer in layers)}

"""The ways a load can be served, and how they are tried: set up, checked against the reference, then timed.

A way that raises, gives what is not finite, or another answer than the reference, is excluded with its reason: for
good, since a backend that is wrong once is not to be trusted. Knows answers and times; knows no engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rose.attention_backends.choose import LAST_RESORT
from rose.config.profile import AttentionShape, Point
from rose.select.comparing import Comparison, Sample, compare
from rose.select.grid import GridLoad

# Rows of answers: of whole models in half precision (another order of summing moves them by some 1e-4), and of one
# layer's attention.
LEAST_COSINE = 0.999


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A way set up for one load. `answer`: rows of numbers; `sample`: runs it once, in µs; `close`: frees the load."""

    answer: Tensor
    sample: Sample
    close: Callable[[], None] = lambda: None


class Ways(Protocol):
    """All ways of one shape on one device.

    Attributes:
        of: what is run, for the profile.
        names: those that can be tried. missing: the others, with the reason.
        reference: the name whose answers are the truth.
        excluded: found unfit before any load, with the reason.
    """

    of: str
    shape: AttentionShape
    names: tuple[str, ...]
    missing: Mapping[str, str]
    reference: str
    excluded: Mapping[str, str]

    def serves(self, name: str, load: GridLoad) -> bool: ...

    def prepare(self, name: str, load: GridLoad, seed: int) -> Ready:
        """Set one way up and run it once. The same seed gives every way the same input."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One load. `point` is None where no way gave a time."""

    load: GridLoad
    point: Point | None
    comparison: Comparison


def measure_load(
    ways: Ways,
    load: GridLoad,
    excluded: dict[str, str],
    *,
    seed: int,
    time_left: Callable[[], bool] = lambda: True,
    max_rounds: int = 40,
) -> Measured:
    """Time every way that serves `load`; what turns out unfit is added to `excluded`.

    The last resort is timed where nothing else serves: it is not chosen for its time, and being launched kernel by
    kernel it took most of the time there was (9 to 90 ms a batch where others take 0.6 to 80; BGE-M3, H200).
    """
    ready = dict(_set_up(ways, load, excluded, seed))
    timed = {name: way.sample for name, way in ready.items() if name != LAST_RESORT or len(ready) == 1}
    try:
        comparison = compare(timed, time_left=time_left, max_rounds=max_rounds)
    finally:
        for way in ready.values():
            way.close()
    for name, reason in comparison.failed.items():
        excluded[name] = f"failed at {load.name}: {reason}"
    point = None
    if comparison.us:
        point = Point(
            tokens=load.tokens,
            sequences=load.sequences,
            max_length=load.max_length,
            us={name: round(us, 2) for name, us in comparison.us.items()},
            spread_us={name: round(us, 2) for name, us in comparison.spread_us.items()},
            of=ways.of,
        )
    return Measured(load=load, point=point, comparison=comparison)


def _set_up(ways: Ways, load: GridLoad, excluded: dict[str, str], seed: int) -> Iterator[tuple[str, Ready]]:
    truth: Tensor | None = None
    # The reference first: the others are compared with it. Where it is gone, they are checked for finite numbers only.
    for name in sorted(ways.names, key=lambda name: name != ways.reference):
        if name in excluded or not ways.serves(name, load):
            continue
        try:
            way = ways.prepare(name, load, seed)
        except torch.OutOfMemoryError:
            continue  # too large for it here, which is no fault
        except Exception as error:  # noqa: BLE001  third-party kernels and compilers raise kinds of their own
            excluded[name] = f"failed at {load.name}: {type(error).__name__}: {str(error)[:200]}"
            continue
        reason = wrong(way.answer, truth)
        if reason is not None:
            excluded[name] = f"{reason} at {load.name}"
            way.close()
            continue
        if name == ways.reference:
            truth = way.answer
        yield name, way


def wrong(answer: Tensor, truth: Tensor | None) -> str | None:
    """None if the rows are finite and point where the reference's do, else what is wrong."""
    if not bool(torch.isfinite(answer).all()):
        return "gave what is not finite"
    if truth is None:
        return None
    if answer.shape != truth.shape:
        return f"gave {tuple(answer.shape)} where the reference gave {tuple(truth.shape)}"
    rows, expected = answer.double().flatten(1), truth.double().flatten(1)
    lengths = rows.norm(dim=1), expected.norm(dim=1)
    cosine = float(((rows * expected).sum(1) / (lengths[0] * lengths[1]).clamp_min(1e-30)).min())
    apart = float((lengths[0] / lengths[1].clamp_min(1e-30) - 1).abs().max())
    if cosine >= LEAST_COSINE and apart <= 0.05:
        return None
    return f"disagrees with the reference (cosine {cosine:.4f}, lengths {apart:.1%} apart)"


def attention_ways(names: tuple[str, ...], check: Callable[[str], str | None]) -> tuple[dict[str, str], dict[str, str]]:
    """(missing, excluded) of `names`: `check` says why one cannot be used; "wrong" and "failed" exclude it for good."""
    missing: dict[str, str] = {}
    excluded: dict[str, str] = {}
    for name in names:
        reason = check(name)
        if reason is not None:
            (excluded if reason.startswith(("wrong", "failed")) else missing)[name] = reason
    return missing, excluded

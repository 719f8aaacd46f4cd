"""Which profile serves a shape on this machine: the user's own before the shipped ones, fresh before stale.

A file of another device is never used, one of other versions is used and told of, one that cannot be read is told of.
Knows folders and files; knows neither devices nor models.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rose.config.profile import (
    AttentionGrid,
    AttentionShape,
    Machine,
    ModelNumbers,
    ModelShape,
    Products,
    Profile,
    read_profile,
)
from rose.errors import RoseError, StartupError

AUTO, NONE = "auto", "none"
# Data of the room that measures, which lies to the right of whoever reads it.
SHIPPED = Path(__file__).parents[1] / "select" / "profiles"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What there is for a shape here.

    Attributes:
        grid, numbers: None where nothing fits.
        paths: the files they came from.
        notes: a line each, to be told at start.
    """

    grid: AttentionGrid | None = None
    numbers: ModelNumbers | None = None
    products: Products = field(default_factory=dict)
    paths: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()


def own_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where `rose select-backend` writes: "profiles" in $ROSE_CACHE, else $XDG_CACHE_HOME/rose, else ~/.cache/rose."""
    if chosen := environ.get("ROSE_CACHE"):
        return Path(chosen).expanduser() / "profiles"
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "rose" / "profiles"


def find_profile(
    asked: str,
    here: Machine,
    shape: AttentionShape,
    model: ModelShape | None = None,
    *,
    folders: Sequence[Path] | None = None,
) -> Found:
    """The grid and numbers to use.

    Args:
        asked: "auto" looks through `folders`, "none" uses no profile, anything else is the path of one.
        folders: in order of preference; the user's own, then the shipped ones, if not given.

    Raises:
        StartupError: the path that was asked for does not exist.
    """
    if asked == NONE:
        return Found()
    notes: list[str] = []
    if asked == AUTO:
        files = [path for folder in folders or (own_folder(), SHIPPED) for path in sorted(folder.glob("*.json"))]
    else:
        files = [Path(asked).expanduser()]
        if not files[0].is_file():
            raise StartupError(f"--profile: there is no file {files[0]}")
    usable = list(_usable(files, here, notes, asked=asked != AUTO))
    grid = next(((p, path, g) for p, path in usable for g in p.grids if g.shape == shape), None)
    numbers = next(((p, path, m) for p, path in usable for m in p.models if m.shape == model), None)
    used = {path: profile for profile, path, _ in (x for x in (grid, numbers) if x is not None)}
    for path, profile in used.items():
        if differences := stale(profile.machine, here):
            notes.append(f"{path} was measured with {differences}: it is used; `rose select-backend` measures anew")
    return Found(
        grid=None if grid is None else grid[2],
        numbers=None if numbers is None else numbers[2],
        products={} if numbers is None else numbers[0].products,
        paths=tuple(used),
        notes=tuple(notes),
    )


def stale(measured: Machine, here: Machine) -> str:
    """How the versions of a profile differ from this machine's, in words; empty if they do not."""
    found = [("driver", measured.driver, here.driver)] if here.driver else []
    found += [(name, version, here.packages.get(name, "missing")) for name, version in measured.packages.items()]
    return ", ".join(f"{name} {then} (here {now})" for name, then, now in found if then and then != now)


def _usable(files: Sequence[Path], here: Machine, notes: list[str], *, asked: bool) -> Iterator[tuple[Profile, Path]]:
    """Those of this device, fresh ones first."""
    read = []
    for path in files:
        try:
            profile = read_profile(path)
        except RoseError as error:
            notes.append(f"the profile cannot be used, and defaults serve: {error.message}")
            continue
        if profile.machine.device == here.device:
            read.append((profile, path))
        elif asked:
            notes.append(f"{path} was measured on {profile.machine.device}, this is {here.device}: it is not used")
    yield from sorted(read, key=lambda found: bool(stale(found[0].machine, here)))

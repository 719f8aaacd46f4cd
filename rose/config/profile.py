"""A profile: what was measured on one device, as plain data and as a JSON file.

An attention grid belongs to a shape of heads and holds the time of each backend at each measured load; the numbers of a
model belong to its whole shape. What was not measured is absent, and defaults serve there. Knows fields; measures
nothing.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path
from typing import Any, Literal

from rose.config.json_file import JsonFile

VERSION = 1
# Beyond these a file was not measured but damaged: no machine has so many threads, no batch so many tokens.
MOST_THREADS, MOST_TOKENS = 1 << 13, 1 << 26
DTYPES = ("float32", "bfloat16", "float16")
Layout = Literal["ragged", "paged"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where something was measured.

    Attributes:
        device: name of the GPU, or of the CPU with the number of its logical ones.
        driver: of the GPU; empty where there is none or nobody knows.
        packages: distribution -> version, of those that decide speed.
    """

    device: str
    driver: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """What the times of attention depend on, beside the load. `layout`: "ragged" or "paged"."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    causal: bool
    window: int | None = None
    layout: Layout = "ragged"

    def __str__(self) -> str:
        kind = "causal" if self.causal else "bidirectional"
        window = "" if self.window is None else f", window {self.window}"
        heads = f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_dim}"
        return f"{heads}, {self.dtype}, {kind}{window}, {self.layout}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One load and the time of a batch by backend.

    Attributes:
        tokens, sequences, max_length: as a graph key tells them; max_length is the bound of the longest sequence. Of a
            paged decode step: tokens of all caches, sequences, bound of the longest cache.
        us: median by backend, in µs, planning included.
        spread_us: half the distance between the quartiles.
        of: what was run: "model", or "24 layers" of attention.
    """

    tokens: int
    sequences: int
    max_length: int
    us: Mapping[str, float]
    spread_us: Mapping[str, float] = field(default_factory=dict)
    of: str = "model"

    @property
    def even(self) -> bool:
        """All sequences have one length, as far as their bound tells."""
        length, rest = divmod(self.tokens, self.sequences)
        return rest == 0 and length <= self.max_length <= max(64, 2 * length - 1)

    @property
    def name(self) -> str:
        """Such as "16 x 512"; of unequal sequences "32 of 2048"."""
        return (
            f"{self.sequences} x {self.tokens // self.sequences}" if self.even else f"{self.sequences} of {self.tokens}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionGrid:
    """The points of one shape. `excluded`: backends that failed or were wrong on this device, with the reason."""

    shape: AttentionShape
    points: tuple[Point, ...]
    excluded: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What the numbers of a model depend on."""

    hidden_size: int
    num_layers: int
    intermediate_size: int
    attention: AttentionShape


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNumbers:
    """What was found for one model shape; None: not measured.

    Attributes:
        name: model that was measured; others of its shape share the numbers.
        online_tokens, bulk_tokens: budgets of the scheduler.
        inflection_tokens: batches of more tokens gain nothing from a graph.
        fine_tokens: up to here batches are padded to steps of 64 tokens, above to steps of 256.
        num_threads: of torch's operators on a CPU.
        fastest_dtype: a dtype in which a CPU is faster; advice only, since it changes results.
        saturation: (tokens, µs of a batch).
        launch: (tokens, µs of the CPU to launch a batch without a graph, µs of that batch, µs of a graph's replay).
        padding: (tokens, µs where padded to 64, µs where padded to 256), means over sizes up to 256 above `tokens`.
        threads: (dtype, threads, µs of a batch).
    """

    shape: ModelShape
    name: str
    online_tokens: int | None = None
    bulk_tokens: int | None = None
    inflection_tokens: int | None = None
    fine_tokens: int | None = None
    num_threads: int | None = None
    fastest_dtype: str | None = None
    saturation: tuple[tuple[int, float], ...] = ()
    launch: tuple[tuple[int, float, float, float], ...] = ()
    padding: tuple[tuple[int, float, float], ...] = ()
    threads: tuple[tuple[str, int, float], ...] = ()


# "op:NxK" -> bucket of tokens -> variant ("table", "library", "epilogue" or "heuristic") -> µs of one product.
Products = Mapping[str, Mapping[str, Mapping[str, float]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One file. `source`: in words, how it came about."""

    machine: Machine
    source: str
    date: str = ""
    commit: str = ""
    grids: tuple[AttentionGrid, ...] = ()
    models: tuple[ModelNumbers, ...] = ()
    products: Products = field(default_factory=dict)


def write_profile(profile: Profile, path: Path) -> None:
    """Whole or not at all: readers never see half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"version": VERSION, **asdict(profile)}, indent=1) + "\n"
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False, encoding="utf-8") as file:
        file.write(text)
    os.replace(file.name, path)  # noqa: PTH105  the name of an open file is a string


def read_profile(path: Path) -> Profile:
    """
    Raises:
        CheckpointError: the file is missing, no JSON, of another version, or a field is not what it should be; names
            the file and the field.
    """
    file = JsonFile.read(path)
    if (version := file.integer("version")) != VERSION:
        raise file.error(f"it is of version {version}, and this ROSE reads version {VERSION}")
    machine = file.child("machine")
    return Profile(
        machine=Machine(
            device=machine.text("device"), driver=machine.text("driver", ""), packages=_texts(machine, "packages")
        ),
        source=file.text("source"),
        date=file.text("date", ""),
        commit=file.text("commit", ""),
        grids=tuple(_grid(entry) for entry in _entries(file, "grids")),
        models=tuple(_numbers(entry) for entry in _entries(file, "models")),
        products=_products(file),
    )


def _grid(file: JsonFile) -> AttentionGrid:
    points = tuple(_point(entry) for entry in _entries(file, "points"))
    return AttentionGrid(shape=_shape(file.child("shape")), points=points, excluded=_texts(file, "excluded"))


def _shape(file: JsonFile) -> AttentionShape:
    layout = file.text("layout", "ragged")
    if layout not in ("ragged", "paged"):
        raise file.error(f"layout is {layout!r}, and must be 'ragged' or 'paged'")
    return AttentionShape(
        num_heads=file.integer("num_heads"),
        num_kv_heads=file.integer("num_kv_heads"),
        head_dim=file.integer("head_dim"),
        dtype=file.text("dtype"),
        causal=file.flag("causal"),
        window=_optional(file, "window"),
        layout="paged" if layout == "paged" else "ragged",
    )


def _point(file: JsonFile) -> Point:
    us = _numbers_by_name(file, "us")
    if not us:
        raise file.error("us is empty: a point needs the time of a backend")
    return Point(
        tokens=file.integer("tokens"),
        sequences=file.integer("sequences"),
        max_length=file.integer("max_length"),
        us=us,
        spread_us=_numbers_by_name(file, "spread_us", least=0.0),
        of=file.text("of", "model"),
    )


def _numbers(file: JsonFile) -> ModelNumbers:
    shape = file.child("shape")
    counts = ("online_tokens", "bulk_tokens", "inflection_tokens", "fine_tokens", "num_threads")
    found: dict[str, Any] = {name: _optional(file, name) for name in counts}
    for name, value in found.items():
        most = MOST_THREADS if name == "num_threads" else MOST_TOKENS
        if value is not None and value > most:
            raise file.error(f"{name} is {value}, and must be at most {most}")
    online, bulk = found["online_tokens"], found["bulk_tokens"]
    if online is not None and bulk is not None and online > bulk:
        raise file.error(f"online_tokens ({online}) is more than bulk_tokens ({bulk})")
    fastest = file.text("fastest_dtype") if "fastest_dtype" in file else None
    if fastest is not None and fastest not in DTYPES:
        raise file.error(f"fastest_dtype is {fastest!r}, and must be one of {', '.join(DTYPES)}")
    return ModelNumbers(
        shape=ModelShape(
            hidden_size=shape.integer("hidden_size"),
            num_layers=shape.integer("num_layers"),
            intermediate_size=shape.integer("intermediate_size"),
            attention=_shape(shape.child("attention")),
        ),
        name=file.text("name"),
        fastest_dtype=fastest,
        **found,
        **{name: _rows(file, name, kinds) for name, kinds in _CURVES.items()},
    )


_CURVES: Mapping[str, tuple[type, ...]] = {
    "saturation": (int, float),
    "launch": (int, float, float, float),
    "padding": (int, float, float),
    "threads": (str, int, float),
}


def _rows(file: JsonFile, key: str, kinds: tuple[type, ...]) -> Any:
    rows = file.data.get(key) or []
    if not isinstance(rows, list):
        raise file.error(f"{key} must be a list of rows")
    for row in rows:
        good = isinstance(row, list) and len(row) == len(kinds)
        if not good or not all(
            isinstance(v, (int, float) if k is float else k) for v, k in zip(row, kinds, strict=True)
        ):
            raise file.error(f"{key} holds {row!r}, and its rows are {', '.join(kind.__name__ for kind in kinds)}")
        for value, kind in zip(row, kinds, strict=True):
            if (kind is int and value < 0) or (kind is float and not 0 < value < inf):
                raise file.error(f"{key} holds {row!r}, and {value} is no {'size' if kind is int else 'time'}")
    return tuple(tuple(row) for row in rows)


def _products(file: JsonFile) -> Products:
    products = file.child("products")
    return {
        name: {bucket: _numbers_by_name(products.child(name), bucket) for bucket in products.child(name).data}
        for name in products.data
    }


def _entries(file: JsonFile, key: str) -> list[JsonFile]:
    entries = file.data.get(key) or []
    if not isinstance(entries, list):
        raise file.error(f"{key} is {entries!r}, and must be a list")
    return [JsonFile.of(file.path, entry) for entry in entries]


def _optional(file: JsonFile, key: str) -> int | None:
    return file.integer(key) if key in file else None


def _texts(file: JsonFile, key: str) -> dict[str, str]:
    child = file.child(key)
    return {name: child.text(name) for name in child.data}


def _numbers_by_name(file: JsonFile, key: str, least: float = 1e-9) -> dict[str, float]:
    """Finite numbers of at least `least`."""
    child = file.child(key)
    found = {name: child.number(name) for name in child.data}
    for name, value in found.items():
        if not least <= value < float("inf"):
            raise file.error(f"{key}: {name} is {value}, which is no time")
    return found

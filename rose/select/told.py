"""Profiles in words: the numbers of a model, and what a new profile changes of the one it replaces.

Knows fields; knows neither files nor devices.
"""

from __future__ import annotations

from collections.abc import Iterator

from rose.config.profile import AttentionGrid, ModelNumbers, Profile

_LABELS = {
    "online_tokens": "tokens of a batch, online",
    "bulk_tokens": "tokens of a batch, bulk",
    "inflection_tokens": "graphs up to tokens",
    "fine_tokens": "padded to 64 up to tokens",
    "num_threads": "threads",
    "fastest_dtype": "faster dtype",
}


def numbers_told(numbers: ModelNumbers) -> Iterator[str]:
    """A line each, of those that were found."""
    for name, label in _LABELS.items():
        if (value := getattr(numbers, name)) is not None:
            yield f"{label}: {value}"


def changes(old: Profile, new: Profile) -> Iterator[str]:
    """A line for each number, and for each shape of heads whose fastest backends are others."""
    for numbers in new.models:
        before = next((other for other in old.models if other.shape == numbers.shape), None)
        for name, label in _LABELS.items() if before is not None else ():
            was, now = getattr(before, name), getattr(numbers, name)
            if was != now:
                yield f"{label}: {_or_default(was)} -> {_or_default(now)}"
    for grid in new.grids:
        same = next((other for other in old.grids if other.shape == grid.shape), None)
        if same is not None and (line := _moved(same, grid)):
            yield line
    for lost in _lost(old, new):
        yield f"no longer in it: {lost}"


def _moved(old: AttentionGrid, new: AttentionGrid) -> str:
    was, now = _fastest(old), _fastest(new)
    common = was.keys() & now.keys()
    moved = [load for load in common if was[load] != now[load]]
    return f"{new.shape}: another backend is fastest at {len(moved)} of {len(common)} loads" if moved else ""


def _fastest(grid: AttentionGrid) -> dict[tuple[int, int, int], str]:
    return {(p.tokens, p.sequences, p.max_length): min(p.us, key=lambda name: p.us[name]) for p in grid.points}


def _lost(old: Profile, new: Profile) -> Iterator[str]:
    """What the old file served and the new one does not."""
    shapes, heads = {numbers.shape for numbers in new.models}, {grid.shape for grid in new.grids}
    yield from (f"the numbers of {numbers.name}" for numbers in old.models if numbers.shape not in shapes)
    yield from (f"the times of {grid.shape}" for grid in old.grids if grid.shape not in heads)


def _or_default(value: object) -> object:
    return "default" if value is None else value

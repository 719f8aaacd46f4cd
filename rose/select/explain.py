"""Why a batch is served as it is: the backend of a load and what the others would cost, and the table told at start.

Knows choices and reasons; measures nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rose.attention_backends.auto import AutoBackend, spec_for
from rose.attention_backends.base import (
    AttentionBackend,
    AttentionSpec,
    backend_names,
    paged_backend_names,
    try_backend,
)
from rose.attention_backends.choose import Load, best_overall, choose, nearest, rank
from rose.config import EngineConfig
from rose.config.profile import AttentionGrid, AttentionShape, Machine, Point
from rose.config.profile_files import Found
from rose.engine.generation.build import paged_exclusions, paged_order
from rose.errors import InternalError
from rose.select.grid import bound_of

# What the table at start tells of: (sequences, tokens each).
TOLD = ((1, 128), (1, 512), (1, 4096), (1, 16384), (16, 128), (16, 512), (32, 512), (4, 4096))


def hint(found: Found, here: Machine, shape: AttentionShape, *, on_gpu: bool) -> str:
    """One line where nothing was measured for a shape on a GPU; empty elsewhere."""
    if found.grid is not None or not on_gpu:
        return ""
    return (
        f"no profile of {here.device} for {shape}: defaults serve; `rose select-backend MODEL` measures in some minutes"
    )


def usage(found: Found, backend: AttentionBackend, limits: EngineConfig) -> str:
    """What is used, a line a fact, each with where it comes from."""
    numbers = found.numbers
    rows = [("profile", ", ".join(map(str, found.paths)) or "none")]
    if isinstance(backend, AutoBackend) and len(backend.backends) > 1:
        for sequences, length in TOLD:
            load = load_of([length] * sequences)
            if length <= limits.max_tokens and load.tokens <= limits.bulk_tokens:
                rows.append((f"{sequences} x {length}", _choice(backend, load)))
    else:
        names = list(getattr(backend, "backends", ())) or [backend.name]
        rows.append(("attention", f"{names[0]}, whatever the load"))
    measured = numbers is not None and numbers.bulk_tokens == limits.bulk_tokens
    batches = f"{limits.online_tokens} tokens online, {limits.bulk_tokens} bulk"
    rows.append(("batches", f"{batches}: {'measured' if measured else 'by default or as asked for'}"))
    if numbers is not None and numbers.inflection_tokens is not None:
        rows.append(("graphs", f"up to {numbers.inflection_tokens} tokens: measured"))
    if numbers is not None and numbers.num_threads is not None:
        rows.append(("threads", f"{numbers.num_threads}: measured, unless asked for"))
    if numbers is not None and numbers.fastest_dtype is not None:
        rows.append(("dtype", f"{numbers.fastest_dtype} is faster here: --dtype {numbers.fastest_dtype}"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def _choice(backend: AutoBackend, load: Load) -> str:
    try:
        choice = backend.explain(load)
    except InternalError as error:  # others may be served all the same
        return error.message
    return f"{choice.backend}: {choice.reason}"


def load_of(lengths: Iterable[int]) -> Load:
    """The load of a batch that needs no padding."""
    each = list(lengths)
    return Load(sum(each), len(each), bound_of(max(each)))


def explain(lengths: list[int], head_dim: int, grid: AttentionGrid | None, left_out: dict[str, str]) -> Iterator[str]:
    """Lines: the backend of a batch shape, why, and what the others would cost."""
    load = load_of(lengths)
    points = () if grid is None else grid.points
    count = "1 sequence" if load.sequences == 1 else f"{load.sequences} sequences"
    yield f"{count}, {load.tokens} tokens, longest up to {load.max_length}"
    choice = choose(head_dim, load, left_out, points)
    if choice is None:
        yield "  no backend is left to serve it"
    else:
        yield f"  {choice.backend}: {choice.reason}"
    point = nearest(points, load)
    if point is None:
        yield "  nothing was measured within a factor of two of it: the table that ships with ROSE decides"
    for place in rank(head_dim, load, points):
        if choice is not None and place.backend == choice.backend:
            continue
        yield _otherwise(place.backend, point, left_out)


def explain_generating(lengths: list[int], grid: AttentionGrid | None, left_out: dict[str, str]) -> Iterator[str]:
    """The same of a step of generating, whose sequences have so many tokens in the cache."""
    load = load_of(lengths)
    count = "1 sequence" if load.sequences == 1 else f"{load.sequences} sequences"
    yield f"a step of generating: {count}, {load.tokens} tokens in the cache, longest up to {load.max_length}"
    names = paged_order(grid)
    chosen = next((name for name in names if name not in left_out), None)
    points = () if grid is None else grid.points
    if chosen is None:
        yield "  no backend is left to serve it"
    elif chosen in best_overall(points):
        place = "fastest" if chosen == best_overall(points)[0] else "next best"
        yield f"  {chosen}: {place} over {len(points)} measured steps; a cache is bound to one backend for all batches"
    else:
        yield f"  {chosen}: first in the order of preference; a cache is bound to one backend for all batches"
    point = nearest(points, load)
    if point is None:
        yield "  no step was measured within a factor of two of it"
    elif chosen is not None and chosen in point.us:
        yield f"  measured at {point.name}: {point.us[chosen]:.0f} µs, spread {_spread(point, chosen)}"
    yield from (_otherwise(name, point, left_out) for name in names if name != chosen)


def missing_here(spec: AttentionSpec, grid: AttentionGrid | None) -> dict[str, str]:
    """Backends that cannot serve on this machine, with the reason; what a profile excludes among them."""
    if spec.layout == "paged":
        found = {name: try_backend(name, spec) for name in paged_backend_names()}
        excluded = paged_exclusions(grid)
    else:
        found = {name: try_backend(name, spec_for(name, spec)) for name in backend_names()}
        excluded = {} if grid is None else dict(grid.excluded)
    missing = {name: reason for name, reason in found.items() if isinstance(reason, str)}
    return {**missing, **excluded}


def _otherwise(backend: str, point: Point | None, left_out: dict[str, str]) -> str:
    us = None if point is None else point.us.get(backend)
    cost = "not measured" if point is None or us is None else f"{us:.0f} µs, spread {_spread(point, backend)}"
    why = f"; left out: {left_out[backend]}" if backend in left_out else ""
    return f"  otherwise {backend}: {cost}{why}"


def _spread(point: Point, backend: str) -> str:
    spread = point.spread_us.get(backend)
    return "unknown" if spread is None else f"{spread:.1f} µs"

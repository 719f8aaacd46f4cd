"""Where a step of generating goes, kernel by kernel: some steps of the engine in this process, profiled by torch.

All prompts have begun and none ends meanwhile, so every step is the same batch. A kernel that is let in before the one
ahead has ended (dependent launch) runs beside it, and mostly waits: what counts is by how much it moves the end of the
work on, so that kernels and gaps come to the step. Knows the engine's way and spans; knows neither loads nor rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rose.bench.breakdown import (
    GAPS,
    KernelTime,
    Span,
    Watched,
    gaps,
    kernel_times,
    print_kernels,
    shares_by_kind,
    shortened,
    watch,
    write_kernels,
)
from rose.bench.carriers import Ids
from rose.bench.decode_ways import EngineWay, Stream
from rose.bench.meter import RUNS
from rose.bench.targets import Target
from rose.errors import InternalError, InvalidInput

STEPS = 20
# Tokens that every prompt has before the first profiled step; batches whose tokens are on their way, and one more that
# is launched before the last of the profiled ones is heard of.
_BEFORE, _ON_THE_WAY = 3, 3


def profile_steps(
    way: EngineWay,
    target: Target,
    rounds: Sequence[Sequence[Ids]],
    backend: str,
    out: Path | None,
) -> dict[str, Any]:
    """Profile STEPS steps, or as many as the engine's longest sequence leaves, of the last round; what the others are
    for is that the step's graph is captured. The table is printed and written beside `out`. Returns what is written.

    Args:
        rounds: prompts of one length, as many in each round; three rounds at least: plain, captured, replayed.

    Raises:
        InvalidInput: there is no step in which all of them decode, since prompts begin one after another.
        InternalError: the profiler saw nothing, or another kind of batch.
        RoseError: whatever a prompt was refused for.
    """
    for prompts in rounds[:-1]:
        with _decoding(way, prompts) as (streams, steps):
            way.advance(streams, steps * len(streams))
    with _decoding(way, rounds[-1]) as (streams, steps):
        before = way.counters()
        seen = watch(target.device, partial(_steps, way, streams, steps))
        after = way.counters()
    done = {name: after[name] - before[name] for name in ("batches", "decode_batches", *RUNS)}
    if not seen.events or not done["batches"] == done["decode_batches"] > 0:
        told = f"{done['batches']} batches, {done['decode_batches']} of them steps, {len(seen.events)} names of kernels"
        raise InternalError(f"the profiler saw no steps of generating alone: {told}")
    return _tell(target, len(rounds[-1][0]), len(streams), backend, seen, done, out)


@contextmanager
def _decoding(way: EngineWay, prompts: Sequence[Ids]) -> Iterator[tuple[dict[int, Stream], int]]:
    """Streams that all decode, with nothing running, and how many steps they have in common; given up in the end."""
    room = way.longest - len(prompts[0])
    streams = way.begin(prompts, room)
    try:
        while min(len(stream.times) for stream in streams.values()) < min(_BEFORE, room):
            way.advance(streams, 1)
        way.wait()
        left = room - max(len(stream.times) for stream in streams.values()) - _ON_THE_WAY
        if left < 1:
            raise InvalidInput(
                f"{room} new tokens of each of {len(prompts)} prompts leave no step in which all of them decode"
            )
        yield streams, min(STEPS, left)
    finally:
        way.settle(streams)


def _steps(way: EngineWay, streams: dict[int, Stream], steps: int) -> None:
    way.advance(streams, steps * len(streams))
    way.wait()


def own_times(spans: Iterable[Span]) -> list[tuple[str, int, float]]:
    """(name, 1, microseconds) of every run: from where everything before it had ended, or from its start if that is
    later, to its end. They and the gaps come to the time from the first start to the last end.
    """
    found, over = [], 0
    for name, start, end in sorted(spans, key=lambda span: span[1]):
        found.append((name, 1, max(0, end - max(start, over)) / 1e3))
        over = max(over, end)
    return found


def _tell(
    target: Target, prompt: int, batch: int, backend: str, seen: Watched, done: dict[str, int], out: Path | None
) -> dict[str, Any]:
    steps = done["batches"]
    times, between = kernel_times(own_times(seen.spans) or seen.events), gaps(seen.spans)
    kernels_ms, gaps_ms = sum(one.ms for one in times), sum(one.ms for one in between)
    result: dict[str, Any] = {
        **asdict(target.facts),
        "load": "decode",
        "tokens": prompt,
        "batch": batch,
        "backend": backend,
        "steps": steps,
        "graph_hit_share": round(done["graph_hits"] / sum(done[name] for name in RUNS), 4),
        "profiled_ms": round(seen.seconds * 1e3, 3),
        "kernels_ms": round(kernels_ms, 3),
        "gaps_ms": round(gaps_ms, 3),
        "step_us": round(1e3 * (kernels_ms + gaps_ms) / steps, 2),
        "kernels_a_step": round(sum(one.calls for one in times) / steps, 1),
        "share_by_kind": shares_by_kind(times),
        "kernels": _rows(times, seen, steps),
        "gaps": [{**asdict(one), "us_a_step": _us(one.ms, steps)} for one in between[:GAPS]],
    }
    what = "kernels" if seen.spans else "operators"
    if not seen.spans:
        print("no CUDA device: operators take the kernels' place, and nothing is known of gaps between them")
    print(
        f"{target.name} {batch} x {prompt}, {steps} steps: {result['step_us']:.1f} us a step, "
        f"{_us(kernels_ms, steps):.1f} in {result['kernels_a_step']:g} {what}, {_us(gaps_ms, steps):.1f} between them"
    )
    print_kernels(times, between, steps)
    write_kernels(target, f"decode_{batch}x{prompt}", result, out)
    return result


def _rows(times: Sequence[KernelTime], seen: Watched, steps: int) -> list[dict[str, Any]]:
    """With microseconds a step, and those of one run from its own start: more, where it starts early and waits."""
    runs: Counter[str] = Counter()
    for name, start, end in seen.spans:
        runs[shortened(name)] += end - start
    found = []
    for one in times:
        run_us = runs[one.name] / 1e3 / one.calls if one.name in runs else 1e3 * one.ms / one.calls
        found.append({**asdict(one), "us_a_step": _us(one.ms, steps), "run_us": round(run_us, 3)})
    return found


def _us(ms: float, steps: int) -> float:
    return round(1e3 * ms / steps, 3)

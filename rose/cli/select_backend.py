"""`rose select-backend`: measure what serves a model fastest on this device, and keep it as a profile.

Knows options and files; the measuring is in rose/select.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rose.cli.shared import Commands, add_command, add_model, add_reading
from rose.errors import RoseError, StartupError

if TYPE_CHECKING:
    from rose.attention_backends.base import AttentionSpec
    from rose.cli.selecting import Target
    from rose.config.profile import Profile
    from rose.select.measure import Options, Result

_SECONDS = 170.0


def add_select_backend(commands: Commands) -> None:
    examples = (
        "rose select-backend minilm                         measure, and keep a profile that rose serve will use",
        "rose select-backend --shape bge-m3 --report out    a published shape with random weights; pictures and HTML",
        "rose select-backend --shape 16/8x128 --check       attention alone; then once more with fresh inputs",
        "rose select-backend minilm --explain 16x512        which backend serves this batch, and why",
    )
    parser = add_command(
        commands,
        "select-backend",
        _select,
        "measure what serves a model fastest here, and keep it as a profile",
        examples,
    )
    add_model(parser)
    parser.add_argument(
        "--shape",
        help="instead of a model: a published one (bge-m3, pplx-embed-0.6b, qwen3.5-4b, ...) with random weights, or "
        "heads as HEADS/KV_HEADSxHEAD_DIM[:causal], attention alone",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N (default: %(default)s)")
    parser.add_argument(
        "--dtype", default="auto", help="auto (bfloat16 on CUDA, float32 on CPU), float32, bfloat16, ..."
    )
    parser.add_argument(
        "--seconds", type=float, default=_SECONDS, help="of measuring; what is worth most comes first (default: 170)"
    )
    parser.add_argument("--batch-tokens", type=int, default=32768, help="largest batch measured (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the inputs")
    parser.add_argument(
        "-o", "--out", type=Path, help="the profile (default: in profiles/ of the cache, where it is found)"
    )
    parser.add_argument(
        "--check", action="store_true", help="measure once more with fresh inputs, and tell how it held"
    )
    parser.add_argument("--rows", type=Path, help="JSONL file of grid points; a new run replaces its own")
    parser.add_argument("--report", type=Path, help="folder for pictures and report.html")
    parser.add_argument("--png", action="store_true", help="pictures as PNG beside SVG")
    parser.add_argument("--explain", metavar="BATCH", help="measure nothing: tell of a batch, as 16x512 or 37+128+300")
    parser.add_argument(
        "--profile", type=Path, help="with --explain, --check or --report: this one instead of measuring"
    )
    parser.add_argument("--commit", default="", help="what is measured, where the machine has no checkout to ask")
    parser.add_argument("--folders", type=Path, help="where models made of random weights are kept")
    add_reading(parser)


def _select(options: argparse.Namespace) -> int:
    from rose.bench.shapes import made_folder
    from rose.cli.selecting import find_target

    if not 0 < options.seconds < float("inf"):
        raise StartupError(f"--seconds must be a number above 0, not {options.seconds}")
    if options.batch_tokens < 512:
        raise StartupError(f"--batch-tokens must be at least 512, not {options.batch_tokens}")
    target = find_target(options, options.folders or made_folder())
    if options.explain is not None:
        return _explain(options, target)
    return _measure(options, target)


def _explain(options: argparse.Namespace, target: Target) -> int:
    """Of a profile that is named, whatever device it is of; else of what serves here."""
    from dataclasses import replace

    from rose.cli.selecting import parse_batch
    from rose.config.profile import read_profile

    lengths = parse_batch(options.explain)
    profile = None if options.profile is None else read_profile(options.profile)
    for layout in target.layouts:
        _explain_layout(options, target, replace(target.spec, layout=layout), lengths, profile)
    return 0


def _explain_layout(
    options: argparse.Namespace, target: Target, spec: AttentionSpec, lengths: list[int], profile: Profile | None
) -> None:
    from dataclasses import replace

    from rose.config.profile_files import AUTO, find_profile
    from rose.engine.profiles import attention_shape, same_kind, this_machine
    from rose.select.explain import explain, explain_generating, missing_here
    from rose.select.told import numbers_told

    shape, here = attention_shape(spec), this_machine(spec.device)
    model = None if target.model is None else replace(target.model, attention=shape)
    print(f"{target.name}: {shape}")
    if profile is None:
        found = find_profile(AUTO, here, shape, model)
        for note in found.notes:
            print(f"rose: {note}", file=sys.stderr)
        grid, numbers, where = found.grid, found.numbers, ", ".join(map(str, found.paths)) or "none"
        left_out = missing_here(spec, grid)
    else:
        grid = next((grid for grid in profile.grids if grid.shape == shape), None)
        numbers = next((numbers for numbers in profile.models if numbers.shape == model), None)
        where = f"{options.profile}, of {profile.machine.device}"
        where += "" if grid or numbers else "; it holds nothing of this shape"
        # What another GPU cannot run is not known here: there, what its own profile excludes.
        tried_here = same_kind(profile.machine, here)
        left_out = missing_here(spec, grid) if tried_here else dict(grid.excluded) if grid else {}
    print(f"profile: {where}")
    for line in () if numbers is None else numbers_told(numbers):
        print(f"  {line}")
    paged = spec.layout == "paged"
    lines = explain_generating(lengths, grid, left_out) if paged else explain(lengths, spec.head_dim, grid, left_out)
    for line in lines:
        print(line)


def _measure(options: argparse.Namespace, target: Target) -> int:
    from rose.config.profile import read_profile, write_profile
    from rose.engine.profiles import preferred
    from rose.kernels import tiles
    from rose.select.measure import Options, Result
    from rose.select.rows import rows_of, summary, write_rows
    from rose.select.session import Bars

    limits = Options(
        seconds=options.seconds,
        seed=options.seed,
        batch_tokens=options.batch_tokens,
        commit=options.commit or _commit(),
        progress=Bars(),
        say=lambda line: print(f"rose: {line}", file=sys.stderr),
    )
    started = time.monotonic()
    facts = _facts(options, target, limits.commit)
    rows = []
    if options.profile is None:
        result = target.measure(limits)
        path = options.out or _default_path(result, target)
        replaced = list(_replaced(path, result))
        write_profile(result.profile, path)
        rows += [row for run in result.runs for row in rows_of(run, run.grid, "first", facts)]
        print(f"{path}: measured in {time.monotonic() - started:.0f} s")
        for line in (*replaced, *_told(result)):
            print(line, flush=True)
        if options.rows is not None:
            write_rows(options.rows, rows)  # whatever becomes of the second run
    else:
        result = Result(profile=read_profile(options.profile))
        tiles.prefer(preferred(result.profile.products))
    if options.check:
        again = _again(target, limits)
        grids = {grid.shape: grid for grid in result.profile.grids}
        checked = [
            row
            for run in again.runs
            if run.ways.shape in grids
            for row in rows_of(run, grids[run.ways.shape], "check", facts)
        ]
        rows += checked
        if options.rows is not None:
            write_rows(options.rows, rows)
        print(f"second run, with inputs of seed {limits.seed + 1}:")
        for line in summary(checked):
            print(line)
    if options.report is not None:
        _report(options, result, target)
    return 0


def _replaced(path: Path, result: Result) -> Iterator[str]:
    """What a file that is there already says otherwise; asked before it is replaced."""
    from rose.config.profile import read_profile
    from rose.select.told import changes

    if not path.exists():
        return
    try:
        old = read_profile(path)
    except RoseError as error:
        yield f"  it replaces a file that is no profile: {error.message}"
        return
    found = list(changes(old, result.profile))
    yield f"  it replaces that of {old.date or 'an unknown day'}" + (":" if found else "; nothing is chosen otherwise")
    yield from (f"    {line}" for line in found)


def _again(target: Target, limits: Options) -> Result:
    from dataclasses import replace

    return target.measure(replace(limits, seed=limits.seed + 1, grids_only=True))


def _told(result: Result) -> list[str]:
    """What was found, for the eye."""
    from rose.select.told import numbers_told

    lines = []
    for numbers in result.profile.models:
        lines += [f"  {line}" for line in numbers_told(numbers)]
    for run in result.runs:
        lines.append(f"{run.ways.shape}: {len(run.measured)} loads measured, {len(run.skipped)} without time")
        for found_at in run.measured:
            if found_at.point is not None:
                times = sorted(found_at.point.us.items(), key=lambda entry: entry[1])
                each = ", ".join(f"{name} {us:.0f}" for name, us in times)
                lines.append(
                    f"  {found_at.point.name:<12} {each} µs" + ("" if found_at.comparison.clear else "; not clear")
                )
    lines += [f"{name} is left out: {reason}" for name, reason in result.left_out.items()]
    return lines


def _report(options: argparse.Namespace, result: Result, target: Target) -> None:
    from rose.select.plots import draw
    from rose.select.report import write_report

    formats = ("svg", "png") if options.png else ("svg",)
    pictures = draw(result.profile, options.report, floor=target.floor, formats=formats)
    write_report(result.profile, pictures, options.report / "report.html", result.left_out)
    print(f"{options.report / 'report.html'} and {len(pictures)} pictures")


def _default_path(result: Result, target: Target) -> Path:
    from rose.config.profile_files import own_folder

    name = f"{result.profile.machine.device}_{target.name}".lower()
    return own_folder() / ("".join(c if c.isalnum() or c in "-_." else "_" for c in name) + ".json")


def _facts(options: argparse.Namespace, target: Target, commit: str) -> dict[str, str]:
    from datetime import UTC, datetime

    from rose.engine.profiles import this_machine

    here = this_machine(target.spec.device)
    arguments = [target.name] if options.shape is None else ["--shape", options.shape]
    more = [flag for flag, given in (("--check", options.check),) if given]
    driver = f", driver {here.driver}" if here.driver else ""
    return {
        "run_id": uuid.uuid4().hex[:8],
        "commit": commit,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": shlex.join(["rose", "select-backend", *arguments, *more, "--seed", str(options.seed)]),
        "machine": f"{here.device}{driver}, " + ", ".join(f"{n} {v}" for n, v in here.packages.items()),
        "model": target.name,
    }


def _commit() -> str:
    from rose.bench.machine import commit

    return commit()

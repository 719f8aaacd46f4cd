"""One HTML file of a profile: tables, reasons and pictures, with nothing to load from elsewhere.

Knows profiles and pictures' text; measures nothing.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rose.attention_backends.choose import TIE
from rose.config.profile import AttentionGrid, ModelNumbers, Profile

_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: .6rem 0 1.4rem } td, th { padding: .15rem .7rem; text-align: right }
th { border-bottom: 1px solid #999 } td:first-child, th:first-child { text-align: left }
td.best { font-weight: 700; background: #e6f4ea } td.none { color: #aaa } svg { max-width: 100%; height: auto }
""".strip()


def write_report(profile: Profile, pictures: Sequence[Path], path: Path, left_out: Mapping[str, str]) -> None:
    """
    Args:
        pictures: SVG files, which are put into the page.
        left_out: backends that were not measured or excluded, with the reason.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(_page(profile, pictures, left_out)) + "\n", encoding="utf-8")


def _page(profile: Profile, pictures: Sequence[Path], left_out: Mapping[str, str]) -> Iterator[str]:
    machine = profile.machine
    title = f"Fastest ways on {machine.device}"
    yield f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{_text(title)}</title>'
    yield f"<style>{_STYLE}</style><h1>{_text(title)}</h1>"
    versions = ", ".join(f"{name} {version}" for name, version in machine.packages.items())
    driver = f"driver {machine.driver}, " if machine.driver else ""
    yield f"<p>{_text(profile.source)}. {_text(profile.date)} {_text(profile.commit)}<br>{_text(driver + versions)}</p>"
    for numbers in profile.models:
        yield from _numbers(numbers)
    for grid in profile.grids:
        yield from _grid(grid)
    if profile.products:
        yield from _products(profile)
    if left_out:
        yield "<h2>Left out</h2><ul>"
        yield from (f"<li>{_text(name)}: {_text(reason)}</li>" for name, reason in left_out.items())
        yield "</ul>"
    for picture in pictures:
        if picture.suffix == ".svg":
            drawn = picture.read_text(encoding="utf-8")
            yield f"<figure>{drawn[drawn.index('<svg') :]}</figure>"


def _numbers(numbers: ModelNumbers) -> Iterator[str]:
    rows = {
        "tokens of a batch while single queries wait": numbers.online_tokens,
        "tokens of a batch otherwise (saturation)": numbers.bulk_tokens,
        "graphs up to so many tokens": numbers.inflection_tokens,
        "padded to 64 up to so many tokens, above to 256": numbers.fine_tokens,
        "threads": numbers.num_threads,
        "faster in another dtype": numbers.fastest_dtype,
    }
    yield f"<h2>{_text(numbers.name)}</h2><table>"
    yield from (f"<tr><td>{name}<td>{_text(str(value))}" for name, value in rows.items() if value is not None)
    yield "</table>"


def _grid(grid: AttentionGrid) -> Iterator[str]:
    names = sorted({name for point in grid.points for name in point.us})
    what = grid.points[0].of if grid.points else ""
    yield f"<h2>{_text(str(grid.shape))}</h2><p>µs of a batch ({_text(what)}), planning included.</p><table>"
    yield "<tr><th>load" + "".join(f"<th>{_text(name)}" for name in names)
    for point in grid.points:
        best = min(point.us.values())
        cells = (_cell(point.us.get(name), point.spread_us.get(name), best) for name in names)
        yield f"<tr><td>{_text(point.name)}{''.join(cells)}"
    yield "</table>"
    yield from (f"<p>{_text(name)} is never used: {_text(reason)}</p>" for name, reason in grid.excluded.items())


def _cell(us: float | None, spread: float | None, best: float) -> str:
    if us is None:
        return '<td class="none">–'
    around = "" if spread is None else f" ± {spread:.0f}"
    kind = ' class="best"' if us <= best * (1 + TIE) else ""
    return f"<td{kind}>{us:.0f}{around}"


def _products(profile: Profile) -> Iterator[str]:
    variants = sorted({variant for rows in profile.products.values() for us in rows.values() for variant in us})
    yield "<h2>Products</h2><p>µs of one product.</p><table>"
    yield "<tr><th>product<th>tokens" + "".join(f"<th>{_text(variant)}" for variant in variants)
    for name, rows in profile.products.items():
        for bucket, us in rows.items():
            cells = "".join(_cell(us.get(variant), None, min(us.values())) for variant in variants)
            yield f"<tr><td>{_text(name)}<td>{_text(bucket)}{cells}"
    yield "</table>"


def _text(text: str) -> str:
    return html.escape(text)

"""Which attention backend serves which load: a small table, read as a pure function of the graph key.

The rows come from times measured on one H200 (benchmarks/attention/backends.py): a layer in µs, replayed in a graph,
bidirectional, bf16. Shapes that were not measured take the row of their load. Where the points of a profile lie near a
load, they come before the table. Knows numbers; runs nothing.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rose.config.profile import Point

ANY = sys.maxsize
# Octaves of tokens, or of the longest sequence, that a measured point reaches; twice as many of the sequences, on which
# times depend least.
REACH = 1.0
# Backends this close to the fastest are as fast: the order of preference decides, so that noise does not.
TIE = 0.01


@dataclass(frozen=True, slots=True)
class Load:
    """What a graph key says about a batch: its padded tokens and sequences, and the bound of its longest sequence."""

    tokens: int
    sequences: int
    max_length: int

    @property
    def mean_length(self) -> float:
        return self.tokens / max(self.sequences, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """`backend` comes first for loads within all these limits, because of `reason`."""

    backend: str
    reason: str
    max_length: int = ANY
    max_tokens: int = ANY
    min_tokens: int = 0
    min_sequences: int = 1
    max_mean_length: int = ANY
    head_dims: tuple[int, ...] = ()

    def covers(self, head_dim: int, load: Load) -> bool:
        return (
            load.max_length <= self.max_length
            and self.min_tokens <= load.tokens <= self.max_tokens
            and load.sequences >= self.min_sequences
            and load.mean_length <= self.max_mean_length
            and (not self.head_dims or head_dim in self.head_dims)
        )


# Longest sequence that some are asked for.
LONGEST: Mapping[str, int] = {"triton_short": 256}
_SHORT = LONGEST["triton_short"]
RULES = (
    Rule(
        backend="triton_short",
        max_length=_SHORT,
        max_tokens=256,
        head_dims=(128, 256),
        reason="at most 256 tokens: one block of keys, no plan, and it overlaps its neighbours "
        "(pplx-embed 0.6b: 920 µs against 1026 at 1 x 128, 1291 against 1375 at 4 x 64)",
    ),
    Rule(
        backend="flash_attention4",
        max_length=_SHORT,
        head_dims=(128, 256),
        reason="many short sequences of wide heads: nothing to plan, and no head's keys are read by each block of "
        "queries again (pplx-embed 0.6b: 6.9 ms against triton_short's 9.4 at 16 x 256, 28.0 against 39.9 at "
        "64 x 256; heads of 256: 24 layers of 16 x 256 take 1.1 ms against 3.5)",
    ),
    Rule(
        backend="triton_short",
        max_length=_SHORT,
        reason="no sequence is longer than 256: one block of keys, no plan, and it overlaps its neighbours "
        "(3.0 µs against 10.1 to 11.1 at 1 x 128; BGE-M3: 16.9 ms against 18.3 to 24.2 at 256 x 64)",
    ),
    Rule(
        backend="flashinfer3",
        # Its plan takes 65 to 580 µs of the CPU; below about 4096 tokens 24 to 28 layers do not save that much.
        min_tokens=4096,
        min_sequences=3,
        max_mean_length=1024,
        head_dims=(64, 128),
        reason="many sequences of some 512 tokens: its balanced schedule wins (16 x 512: 61 against 72 µs with 16 x 64 "
        "heads, 93 against 104 with 16/8 x 128) and outweighs its plan",
    ),
    Rule(
        backend="flash_attention4",
        reason="one or few long sequences, or too few tokens to pay for a plan: nothing to plan, fastest on long ones "
        "(1 x 16384: 1916 against 2222 µs with 16 x 64 heads, 3251 against 3401 with 16/8 x 128)",
    ),
)

# Where the first choice is left out, of those that serve the load.
FALL_BACK = ("flash_attention4", "flashinfer3", "flashinfer2", "triton_short", "torch_sdpa")


# Never chosen for its time while another has one: quick where all sequences are equally long, which a graph key does
# not say (64 of 256: 19.0 ms, 64 of up to 512 and mixed: 81.8 where others take 15.1), and launched kernel by kernel,
# which would hold the thread that serves for 11 to 18 ms a batch (BGE-M3, H200).
LAST_RESORT = "torch_sdpa"
# Order among those that are as fast.
ORDER = ("triton_short", *(name for name in FALL_BACK if name != "triton_short"))


@dataclass(frozen=True, slots=True)
class Choice:
    """`backend` serves the load; `reason` says why it and, if it was not the first choice, why not the others."""

    backend: str
    reason: str


def serves(backend: str, load: Load) -> bool:
    return load.max_length <= LONGEST.get(backend, ANY)


def rank(head_dim: int, load: Load, measured: Sequence[Point] = ()) -> tuple[Choice, ...]:
    """All backends that may serve `load`, best first: as the nearest point of `measured` has them, then the table."""
    point = nearest(measured, load)
    choices = [] if point is None else [c for c in ranked(point) if serves(c.backend, load)]
    rule = next(rule for rule in RULES if rule.covers(head_dim, load))
    choices.append(Choice(rule.backend, rule.reason))
    choices += [Choice(name, "next in the fall-back order") for name in FALL_BACK if serves(name, load)]
    first: dict[str, Choice] = {}
    for choice in choices:
        first.setdefault(choice.backend, choice)
    return tuple(first.values())


def choose(head_dim: int, load: Load, left_out: Mapping[str, str], measured: Sequence[Point] = ()) -> Choice | None:
    """The best backend for `load` that is not left out.

    Args:
        left_out: why each backend that cannot be used cannot.
        measured: points of a profile, for this shape and device.

    Returns:
        The choice, or None if every backend is left out.
    """
    skipped: list[str] = []
    for choice in rank(head_dim, load, measured):
        if choice.backend not in left_out:
            return Choice(choice.backend, "; ".join([choice.reason, *skipped]))
        skipped.append(f"{choice.backend} would come before it but is left out: {left_out[choice.backend]}")
    return None


def nearest(measured: Iterable[Point], load: Load) -> Point | None:
    """The point whose order holds for `load`, or None where none lies within REACH.

    The same backends must be able to serve both. Of equally near ones the smaller, whatever the order they come in.
    """
    found = (((_distance(point, load)), *_size(point), point) for point in measured)
    within = [entry for entry in found if entry[0] < math.inf]
    return min(within, key=lambda entry: entry[:-1])[-1] if within else None


def ranked(point: Point) -> list[Choice]:
    """The backends of a point, fastest first; those within TIE of the fastest in order of preference."""
    best = point.us[fastest(point.us)]

    def order(name: str) -> tuple[bool, float, tuple[int, str]]:
        as_fast = point.us[name] <= best * (1 + TIE)
        return name == LAST_RESORT, 0.0 if as_fast else point.us[name], _place(name)

    names = sorted(point.us, key=order)
    return [Choice(name, _reason(point, name, best)) for name in names]


def fastest(us: Mapping[str, float]) -> str:
    """The name with the least time, the last resort only where it is alone."""
    return min(us, key=lambda name: (name == LAST_RESORT, us[name]))


def _size(point: Point) -> tuple[int, int, int]:
    return point.tokens, point.sequences, point.max_length


def _place(name: str) -> tuple[int, str]:
    return (ORDER.index(name) if name in ORDER else len(ORDER), name)


def _distance(point: Point, load: Load) -> float:
    if any((point.max_length <= longest) != (load.max_length <= longest) for longest in LONGEST.values()):
        return math.inf
    pairs = ((point.tokens, load.tokens), (point.max_length, load.max_length), (point.sequences, load.sequences))
    tokens, length, sequences = (abs(math.log2(there / here)) for there, here in pairs)
    octaves = (tokens, length, sequences / 2)
    # Rounded, so that equal distances are equal however they were computed.
    return round(sum(x * x for x in octaves), 9) if max(octaves) <= REACH else math.inf


def _reason(point: Point, name: str, best: float) -> str:
    mine = point.us[name]
    others = [
        f"{other} {us / mine - 1:+.0%}" for other, us in sorted(point.us.items(), key=lambda e: e[1]) if other != name
    ]
    tie = ", as fast as the fastest" if best < mine <= best * (1 + TIE) else ""
    beside = f" ({', '.join(others)})" if others else ", alone"
    return f"measured at {point.name}: {mine:.0f} µs{tie}{beside}"


def best_overall(points: Sequence[Point]) -> tuple[str, ...]:
    """Backends, best first, where one has to serve every load: by their mean distance from the fastest at each point.

    Only those that were measured at every point.
    """
    names = set.intersection(*(set(point.us) for point in points)) if points else set()

    def loss(name: str) -> float:
        return sum(math.log(point.us[name] / min(point.us.values())) for point in points) / len(points)

    return tuple(sorted(names, key=lambda name: (round(loss(name), 9), _place(name))))

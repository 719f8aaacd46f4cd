"""Which attention backend serves which load: a small table, read as a pure function of the graph key.

The rows come from times measured on one H200 (benchmarks/attention/backends.py): a layer in µs, replayed in a graph,
bidirectional, bf16. Shapes that were not measured take the row of their load. Knows numbers; runs nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

ANY = sys.maxsize


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
    min_tokens: int = 0
    min_sequences: int = 1
    max_mean_length: int = ANY
    head_dims: tuple[int, ...] = ()

    def covers(self, head_dim: int, load: Load) -> bool:
        return (
            load.max_length <= self.max_length
            and load.tokens >= self.min_tokens
            and load.sequences >= self.min_sequences
            and load.mean_length <= self.max_mean_length
            and (not self.head_dims or head_dim in self.head_dims)
        )


RULES = (
    Rule(
        backend="triton_short",
        max_length=256,
        reason="no sequence is longer than 256: one block of keys, no plan, and it overlaps its neighbours "
        "(3.0 µs against 10.1 to 11.1 at 1 x 128)",
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

# Where the first choice is left out. triton_short is not here: it serves no sequence longer than 256.
FALL_BACK = ("flash_attention4", "flashinfer3", "flashinfer2", "torch_sdpa")


@dataclass(frozen=True, slots=True)
class Choice:
    """`backend` serves the load; `reason` says why it and, if it was not the first choice, why not the others."""

    backend: str
    reason: str


def rank(head_dim: int, load: Load) -> tuple[Choice, ...]:
    """All backends that may serve `load`, best first."""
    rule = next(rule for rule in RULES if rule.covers(head_dim, load))
    first = Choice(rule.backend, rule.reason)
    return (first, *(Choice(name, "next in the fall-back order") for name in FALL_BACK if name != rule.backend))


def choose(head_dim: int, load: Load, left_out: Mapping[str, str]) -> Choice | None:
    """The best backend for `load` that is not left out.

    Args:
        left_out: why each backend that cannot be used cannot.

    Returns:
        The choice, or None if every backend is left out.
    """
    skipped: list[str] = []
    for choice in rank(head_dim, load):
        if choice.backend not in left_out:
            return Choice(choice.backend, "; ".join([choice.reason, *skipped]))
        skipped.append(f"{choice.backend} would come before it but is left out: {left_out[choice.backend]}")
    return None

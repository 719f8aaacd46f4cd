"""The language of the rule tables: rename, fuse, split, drop.

A template is a tensor name in which {n} stands for a layer number, {name} for one part between dots, and {name*} for
one or more parts. Whatever stood there is carried into the target. The first rule that matches counts; a tensor that
none matches keeps its name. Knows names; knows neither files nor models.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache


@dataclass(frozen=True, slots=True)
class Rename:
    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Fuse:
    """The sources, one above the other (along axis 0), become the target."""

    sources: tuple[str, ...]
    target: str


@dataclass(frozen=True, slots=True)
class Split:
    """The source, cut into equal parts along axis 0, becomes the targets."""

    source: str
    targets: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Drop:
    """A tensor that the model has no use for; `why` is for the reader of the table."""

    source: str
    why: str


Rule = Rename | Fuse | Split | Drop


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How the checkpoints of one family name their tensors.

    Attributes:
        anchor: a tensor every checkpoint of the family has; the prefix is what stands before it.
        prefixes: what may stand before every name of the backbone, "" included.
        rules: for names with the prefix taken off.
        outside: drops for names that do not carry the prefix, such as a language model's head.
        tied: (a name outside the backbone, the backbone's own) of one matrix under two names, where tie_word_embeddings
            says so; whichever the file holds stands for both.
    """

    anchor: str
    prefixes: tuple[str, ...]
    rules: tuple[Rule, ...] = ()
    outside: tuple[Drop, ...] = ()
    tied: tuple[str, str] | None = field(default=None)


def match(template: str, name: str) -> dict[str, str] | None:
    """What stood in the template's gaps, or None where the name does not fit.

    >>> match("layers.{n}.mlp.{part}.weight", "layers.3.mlp.up.weight")
    {'n': '3', 'part': 'up'}
    """
    found = _compile(template).fullmatch(name)
    return None if found is None else found.groupdict()


def fill(template: str, gaps: dict[str, str]) -> str:
    """The template with its gaps filled in."""
    return re.sub(r"\{(\w+)\*?\}", lambda gap: gaps[gap[1]], template)


@cache
def _compile(template: str) -> re.Pattern[str]:
    pattern = ""
    for literal, gap, star in re.findall(r"([^{]+)|\{(\w+)(\*?)\}", template):
        if literal:
            pattern += re.escape(literal)
        elif star:
            pattern += f"(?P<{gap}>.+)"
        else:
            pattern += f"(?P<{gap}>\\d+)" if gap == "n" else f"(?P<{gap}>[^.]+)"
    return re.compile(pattern)

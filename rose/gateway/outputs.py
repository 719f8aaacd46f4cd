"""The outputs of a model card: which are asked for, which can be had, how long they may be cut.

Knows the card; knows neither requests nor arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rose.errors import InvalidInput, PayloadTooLarge
from rose.gateway.inputs import show
from rose.proto import rose_pb2 as pb

Kind = Literal["vector", "weights", "score"]
VECTOR: Kind = "vector"
WEIGHTS: Kind = "weights"
SCORE: Kind = "score"
# Numbers of an answer with a row a token, at most: 64 MiB of float32.
MOST_NUMBERS = 1 << 24


def kind_of(output: pb.OutputCard) -> Kind:
    """A card from before there were kinds means vectors."""
    return SCORE if output.kind == SCORE else WEIGHTS if output.kind == WEIGHTS else VECTOR


def find_output(card: pb.ModelCard, name: str) -> pb.OutputCard | None:
    for output in card.outputs:
        if output.name == name:
            return output
    return None


def output_cards(card: pb.ModelCard, names: Sequence[str]) -> list[pb.OutputCard]:
    """The cards of the asked outputs, or of the default one."""
    if not names:
        default = find_output(card, card.default_output) if card.default_output else next(iter(card.outputs), None)
        return [] if default is None else [default]
    by_name = {output.name: output for output in card.outputs}
    return [by_name[name] for name in names if name in by_name]


def check_outputs(card: pb.ModelCard, names: Sequence[str]) -> None:
    """Raises InvalidInput for an output the model does not know or cannot give, and for one asked for twice."""
    for index, name in enumerate(names):
        found = find_output(card, name)
        if found is None:
            known = ", ".join(output.name for output in card.outputs)
            raise InvalidInput(f"the model has no output {name!r}; it has: {known}", param="outputs", index=index)
        if found.unavailable:
            raise InvalidInput(f"the output {name!r} cannot be had: {found.unavailable}", param="outputs", index=index)
        if name in names[:index]:
            raise InvalidInput(f"the output {name!r} is asked for twice", param="outputs", index=index)


def is_cut(output: pb.OutputCard) -> bool:
    """Whether `dimensions` are about it: a float vector a text. Others are left whole beside it."""
    return kind_of(output) == VECTOR and output.dtype == pb.FLOAT32 and not output.per_token


def check_dimensions(card: pb.ModelCard, names: Sequence[str], dimensions: int, *, strict: bool) -> None:
    """0 keeps all. Raises InvalidInput above the length of a vector that is cut, where there is none to cut, or, if
    strict, for a length not trained for."""
    if dimensions == 0:
        return
    asked = output_cards(card, names)
    vectors = [output for output in asked if is_cut(output)]
    for output in vectors:
        if not 0 < dimensions <= output.dimension:
            raise InvalidInput(
                f"dimensions of {show(dimensions)}: 1..{output.dimension} for {output.name}",
                param="dimensions",
            )
        if strict:
            check_trained(card, dimensions, output.dimension)
    if not vectors and any(dimensions != output.dimension for output in asked):
        listed = ", ".join(output.name for output in asked)
        raise InvalidInput(
            f"dimensions of {show(dimensions)}: only a float vector a text is cut, and {listed} is none",
            param="dimensions",
        )


def check_trained(card: pb.ModelCard, dimensions: int, most: int) -> None:
    """Raises InvalidInput for a length the model was not trained for; `most` is that of the whole vector."""
    if dimensions not in (0, most) and dimensions not in card.matryoshka_dimensions:
        trained = sorted({*card.matryoshka_dimensions, most})
        raise InvalidInput(
            f"dimensions of {dimensions}: this server only gives what the model was trained for: {trained}",
            param="dimensions",
        )


def check_size(card: pb.ModelCard, names: Sequence[str], tokens: int) -> None:
    """Raises PayloadTooLarge where a vector for every token would make an answer that nobody wants to hold."""
    numbers = tokens * sum([output.dimension for output in output_cards(card, names) if output.per_token])
    if numbers > MOST_NUMBERS:
        raise PayloadTooLarge(
            f"a row for each of {tokens} tokens would make {numbers} numbers, the limit is {MOST_NUMBERS}: "
            "send fewer inputs in one request",
            param="outputs",
        )

"""The elements of `data` for a request that names its outputs: a vector, lexical weights, token vectors, side by side.

Knows outputs and their JSON; knows neither texts nor replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from rose.errors import InvalidInput
from rose.gateway.forms import Form, cut_rows
from rose.gateway.outputs import SCORE, WEIGHTS, find_output, kind_of
from rose.gateway.scoring import Lexical, lexical_items
from rose.gateway.service import Embedded, numbers
from rose.gateway.tokenizer import TextTokenizer
from rose.gateway.vectors import base64_array, for_numbers, row_values, shortest, sparse_ids
from rose.proto import rose_pb2 as pb
from rose.proto.convert import AnyArray

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Named:
    """What each item carries.

    Attributes:
        outputs: as they were asked for.
        default: the one that is called `embedding`.
        form: of that one.
        sparse_format: of lexical weights.
    """

    outputs: tuple[str, ...]
    default: str
    form: Form
    sparse_format: Literal["ids", "tokens"]

    def sources(self) -> tuple[str, ...]:
        """The outputs of the model it takes, each once."""
        return tuple(dict.fromkeys(self.form.source if name == self.default else name for name in self.outputs))


def check_kinds(card: pb.ModelCard, names: Sequence[str]) -> None:
    """Raises InvalidInput for a score, which belongs to a pair of texts."""
    for index, name in enumerate(names):
        found = find_output(card, name)
        if found is not None and kind_of(found) == SCORE:
            raise InvalidInput(
                f"the output {name!r} is the score of a pair of texts: ask /v1/rerank or /v1/score for it",
                param="outputs",
                index=index,
            )


async def named_list(card: pb.ModelCard, named: Named, done: Embedded, tokenizer: TextTokenizer, cut: int = 0) -> bytes:
    """The elements, comma separated, each with its index; from a thread where they hold many numbers.

    Args:
        cut: length that `embedding` still has to be cut to; 0 leaves it.
    """
    return await for_numbers(numbers(done), _named_list, card, named, done, tokenizer, cut)


def _named_list(card: pb.ModelCard, named: Named, done: Embedded, tokenizer: TextTokenizer, cut: int) -> bytes:
    columns = [_column(card, name, named, done, tokenizer, cut) for name in named.outputs]
    heads = [b"" if named.default in named.outputs else b',"embedding":null'] * len(done.sequences)
    pieces: list[bytes] = []
    # Joined once, however many outputs there are: a copy of 200 MB is felt.
    for i, (head, *row) in enumerate(zip(heads, *columns, strict=True)):
        pieces += [b'%b{"object":"embedding","index":%d' % (b"," if i else b"", i), head]
        for field in row:
            pieces += field
        pieces.append(b"}")
    return b"".join(pieces)


def _column(
    card: pb.ModelCard, name: str, named: Named, done: Embedded, tokenizer: TextTokenizer, cut: int
) -> list[list[bytes]]:
    """One output of every item, as a field with its name, in pieces."""
    if name == named.default:
        rows = cut_rows(card, named.form, done.result.outputs[named.form.source], cut)
        fields = named.form.fields()
        return [[b',"embedding":', value, fields] for value in row_values(rows, as_base64=named.form.base64)]
    output = find_output(card, name)
    assert output is not None  # outputs are checked before they are computed
    items = range(len(done.sequences))
    values: Iterable[bytes]
    if kind_of(output) == WEIGHTS:
        weights = [done.result.item(name, i) for i in items]
        found = lexical_items(weights, done.sequences, output.skip_tokens, tokenizer.control_ids)
        values = (_sparse(one, named, tokenizer) for one in found)
    elif output.per_token:
        values = (_matrix(done.result.item(name, i), named.form.base64) for i in items)
    elif named.form.base64:
        values = (base64_array(row) for row in done.result.outputs[name])
    else:
        values = row_values(done.result.outputs[name], as_base64=False)
    key = b",%b:" % _encode(name)
    return [[key, value] for value in values]


def _matrix(rows: AnyArray, as_base64: bool) -> bytes:
    """[tokens, dimension] of one item."""
    return base64_array(rows) if as_base64 else b"[%b]" % b",".join(row_values(rows, as_base64=False))


def _sparse(found: Lexical, named: Named, tokenizer: TextTokenizer) -> bytes:
    if named.sparse_format == "ids":
        return sparse_ids(found.ids, found.weights)
    pieces = (tokenizer.piece(number) for number in found.ids.tolist())
    return _encode(dict(zip(pieces, shortest(found.weights).tolist(), strict=True)))

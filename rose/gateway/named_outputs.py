"""The elements of `data` for a request that names its outputs: a vector, lexical weights, token vectors, side by side.

Knows outputs and their JSON; knows neither texts nor replicas.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from rose.errors import InvalidInput
from rose.gateway.forms import Form, cut_rows
from rose.gateway.outputs import SCORE, WEIGHTS, find_output, kind_of
from rose.gateway.scoring import Lexical, lexical_items
from rose.gateway.service import Embedded
from rose.gateway.tokenizer import TextTokenizer
from rose.gateway.vectors import base64_array, shortest, sparse_ids, value_list
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
    """The elements, comma separated, each with its index.

    Args:
        cut: length that `embedding` still has to be cut to; 0 leaves it.
    """
    columns = [await _column(card, name, named, done, tokenizer, cut) for name in named.outputs]
    heads = [b"" if named.default in named.outputs else b',"embedding":null'] * len(done.sequences)
    rows = zip(heads, *columns, strict=True)
    return b",".join(b'{"object":"embedding","index":%d%b}' % (i, b"".join(row)) for i, row in enumerate(rows))


async def _column(
    card: pb.ModelCard, name: str, named: Named, done: Embedded, tokenizer: TextTokenizer, cut: int
) -> list[bytes]:
    """One output of every item, as a field with its name."""
    if name == named.default:
        rows = cut_rows(card, named.form, done.result.outputs[named.form.source], cut)
        values = await value_list(rows, as_base64=named.form.base64)
        return [b',"embedding":%b%b' % (value, named.form.fields()) for value in values]
    output = find_output(card, name)
    assert output is not None  # outputs are checked before they are computed
    items = range(len(done.sequences))
    if kind_of(output) == WEIGHTS:
        weights = [done.result.item(name, i) for i in items]
        found = lexical_items(weights, done.sequences, output.skip_tokens, tokenizer.control_ids)
        values = [_sparse(one, named, tokenizer) for one in found]
    elif output.per_token:
        values = [await _matrix(done.result.item(name, i), named.form.base64) for i in items]
    elif named.form.base64:
        values = [base64_array(row) for row in done.result.outputs[name]]
    else:
        values = await value_list(done.result.outputs[name], as_base64=False)
    key = _encode(name)
    return [b",%b:%b" % (key, value) for value in values]


async def _matrix(rows: AnyArray, as_base64: bool) -> bytes:
    """[tokens, dimension] of one item."""
    if as_base64:
        await asyncio.sleep(0)
        return base64_array(rows)
    return b"[%b]" % b",".join(await value_list(rows, as_base64=False))


def _sparse(found: Lexical, named: Named, tokenizer: TextTokenizer) -> bytes:
    if named.sparse_format == "ids":
        return sparse_ids(found.ids, found.weights)
    pieces = (tokenizer.piece(number) for number in found.ids.tolist())
    return _encode(dict(zip(pieces, shortest(found.weights).tolist(), strict=True)))

"""Answers of the embeddings route as columns: what each item got, by name.

    embedding    [items, dimension]
    sparse       {"indices": [...], "values": [...]} an item
    colbert      [tokens, dimension] an item

Knows the route's JSON; knows no file.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rose.errors import InternalError

Array: TypeAlias = npt.NDArray[Any]
Cell: TypeAlias = Array | Mapping[str, Any]
EMBEDDING = "embedding"
# Fields of an item that describe it, and are no output.
_ABOUT = {"object", "index", "dtype", "bit_order"}


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request got.

    Attributes:
        columns: output name -> one cell an item.
        tokens: as the server counted them.
        prompt: name of the prompt it put before the texts, or None.
    """

    columns: Mapping[str, Sequence[Cell]]
    tokens: int
    prompt: str | None

    @property
    def items(self) -> int:
        return len(next(iter(self.columns.values())))


def read_answer(answer: Any, items: int) -> Answer:
    """Raises InternalError for anything but one entry an item, in order."""
    try:
        data = answer["data"]
        if [entry["index"] for entry in data] != list(range(items)):
            raise InternalError(f"the server answered {len(data)} items where {items} were due")
        names = [name for name in data[0] if name not in _ABOUT and data[0][name] is not None]
        columns = {name: [_cell(entry[name], entry) for entry in data] for name in names}
        return Answer(columns, int(answer["usage"]["prompt_tokens"]), answer.get("prompt_name"))
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise InternalError(f"the server's answer is not of the embeddings route: {error!r}") from None


def join_answers(answers: Sequence[Answer]) -> Answer:
    """Answers of consecutive items as one."""
    columns = {name: [cell for one in answers for cell in one.columns[name]] for name in answers[0].columns}
    return Answer(columns, sum(one.tokens for one in answers), answers[0].prompt)


def _cell(value: Any, entry: Mapping[str, Any]) -> Cell:
    if isinstance(value, str):
        return np.frombuffer(base64.b64decode(value), _DTYPES[entry.get("dtype", "float32")])
    if isinstance(value, list):
        return np.array(value, dtype=np.float32)
    if "data" in value:
        found = np.frombuffer(base64.b64decode(value["data"]), np.dtype(value["dtype"]).newbyteorder("<"))
        return found.reshape(value["shape"])
    if "indices" in value:
        return {"indices": [int(i) for i in value["indices"]], "values": [float(v) for v in value["values"]]}
    raise InternalError(f"the server's answer holds an output of an unknown shape: {sorted(value)}")


_DTYPES = {"float32": "<f4", "int8": "i1", "uint8": "u1", "binary": "i1", "ubinary": "u1"}

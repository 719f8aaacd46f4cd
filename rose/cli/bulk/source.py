"""Texts of a file or of standard input, one after the other: lines, JSON lines, or a column of a Parquet file.

Every refusal names the file and the line or row. Knows file formats; knows nothing of what becomes of the texts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from rose.errors import InvalidInput

InForm = Literal["lines", "jsonl", "parquet"]
FORMS: dict[str, InForm] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
_CHUNK = 1 << 20
_BOM = b"\xef\xbb\xbf"
_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Item:
    """One text.

    Attributes:
        number: its line or row in the file, counted from 1.
        id: what the file says it is called, or None.
    """

    text: str
    number: int
    id: str | int | None = None


class Source:
    """A file of texts, or standard input ("-").

    Args:
        form: how the file is written; None goes by its name, and means lines for any other.
        field: key of a JSON line, or column, that holds the text.
        id_field: key or column that holds an id to be passed on, or None.

    Raises:
        InvalidInput: no such file, or a form that cannot be read from standard input.
    """

    def __init__(self, name: str, form: InForm | None = None, field: str = "text", id_field: str | None = None) -> None:
        self.name = name
        self.form = form or FORMS.get(Path(name).suffix.lower(), "lines")
        self._field = field
        self._id_field = id_field
        self.is_stdin = name == "-"
        if self.is_stdin and self.form == "parquet":
            raise InvalidInput("a Parquet file cannot be read from standard input: give its path")
        if not self.is_stdin and not Path(name).is_file():
            raise InvalidInput(f"there is no file {name}")
        if id_field is not None and self.form == "lines":
            raise InvalidInput("lines of text have no ids: --id-field is for JSON lines and Parquet")

    def where(self, number: int) -> str:
        unit = "row" if self.form == "parquet" else "line"
        return f"{'standard input' if self.is_stdin else self.name}, {unit} {number}"

    def count(self) -> int | None:
        """Lines or rows, for the progress bar; None where they cannot be counted beforehand."""
        if self.is_stdin:
            return None
        if self.form == "parquet":
            return int(_parquet(self.name).metadata.num_rows)
        lines, last = 0, b"\n"
        with Path(self.name).open("rb") as file:
            while chunk := file.read(_CHUNK):
                lines += chunk.count(b"\n")
                last = chunk[-1:]
        return lines + (last != b"\n")

    def check_first(self) -> None:
        """Read the first text of a file, so that a wrong file is found before a model is loaded for it.

        Raises:
            InvalidInput: there is none, or it cannot be read. Of standard input only whoever embeds it knows.
        """
        if not self.is_stdin and next(self.items(), None) is None:
            raise self.empty()

    def empty(self) -> InvalidInput:
        return InvalidInput(f"{'standard input' if self.is_stdin else self.name}: there is no text in it")

    def items(self) -> Iterator[Item]:
        """Raises InvalidInput, when it gets there, for what is no text or an empty one."""
        for item in self._rows() if self.form == "parquet" else self._lines():
            if not item.text:
                raise InvalidInput(f"{self.where(item.number)}: the text is empty")
            yield item

    def _lines(self) -> Iterator[Item]:
        with self._open() as file:
            for number, raw in enumerate(file, 1):
                line = self._decoded(raw.removeprefix(_BOM) if number == 1 else raw, number)
                if self.form == "lines":
                    yield Item(line, number)
                elif line.strip():
                    yield self._parsed(line, number)

    def _open(self) -> AbstractContextManager[BinaryIO]:
        return nullcontext(sys.stdin.buffer) if self.is_stdin else Path(self.name).open("rb")

    def _decoded(self, raw: bytes, number: int) -> str:
        try:
            return raw.removesuffix(b"\n").removesuffix(b"\r").decode()
        except UnicodeDecodeError as error:
            raise InvalidInput(f"{self.where(number)} is no UTF-8: {error.reason} at byte {error.start}") from None

    def _parsed(self, line: str, number: int) -> Item:
        try:
            value = json.loads(line)
        except ValueError as error:
            raise InvalidInput(f"{self.where(number)} is no JSON: {error}") from None
        if not isinstance(value, dict):
            raise InvalidInput(f"{self.where(number)} is no JSON object")
        for key in (self._field, self._id_field):
            if key is not None and key not in value:
                raise InvalidInput(f"{self.where(number)} has no {key!r}; it has: {', '.join(value) or 'nothing'}")
        text = self._text(value[self._field], number)
        return Item(text, number, self._id(value[self._id_field], number) if self._id_field else None)

    def _rows(self) -> Iterator[Item]:
        file = _parquet(self.name)
        wanted = [name for name in (self._field, self._id_field) if name is not None]
        for name in wanted:
            if name not in file.schema_arrow.names:
                known = ", ".join(file.schema_arrow.names)
                raise InvalidInput(f"{self.name} has no column {name!r}; it has: {known}")
        number = 0
        for batch in file.iter_batches(batch_size=_ROWS, columns=wanted):
            columns = [batch.column(name).to_pylist() for name in wanted]
            for row in zip(*columns, strict=True):
                number += 1
                yield Item(self._text(row[0], number), number, self._id(row[-1], number) if self._id_field else None)

    def _id(self, value: object, number: int) -> str | int:
        if isinstance(value, bool) or not isinstance(value, (str, int)):
            kind = type(value).__name__
            raise InvalidInput(
                f"{self.where(number)}: {self._id_field!r} is neither text nor a whole number but {kind}"
            )
        return value

    def _text(self, value: object, number: int) -> str:
        if not isinstance(value, str):
            raise InvalidInput(f"{self.where(number)}: {self._field!r} is no text but {type(value).__name__}")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidInput(f"{self.where(number)}: the text holds a lone surrogate") from None
        return value


def _parquet(name: str) -> Any:
    from pyarrow import ArrowInvalid, parquet

    try:
        return parquet.ParquetFile(name)
    except ArrowInvalid as error:
        raise InvalidInput(f"{name} is no Parquet file: {error}") from None

"""How rows are written: JSON lines, a .npy array, a Parquet file. Each can be appended to and cut off at any row.

    start -> bytes before the first row; rows -> bytes of some; finish -> a file as it is meant to be

What `finish` leaves behind at the path of the rows can be gone on with and finished again, wherever it was stopped.

Parquet has its index at the end and cannot be appended to, so its rows are kept as an Arrow stream meanwhile. Knows
formats; knows neither where the bytes lie nor how far the work has come.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from rose.cli.bulk.answers import EMBEDDING, Answer, Array, Cell
from rose.cli.bulk.source import Item
from rose.errors import Unsupported

OutForm = Literal["jsonl", "npy", "parquet"]
# A row group of a Parquet file: as many rows as readers like to have at once, and no more bytes than fit into memory.
GROUP_ROWS = 65_536
GROUP_BYTES = 256 << 20
FORMS: dict[str, OutForm] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".npy": "npy", ".parquet": "parquet"}


class Form(Protocol):
    """One format."""

    def start(self, items: Sequence[Item], answer: Answer) -> bytes:
        """What stands before the first row; a first answer says what rows there will be."""
        ...

    def rows(self, first: int, items: Sequence[Item], answer: Answer) -> bytes:
        """The rows of one answer, of which the first has index `first`."""
        ...

    def finish(self, path: Path, rows: int) -> Path:
        """The file as it is meant to be, out of the rows at `path`: that path itself, or one beside it."""
        ...


def form_for(name: OutForm) -> Form:
    forms: dict[OutForm, Form] = {"jsonl": JsonLines(), "npy": Npy(), "parquet": Parquet()}
    return forms[name]


class JsonLines:
    """{"index": 0, "embedding": [...]}, with the item's id where it has one, and one key an output."""

    def start(self, items: Sequence[Item], answer: Answer) -> bytes:
        return b""

    def rows(self, first: int, items: Sequence[Item], answer: Answer) -> bytes:
        lines = []
        for offset, item in enumerate(items):
            row: dict[str, Any] = {"index": first + offset}
            if item.id is not None:
                row["id"] = item.id
            row |= {name: _plain(cells[offset]) for name, cells in answer.columns.items()}
            lines.append(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n")
        return "".join(lines).encode()

    def finish(self, path: Path, rows: int) -> Path:
        return path


class Npy:
    """[rows, dimension] of the embedding alone, in the texts' order."""

    def start(self, items: Sequence[Item], answer: Answer) -> bytes:
        if list(answer.columns) != [EMBEDDING]:
            raise Unsupported(f"a .npy file holds one array, not {', '.join(answer.columns)}: write .jsonl or .parquet")
        return _npy_header(0, np.asarray(answer.columns[EMBEDDING][0]))

    def rows(self, first: int, items: Sequence[Item], answer: Answer) -> bytes:
        return np.stack([np.asarray(cell) for cell in answer.columns[EMBEDDING]]).tobytes()

    def finish(self, path: Path, rows: int) -> Path:
        """Put the number of rows, which nobody knew before, into the header."""
        with path.open("r+b") as file:
            version = np.lib.format.read_magic(file)
            assert version == (1, 0)
            (_, width), _, dtype = np.lib.format.read_array_header_1_0(file)
            end = file.tell()
            header = _npy_header(rows, np.empty(width, dtype))
            assert len(header) == end, "numpy leaves room for the first axis to grow"
            file.seek(0)
            file.write(header)
        return path


class Parquet:
    """A column an output: fixed-size lists, {indices, values}, or lists of fixed-size lists; index and id beside."""

    def start(self, items: Sequence[Item], answer: Answer) -> bytes:
        return bytes(self._batch(0, items, answer).schema.serialize())

    def rows(self, first: int, items: Sequence[Item], answer: Answer) -> bytes:
        return bytes(self._batch(first, items, answer).serialize())

    def finish(self, path: Path, rows: int) -> Path:
        import pyarrow as pa
        from pyarrow import parquet

        made = path.with_name(f"{path.name}.parquet")
        try:
            with pa.ipc.open_stream(path) as stream, parquet.ParquetWriter(made, stream.schema) as writer:
                for batches in _groups(stream):
                    writer.write_table(pa.Table.from_batches(batches))
        except OSError:  # a full disk has no room for half of it
            made.unlink(missing_ok=True)
            raise
        return made

    def _batch(self, first: int, items: Sequence[Item], answer: Answer) -> Any:
        import pyarrow as pa

        columns = {"index": pa.array(range(first, first + len(items)), pa.int64())}
        if items[0].id is not None:
            columns["id"] = pa.array([str(item.id) for item in items])  # a column has one type, whatever the file had
        columns |= {name: _arrow(cells) for name, cells in answer.columns.items()}
        return pa.record_batch(columns)


def _groups(stream: Iterable[Any]) -> Iterator[list[Any]]:
    """Record batches of a request each, put together to row groups: full ones, but for the last."""
    group: list[Any] = []
    rows, size = 0, 0
    for batch in stream:
        group.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if rows >= GROUP_ROWS or size >= GROUP_BYTES:
            yield group
            group, rows, size = [], 0, 0
    if group:
        yield group


def _npy_header(rows: int, row: Array) -> bytes:
    buffer = io.BytesIO()
    described = {"descr": np.lib.format.dtype_to_descr(row.dtype), "fortran_order": False, "shape": (rows, len(row))}
    np.lib.format.write_array_header_1_0(buffer, described)
    return buffer.getvalue()


def _plain(cell: Cell) -> Any:
    """A cell as JSON; float32 with the fewest digits that give it back."""
    from rose.gateway.vectors import shortest

    return cell if isinstance(cell, Mapping) else shortest(cell).tolist()


def _arrow(cells: Sequence[Cell]) -> Any:
    import pyarrow as pa

    first = cells[0]
    if isinstance(first, Mapping):
        weights = pa.struct([("indices", pa.list_(pa.int32())), ("values", pa.list_(pa.float32()))])
        return pa.array(cells, weights)
    arrays = [np.asarray(cell) for cell in cells]
    if first.ndim == 1:
        return pa.FixedSizeListArray.from_arrays(pa.array(np.concatenate(arrays)), len(first))
    rows = np.concatenate(arrays)
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), rows.shape[1])
    ends = np.cumsum([0, *(len(array) for array in arrays)])
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), vectors)

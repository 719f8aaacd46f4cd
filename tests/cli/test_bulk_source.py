"""Texts come out of each form as they went in, and what is none is refused with its place."""

from __future__ import annotations

import io
import json

import pyarrow as pa
import pytest
from pyarrow import parquet

from rose.cli.bulk.source import Source
from rose.errors import InvalidInput

TEXTS = ["first", " spaces kept  ", "tab\tin it", "你好 🙂", "\u2028 no line end \x85"]


def texts(source: Source) -> list[str]:
    return [item.text for item in source.items()]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("closed", [True, False])
def test_lines(tmp_path, end, closed):
    path = tmp_path / "t.txt"
    path.write_bytes(("\ufeff" + end.join(TEXTS) + end * closed).encode())
    source = Source(str(path))
    assert texts(source) == TEXTS
    assert [item.number for item in source.items()] == [1, 2, 3, 4, 5]
    assert source.count() == 5


def test_json_lines_and_their_ids(tmp_path):
    path = tmp_path / "t.ndjson"
    rows = [json.dumps({"body": text, "key": i, "else": None}) for i, text in enumerate(TEXTS)]
    path.write_text(rows[0] + "\n\n" + "\n".join(rows[1:]))
    items = list(Source(str(path), field="body", id_field="key").items())
    assert [item.text for item in items] == TEXTS
    assert [item.id for item in items] == [0, 1, 2, 3, 4]
    assert [item.number for item in items] == [1, 3, 4, 5, 6]


def test_a_column_of_a_parquet_file(tmp_path):
    many = TEXTS * 1000
    parquet.write_table(pa.table({"text": many, "n": range(5000)}), tmp_path / "t.parquet", row_group_size=700)
    source = Source(str(tmp_path / "t.parquet"), id_field="n")
    assert source.count() == 5000
    items = list(source.items())
    assert [item.text for item in items] == many
    assert (items[-1].number, items[-1].id) == (5000, 4999)


def test_standard_input_is_read_as_it_comes(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'{"text": "a"}\n{"text": "b"}')))
    source = Source("-", "jsonl")
    assert source.count() is None
    assert texts(source) == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("t.txt", b"a\n\nb\n", r"t\.txt, line 2: the text is empty"),
        ("t.txt", b"a\nb\xff\n", r"t\.txt, line 2 is no UTF-8: invalid start byte at byte 1"),
        ("t.jsonl", b'{"text": "a"}\n{"text": ', r"line 2 is no JSON: "),
        ("t.jsonl", b'"a"\n', r"line 1 is no JSON object"),
        ("t.jsonl", b'{"body": "a"}\n', r"line 1 has no 'text'; it has: body"),
        ("t.jsonl", b'{"text": 5}\n', r"line 1: 'text' is no text but int"),
        ("t.jsonl", b'{"text": ""}\n', r"line 1: the text is empty"),
        ("t.jsonl", b'{"text": "\\ud800"}\n', r"line 1: the text holds a lone surrogate"),
        ("t.parquet", b"PAR0", r"t\.parquet is no Parquet file"),
    ],
)
def test_what_is_no_text_is_refused_with_its_place(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InvalidInput, match=message):
        texts(Source(str(tmp_path / name)))


def test_rows_that_are_no_text(tmp_path):
    path = tmp_path / "t.parquet"
    parquet.write_table(pa.table({"text": ["a", None], "n": [1.5, 2.5]}), path)
    with pytest.raises(InvalidInput, match="row 2: 'text' is no text but NoneType"):
        texts(Source(str(path)))
    with pytest.raises(InvalidInput, match=r"has no column 'body'; it has: text, n"):
        texts(Source(str(path), field="body"))
    with pytest.raises(InvalidInput, match="row 1: 'n' is neither text nor a whole number but float"):
        texts(Source(str(path), id_field="n"))


def test_what_cannot_be_opened_is_refused_before_anything_is_started(tmp_path):
    with pytest.raises(InvalidInput, match="there is no file"):
        Source(str(tmp_path / "nothing.txt"))
    with pytest.raises(InvalidInput, match="cannot be read from standard input"):
        Source("-", "parquet")

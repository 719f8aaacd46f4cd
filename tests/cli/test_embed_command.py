"""`rose embed` against a server whose answers are known: every form in and out, what is asked for, and faults."""

from __future__ import annotations

import io
import json
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from pyarrow import parquet

from rose import cli
from tests.support.embedding_command import TEXTS, embed, expected, left_behind, rows_of
from tests.support.scripted_api import refusal


def test_lines_to_an_array(api, texts, tmp_path, capsys):
    assert embed(api, texts, "-o", tmp_path / "v.npy") == 0
    found = np.load(tmp_path / "v.npy")
    assert found.dtype == np.float32
    assert np.array_equal(found, expected())
    assert left_behind(tmp_path) == []
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"300 texts, {sum(map(len, TEXTS))} tokens, ")


def test_json_lines_keep_ids_and_give_back_the_very_float32(api, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"key": f"d{i}", "body": text}) + "\n\n" for i, text in enumerate(TEXTS)))
    assert embed(api, source, "--field", "body", "--id-field", "key", "-o", tmp_path / "v.jsonl") == 0
    rows = rows_of(tmp_path / "v.jsonl")
    assert [(row["index"], row["id"]) for row in rows] == [(i, f"d{i}") for i in range(300)]
    assert np.array_equal(np.array([row["embedding"] for row in rows], np.float32), expected())


def test_parquet_in_and_out_with_every_kind_of_output(api, tmp_path):
    import pyarrow as pa

    parquet.write_table(pa.table({"n": range(300), "text": TEXTS}), tmp_path / "in.parquet")
    outputs = ["--outputs", "dense,sparse,colbert", "--dimensions", "4"]
    assert embed(api, tmp_path / "in.parquet", "--id-field", "n", "-o", tmp_path / "v.parquet", *outputs) == 0
    table = parquet.read_table(tmp_path / "v.parquet")
    assert table.column("index").to_pylist() == list(range(300))
    assert table.column("id").to_pylist() == [str(i) for i in range(300)]
    assert np.array_equal(np.array(table.column("embedding").to_pylist(), np.float32), expected(dimension=4))
    assert table.schema.field("embedding").type.list_size == 4
    assert table.column("sparse").to_pylist()[5] == {"indices": [len(TEXTS[5]), 7], "values": [0.5, 0.25]}
    for text, rows in zip(TEXTS, table.column("colbert").to_pylist(), strict=True):
        assert rows == np.arange(len(text) * 2, dtype=np.float32).reshape(-1, 2).tolist()


@pytest.mark.parametrize(
    ("limit", "expected_groups"),
    [({}, [1000]), ({"GROUP_ROWS": 256}, [256, 256, 256, 232]), ({"GROUP_BYTES": 5000}, [128] * 7 + [104])],
)
def test_row_groups_hold_many_requests(api, tmp_path, monkeypatch, limit, expected_groups):
    """128 texts of 8 float32 and an index are 5120 bytes."""
    from rose.cli.bulk import forms

    for name, value in limit.items():
        monkeypatch.setattr(forms, name, value)
    many = [f"text {i}" for i in range(1000)]
    (tmp_path / "t.txt").write_text("\n".join(many))
    assert embed(api, tmp_path / "t.txt", "-o", tmp_path / "v.parquet") == 0
    metadata = parquet.ParquetFile(tmp_path / "v.parquet").metadata
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == expected_groups
    table = parquet.read_table(tmp_path / "v.parquet")
    assert np.array_equal(np.array(table.column("embedding").to_pylist(), np.float32), expected(many))


def test_outputs_without_the_vector(api, texts, tmp_path):
    assert embed(api, texts, "-o", tmp_path / "v.jsonl", "--outputs", "sparse") == 0
    assert rows_of(tmp_path / "v.jsonl")[3] == {
        "index": 3,
        "sparse": {"indices": [len(TEXTS[3]), 7], "values": [0.5, 0.25]},
    }


def test_standard_input_to_standard_output(api, monkeypatch, capfdbinary):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("eins\r\nzwei\n\ufeffdrei".encode())))
    assert embed(api, "-") == 0
    rows = [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()]
    assert [row["index"] for row in rows] == [0, 1, 2]
    texts = ["eins", "zwei", "\ufeffdrei"]  # only at the very start is it a mark and no text
    assert np.array_equal(np.array([row["embedding"] for row in rows], np.float32), expected(texts))


def test_what_is_asked_for_reaches_the_server(api, texts, tmp_path, capsys):
    options = ["--prompt-name", "query", "--dimensions", "4", "--truncate"]
    assert embed(api, texts, "-o", tmp_path / "v.npy", *options) == 0
    assert {tuple(sorted(set(body) - {"input"})) for body in api.requests} == {
        ("dimensions", "encoding_format", "model", "priority", "prompt_name", "truncate")
    }
    body = api.requests[0]
    assert (body["model"], body["prompt_name"], body["dimensions"], body["truncate"]) == ("tiny", "query", 4, True)
    assert "prompt 'query'" in capsys.readouterr().err
    assert np.load(tmp_path / "v.npy").shape == (300, 4)


def test_another_server_of_the_api_is_sent_nothing_it_may_not_know(api, texts, tmp_path):
    api.models = [{"id": "other", "owned_by": "somebody"}]
    assert embed(api, texts, "-o", tmp_path / "v.npy") == 0
    assert set(api.requests[0]) == {"input", "model", "encoding_format"}


def test_batches_are_bounded_in_items_and_characters(api, tmp_path):
    texts = ["x" * 40_000, "y" * 40_000, "z" * 100_000, *("short" for _ in range(200))]
    (tmp_path / "t.txt").write_text("\n".join(texts))
    assert embed(api, tmp_path / "t.txt", "-o", tmp_path / "v.npy") == 0
    sizes = sorted(len(body["input"]) for body in api.requests)
    assert sizes == [1, 1, 1, 72, 128]
    assert np.array_equal(np.load(tmp_path / "v.npy"), expected(texts))


def test_a_request_that_is_too_large_is_halved(api, texts, tmp_path):
    def at_most_fifty(body):
        return refusal(413, "payload_too_large", "too many") if len(body["input"]) > 50 else None

    api.fault = at_most_fifty
    assert embed(api, texts, "-o", tmp_path / "v.npy") == 0
    assert np.array_equal(np.load(tmp_path / "v.npy"), expected())


def test_a_server_that_is_not_there_is_told_of_at_once(api, texts, tmp_path, monkeypatch, capsys):
    """One line after the first try, and none after those that follow; the reason ends the command."""
    from rose.cli.bulk import options
    from rose.cli.bulk.api import Api

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # held and not listened to: nobody answers there
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        monkeypatch.setattr(options, "Api", lambda url, tell: Api(url, patience_s=2.0, tell=tell))
        assert cli.main(["embed", str(texts), "--server", url]) == 2
    shown = capsys.readouterr().err.splitlines()
    refused = f"rose: no answer from {url}: [Errno 111] Connection refused"
    assert shown == [f"{refused}; trying again for 2 s", refused]


def test_a_full_server_is_nothing_to_tell_of(api, texts, tmp_path, capsys):
    faults = [(429, {"error": {"message": "full", "code": "overloaded"}}, {})]
    api.fault = lambda body: faults.pop() if faults else None
    assert embed(api, texts, "-o", tmp_path / "v.npy") == 0
    assert capsys.readouterr().err.startswith("300 texts, ")


def test_a_full_server_and_a_lost_connection_are_tried_again(api, texts, tmp_path):
    faults = [(503, {"error": {"message": "starting", "code": "unavailable"}}, {"Retry-After": "0"}), "hang up"]
    api.fault = lambda body: faults.pop() if faults else None
    assert embed(api, texts, "-o", tmp_path / "v.npy") == 0
    assert faults == []
    assert np.array_equal(np.load(tmp_path / "v.npy"), expected())


@pytest.mark.parametrize(("command", "field"), [("embed", "input"), ("rerank", "documents")])
@pytest.mark.parametrize("placed", [True, False])
def test_a_refusal_names_the_option_and_not_the_field_of_the_route(api, texts, capsys, command, field, placed):
    def too_long(body):
        index = body[field].index(TEXTS[7]) if placed else None
        reason = "600 tokens, the limit is 512; shorten it or send truncate=true"
        return refusal(400, "invalid_input", reason, param=field, index=index)

    texts.write_text("".join(f"{text}\n" for text in TEXTS[:9]), encoding="utf-8")
    api.fault = too_long
    asked = ["a query"] if command == "rerank" else []
    assert cli.main([command, *asked, str(texts), "--server", api.url]) == 2
    place = f"{texts}, line 8: " if placed else ""
    assert capsys.readouterr().err == f"rose: {place}600 tokens, the limit is 512; shorten it or use --truncate\n"


def test_an_output_that_is_there_is_kept_unless_told_otherwise(api, texts, tmp_path, capsys):
    out = tmp_path / "v.npy"
    out.write_bytes(b"mine")
    assert embed(api, texts, "-o", out) == 2
    assert f"{out} is there already; --overwrite replaces it" in capsys.readouterr().err
    assert out.read_bytes() == b"mine"
    assert embed(api, texts, "-o", out, "--overwrite") == 0
    assert np.array_equal(np.load(out), expected())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-o", "v.bin"], "cannot be told from its name: use --to"),
        (["--to", "npy"], "npy needs a file to go to"),
        (["-o", "no/such/folder/v.npy"], "cannot write no/such/folder/v.npy.partial: No such file or directory"),
        (["-o", "v.npy", "--outputs", "sparse"], "a .npy file holds one array, not sparse"),
        (["-o", "v.npy", "--num-threads", "1"], "--num-threads is for an engine that is started here"),
        (["-o", "v.npy", "--id-field", "id"], "lines of text have no ids"),
    ],
)
def test_wrong_requests_are_one_line(api, texts, tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.chdir(tmp_path)
    assert embed(api, texts, *options) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1
    assert left_behind(tmp_path) == []


def test_a_server_with_several_models_needs_a_name(api, texts, tmp_path, capsys):
    api.models = [{"id": "a"}, {"id": "b"}]
    assert embed(api, texts, "-o", tmp_path / "v.npy") == 2
    assert "serves a, b: name one with --model" in capsys.readouterr().err
    assert embed(api, texts, "-o", tmp_path / "v.npy", "--model", "b") == 0
    assert api.requests[0]["model"] == "b"


def test_a_server_that_is_no_address_or_not_there(texts, capsys, monkeypatch):
    monkeypatch.setattr("rose.cli.bulk.api.PATIENCE_S", 0.0)
    assert cli.main(["embed", str(texts), "--server", "ftp://x"]) == 2
    assert "'ftp://x' is no address of a server" in capsys.readouterr().err


def test_the_answers_of_other_routes_are_refused(api, texts, tmp_path, capsys):
    api.answer = lambda path, body: {"data": [{"index": 1, "embedding": "AAAA"}]}
    assert embed(api, texts, "-o", tmp_path / "v.npy") == 2
    assert "answered 1 items where" in capsys.readouterr().err
    api.answer = lambda path, body: {"hello": 1}
    assert embed(api, texts, "-o", tmp_path / "v.npy") == 2
    assert "not of the embeddings route" in capsys.readouterr().err


def test_a_reader_that_goes_away_ends_the_command_quietly(api, tmp_path):
    (tmp_path / "t.txt").write_text("\n".join(TEXTS * 20))
    command = [sys.executable, "-m", "rose.cli", "embed", str(tmp_path / "t.txt"), "--server", api.url]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(30) == 141
    assert process.stderr.read() == b""
    process.stderr.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
def test_an_output_that_is_full_is_a_line(api, texts):
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-m", "rose.cli", "embed", str(texts), "--server", api.url]
        process = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (process.returncode, process.stderr) == (
        2,
        "rose: the output cannot be written: No space left on device\n",
    )

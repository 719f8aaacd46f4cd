"""`rose embed` that was stopped, killed, refused or begun otherwise: what it keeps, and what it goes on with."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from rose.cli.bulk import run as bulk_run
from tests.support.embedding_command import TEXTS, asked_again, embed, expected, left_behind, rows_of
from tests.support.scripted_api import refusal


def test_a_bad_text_is_named_with_its_line_and_what_comes_before_it_is_kept(api, texts, tmp_path, capsys):
    bad = TEXTS[200]

    def refuse(body):
        if bad in body["input"]:
            return refusal(400, "invalid_input", "600 tokens", param="input", index=body["input"].index(bad))
        return None

    api.fault = refuse
    assert embed(api, texts, "-o", tmp_path / "v.npy") == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "rose: done so far: 128 texts; the same command goes on there",
        f"rose: {texts}, line 201: 600 tokens",
    ]
    assert not (tmp_path / "v.npy").exists()
    api.fault = lambda body: None
    assert not asked_again(api, TEXTS[:128], lambda: embed(api, texts, "-o", tmp_path / "v.npy"))
    assert np.array_equal(np.load(tmp_path / "v.npy"), expected())


@pytest.mark.parametrize("form", ["npy", "jsonl", "parquet"])
def test_an_interrupted_run_goes_on_where_it_stopped(api, texts, tmp_path, monkeypatch, capsys, form):
    """Stopped at every batch in turn, the last of them after its rows were written and before they were recorded."""
    monkeypatch.setattr(bulk_run, "BATCH_ITEMS", 64)
    whole, stopped = tmp_path / f"whole.{form}", tmp_path / f"stopped.{form}"
    assert embed(api, texts, "-o", whole) == 0
    asked = api.texts
    for done in range(1, 5):
        with monkeypatch.context() as patch:
            patch.setattr("rose.cli.embed.text_bar", interrupting(done * 64))
            assert embed(api, texts, "-o", stopped) == 130
        assert not stopped.exists()
        assert f"done so far: {done * 64} texts" in capsys.readouterr().err
        with (tmp_path / f"{stopped.name}.partial").open("ab") as partial:
            partial.write(b"half a row that was never recorded")
    assert embed(api, texts, "-o", stopped) == 0
    assert "(256 of an earlier run before them)" in capsys.readouterr().err
    assert stopped.read_bytes() == whole.read_bytes()
    assert left_behind(tmp_path) == []
    # Nothing that was recorded was asked for again; up to IN_FLIGHT requests were under way at each stop.
    assert api.texts - asked <= 300 + 4 * bulk_run.IN_FLIGHT * 64


def interrupting(rows: int):
    """A progress bar that raises KeyboardInterrupt once so many rows are done."""
    from contextlib import contextmanager

    @contextmanager
    def bar(total):
        def advance(done, tokens):
            if done >= rows:
                raise KeyboardInterrupt

        yield advance

    return bar


@pytest.mark.parametrize("form", ["npy", "jsonl", "parquet"])
@pytest.mark.parametrize("full", ["rows", "record", "finish"])
def test_a_full_disk_is_a_line_and_loses_nothing(api, texts, tmp_path, monkeypatch, capsys, form, full):
    """No room for the rows of a batch, for the record behind them, or for the file that is made of them."""
    monkeypatch.setattr(bulk_run, "BATCH_ITEMS", 64)
    whole, stopped = tmp_path / f"whole.{form}", tmp_path / f"stopped.{form}"
    assert embed(api, texts, "-o", whole) == 0
    with monkeypatch.context() as patch:
        fill_up(patch, full, after=2)
        assert embed(api, texts, "-o", stopped) == 2
    done = len(TEXTS) if full == "finish" else 128
    assert capsys.readouterr().err.splitlines()[-2:] == [
        f"rose: done so far: {done} texts; the same command goes on there",
        f"rose: cannot write {stopped}.partial: {os.strerror(errno.ENOSPC)}",
    ]
    assert {path.name for path in tmp_path.iterdir() if path.name.startswith("stopped")} == {
        f"{stopped.name}.partial",
        f"{stopped.name}.partial.json",
    }
    assert not asked_again(api, TEXTS[:done], lambda: embed(api, texts, "-o", stopped))
    assert stopped.read_bytes() == whole.read_bytes()
    assert left_behind(tmp_path) == []


def fill_up(patch, full, after):
    """A disk that is full from the third batch on."""
    no_room = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    count = iter(range(1000))

    def refuse(*_, **__):
        raise no_room

    if full == "rows":

        class Full(io.FileIO):
            def write(self, data):
                if next(count) >= after:
                    super().write(bytes(data)[:10])
                    raise no_room
                return super().write(data)

        patch.setattr("rose.cli.bulk.resume.FileIO", Full)
    elif full == "record":
        write_text = Path.write_text

        def write_some(path, text, **how):
            if path.name.endswith(".tmp") and next(count) >= after:
                write_text(path, text[:10], **how)
                raise no_room
            return write_text(path, text, **how)

        patch.setattr(Path, "write_text", write_some)
    else:
        patch.setattr("rose.cli.bulk.resume.os.fsync", refuse)


@pytest.mark.parametrize("form", ["npy", "jsonl", "parquet"])
@pytest.mark.parametrize("step", ["finish", "fsync", "replace", "unlink"])
def test_a_run_that_is_stopped_while_it_finishes_loses_nothing(api, texts, tmp_path, monkeypatch, capsys, form, step):
    """All rows are there: the same command asks for none of them again, wherever before the rename it was stopped."""
    whole, out = tmp_path / f"whole.{form}", tmp_path / f"v.{form}"
    assert embed(api, texts, "-o", whole) == 0
    with monkeypatch.context() as patch:
        stop_at(patch, step, form, out)
        assert embed(api, texts, "-o", out) == 130
    assert out.exists() == (step == "unlink")
    assert ("done so far: 300 texts" in capsys.readouterr().err) == (step != "unlink")
    if step == "unlink":  # published: what is left of the run stands in nobody's way
        assert out.read_bytes() == whole.read_bytes()
        assert embed(api, texts, "-o", out, "--overwrite") == 0
    else:
        assert not asked_again(api, TEXTS, lambda: embed(api, texts, "-o", out))
    assert out.read_bytes() == whole.read_bytes()
    assert left_behind(tmp_path) == []


def stop_at(patch, step: str, form: str, out: Path) -> None:
    """KeyboardInterrupt half way through a form's last touch, or at a system call of the publishing."""
    from rose.cli.bulk import forms, resume

    def interrupt(*arguments, **named):
        raise KeyboardInterrupt

    kind = {"npy": forms.Npy, "jsonl": forms.JsonLines, "parquet": forms.Parquet}[form]
    if step == "finish":
        finish = kind.finish
        patch.setattr(kind, "finish", lambda self, path, rows: (finish(self, path, rows), interrupt())[0])
    elif step == "fsync":
        patch.setattr(resume.os, "fsync", interrupt)
    else:
        original = getattr(Path, step)
        last = out if step == "replace" else out.with_name(f"{out.name}.partial.json")

        def stopping(self, *arguments, **named):
            if last in (self, *arguments):
                raise KeyboardInterrupt
            return original(self, *arguments, **named)

        patch.setattr(Path, step, stopping)


def test_a_killed_process_loses_nothing_that_was_recorded(api, texts, tmp_path):
    out = tmp_path / "v.jsonl"
    api.fault = lambda body: (time.sleep(0.1), None)[1]
    command = [sys.executable, "-c", _SMALL_BATCHES, "embed", str(texts), "-o", str(out), "--server", api.url]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    record = tmp_path / "v.jsonl.partial.json"
    deadline = time.monotonic() + 30
    while not record.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = json.loads(record.read_text())["rows"]
    assert 0 < done < 300
    assert not asked_again(api, TEXTS[:done], lambda: embed(api, texts, "-o", out))
    assert [row["index"] for row in rows_of(out)] == list(range(300))
    assert np.array_equal(np.array([row["embedding"] for row in rows_of(out)], np.float32), expected())


_SMALL_BATCHES = "import sys; from rose.cli import main; from rose.cli.bulk import run; run.BATCH_ITEMS = 8; main()"


def begun(api, texts, out, *options) -> None:
    """A run that stopped after its first batch."""
    api.fault = lambda body: None if TEXTS[0] in body["input"] else refusal(400, "invalid_input", "no")
    assert embed(api, texts, "-o", out, *options) == 2
    api.fault = lambda body: None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dimensions", "4"], "was begun with dimensions None, not 4; --restart begins anew"),
        (["--prompt-name", "query"], "was begun with prompt_name None, not 'query'"),
        (["--to", "jsonl"], "was begun with form 'npy', not 'jsonl'"),
    ],
)
def test_rows_of_two_kinds_are_never_mixed(api, texts, tmp_path, capsys, options, message):
    out = tmp_path / "v.npy"
    begun(api, texts, out)
    assert embed(api, texts, "-o", out, *options) == 2
    assert message in capsys.readouterr().err
    assert embed(api, texts, "-o", out, *options, "--restart") == 0
    assert out.exists()


def test_rows_of_other_texts_are_not_gone_on_with(api, texts, tmp_path, capsys):
    begun(api, texts, tmp_path / "v.npy")
    texts.write_text(texts.read_text().replace("text 5 ", "text five ", 1))
    assert embed(api, texts, "-o", tmp_path / "v.npy") == 2
    assert "the first 128 texts, or their ids, are not those of the run that was interrupted" in capsys.readouterr().err
    texts.write_text("one\n")
    assert embed(api, texts, "-o", tmp_path / "v.npy") == 2


@pytest.mark.parametrize("other", ["d5x", 5])
def test_rows_of_other_ids_are_not_gone_on_with(api, tmp_path, capsys, other):
    source, out = tmp_path / "in.jsonl", tmp_path / "v.jsonl"

    def written(changed):
        ids = [changed if i == 5 else str(i) for i in range(300)]
        source.write_text("".join(json.dumps({"id": i, "text": t}) + "\n" for i, t in zip(ids, TEXTS, strict=True)))

    written("5")
    begun(api, source, out, "--id-field", "id")
    written(other)
    assert embed(api, source, "-o", out, "--id-field", "id") == 2
    assert "the first 128 texts, or their ids, are not those" in capsys.readouterr().err
    written("5")
    assert not asked_again(api, TEXTS[:128], lambda: embed(api, source, "-o", out, "--id-field", "id"))
    assert [row["id"] for row in rows_of(out)] == [str(i) for i in range(300)]


@pytest.mark.parametrize("damage", ["record", "data"])
def test_a_damaged_partial_file_is_refused(api, texts, tmp_path, capsys, damage):
    begun(api, texts, tmp_path / "v.npy")
    if damage == "record":
        (tmp_path / "v.npy.partial.json").write_text("{")
    else:
        os.truncate(tmp_path / "v.npy.partial", 200)
    assert embed(api, texts, "-o", tmp_path / "v.npy") == 2
    assert "--restart begins anew" in capsys.readouterr().err.splitlines()[-1]
    assert embed(api, texts, "-o", tmp_path / "v.npy", "--restart") == 0
    assert np.array_equal(np.load(tmp_path / "v.npy"), expected())


def test_two_runs_do_not_write_one_file(api, texts, tmp_path, capsys):
    import fcntl

    with (tmp_path / "v.npy.partial").open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert embed(api, texts, "-o", tmp_path / "v.npy") == 2
    assert f"another run is writing {tmp_path / 'v.npy'}" in capsys.readouterr().err

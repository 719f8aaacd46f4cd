"""What `rose embed` and `rose rerank` find before they start a server, and how long they wait for one that runs."""

from __future__ import annotations

import socket
import time

import pytest

from rose import cli
from rose.cli.bulk import api as room
from rose.cli.bulk.api import Api
from rose.errors import Unavailable

FILES = {
    "empty.txt": (b"", "empty.txt: there is no text in it"),
    "latin.txt": (b"caf\xe9\n", "latin.txt, line 1 is no UTF-8"),
    "blank.txt": (b"\n", "blank.txt, line 1: the text is empty"),
    "other.jsonl": (b'{"body": "x"}\n', "other.jsonl, line 1 has no 'text'; it has: body"),
}


@pytest.mark.parametrize("command", ["embed", "rerank"])
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_cannot_be_read_starts_nothing(command, name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("rose.cli.bulk.options.rose_server", lambda command: pytest.fail("it was started"))
    data, words = FILES[name]
    (tmp_path / name).write_bytes(data)
    asked = ["rerank", "query"] if command == "rerank" else ["embed"]
    assert cli.main([*asked, str(tmp_path / name)]) == 2
    assert words in capsys.readouterr().err


def test_an_address_that_never_answered_is_given_up_sooner(monkeypatch):
    monkeypatch.setattr(room, "FIRST_PATIENCE_S", 0.6)
    told = []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # held and not listened to: nobody answers there
        api = Api(f"http://127.0.0.1:{free.getsockname()[1]}", tell=told.append)
        started = time.monotonic()
        with pytest.raises(Unavailable, match="Connection refused"):
            api.get("/v1/models")
    assert time.monotonic() - started < 5
    assert len(told) == 1
    assert told[0].endswith("Connection refused; trying again for 1 s")


def test_a_server_that_has_answered_is_waited_for(api, monkeypatch):
    monkeypatch.setattr(room, "FIRST_PATIENCE_S", 0.0)
    monkeypatch.setattr(room, "_FIRST_PAUSE_S", 0.01)
    asked = Api(api.url)
    assert asked.get("/v1/models")["data"]
    tries = []

    def away(body):
        tries.append(body)
        return (503, {"error": {"message": "away", "code": "unavailable"}}, {}) if len(tries) < 3 else None

    api.fault = away
    assert asked.post("/v1/embeddings", {"model": "tiny", "input": ["x"]})["data"]
    assert len(tries) == 3
    asked.close()

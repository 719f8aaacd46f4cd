"""`rose serve` and `rose gateway`: options reach the room they belong to, and the processes come up and go."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rose import cli
from rose.cli.shared import DTYPES
from rose.hub.package import sha256_of
from rose.server.__main__ import build_parser as engine_parser
from rose.server.device import DTYPES as ENGINE_DTYPES
from tests.support.tiny_checkpoints import tiny_bert

PORTS = ["--http", "0", "--grpc", "off"]


@pytest.fixture
def served(monkeypatch):
    """Catches what `rose serve` hands to the gateway room: (folder, config, engine commands)."""
    calls = []

    def serve(folder, config, engines, **_):
        calls.append((folder, config, [list(engine("unix:/s")) for engine in engines]))
        return 0

    monkeypatch.setattr("rose.gateway.supervise.serve", serve)
    return calls


def test_the_front_gets_its_options(served, tmp_path):
    options = ["--host", "0.0.0.0", "--http", "81", "--grpc", "82", "--timeout", "7.5", "--strict-dimensions"]
    options += ["--drain-seconds", "3", "--max-items", "9", "--max-body-bytes", "1000"]
    options += ["--max-request-tokens", "77", "--max-held-bytes", "2000", "--tokenizer-threads", "5"]
    options += ["--replica-silence-seconds", "1.5", "--replica-spin-seconds", "0.01", "--fronts", "3"]
    assert cli.main(["serve", str(tmp_path), *options]) == 0
    folder, config, _ = served[0]
    assert (config.max_request_tokens, config.max_held_bytes, config.tokenizer_threads) == (77, 2000, 5)
    assert (config.replica_silence_seconds, config.replica_spin_seconds) == (1.5, 0.01)
    assert (config.fronts, config.shared_ports) == (3, False)
    assert folder == tmp_path
    assert (config.host, config.http_port, config.grpc_port) == ("0.0.0.0", 81, 82)
    assert (config.drain_seconds, config.max_items, config.max_body_bytes) == (3.0, 9, 1000)
    assert (config.default_timeout_s, config.strict_dimensions, config.replicas) == (7.5, True, ())


def test_everything_binds_to_loopback_unless_told_otherwise(served, tmp_path):
    cli.main(["serve", str(tmp_path)])
    config = served[0][1]
    assert (config.host, config.http_port, config.grpc_port) == ("127.0.0.1", 8080, None)


def test_a_carrier_can_be_left_out(served, tmp_path):
    cli.main(["serve", str(tmp_path), "--http", "off", "--grpc", "0"])
    assert (served[0][1].http_port, served[0][1].grpc_port) == (None, 0)


def engine_options(command: Sequence[str]) -> dict[str, Any]:
    """What the engine's own parser reads in the command line that starts it."""
    module = command.index("rose.server")
    assert command[module - 1] == "-m"
    return vars(engine_parser().parse_args(command[module + 1 :]))


def test_the_engine_understands_every_option_it_is_handed(served, tmp_path):
    """The engine's own parser reads the command line that `rose serve` makes."""
    numbers = {"online-tokens": 11, "bulk-tokens": 12, "max-sequences": 13, "max-tokens": 14}
    numbers |= {"max-queued-tokens": 15, "max-queued-requests": 16, "num-threads": 17}
    numbers |= {"max-in-flight": 18, "graph-bytes": 19, "max-running": 20, "prefill-tokens": 21}
    numbers |= {"kv-cache-bytes": 22, "page-size": 23}
    options = [word for name, number in numbers.items() for word in (f"--{name}", str(number))]
    options += ["--dtype", "bfloat16", "--backend", "torch_sdpa", "--pooling", "last", "--bidirectional"]
    options += ["--task", "embed", "--rerank-template", "none", "--no-warm-up"]
    options += ["--no-prefix-cache"]
    cli.main(["serve", str(tmp_path), "--device", "cpu", "--name", "mine", *options])
    (command,) = served[0][2]
    read = engine_options(command)
    assert {name: read[name.replace("-", "_")] for name in numbers} == numbers
    assert (read["dtype"], read["backend"], read["pooling"], read["causal"]) == (
        "bfloat16",
        "torch_sdpa",
        "last",
        False,
    )
    assert (read["task"], read["template"], read["warm_up"]) == ("embed", "none", False)
    assert read["prefix_cache"] is False
    assert (read["model_folder"], read["device"], read["served_name"]) == (str(tmp_path), "cpu", "mine")


def test_what_is_not_given_is_left_to_the_engine(served, tmp_path):
    cli.main(["serve", str(tmp_path)])
    read = engine_options(served[0][2][0])
    assert set(read) <= {"model_folder", "address", "device", "served_name", "log_level", "warm_up"}


def test_one_engine_a_device(served, tmp_path):
    cli.main(["serve", str(tmp_path), "--device", "cuda:0,cuda:1"])
    devices = [engine_options(command)["device"] for command in served[0][2]]
    assert devices == ["cuda:0", "cuda:1"]


@pytest.mark.parametrize(("asked", "name"), [("minilm", "minilm"), ("acme/embedder", "acme/embedder")])
def test_clients_use_the_name_that_was_asked_for(served, tmp_path, monkeypatch, asked, name):
    monkeypatch.setattr("rose.cli.serving.find_model", lambda name, cache: tmp_path)
    monkeypatch.chdir(tmp_path)
    cli.main(["serve", asked])
    assert engine_options(served[0][2][0])["served_name"] == name


def test_a_folder_is_served_under_its_own_name(served, tmp_path, monkeypatch):
    (tmp_path / "my-model").mkdir()
    monkeypatch.chdir(tmp_path / "my-model")
    cli.main(["serve", "."])
    assert engine_options(served[0][2][0])["served_name"] == "my-model"


def test_the_gateway_gets_its_replicas(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(
        "rose.gateway.fronts.run_fronts", lambda config, folder, **_: calls.append((config, folder)) or 0
    )
    assert cli.main(["gateway", str(tmp_path), "--replica", "10.0.0.5:7000", "unix:/run/rose"]) == 0
    config, folder = calls[0]
    assert (config.replicas, folder) == (("10.0.0.5:7000", "unix:/run/rose"), tmp_path)


READING = ["--pooling", "cls", "--causal", "--task", "rerank", "--rerank-template", "qwen3"]


@pytest.mark.parametrize(
    ("command", "target"),
    [
        (["serve"], "rose.gateway.supervise.serve"),
        (["gateway", "--replica", "unix:/x"], "rose.gateway.fronts.run_fronts"),
        (["info"], "rose.config.read_model_folder"),
    ],
)
def test_the_folder_is_read_alike_by_whoever_reads_it(command, target, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(target, lambda *_, reading=None, **given: seen.append(reading or given) or 0)
    monkeypatch.setattr("rose.cli.models._folder_facts", lambda folder: [("folder", folder)])
    assert cli.main([command[0], str(tmp_path), *command[1:], *READING]) == 0
    assert seen == [{"pooling": "cls", "causal": True, "task": "rerank", "template": "qwen3"}]


@pytest.mark.parametrize("command", [["serve", "x"], ["embed", "x"], ["rerank", "x", "y"], ["generate", "x", "y"]])
def test_an_unknown_dtype_is_found_before_anything_is_started(command, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "--dtype", "fp7"])
    assert ended.value.code == 2
    assert "argument --dtype: invalid choice: 'fp7' (choose from" in capsys.readouterr().err


def test_the_dtypes_are_those_of_the_engine():
    assert ("auto", *ENGINE_DTYPES) == DTYPES


@pytest.mark.parametrize(("options", "words"), [(["--backend", "none-such"], "none-such")])
def test_what_an_engine_refuses_is_said_last_and_no_address_before(options, words, tmp_path):
    folder = tiny_bert(tmp_path / "m")
    process = subprocess.run(
        [sys.executable, "-m", "rose.cli", "serve", str(folder), *PORTS, "--device", "cpu", *options],
        capture_output=True,
        text=True,
        timeout=90,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert (process.returncode, process.stdout) == (2, "")
    last = process.stderr.splitlines()[-1]
    assert last.startswith("rose: engine-0 refused to start: ")
    assert words in last


def start(*arguments: str) -> tuple[subprocess.Popen[str], str]:
    """A `rose` command that serves HTTP, and its base address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "rose.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("http://127.0.0.1:"), line
    return process, line.split()[0]


def get(url: str) -> dict:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)


def wait_ready(base: str) -> None:
    deadline = time.monotonic() + 120
    while True:
        try:
            get(f"{base}/ready")
        except OSError:
            assert time.monotonic() < deadline, "not ready within 120 s"
            time.sleep(0.1)
        else:
            return


def embed(base: str, text: str) -> list[float]:
    body = json.dumps({"model": "minilm", "input": text}).encode()
    request = urllib.request.Request(f"{base}/v1/embeddings", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)["data"][0]["embedding"]


@pytest.mark.weights
def test_an_engine_and_a_gateway_of_its_own_answer_as_serve_does(minilm_folder: Path, tmp_path: Path, capsys):
    serve, serve_base = start("serve", "minilm", *PORTS)
    address = f"unix:{tmp_path}/engine"
    engine = subprocess.Popen(
        [sys.executable, "-m", "rose.server", str(minilm_folder), "--address", address, "--served-name", "minilm"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    gateway, gateway_base = start("gateway", "minilm", "--replica", address, *PORTS)
    try:
        for base in (serve_base, gateway_base):
            wait_ready(base)
        assert [model["id"] for model in get(f"{serve_base}/v1/models")["data"]] == ["minilm"]
        first, second = (embed(base, "one front or another") for base in (serve_base, gateway_base))
        assert len(first) == 384
        assert cli.main(["info", "--replica", address]) == 0
        facts = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
        assert facts["model"] == "minilm, BertModel"
        assert facts["output"] == "dense: 384 dimensions"
        assert facts["tokenizer"] == f"sha256 {sha256_of(minilm_folder / 'tokenizer.json')}"
        assert first == second
    finally:
        for process in (serve, gateway, engine):
            process.send_signal(signal.SIGTERM)
        statuses = [process.wait(30) for process in (serve, gateway, engine)]
        for process in (serve, gateway):
            process.stdout.close()
    assert statuses == [0, 0, 0]

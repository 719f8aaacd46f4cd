"""Engines as children: brought back when they die, ended after the front, never left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from rose.errors import StartupError
from rose.gateway import keeper
from rose.gateway.child_process import ChildProcess
from rose.gateway.keeper import Keeper
from rose.gateway.supervise import engine_command
from tests.gateway.processes import alive, command, ports, running, says, wait_for
from tests.support.tiny_checkpoints import tiny_bert


@contextmanager
def served(folder, tmp_path, count=1, **engine):
    """`rose serve` over fake engines: process, HTTP client, and a function that lists the engines' pids so far."""
    pids = tmp_path / "pids"
    engines = [{"folder": str(folder), "pids": str(pids), **engine}] * count
    with running("serve", folder=str(folder), engines=engines, config={}) as process:
        http, _ = ports(process)
        with httpx.Client(base_url=f"http://{http}", timeout=30) as client:
            yield process, client, lambda: [int(line) for line in pids.read_text().split()]


def embed(client):
    return client.post("/v1/embeddings", json={"input": [5, 6, 7]})


def ready(client):
    return client.get("/ready").status_code == 200


def test_an_engine_that_dies_is_brought_back_and_nobody_waits_for_it(text_folder, tmp_path):
    with served(text_folder, tmp_path) as (process, client, pids):
        wait_for(lambda: ready(client))
        assert embed(client).status_code == 200
        (first,) = pids()
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: not ready(client), timeout_s=5.0)
        refused = embed(client)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
        assert int(refused.headers["retry-after"]) >= 1
        assert client.get("/health").status_code == 200
        wait_for(lambda: ready(client))
        assert embed(client).status_code == 200
        second = pids()[-1]
        assert second != first
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0
        assert not alive(second)


def test_the_front_drains_before_the_engines_end(text_folder, tmp_path):
    with (
        served(text_folder, tmp_path, delay_s=2.0, backwards=8) as (process, client, pids),
        ThreadPoolExecutor(8) as threads,
    ):
        wait_for(lambda: ready(client))
        requests = [threads.submit(embed, client) for _ in range(8)]
        wait_for(lambda: "rose_requests_in_flight 8.0" in client.get("/metrics").text)
        process.send_signal(signal.SIGTERM)
        wait_for(lambda: not ready(client), timeout_s=5.0)
        assert all(alive(pid) for pid in pids())
        assert [request.result(20).status_code for request in requests] == [200] * 8
        assert process.wait(15) == 0
        assert not any(alive(pid) for pid in pids())


def test_a_killed_front_leaves_no_engine(text_folder, tmp_path):
    """However the front goes, its engines go with it."""
    with served(text_folder, tmp_path, count=2) as (process, client, pids):
        wait_for(lambda: ready(client))
        wait_for(lambda: len(pids()) == 2)
        assert all(alive(pid) for pid in pids())
        process.kill()
        process.wait(10)
        wait_for(lambda: not any(alive(pid) for pid in pids()), timeout_s=5.0)


def test_a_second_signal_ends_front_and_engines_at_once(text_folder, tmp_path):
    with served(text_folder, tmp_path, delay_s=60.0) as (process, client, pids), ThreadPoolExecutor(1) as threads:
        wait_for(lambda: ready(client))
        request = threads.submit(embed, client)
        wait_for(lambda: "rose_requests_in_flight 1.0" in client.get("/metrics").text)
        process.send_signal(signal.SIGTERM)
        wait_for(lambda: not ready(client), timeout_s=5.0)
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 1
        assert time.monotonic() - started < 5
        assert not any(alive(pid) for pid in pids())
        assert request.exception(10) is not None or request.result().status_code >= 500


def test_an_engine_that_never_serves_ends_the_whole(text_folder, tmp_path):
    engine = {"folder": str(text_folder), "pids": str(tmp_path / "pids"), "fails": 3}
    with running("serve", folder=str(text_folder), engines=[engine], config={}) as process:
        output, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "engine-0 ended with status 3 before it served: this is why" in errors
    assert "ready" not in output


def test_an_engine_that_refuses_to_start_ends_the_whole_and_is_not_asked_again(text_folder, tmp_path):
    pids = tmp_path / "pids"
    engines = [{"folder": str(text_folder), "pids": str(pids), "fails": fails} for fails in (0, 2)]
    with running("serve", folder=str(text_folder), engines=engines, config={}) as process:
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 2
    assert errors.splitlines()[-1] == "refused: engine-1 refused to start: this is why"
    assert "restart" not in errors
    assert not any(alive(int(pid)) for pid in pids.read_text().split())


def test_one_engine_that_gives_up_leaves_the_others_serving(text_folder, tmp_path):
    pids = tmp_path / "pids"
    engines = [{"folder": str(text_folder), "pids": str(pids), "fails": fails} for fails in (3, 0)]
    with running("serve", folder=str(text_folder), engines=engines, config={}) as process:
        http, _ = ports(process)
        with httpx.Client(base_url=f"http://{http}", timeout=30) as client:
            says(process, "engine-0 ended with status 3 before it served: this is why; 1 of 2 engines are left")
            wait_for(lambda: ready(client))
            assert embed(client).status_code == 200
            states = {one["address"]: one["ready"] for one in client.get("/ready").json()["replicas"]}
            assert states == {"engine-0": False, "engine-1": True}
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=15)
    assert process.returncode == 0


def test_readiness_is_announced_once_it_is_true(text_folder, tmp_path):
    engine = {"folder": str(text_folder), "pids": str(tmp_path / "pids"), "loads_s": 0.5}
    with running(
        "serve", folder=str(text_folder), engines=[engine], config={"grpc_port": None}, say_ready=True
    ) as process:
        started = time.monotonic()
        http, _ = ports(process)
        assert time.monotonic() - started > 0.5
        assert httpx.get(f"http://{http}/ready").status_code == 200
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=15)
    assert f"listening: http {http}, grpc off" in log
    assert "replica engine-0 is loading" in log
    assert "is not ready" not in log


def test_what_an_engine_writes_is_passed_on_whatever_it_is(text_folder, tmp_path):
    """Lines of a megabyte, no line ends, bytes that are no text: nothing stops the reader, and so the engine."""
    noise = (
        "import sys; sys.stdout.write('x' * 3_000_000); sys.stderr.buffer.write(b'\\xff' * 2_000_000 + b'\\nlast\\n')"
    )

    async def run():
        process = await ChildProcess.start([sys.executable, "-c", noise])
        return await asyncio.wait_for(process.wait(), 20), process.last_words

    assert asyncio.run(run()) == (0, "last")


def test_a_child_of_the_engine_that_holds_its_pipes_is_not_waited_for(tmp_path):
    code = "import subprocess, sys; subprocess.Popen(['sleep', '30']); sys.exit('rose-server: gone')"

    async def run():
        process = await ChildProcess.start([sys.executable, "-c", code])
        status = await asyncio.wait_for(process.wait(), 10)
        os.killpg(process.pid, signal.SIGKILL)
        return status, process.last_words

    assert asyncio.run(run()) == (1, "gone")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dtype", "float99"], "argument --dtype: invalid choice: 'float99'"),
        (["--device", "nowhere"], "device 'nowhere'"),
        (["--max-tokens", "100000"], "this model takes at most 128"),
    ],
)
def test_the_reason_of_a_real_engine_comes_last(tmp_path, arguments, words):
    folder = tiny_bert(tmp_path / "m")
    with running("serve", folder=str(folder), engines=[["--device", "cpu", *arguments]], config={}) as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    last = errors.splitlines()[-1]
    assert last.startswith("refused: engine-0 refused to start: ")
    assert words in last


def test_restarts_are_bounded(text_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(keeper, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(keeper, "MAX_RESTARTS", 2)
    pids = tmp_path / "pids"
    socket = f"unix:{tmp_path}/socket"
    engine = command("engine", address=socket, folder=str(text_folder), pids=str(pids), lives_s=0.01)
    monkeypatch.chdir(Path(__file__).parents[2])
    with pytest.raises(StartupError, match="ended 3 times in a row, the last time with status 4"):
        asyncio.run(Keeper(lambda: engine, "engine").keep())
    assert len(pids.read_text().split()) == 3


def test_the_command_of_a_real_engine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = engine_command(tmp_path, ["--device", "cuda:1"])("unix:/run/x")
    assert made == (
        *(sys.executable, "-P", "-m", "rose.server", str(tmp_path), "--address", "unix:/run/x"),
        *("--device", "cuda:1"),
    )

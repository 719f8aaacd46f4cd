"""Several fronts on one pair of ports: they share the work, the counts and the end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path

import grpc
import httpx
import numpy as np
import pytest

from rose.config.serving import GatewayConfig
from rose.gateway import fronts
from rose.gateway.run import Stop
from rose.proto import rose_pb2 as pb
from rose.proto.convert import tokens_to_proto
from tests.gateway.processes import alive, ports, running, wait_for

FRONTS = 3


@contextmanager
def served(folder, tmp_path, config=None, **engine):
    """`rose serve` with several fronts over one fake engine: process, HTTP address, gRPC address."""
    engines = [{"folder": str(folder), "pids": str(tmp_path / "pids"), **engine}]
    config = {"fronts": FRONTS, **(config or {})}
    with running("serve", folder=str(folder), engines=engines, config=config, say_ready=True) as process:
        yield process, *ports(process)


def embed(address, timeout_s=30):
    """One request over a connection of its own."""
    return httpx.post(f"http://{address}/v1/embeddings", json={"input": [5, 6, 7]}, timeout=timeout_s)


def number(address, name):
    page = httpx.get(f"http://{address}/metrics", timeout=30).text
    return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if re.match(rf"{name}[ {{]", line))


def fronts_of(process):
    """Process ids of the children that are fronts."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and alive(int(path.name)):
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == process.pid and b"rose.gateway" in (path / "cmdline").read_bytes():
                found.append(int(path.name))
    return sorted(found)


def connections(pid, port):
    """Open TCP connections of a front on a port."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.update(re.findall(r"socket:\[(\d+)\]", str(link.readlink())))
        except OSError:
            continue
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[9] in inodes and row[1].endswith(f":{port:04X}") and row[3] == "01" for row in rows)


def test_every_front_serves_and_any_of_them_tells_what_all_have_counted(text_folder, tmp_path):
    with served(text_folder, tmp_path) as (process, http, _):
        pids = fronts_of(process)
        assert len(pids) == FRONTS
        answers = [embed(http) for _ in range(30)]
        assert [answer.status_code for answer in answers] == [200] * 30
        assert len({answer.text for answer in answers}) == 1
        wait_for(lambda: number(http, "rose_ready") == 1 and number(http, "rose_replica_ready") == 1)
        for _ in range(10):  # each over a connection of its own, so by another front
            assert number(http, "rose_requests_total") >= 30
            assert number(http, "rose_items_total") == 30
            assert number(http, "rose_ready") == 1
            assert number(http, "rose_replica_ready") == 1
        port = int(http.rpartition(":")[2])
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(60)]
        wait_for(lambda: sum(connections(pid, port) for pid in pids) >= 60)
        held = [connections(pid, port) for pid in pids]
        assert min(held) > 0, held
        for client in clients:
            client.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert not any(map(alive, pids))


def test_grpc_shares_its_port_too(text_folder, tmp_path):
    message = pb.EmbedRequest(tokens=tokens_to_proto([np.array([5, 6, 7])])).SerializeToString()
    with served(text_folder, tmp_path) as (_, http, address):
        for _ in range(12):
            with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
                raw = channel.unary_unary("/rose.v1.Rose/Embed")(message, timeout=30)
            assert pb.EmbedResponse.FromString(raw).prompt_tokens == 3
        assert number(http, "rose_items_total") == 12


def status(address, method, path, body=None):
    """Over a connection of its own."""
    with closing(HTTPConnection(address, timeout=30)) as connection:
        connection.request(method, path, body)
        return connection.getresponse().status


def is_ready(address):
    return status(address, "GET", "/ready") == 200


def statuses(address, count=200):
    """Of so many requests, from the first front that calls itself ready on."""
    wait_for(lambda: is_ready(address))
    return {status(address, "POST", "/v1/embeddings", b'{"input": [5, 6, 7]}') for _ in range(count)}


@pytest.mark.parametrize("child", [True, False], ids=["child", "remote"])
def test_what_one_front_called_ready_no_other_refuses(text_folder, tmp_path, child):
    """While the engine loads, each front asks for it in turns of its own, up to a second apart."""
    engine = {"folder": str(text_folder), "pids": str(tmp_path / "pids"), "loads_s": 3.0}
    config = {"fronts": FRONTS, "grpc_port": None}
    with ExitStack() as stack:
        if child:
            options = {"folder": str(text_folder), "engines": [engine], "config": config}
            process = stack.enter_context(running("serve", **options))
        else:
            engine |= {"address": f"unix:{tmp_path}/engine", "loads_s": 4.0}
            stack.enter_context(running("engine", **engine))
            options = {"folder": str(text_folder), "replicas": [engine["address"]], "config": config}
            process = stack.enter_context(running("fronts", **options))
        http, _ = ports(process)
        assert not is_ready(http)
        assert statuses(http) == {200}
        # The same where an engine comes back: those that were connected look for it in turns again.
        (pid,) = map(int, (tmp_path / "pids").read_text().split())
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not is_ready(http))
        if not child:
            stack.enter_context(running("engine", **engine))
        assert statuses(http) == {200}


def test_grpc_of_another_front_answers_what_http_called_ready(text_folder, tmp_path):
    message = pb.EmbedRequest(tokens=tokens_to_proto([np.array([5, 6, 7])])).SerializeToString()
    engines = [{"folder": str(text_folder), "pids": str(tmp_path / "pids"), "loads_s": 3.0}]
    with running("serve", folder=str(text_folder), engines=engines, config={"fronts": FRONTS}) as process:
        http, address = ports(process)
        wait_for(lambda: is_ready(http))
        for _ in range(40):
            with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
                raw = channel.unary_unary("/rose.v1.Rose/Embed")(message, timeout=30)
            assert pb.EmbedResponse.FromString(raw).prompt_tokens == 3


def test_gauges_of_all_fronts_are_added(text_folder, tmp_path):
    """The engine answers none of eight: with the ninth, all of them a second later."""
    with (
        served(text_folder, tmp_path, delay_s=1.0, backwards=9) as (process, http, _),
        ThreadPoolExecutor(9) as threads,
    ):
        requests = [threads.submit(embed, http) for _ in range(8)]
        wait_for(lambda: number(http, "rose_requests_in_flight") == 8)
        wait_for(lambda: number(http, "rose_replica_outstanding_parts") == 8)
        requests.append(threads.submit(embed, http))
        wait_for(lambda: number(http, "rose_requests_in_flight") == 9 or requests[-1].done())
        process.send_signal(signal.SIGTERM)
        assert [request.result(30).status_code for request in requests] == [200] * 9
        assert process.wait(20) == 0


def test_a_front_that_dies_is_brought_back_and_what_it_counted_stays(text_folder, tmp_path):
    with served(text_folder, tmp_path) as (process, http, _):
        assert all(embed(http).status_code == 200 for _ in range(20))
        before = fronts_of(process)
        os.kill(before[0], signal.SIGKILL)
        wait_for(lambda: len(set(fronts_of(process)) - set(before)) == 1)
        assert number(http, "rose_items_total") == 20
        new = (set(fronts_of(process)) - set(before)).pop()
        port = int(http.rpartition(":")[2])
        clients = []

        def reached():
            clients.append(socket.create_connection(("127.0.0.1", port)))
            return connections(new, port)

        wait_for(reached)
        for client in clients:
            client.close()
        wait_for(lambda: number(http, "rose_ready") == 1)
        assert all(embed(http).status_code == 200 for _ in range(20))
        assert number(http, "rose_items_total") == 40


def test_a_second_signal_ends_all_at_once(text_folder, tmp_path):
    with served(text_folder, tmp_path, delay_s=60.0) as (process, http, _), ThreadPoolExecutor(4) as threads:
        requests = [threads.submit(embed, http) for _ in range(4)]
        wait_for(lambda: number(http, "rose_requests_in_flight") == 4)
        pids = fronts_of(process)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 1, "draining would take 30 s"
        assert not any(map(alive, pids))
        assert all(request.exception(10) is not None or request.result().status_code >= 500 for request in requests)


def test_stopped_before_it_listens_it_has_cut_nobody_off(text_folder, tmp_path):
    engines = [{"folder": str(text_folder), "pids": str(tmp_path / "pids")}]
    with running("serve", folder=str(text_folder), engines=engines, config={"fronts": FRONTS}) as process:
        wait_for(lambda: len(fronts_of(process)) == FRONTS)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_killed_it_leaves_no_front(text_folder, tmp_path):
    with served(text_folder, tmp_path) as (process, _, _):
        pids = fronts_of(process)
        process.kill()
        process.wait(10)
        wait_for(lambda: not any(map(alive, pids)))


def test_a_port_that_is_taken_is_refused_also_by_those_who_share(text_folder, tmp_path):
    with served(text_folder, tmp_path, {"grpc_port": None}) as (_, http, _):
        port = int(http.rpartition(":")[2])
        engines = [{"folder": str(text_folder), "pids": str(tmp_path / "others")}]
        for fronts in (1, 2):
            config = {"fronts": fronts, "http_port": port, "grpc_port": None}
            with running("serve", folder=str(text_folder), engines=engines, config=config) as second:
                _, errors = second.communicate(timeout=30)
            assert second.returncode == 2
            assert f"refused: HTTP cannot listen on 127.0.0.1:{port}" in errors


@pytest.mark.parametrize(
    ("broken", "words"),
    [("tokenizer.json", "cannot be read as a tokenizer"), ("config.json", "config.json")],
)
def test_what_no_front_can_read_is_refused_in_its_words(text_folder, tmp_path, broken, words):
    folder = tmp_path / "folder"
    folder.mkdir()
    for path in text_folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / broken).write_text("{")
    engines = [{"folder": str(text_folder), "pids": str(tmp_path / "pids")}]
    with running("serve", folder=str(folder), engines=engines, config={"fronts": 2}) as process:
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 2
    assert re.match(r"refused: front-\d refused to start: ", errors.splitlines()[-1])
    assert words in errors.splitlines()[-1]


def test_a_front_that_is_given_up_is_not_waited_for(monkeypatch, tmp_path):
    """The one that listens is told of; the other ended before it did, for a reason of its own."""
    body = (
        "import os, sys, time\n"
        "try:\n"
        f"    os.mkdir({str(tmp_path / 'first')!r})\n"
        "except FileExistsError:\n"
        "    sys.exit(1)\n"
        "print('rose-front ready', flush=True)\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setattr(fronts, "_command", lambda *_: (sys.executable, "-c", body))
    told = []

    async def main():
        stop = Stop()

        def listening(where):
            told.append(where.http)
            stop.drain.set()

        async with asyncio.timeout(30):
            config = GatewayConfig(replicas=("unix:/none",), fronts=2, http_port=0)
            return await fronts.serve_any(config, tmp_path, stop, on_listening=listening)

    assert asyncio.run(main()) == 1
    assert len(told) == 1


def test_no_fronts_are_refused(text_folder):
    with running("serve", folder=str(text_folder), engines=[], config={"fronts": 0}) as process:
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors.splitlines()[-1]) == (2, "refused: --fronts must be at least 1, not 0")


def test_the_argument_of_a_child_is_the_whole_configuration(text_folder, tmp_path):
    """What is asked of the whole is what each front does: here, the most inputs of one request."""
    with served(text_folder, tmp_path, {"max_items": 2}) as (_, http, _):
        for _ in range(2 * FRONTS):
            answer = httpx.post(f"http://{http}/v1/embeddings", json={"input": [[5], [6], [7]]}, timeout=30)
            assert answer.status_code == 413, json.dumps(answer.json())

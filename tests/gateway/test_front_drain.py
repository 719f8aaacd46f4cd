"""SIGTERM at a busy front: not ready at once, every open request answered, nothing hangs, exit 0."""

from __future__ import annotations

import json
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import httpx

from rose.proto import rose_pb2 as pb
from rose.proto import rose_pb2_grpc
from tests.gateway.processes import ports, running, wait_for


@contextmanager
def slow_front(folder, tmp_path, delay_s, backwards=1, **config):
    """A front over a fake engine that answers `delay_s` after `backwards` requests wait.

    Gives its process, an HTTP client and its gRPC address.
    """
    address = f"unix:{tmp_path}/engine"
    engine = {"folder": str(folder), "address": address, "pids": str(tmp_path / "pids"), "delay_s": delay_s}
    engine["backwards"] = backwards
    options = {"folder": str(folder), "replicas": [address], "config": config}
    with running("engine", **engine), running("front", **options) as front:
        http, grpc_address = ports(front)
        limits = httpx.Limits(max_connections=200, max_keepalive_connections=200)
        with httpx.Client(base_url=f"http://{http}", timeout=30, limits=limits) as client:
            wait_for(lambda: client.get("/ready").status_code == 200)
            yield front, client, grpc_address


def embed(client):
    return client.post("/v1/embeddings", json={"input": [5, 6, 7]})


def in_flight(client):
    text = client.get("/metrics").text
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith("rose_requests_in_flight "))


def test_fifty_open_requests_are_answered_and_the_front_leaves(text_folder, tmp_path):
    """Report C157 (kserve#3360): idle and half-sent connections do not hold it up either."""
    with (
        slow_front(text_folder, tmp_path, delay_s=2.0, backwards=50) as (front, client, _),
        ThreadPoolExecutor(50) as threads,
    ):
        host, port = client.base_url.host, client.base_url.port
        half_sent = socket.create_connection((host, port))
        half_sent.sendall(b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        open_requests = [threads.submit(embed, client) for _ in range(50)]
        wait_for(lambda: in_flight(client) == 50)
        front.send_signal(signal.SIGTERM)
        with httpx.Client(base_url=client.base_url) as late:
            answer = wait_for(lambda: (found := late.get("/ready")).status_code == 503 and found, timeout_s=5.0)
            assert answer.json()["reasons"] == ["draining"]
            assert answer.headers["connection"] == "close"
            refused = late.post("/v1/embeddings", json={"input": "a"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
            assert refused.headers["connection"] == "close"
            assert refused.headers["retry-after"] == "1"
            assert late.get("/health").status_code == 200
        answers = [request.result(20) for request in open_requests]
        assert [answer.status_code for answer in answers] == [200] * 50
        assert {answer.headers["connection"] for answer in answers} == {"close"}
        assert front.wait(10) == 0
        half_sent.close()


def test_an_idle_front_leaves_at_once_with_keep_alive_connections_open(text_folder, tmp_path):
    with slow_front(text_folder, tmp_path, delay_s=0.0) as (front, client, grpc_address):
        assert embed(client).status_code == 200
        with grpc.insecure_channel(grpc_address) as channel:
            rose_pb2_grpc.RoseStub(channel).Info(pb.InfoRequest())
            started = time.monotonic()
            front.send_signal(signal.SIGINT)
            assert front.wait(10) == 0
            assert time.monotonic() - started < 5


def test_a_grpc_call_in_flight_is_answered_too(text_folder, tmp_path):
    with slow_front(text_folder, tmp_path, delay_s=2.0) as (front, client, grpc_address):
        with grpc.insecure_channel(grpc_address) as channel:
            tokens = pb.Tokens(ids=b"\x05\0\0\0", lengths=[1])
            call = rose_pb2_grpc.RoseStub(channel).Embed.future(pb.EmbedRequest(tokens=tokens))
            wait_for(lambda: in_flight(client) == 1)
            front.send_signal(signal.SIGTERM)
            assert call.result(20).prompt_tokens == 1
        assert front.wait(10) == 0


def test_a_second_signal_does_not_wait(text_folder, tmp_path):
    with slow_front(text_folder, tmp_path, delay_s=60.0) as (front, client, _), ThreadPoolExecutor(1) as threads:
        request = threads.submit(embed, client)
        wait_for(lambda: in_flight(client) == 1)
        front.send_signal(signal.SIGTERM)
        wait_for(lambda: client.get("/ready").status_code == 503)
        assert front.poll() is None
        started = time.monotonic()
        front.send_signal(signal.SIGTERM)
        assert front.wait(10) == 1
        assert time.monotonic() - started < 5
        assert request.exception(10) is not None or request.result().status_code >= 500
        said = "draining: 1 request in flight; press Ctrl-C again to cut off what is left (at most 30 s)"
        assert said in front.stderr.read()


def test_a_drain_ends_at_its_limit(text_folder, tmp_path):
    busy = slow_front(text_folder, tmp_path, delay_s=60.0, drain_seconds=0.5)
    with busy as (front, client, _), ThreadPoolExecutor(1) as threads:
        request = threads.submit(embed, client)
        wait_for(lambda: in_flight(client) == 1)
        front.send_signal(signal.SIGTERM)
        assert front.wait(10) == 1
        assert request.exception(10) is not None or request.result().status_code >= 500


def test_a_port_in_use_is_refused_by_name(text_folder, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = {"folder": str(text_folder), "replicas": ["unix:/nowhere"], "config": {"http_port": port}}
        with running("front", **options) as front:
            _, errors = front.communicate(timeout=30)
            assert front.returncode != 0
            assert f"HTTP cannot listen on 127.0.0.1:{port}" in errors
            assert json.dumps(port) in errors

"""What the light link and the reactor add to a forward: one request of 128 ids at a time, 1024 floats back.

    python benchmarks/server/link_overhead.py --out link_overhead.json

Client and server are two processes, as in service. Rows, p50 / p99 in µs over `--requests` round trips after a tenth of
them as warm-up:

    raw      the same number of bytes each way over a plain socket, no frames, no messages: the floor
    reactor  the engine process around an engine that answers at once
    engine   the engine process around the real engine, its forward inline and empty, as queued kernels return at once
    event    the same, but each batch's event comes `--event-us` after its launch, and may only be asked for
             (what is printed is the round trip less that time: how late answers leave)
    thread   the same, with the CPU's worker thread and descriptor
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import uvloop

from rose.attention_backends.base import AttentionSpec
from rose.bench.machine import commit, cpu_model
from rose.client import AsyncClient, Client
from rose.config import EngineConfig, ServerConfig
from rose.engine import Engine
from rose.engine.execution import CpuExecutor, DoneTicket
from rose.engine.request import Item, StepResult
from rose.models.base import OutputSpec
from rose.proto import rose_pb2 as pb
from rose.proto.address import parse_address
from rose.proto.convert import tensor_to_proto, tokens_to_proto
from rose.proto.frames import FrameType, encode_frame
from rose.server.card import request_limits
from rose.server.listener import Listener
from rose.server.reactor import Reactor
from rose.server.waiting import sharpen_sleep

TOKENS, DIMENSION = 128, 1024
SERVERS = ("raw", "reactor", "engine", "event", "thread")
IDS = np.arange(TOKENS, dtype=np.int32)
REQUEST = encode_frame(FrameType.EMBED, 1, pb.EmbedRequest(tokens=tokens_to_proto([IDS])).SerializeToString())
ANSWER = encode_frame(
    FrameType.EMBED_RESULT,
    1,
    pb.EmbedResponse(
        outputs=[pb.Output(name="dense", values=tensor_to_proto(np.ones((1, DIMENSION), dtype=np.float32)))],
        prompt_tokens=TOKENS,
        timing=pb.Timing(queue_us=20, compute_us=20, batches=1),
    ).SerializeToString(),
)


class EmptyModel:
    """Answers with rows that exist already."""

    outputs = {"dense": OutputSpec(dtype="float32", dimension=DIMENSION, normalized=True)}  # noqa: RUF012
    default_output = "dense"
    vocab_size = 250_000
    num_layers = 0

    def __init__(self) -> None:
        self._rows = torch.full((1024, DIMENSION), DIMENSION**-0.5)

    def attention_spec(self, device, dtype) -> AttentionSpec:
        raise NotImplementedError("nothing attends here")

    def __call__(self, batch, outputs):
        return {"dense": self._rows[: batch.num_sequences]}


class NoAttention:
    name = "none"

    def supports(self, spec) -> str | None:
        return None

    def plan(self, batch, slot: int = 0):
        return self

    def run(self, q, k, v, layer):
        return v


class EventTicket:
    """Ready at a time, not before, as an event a device records."""

    def __init__(self, value, seconds: float) -> None:
        self._value = value
        self._seconds = seconds
        self.expected_end: float | None = time.monotonic() + seconds

    def ready(self) -> bool:
        return time.monotonic() >= self.expected_end

    def wait(self) -> None:
        while not self.ready():
            pass

    def result(self):
        self.wait()
        return self._value

    def seconds(self) -> float | None:
        return self._seconds if self.ready() else None

    def on_done(self, callback) -> None:
        raise NotImplementedError


class InlineExecutor:
    """Runs a launch at once; its event comes `seconds` later."""

    device = torch.device("cpu")

    def __init__(self, seconds: float) -> None:
        self._event_s = seconds

    def launch(self, fn, *, expected_seconds=None):
        if self._event_s:
            return EventTicket(fn(), self._event_s)
        ticket = DoneTicket()
        ticket.settle(fn(), 0.0)
        return ticket

    def fileno(self) -> int | None:
        return None

    def acknowledge(self) -> None:
        pass

    def close(self) -> None:
        pass


class InstantOutput:
    expected_end = None

    def __init__(self, rows: np.ndarray) -> None:
        self._rows = rows

    def ready(self) -> bool:
        return True

    def result(self) -> np.ndarray:
        return self._rows


class InstantEngine:
    """Answers every request in a batch of its own, at once."""

    def __init__(self) -> None:
        self.executor = InlineExecutor(0.0)
        self._waiting = []
        self._rows = np.full((1, DIMENSION), DIMENSION**-0.5, dtype=np.float32)

    @property
    def queued_tokens(self) -> int:
        return len(self._waiting) * TOKENS

    @property
    def queued_requests(self) -> int:
        return len(self._waiting)

    def wake_at(self) -> float | None:
        return 0.0 if self._waiting else None

    def add(self, request) -> None:
        self._waiting.append(request)

    def abort(self, request_id: int) -> bool:
        return False

    def step(self) -> list[StepResult]:
        request = self._waiting.pop()
        return [StepResult((Item(request.id, 0),), {"dense": InstantOutput(self._rows)}, (0, TOKENS), tokens=TOKENS)]


def serve(kind: str, address: str, event_s: float) -> None:
    listener = Listener(parse_address(address))
    if kind == "raw":
        listener.listen()
        sys.stdout.write(f"{listener.address}\n")
        sys.stdout.flush()
        echo(listener)
    model, config, server = EmptyModel(), EngineConfig(max_tokens=512), ServerConfig()
    if kind == "reactor":
        engine = InstantEngine()
    else:
        executor = (
            CpuExecutor(num_threads=1) if kind == "thread" else InlineExecutor(event_s if kind == "event" else 0.0)
        )
        engine = Engine(model, config, executor, NoAttention())
    sharpen_sleep()
    reactor = Reactor(engine, request_limits(model, config, server, "empty"), pb.ModelCard(), listener, server)
    reactor.listen()
    sys.stdout.write(f"{listener.address}\n")
    sys.stdout.flush()
    reactor.run()


def echo(listener: Listener) -> None:
    listener.socket.setblocking(True)
    buffer = bytearray(65536)
    while True:
        connected, _ = listener.socket.accept()
        if not listener.address.path:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while connected.recv_into(buffer) >= len(REQUEST):
            connected.sendall(ANSWER)


@contextmanager
def server_process(kind: str, address: str, event_us: float) -> Iterator[str]:
    command = [sys.executable, __file__, "--serve", kind, "--address", address, "--event-us", str(event_us)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def percentiles(round_trip: Callable[[], object], requests: int, less_us: float = 0.0) -> dict[str, float]:
    took = np.empty(requests + requests // 10)
    for i in range(len(took)):
        start = time.perf_counter()
        round_trip()
        took[i] = time.perf_counter() - start
    p50, p90, p99 = (np.percentile(took[requests // 10 :] * 1e6, (50, 90, 99)) - less_us).tolist()
    return {"p50_us": round(p50, 1), "p90_us": round(p90, 1), "p99_us": round(p99, 1)}


def measure_raw(address: str, requests: int) -> dict[str, float]:
    where = parse_address(address)
    if where.path:
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connected.connect(where.path)
    else:
        connected = socket.create_connection((where.host, where.port))
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffer = memoryview(bytearray(65536))

    def round_trip() -> None:
        connected.sendall(REQUEST)
        missing = len(ANSWER)
        while missing:
            missing -= connected.recv_into(buffer)

    with connected:
        return percentiles(round_trip, requests)


def measure_sync(address: str, requests: int, less_us: float) -> dict[str, float]:
    with Client(address) as client:
        return percentiles(lambda: client.embed([IDS]), requests, less_us)


def measure_async(address: str, requests: int, less_us: float) -> dict[str, float]:
    async def main() -> dict[str, float]:
        took = []
        async with await AsyncClient.connect(address) as client:
            for _ in range(requests + requests // 10):
                start = time.perf_counter()
                await client.embed([IDS], deadline_s=10.0)
                took.append(time.perf_counter() - start)
        p50, p90, p99 = (np.percentile(np.array(took[requests // 10 :]) * 1e6, (50, 90, 99)) - less_us).tolist()
        return {"p50_us": round(p50, 1), "p90_us": round(p90, 1), "p99_us": round(p99, 1)}

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


def measure(requests: int, event_us: float) -> dict[str, dict[str, dict[str, float]]]:
    rows: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for carrier, address in (("tcp", "127.0.0.1:0"), ("unix", f"unix:{folder}/link.sock")):
            for kind in SERVERS:
                with server_process(kind, address, event_us) as bound:
                    less = event_us if kind == "event" else 0.0
                    row = rows.setdefault(f"{kind} {carrier}", {})
                    if kind == "raw":
                        row["socket"] = measure_raw(bound, requests)
                    else:
                        row["sync"] = measure_sync(bound, requests, less)
                        row["async"] = measure_async(bound, requests, less)
                print(f"{kind:8} {carrier:5}", row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to write JSON")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--event-us", type=float, default=600.0)
    parser.add_argument("--serve", choices=SERVERS, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.address, options.event_us * 1e-6)
        return
    rows = measure(options.requests, options.event_us)
    if options.out:
        facts = {
            "what": "round trip of one request of 128 ids and 1024 floats, client and server in two processes, us",
            "command": f"python benchmarks/server/link_overhead.py --requests {options.requests}",
            "commit": commit(),
            "cpu": cpu_model(),
            "logical_cpus": os.cpu_count(),
            "load_average_1min": round(os.getloadavg()[0], 2),
            "python": platform.python_version(),
            "requests": options.requests,
            "event_us": options.event_us,
        }
        options.out.write_text(json.dumps({**facts, "rows": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

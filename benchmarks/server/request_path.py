"""What the engine process adds to one request where it counts: before its graph is replayed, and after its event.

    python benchmarks/server/request_path.py --out request_path.json

One process holds both ends of a connection and turns the reactor by hand, around the real engine with a graph, an
executor and an event of pretence; so nothing sleeps, no other process disturbs, and what runs beside the device
(between replay and event) is told apart. Rows, best / p50 in µs over `--requests` requests:

    before the replay   from the poller's wake-up to the graph's launch: decoding, validation, scheduling, staging
    beside the device   from there until the loop waits again
    after the event     from the event to the answer's bytes in the socket
    after the answer    from there until the loop waits again

and the bytecodes and calls of each, which do not depend on the machine. `--cold MIB` touches so much memory before each
half of a request: a host whose processor did other work meanwhile does not have this code in its caches any more.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from rose.bench.machine import commit, cpu_model
from rose.config import EngineConfig, ServerConfig
from rose.engine import Engine
from rose.engine.graphs import LazyGraphs
from rose.models.base import OutputSpec
from rose.proto import rose_pb2 as pb
from rose.proto.address import parse_address
from rose.proto.convert import tokens_to_proto
from rose.proto.frames import FrameType, encode_frame
from rose.server.card import request_limits
from rose.server.listener import Listener
from rose.server.reactor import Reactor

TOKENS, DIMENSION = 128, 1024
STEPS = ("before the replay", "beside the device", "after the event", "after the answer")
now = time.perf_counter


class Model:
    outputs = {"dense": OutputSpec(dtype="float32", dimension=DIMENSION, normalized=True)}  # noqa: RUF012
    default_output = "dense"
    vocab_size = 250_000
    num_layers = 0

    def __init__(self) -> None:
        self._rows = torch.full((1024, DIMENSION), DIMENSION**-0.5)

    def attention_spec(self, device, dtype):
        raise NotImplementedError("nothing attends here")

    def __call__(self, batch, outputs):
        return {"dense": self._rows[: batch.num_sequences]}


class NoAttention:
    """Its plan is its own; it is the same for every batch of a key."""

    name = "none"
    capturable = fixed = True

    def supports(self, spec) -> str | None:
        return None

    def plan(self, batch, slot: int = 0):
        return self


class Stamps:
    """Where the request is: `mark` ends a step."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self.step = -1

    def mark(self) -> None:
        self.at.append(now())
        self.step += 1


class Graph:
    bytes = 1

    def __init__(self, outputs, stamps: Stamps) -> None:
        self.outputs = outputs
        self._stamps = stamps

    def replay(self) -> None:
        self._stamps.mark()

    def release(self) -> None:
        pass


class Capturer:
    def __init__(self, stamps: Stamps) -> None:
        self._stamps = stamps

    def capture(self, key, fn):
        return Graph(fn(), self._stamps)


class Ticket:
    """Ready when it is told so."""

    def __init__(self, value, over: bool, expected_seconds: float | None) -> None:
        self._value = value
        self.over = over
        self.expected_end = time.monotonic() + (expected_seconds or 0.0)

    def ready(self) -> bool:
        return self.over

    def wait(self) -> None:
        if not self.over:
            raise RuntimeError("nobody may wait here")

    def result(self):
        self.wait()
        return self._value

    def seconds(self) -> float | None:
        return 2e-3 if self.over else None

    def on_done(self, callback) -> None:
        raise NotImplementedError


class Executor:
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.at_once = True
        self.last: Ticket

    def launch(self, fn, *, expected_seconds=None):
        self.last = Ticket(fn(), self.at_once, expected_seconds)
        return self.last

    def fileno(self) -> int | None:
        return None

    def acknowledge(self) -> None:
        pass

    def close(self) -> None:
        pass


class Socket:
    """The server's end, telling when an answer was sent."""

    def __init__(self, connected, stamps: Stamps) -> None:
        self._connected = connected
        self._stamps = stamps
        self.recv_into = connected.recv_into
        self.close = connected.close

    def send(self, data) -> int:
        count = self._connected.send(data)
        self._stamps.mark()
        return count


class Waiter:
    """Never waits: what is to come is there already. A step begins when it returns."""

    def __init__(self, poller, stamps: Stamps) -> None:
        self._poller = poller
        self._stamps = stamps

    def wait(self, timeout_s):
        events = self._poller.poll(0)
        self._stamps.mark()
        return events

    def wait_for_batch(self, ready, expected_end, timeout_s):
        assert ready()
        self._stamps.mark()
        return []

    def close(self) -> None:
        self._poller.close()


class Bench:
    def __init__(self, folder: str, cold_mib: int) -> None:
        self.stamps, self.executor = Stamps(), Executor()
        model, config, server = Model(), EngineConfig(max_tokens=512), ServerConfig()
        graphs = LazyGraphs(torch.device("cpu"), capturer=Capturer(self.stamps), max_bytes=1 << 30)
        engine = Engine(model, config, self.executor, NoAttention(), graphs=graphs, inflection_tokens=1024)
        engine.warmup([engine.key_for([TOKENS])])
        self.executor.at_once = False
        listener = Listener(parse_address(f"unix:{folder}/s"))
        limits = request_limits(model, config, server, "empty")
        self.reactor = Reactor(engine, limits, pb.ModelCard(), listener, server)
        self.reactor.listen()
        self.client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.client.connect(f"{folder}/s")
        self.client.setblocking(False)
        self.reactor._turn()
        for connection in self.reactor._clients._connections.values():
            connection.socket = Socket(connection.socket, self.stamps)
        self.reactor._waiter = Waiter(self.reactor._waiter.poller, self.stamps)
        self._memory = np.zeros(cold_mib << 20, dtype=np.uint8)
        self._buffer = bytearray(1 << 16)

    def request(self, request_id: int, ids: np.ndarray, counter=None) -> list[float]:
        """Seconds of each step."""
        frame = encode_frame(
            FrameType.EMBED, request_id, pb.EmbedRequest(tokens=tokens_to_proto([ids])).SerializeToString()
        )
        self.client.sendall(frame)
        self._evict()
        stamps = self.stamps
        stamps.at, stamps.step = [], -1
        sys.settrace(counter)
        self.reactor._turn()
        stamps.mark()
        sys.settrace(None)
        self.executor.last.over = True
        self._evict()
        stamps.step = 1
        sys.settrace(counter)
        self.reactor._turn()
        stamps.mark()
        sys.settrace(None)
        assert self.client.recv_into(self._buffer) > 4 * DIMENSION
        begin, replay, launched, event, sent, end = stamps.at
        return [replay - begin, launched - replay, sent - event, end - sent]

    def _evict(self) -> None:
        if len(self._memory):
            self._memory[::64] += 1


def counts(bench: Bench, request_id: int, ids: np.ndarray) -> dict[str, dict[str, int]]:
    """Bytecodes and Python calls of each step."""
    bytecodes: Counter[int] = Counter()
    calls: Counter[int] = Counter()

    def trace(frame, event, arg):
        if event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            calls[bench.stamps.step] += 1
        elif event == "opcode":
            bytecodes[bench.stamps.step] += 1
        return trace

    bench.request(request_id, ids, trace)
    return {step: {"bytecodes": bytecodes[i], "calls": calls[i]} for i, step in enumerate(STEPS)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to write JSON")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--cold", type=int, default=64, metavar="MIB")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    rows: dict[str, dict[str, object]] = {step: {} for step in STEPS}
    for name, mib in (("hot", 0), (f"cold {options.cold} MiB", options.cold)):
        with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
            bench = Bench(folder, mib)
            took = np.array(
                [
                    bench.request(i + 1, rng.integers(5, 250_000, TOKENS, dtype=np.int32))
                    for i in range(options.requests)
                ]
            )
            counted = counts(bench, options.requests + 1, rng.integers(5, 250_000, TOKENS, dtype=np.int32))
            bench.reactor._close()
        kept = took[options.requests // 5 :] * 1e6
        for i, step in enumerate(STEPS):
            best, p50 = np.percentile(kept[:, i], (2, 50)).tolist()
            rows[step] |= {name: {"best_us": round(best, 1), "p50_us": round(p50, 1)}} | counted[step]
    for step, row in rows.items():
        print(f"{step:20}", row)
    if options.out:
        facts = {
            "what": "one request of 128 ids and 1024 floats through the reactor and the engine, us",
            "command": "python " + " ".join(sys.argv),
            "commit": commit(),
            "cpu": cpu_model(),
            "python": sys.version.split()[0],
        }
        options.out.write_text(json.dumps({**facts, "rows": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

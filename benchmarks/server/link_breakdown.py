"""Where the time of one request over the light link goes, on the real engine: client, socket, server, device.

    python benchmarks/server/link_breakdown.py --model bge-m3 --tokens 128 --out link_breakdown.json

Client and server are two processes and share the machine's monotonic clock; the server is stamped from outside.
Rows, p50 / p99 in µs over `--requests` requests: from the client's call to the server's read, from there to the launch
(decoding, validation, staging, queueing kernels), to the event, to the answer on its way, and to the client's return.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

STEPS = ("to the server's read", "to the launch", "to the event", "to the answer sent", "to the client's return")


def server(folder: str, address: str, out: str) -> int:
    """The engine process, with a stamp at every step."""
    from rose.config import ServerConfig
    from rose.server import run
    from rose.server.batches import Batches
    from rose.server.connection import Connection

    stamps: dict[str, list[float]] = {"read": [], "launch": [], "event": [], "sent": []}
    now = time.monotonic
    read, launch, finish, flush = Connection.read, Batches.launch, Batches._finish, Connection.flush

    def stamped_read(self, buffer, at):
        stamps["read"].append(now())
        return read(self, buffer, at)

    def stamped_launch(self):
        launched = launch(self)
        if launched:
            stamps["launch"].append(now())
        return launched

    def stamped_finish(self, flight):
        stamps["event"].append(now())
        return finish(self, flight)

    def stamped_flush(self, at):
        flush(self, at)
        stamps["sent"].append(now())

    Connection.read, Batches.launch = stamped_read, stamped_launch
    Batches._finish, Connection.flush = stamped_finish, stamped_flush
    status = run.serve(folder, config=ServerConfig(address=address))
    Path(out).write_text(json.dumps(stamps))
    return status


def measure(folder: str, tokens: int, requests: int, spin_s: float, vocab_size: int) -> dict[str, list[float]]:
    from rose.client import Client
    from rose.errors import Unavailable

    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as directory:
        address, out = f"unix:{directory}/s", f"{directory}/stamps.json"
        process = subprocess.Popen([sys.executable, __file__, "--serve", folder, address, out], env=os.environ)
        client = None
        while client is None:
            try:
                client = Client(address, spin_s=spin_s)
            except Unavailable:
                if process.poll() is not None:
                    raise RuntimeError("the server ended") from None
                time.sleep(0.2)
        spans = []
        for _ in range(requests):
            ids = rng.integers(5, vocab_size, tokens, dtype=np.int32)
            begin = time.monotonic()
            client.embed([ids])
            spans.append((begin, time.monotonic()))
        process.send_signal(signal.SIGTERM)
        process.wait()
        stamps = json.loads(Path(out).read_text())
    kept = spans[requests // 5 :]
    count = len(kept)
    table = np.array([[b, *(stamps[s][-count:][i] for s in ("read", "launch", "event", "sent")), e]
                      for i, (b, e) in enumerate(kept)])  # fmt: skip
    steps = np.diff(table, axis=1) * 1e6
    rows = {name: steps[:, i] for i, name in enumerate(STEPS)}
    rows["whole"] = (table[:, -1] - table[:, 0]) * 1e6
    return {name: [round(float(np.percentile(v, q)), 1) for q in (50, 99)] for name, v in rows.items()}


def main() -> None:
    from rose.bench.shapes import build_checkpoint, made_folder
    from rose.config import read_model_folder

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="bge-m3", help="a shape, or NAME=FOLDER")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--spin-s", type=float, nargs="+", default=[0.0, 0.01], help="of the client, in turn")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    name, _, given = args.model.partition("=")
    folder = given or str(build_checkpoint(name, made_folder() / name))
    vocab_size = read_model_folder(folder).architecture.vocab_size
    results = []
    for spin in args.spin_s:
        rows = measure(folder, args.tokens, args.requests, spin, vocab_size)
        results.append({"model": name, "tokens": args.tokens, "client_spin_s": spin, "us_p50_p99": rows})
        print(f"{name} {args.tokens} tokens, client spins {spin} s")
        for step, (middle, high) in rows.items():
            print(f"  {step:24s} {middle:8.1f} {high:8.1f}", flush=True)
    if args.out:
        args.out.write_text(json.dumps({"command": " ".join(sys.argv), "rows": results}, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        raise SystemExit(server(*sys.argv[2:5]))
    main()

#!/usr/bin/env python3
"""Serve the default model, embed a dozen sentences over HTTP, and print the nearest neighbour of each.

Run by scripts/demo.sh. Uses nothing but the standard library on the client's side, so what it shows is what any HTTP
client gets.
"""

from __future__ import annotations

import argparse
import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rose.errors import PullError
from rose.hub import DEFAULT_MODEL, Bars, default_cache, resolve

SENTENCES = (
    "The night train to Vienna was forty minutes late.",
    "Our railway connection to Austria was delayed by more than half an hour.",
    "Water the tomato plants early in the morning, before the sun is strong.",
    "Vegetable beds should be given water at dawn rather than at noon.",
    "The court ruled that the landlord must return the deposit.",
    "A judge ordered the owner of the flat to pay the tenant's money back.",
    "She tuned her violin and played the first bars of a waltz.",
    "The musician warmed up with a dance tune on her fiddle.",
    "A cold front will bring snow to the valleys tonight.",
    "Forecasters expect the temperature to fall and flakes to settle by morning.",
    "The vaccine halves the risk of a severe course of the disease.",
    "People who got the injection were half as likely to become seriously ill.",
)
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0


def main() -> int:
    options = parse_arguments()
    try:
        resolve(DEFAULT_MODEL, progress=Bars())
    except PullError as error:
        print(f"demo: {error.message}", file=sys.stderr)
        return 1
    print(f"model    {DEFAULT_MODEL} in {default_cache()}")
    port = options.port or free_port()
    server = start_server(port)
    try:
        wait_until_ready(server, port)
        print(f"server   http://127.0.0.1:{port}   API page: http://127.0.0.1:{port}/docs\n")
        show_neighbours(port)
        if options.keep:
            print("\nThe server keeps running; stop it with Ctrl-C.")
            server.wait()
    except KeyboardInterrupt:
        print()
    except RuntimeError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    finally:
        stopped = stop(server)
    print(f"\nstopped  {stopped}")
    return 0 if stopped == "cleanly" else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=0, help="port to serve on (default: a free one)")
    parser.add_argument("--keep", action="store_true", help="leave the server running until Ctrl-C")
    return parser.parse_args()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_server(port: int) -> subprocess.Popen[bytes]:
    """`rose serve`, in a session of its own: Ctrl-C must reach this process alone, which then stops the server."""
    command = [
        str(Path(sys.executable).with_name("rose")),
        "serve",
        DEFAULT_MODEL,
        "--http",
        str(port),
        "--log-level",
        "warning",
    ]
    print(f"starting {' '.join(command)}", flush=True)
    return subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL)


def wait_until_ready(server: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with exit status {server.returncode} (its reason is above)")
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/ready")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"the server was not ready within {START_TIMEOUT_S:.0f} s")


def show_neighbours(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    vectors, milliseconds = [], []
    for sentence in SENTENCES:
        started = time.perf_counter()
        vectors.append(embed(connection, [sentence])[0])
        milliseconds.append((time.perf_counter() - started) * 1e3)
    for i, sentence in enumerate(SENTENCES):
        score, nearest = max((dot(vectors[i], other), j) for j, other in enumerate(vectors) if j != i)
        print(f"{sentence}   ({milliseconds[i]:.1f} ms)\n    {score:.3f}  {SENTENCES[nearest]}")
    started = time.perf_counter()
    embed(connection, list(SENTENCES))
    together = (time.perf_counter() - started) * 1e3
    middle = sorted(milliseconds)[len(milliseconds) // 2]
    print(f"\nlatency  one sentence a request: median {middle:.1f} ms, slowest {max(milliseconds):.1f} ms")
    print(f"         all {len(SENTENCES)} in one request: {together:.1f} ms")


def embed(connection: http.client.HTTPConnection, texts: list[str]) -> list[list[float]]:
    body = json.dumps({"model": DEFAULT_MODEL, "input": texts})
    connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer: dict[str, Any] = json.loads(response.read())
    if response.status != 200:
        raise RuntimeError(f"HTTP {response.status}: {answer}")
    return [item["embedding"] for item in answer["data"]]


def dot(a: list[float], b: list[float]) -> float:
    """The vectors have unit length, so this is their cosine."""
    return sum(x * y for x, y in zip(a, b, strict=True))


def stop(server: subprocess.Popen[bytes]) -> str:
    """Ask the server to finish; say whether it, and every process it started, is gone."""
    started = descendants(server.pid)
    if server.poll() is None:
        server.send_signal(signal.SIGTERM)
    try:
        status = server.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        server.kill()
        return f"by force: it was still there {STOP_TIMEOUT_S:.0f} s after SIGTERM"
    if left := [pid for pid in started if is_alive(pid)]:
        return f"but left processes behind: {left}"
    return "cleanly" if status == 0 else f"with exit status {status}"


def descendants(root: int) -> list[int]:
    """Process ids of the children of `root`, their children and so on (from /proc, so on Linux only)."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        if (parent := stat_fields(int(entry.name))) is not None:
            parents[int(entry.name)] = int(parent[1])
    found, wave = [], [root]
    while wave:
        wave = [pid for pid, parent in parents.items() if parent in wave]
        found += wave
    return found


def is_alive(pid: int) -> bool:
    fields = stat_fields(pid)
    return fields is not None and fields[0] != "Z"  # a zombie has ended and only waits for its parent to look


def stat_fields(pid: int) -> list[str] | None:
    """State, parent and the rest of /proc/PID/stat, or None where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


if __name__ == "__main__":
    sys.exit(main())

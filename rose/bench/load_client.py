"""One client process of a load: sends prepared requests one after another until a given time, and tells when each ran.

    python -m rose.bench.load_client VIA ADDRESS FILE

FILE holds the requests as they are sent, each after its length. Prints `ready` after a first request, begins with the
first line on stdin, reads the time to end at (time.monotonic(), which processes of one machine share) from the second,
whenever that comes, and prints the times as JSON in the end.
Knows bytes and clocks; knows neither models nor tables, and loads no torch.
"""

from __future__ import annotations

import gc
import json
import math
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, Any

from rose.bench.carriers import GrpcDriver, HttpDriver, LinkDriver
from rose.proto import rose_pb2 as pb

_LENGTH = struct.Struct("<Q")


def write_requests(path: Path, requests: Iterable[bytes]) -> None:
    with path.open("wb") as file:
        for request in requests:
            file.write(_LENGTH.pack(len(request)))
            file.write(request)


def read_requests(path: Path) -> list[bytes]:
    data, found, at = path.read_bytes(), [], 0
    while at < len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        found.append(data[at : at + length])
        at += length
    return found


def connect(via: str, address: str) -> tuple[Callable[[bytes], Any], Callable[[Any], object]]:
    """(what to make of a request before the clock starts, what sends it and waits).

    Args:
        address: of the engine (link) or the front (grpc), or the URL to send to up to /embeddings (http).
    """
    if via == "link":
        return pb.EmbedRequest.FromString, LinkDriver(address).send_message
    if via == "grpc":
        return pb.EmbedRequest.FromString, GrpcDriver(address).send
    if via == "http":
        return bytes, HttpDriver(address, "").send
    raise ValueError(f"no client for {via!r}")


class End:
    """The time to stop at, which may be told while requests run.

    Attributes:
        at: time.monotonic(); for ever until it is told.
    """

    def __init__(self, at: float = math.inf) -> None:
        self.at = at

    def read_from(self, source: IO[bytes]) -> None:
        """Take it from the next line, in a thread; where there is none any more, the parent is gone: stop now."""

        def read() -> None:
            line = source.readline()
            self.at = float(line) if line.strip() else -math.inf

        threading.Thread(target=read, daemon=True).start()


def run(
    send: Callable[[Any], object],
    prepared: Sequence[Any],
    end: End,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[list[float], list[float]]:
    """(starts, ends) of requests sent until `end`; the last may take longer."""
    starts: list[float] = []
    ends: list[float] = []
    while (start := clock()) < end.at:
        send(prepared[len(starts) % len(prepared)])
        ends.append(clock())
        starts.append(start)
    return starts, ends


def main(arguments: Sequence[str]) -> int:
    via, address, path = arguments
    prepare, send = connect(via, address)
    prepared = [prepare(request) for request in read_requests(Path(path))]
    send(prepared[-1])
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    # Unbuffered: nothing may hold a lock on it when the interpreter ends.
    told = open(sys.stdin.fileno(), "rb", buffering=0, closefd=False)  # noqa: SIM115
    if not told.readline().strip():
        return 1  # the parent is gone
    end = End()
    end.read_from(told)
    gc.collect()
    gc.disable()  # the client's collector is not what is measured
    starts, ends = run(send, prepared, end)
    json.dump({"starts": starts, "ends": ends}, sys.stdout)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

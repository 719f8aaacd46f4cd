"""What the front process adds to the light link, and how much of it belongs to the libraries that carry its requests.

    python benchmarks/server/front_overhead.py --out front_overhead.json

One request of 128 ids at a time, 1024 floats back; an engine process of pretence answers at once. Rows:

    link        the blocking client on the engine itself: what every front stands on
    http bare   uvicorn, as the front runs it, around an application that reads the body and answers the same bytes
    http        the front: /v1/embeddings, ids in, base64 out
    grpc aio    a server of grpc.aio whose method answers the same bytes
    grpc pool   the same on grpc's server of threads
    grpc        the front: Embed, tokens in

With `--tokenizer FOLDER` (`rose pull xlm-roberta` prints one) two more, of eight English texts of 512 tokens in turn:

    encode      the front's tokenizer alone, in this process
    http text   the front: /v1/embeddings, a text in, base64 out

Each carrier has its process, and all of them run at the same time; they take turns of `--turn` requests, so that
whatever else the machine does falls on all of them. Of each: p50 of the best turn, p50 and p99 of all requests, and the
processor time that its process spent on one, in µs. `--gap-ms` waits between requests: processors go to sleep and
caches get cold. `--answer-us` is how long the engine takes, `--spin-us` how long the front stays awake for it.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from itertools import cycle
from pathlib import Path

import grpc
import numpy as np
import uvicorn
import uvloop
from tokenizers import Tokenizer, models

from rose.bench.machine import commit, cpu_model
from rose.client import Client
from rose.config.serving import GatewayConfig
from rose.gateway.tokenizer import TextTokenizer
from rose.proto import rose_pb2 as pb
from rose.proto.address import parse_address
from rose.proto.convert import tensor_to_proto, tokens_to_proto
from rose.proto.frames import FrameDecoder, FrameType, encode_frame

TOKENS, DIMENSION, VOCABULARY = 128, 1024, 250_000
TEXT_TOKENS, TEXTS = 512, 8
METHOD = "/rose.v1.Rose/Embed"
IDS = np.random.default_rng(0).integers(5, VOCABULARY, TOKENS, dtype=np.int32)
VECTOR = np.full((1, DIMENSION), DIMENSION**-0.5, dtype=np.float32)
MESSAGE = pb.EmbedRequest(tokens=tokens_to_proto([IDS])).SerializeToString()
BODY = json.dumps({"model": "m", "input": [IDS.tolist()], "encoding_format": "base64"}).encode()
ANSWER = pb.EmbedResponse(
    outputs=[pb.Output(name="dense", values=tensor_to_proto(VECTOR))],
    prompt_tokens=TOKENS,
    timing=pb.Timing(queue_us=20, compute_us=20, batches=1),
).SerializeToString()
JSON_ANSWER = (
    b'{"object":"list","data":[{"object":"embedding","index":0,"embedding":"%b"}],"model":"m","usage":'
    b'{"prompt_tokens":128,"total_tokens":128}}' % base64.b64encode(VECTOR.tobytes())
)


def engine(folder: Path, answer_s: float, spin_s: float) -> None:
    """Answers EMBED `answer_s` after it came, INFO and STATS at once; a thread a connection."""
    card = pb.ModelCard(
        model="m",
        outputs=[pb.OutputCard(name="dense", dtype=pb.FLOAT32, dimension=DIMENSION, normalized=True, kind="vector")],
        default_output="dense",
        vocab_size=VOCABULARY,
        max_tokens=8192,
        max_batch_tokens=16384,
        max_request_items=4096,
        tokenizer_sha256=hashlib.sha256((folder / "tokenizer.json").read_bytes()).digest(),
    ).SerializeToString()
    answers = {
        FrameType.EMBED: (FrameType.EMBED_RESULT, ANSWER),
        FrameType.INFO: (FrameType.INFO_RESULT, card),
        FrameType.STATS: (FrameType.STATS_RESULT, b""),
    }

    def serve(connection: socket.socket) -> None:
        decoder = FrameDecoder()
        while data := connection.recv(65536):
            for frame in decoder.feed(data):
                if frame.type in answers:
                    if answer_s and frame.type is FrameType.EMBED:
                        time.sleep(answer_s)
                    kind, payload = answers[frame.type]
                    connection.sendall(encode_frame(kind, frame.request_id, payload))

    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(folder / "engine"))
    listener.listen()
    say(f"unix:{folder}/engine")
    while True:
        threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()


def front(folder: Path, answer_s: float, spin_s: float) -> None:
    from rose.gateway.run import run_front

    config = GatewayConfig(replicas=(f"unix:{folder}/engine",), http_port=0, grpc_port=0, replica_spin_seconds=spin_s)
    run_front(config, folder, on_listening=lambda listening: say(f"{listening.http} {listening.grpc}"))


def bare_http(*_: object) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(JSON_ANSWER))]

    async def app(scope, receive, send) -> None:
        while (await receive())["more_body"]:
            pass
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": JSON_ANSWER})

    with socket.create_server(("127.0.0.1", 0)) as listener:
        say(f"127.0.0.1:{listener.getsockname()[1]}")
        config = uvicorn.Config(
            app, http="httptools", ws="none", lifespan="off", log_config=None, access_log=False, server_header=False
        )
        uvloop.run(uvicorn.Server(config).serve(sockets=[listener]))


def handlers(method) -> grpc.GenericRpcHandler:
    return grpc.method_handlers_generic_handler("rose.v1.Rose", {"Embed": grpc.unary_unary_rpc_method_handler(method)})


def bare_aio(*_: object) -> None:
    async def embed(raw: bytes, context) -> bytes:
        return ANSWER

    async def main() -> None:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((handlers(embed),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        say(f"127.0.0.1:{port}")
        await server.wait_for_termination()

    uvloop.run(main())


def bare_pool(*_: object) -> None:
    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((handlers(lambda raw, context: ANSWER),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    say(f"127.0.0.1:{port}")
    server.wait_for_termination()


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


SERVERS = {"engine": engine, "front": front, "bare http": bare_http, "bare aio": bare_aio, "bare pool": bare_pool}


@contextmanager
def running(kind: str, folder: Path, answer_s: float = 0.0, spin_s: float = 0.0) -> Iterator[tuple[int, list[str]]]:
    """A server's process id and where it listens."""
    command = [sys.executable, __file__, "--serve", kind, "--folder", str(folder)]
    command += ["--answer-us", str(answer_s * 1e6), "--spin-us", str(spin_s * 1e6)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process.pid, process.stdout.readline().split()
        finally:
            process.kill()


def cpu_seconds(pid: int) -> float:
    """That all threads of a process have run for."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) * 1e-9


def over_link(address: str) -> Callable[[], object]:
    client = Client(address)
    return lambda: client.embed([IDS])


def over_grpc(target: str) -> Callable[[], object]:
    call = grpc.insecure_channel(target).unary_unary(METHOD)
    return lambda: call(MESSAGE)


def over_http(target: str, bodies: Sequence[bytes] = (BODY,)) -> Callable[[], object]:
    where = parse_address(target)
    connection = socket.create_connection((where.host, where.port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: {target}\r\nContent-Type: application/json\r\n"
    requests = cycle([f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body for body in bodies])

    def call() -> None:
        connection.sendall(next(requests))
        answer = connection.recv(65536)
        while not answer.endswith(b"}"):
            answer += connection.recv(65536)
        assert answer.startswith(b"HTTP/1.1 200"), answer

    return call


class Row:
    """The requests of one carrier."""

    def __init__(self, call: Callable[[], object], pid: int) -> None:
        self._call, self._pid = call, pid
        self._turns: list[np.ndarray] = []
        self._cpu_s: list[float] = []

    def warm(self, requests: int) -> None:
        for _ in range(requests):
            self._call()

    def turn(self, requests: int, gap_s: float) -> None:
        took = np.empty(requests)
        before = cpu_seconds(self._pid)
        for i in range(requests):
            if gap_s:
                time.sleep(gap_s)
            begin = time.perf_counter()
            self._call()
            took[i] = time.perf_counter() - begin
        self._cpu_s.append((cpu_seconds(self._pid) - before) / requests)
        self._turns.append(took)

    def numbers(self) -> dict[str, float]:
        p50, p99 = np.percentile(np.concatenate(self._turns), (50, 99)).tolist()
        seconds = {
            "best_p50_us": min(float(np.median(turn)) for turn in self._turns),
            "p50_us": p50,
            "p99_us": p99,
            "cpu_us": float(np.median(self._cpu_s)),
        }
        return {name: round(value * 1e6, 1) for name, value in seconds.items()}


def wait_ready(call: Callable[[], object]) -> None:
    """Until the front has met its engine."""
    end = time.monotonic() + 30
    while True:
        try:
            call()
            return
        except grpc.RpcError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def make_texts(tokenizer: TextTokenizer) -> list[str]:
    # Not for the servers, which are this file too: a front has no torch.
    from rose.bench.loads import SEED
    from rose.bench.pseudo_texts import exact_texts
    from rose.bench.texts import english_words

    def count(some: list[str]) -> list[int]:
        return [len(ids) for ids in tokenizer.encode(some)]

    return exact_texts(TEXT_TOKENS, TEXTS, count, english_words(SEED))


def measure(
    turns: int, requests: int, gap_s: float, answer_s: float, spin_s: float, tokenizer_folder: Path | None
) -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        if tokenizer_folder is None:
            Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(f"{name}/tokenizer.json")
        else:
            shutil.copy(tokenizer_folder / "tokenizer.json", folder)
        at = {kind: stack.enter_context(running(kind, folder, answer_s, spin_s)) for kind in SERVERS}
        pid, (http, grpc_address) = at["front"]
        through_grpc = over_grpc(grpc_address)
        wait_ready(through_grpc)
        rows = {"link": Row(over_link(at["engine"][1][0]), at["engine"][0])}
        for label, kind, connect in (
            ("http bare", "bare http", over_http),
            ("grpc aio", "bare aio", over_grpc),
            ("grpc pool", "bare pool", over_grpc),
        ):
            rows[label] = Row(connect(at[kind][1][0]), at[kind][0])
        rows |= {"http": Row(over_http(http), pid), "grpc": Row(through_grpc, pid)}
        if tokenizer_folder is not None:
            tokenizer = stack.enter_context(closing(TextTokenizer(folder)))
            texts = make_texts(tokenizer)
            bodies = [json.dumps({"model": "m", "input": text, "encoding_format": "base64"}).encode() for text in texts]
            turn = cycle(texts)
            rows["encode"] = Row(lambda: tokenizer.encode([next(turn)]), os.getpid())
            rows["http text"] = Row(over_http(http, bodies), pid)
        for row in rows.values():
            row.warm(requests)
        for _ in range(turns):
            for row in rows.values():
                row.turn(requests, gap_s)
        return {label: row.numbers() for label, row in rows.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to write JSON")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--turn", type=int, default=200, metavar="REQUESTS")
    parser.add_argument("--gap-ms", type=float, default=0.0)
    parser.add_argument("--answer-us", type=float, default=0.0)
    parser.add_argument("--spin-us", type=float, default=0.0)
    parser.add_argument("--tokenizer", type=Path, help="folder of a tokenizer.json, for rows of texts")
    parser.add_argument("--serve", choices=SERVERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        SERVERS[options.serve](options.folder, options.answer_us * 1e-6, options.spin_us * 1e-6)
        return
    gap_s, answer_s, spin_s = options.gap_ms * 1e-3, options.answer_us * 1e-6, options.spin_us * 1e-6
    rows = measure(options.turns, options.turn, gap_s, answer_s, spin_s, options.tokenizer)
    for label, row in rows.items():
        print(f"{label:10}", row)
    if options.out:
        facts = {
            "what": "one request of 128 ids and 1024 floats at a time, engine of pretence, us",
            "command": "python benchmarks/server/front_overhead.py " + " ".join(sys.argv[1:]),
            "commit": commit(),
            "cpu": cpu_model(),
            "logical_cpus": os.cpu_count(),
            "load_average_1min": round(os.getloadavg()[0], 2),
            "python": platform.python_version(),
        }
        options.out.write_text(json.dumps({**facts, "rows": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Ways to send one request of token ids and wait for its vectors: in process, light link, gRPC, any OpenAI server.

What a client must prepare is prepared before the clock starts; the clock stops when the last byte is in.
Knows carriers; knows neither loads nor tables.
"""

from __future__ import annotations

import base64
import http.client
import json
import socket
from collections.abc import Sequence
from typing import Any, Protocol
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from rose.bench.reference import Vectors
from rose.client import Client
from rose.engine.engine import Engine
from rose.engine.request import Request
from rose.proto import rose_pb2 as pb
from rose.proto.convert import tensor_from_proto, tokens_to_proto

Ids = npt.NDArray[np.int32]


class Driver(Protocol):
    """One way to a model.

    `prepare` may take its time; `send` is what is timed; `vectors` reads what `send` gave back.
    """

    via: str

    def prepare(self, sequences: Sequence[Ids]) -> Any: ...

    def send(self, prepared: Any) -> Any: ...

    def vectors(self, answer: Any) -> Vectors: ...

    def counters(self) -> tuple[int, int]:
        """(batches replayed from a graph, batches run plain or captured) since start."""
        ...

    def close(self) -> None: ...


class EngineDriver:
    """The engine in this process: add, step, result."""

    via = "engine"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._next = 0
        # As the server's thread does: stream and inference mode are kept, not entered for every batch.
        self._owner = engine.executor.owner()
        self._owner.__enter__()

    def prepare(self, sequences: Sequence[Ids]) -> list[Ids]:
        return list(sequences)

    def send(self, prepared: list[Ids]) -> Vectors:
        self._next += 1
        self._engine.add(Request(self._next, prepared))
        rows: list[tuple[list[int], Any]] = []
        while self._engine.queued_requests:
            results = self._engine.step()
            rows += [([item.index for item in r.items], r.outputs) for r in results if r.items]
            if not results:
                # Two batches are under way: wait for the older one.
                next(iter(rows[-2 if len(rows) > 1 else -1][1].values())).result()
        found = [(order, next(iter(outputs.values())).result()) for order, outputs in rows]
        if len(found) == 1:
            only: Vectors = found[0][1]
            return only
        joined = np.empty((len(prepared), found[0][1].shape[1]), dtype=found[0][1].dtype)
        for order, block in found:
            joined[order] = block
        return joined

    def vectors(self, answer: Vectors) -> Vectors:
        return answer.astype(np.float32)

    def counters(self) -> tuple[int, int]:
        metrics = self._engine.graphs.metrics
        return metrics.hits, metrics.plain + metrics.captures

    def close(self) -> None:
        self._owner.__exit__(None, None, None)
        self._engine.close()


class LinkDriver:
    """The blocking client of the light link, to an engine process."""

    via = "link"

    def __init__(self, address: str) -> None:
        self._client = Client(address)

    def prepare(self, sequences: Sequence[Ids]) -> list[Ids]:
        return list(sequences)

    def send(self, prepared: list[Ids]) -> Any:
        return self._client.embed(prepared)

    def vectors(self, answer: Any) -> Vectors:
        found: Vectors = answer.vectors.astype(np.float32)
        return found

    def counters(self) -> tuple[int, int]:
        counters = self._client.stats().engine_counters
        return counters["graph_hits"], counters["graph_plain"] + counters["graph_captures"]

    def close(self) -> None:
        self._client.close()


class GrpcDriver:
    """grpcio's blocking stub, to a front."""

    via = "grpc"
    _LIMIT = 256 << 20

    def __init__(self, target: str, stats: LinkDriver) -> None:
        import grpc

        from rose.proto import rose_pb2_grpc

        limits = [("grpc.max_receive_message_length", self._LIMIT), ("grpc.max_send_message_length", self._LIMIT)]
        self._channel = grpc.insecure_channel(target, options=limits)
        self._stub: Any = rose_pb2_grpc.RoseStub(self._channel)  # type: ignore[no-untyped-call]
        self._stats = stats

    def prepare(self, sequences: Sequence[Ids]) -> pb.EmbedRequest:
        return pb.EmbedRequest(tokens=tokens_to_proto(list(sequences)))

    def send(self, prepared: pb.EmbedRequest) -> pb.EmbedResponse:
        answer: pb.EmbedResponse = self._stub.Embed(prepared)
        return answer

    def vectors(self, answer: pb.EmbedResponse) -> Vectors:
        return tensor_from_proto(answer.outputs[0].values).astype(np.float32)

    def counters(self) -> tuple[int, int]:
        return self._stats.counters()

    def close(self) -> None:
        self._channel.close()


class HttpDriver:
    """POST /v1/embeddings of any OpenAI-compatible server, ids in and base64 out, on one kept-alive connection."""

    via = "http"

    def __init__(self, url: str, model: str, stats: LinkDriver | None = None) -> None:
        """
        Args:
            url: of the server, with the path before /embeddings ("http://127.0.0.1:8080/v1").
            stats: where ROSE's engine tells its graph counters; None for another server.
        """
        parts = urlsplit(url)
        if parts.hostname is None:
            raise ValueError(f"{url!r} names no host")
        self._path = parts.path.rstrip("/") + "/embeddings"
        self._model = model
        self._stats = stats
        self._connection = http.client.HTTPConnection(parts.hostname, parts.port or 80, timeout=120)
        self._connection.connect()
        self._connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def prepare(self, sequences: Sequence[Ids]) -> bytes:
        body = {"model": self._model, "input": [s.tolist() for s in sequences], "encoding_format": "base64"}
        return json.dumps(body).encode()

    def send(self, prepared: bytes) -> bytes:
        self._connection.request("POST", self._path, prepared, {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        body = response.read()
        if response.status != 200:
            raise RuntimeError(f"HTTP {response.status}: {body[:500].decode(errors='replace')}")
        return body

    def vectors(self, answer: bytes) -> Vectors:
        data = json.loads(answer)["data"]
        return np.stack([np.frombuffer(base64.b64decode(item["embedding"]), dtype="<f4") for item in data])

    def counters(self) -> tuple[int, int]:
        return self._stats.counters() if self._stats is not None else (0, 0)

    def close(self) -> None:
        self._connection.close()

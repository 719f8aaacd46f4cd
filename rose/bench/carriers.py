"""Ways to send token ids to another process and wait for their vectors: light link, gRPC, any OpenAI-compatible server.

What a client must prepare is prepared before the clock starts; the clock stops when the last byte is in.
Knows carriers; knows neither loads nor tables, and loads no torch: client processes start in a fifth of a second.
"""

from __future__ import annotations

import base64
import http.client
import json
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Protocol
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from rose.client import Client
from rose.proto import rose_pb2 as pb
from rose.proto.convert import tensor_from_proto, tokens_to_proto

Vectors = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int32]
# Longest wait for an answer, generous since a first batch may compile kernels: an engine that hangs ends the bench.
REQUEST_S = 120.0


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


class LinkDriver:
    """The blocking client of the light link, to an engine process."""

    via = "link"

    def __init__(self, address: str, spin_s: float = 0.0) -> None:
        """
        Args:
            spin_s: see `Client`.
        """
        self._client = Client(address, spin_s=spin_s)

    def prepare(self, sequences: Sequence[Ids]) -> list[Ids]:
        return list(sequences)

    def send(self, prepared: list[Ids]) -> Any:
        return self._client.embed(prepared, deadline_s=REQUEST_S)

    def send_message(self, message: pb.EmbedRequest) -> pb.EmbedResponse:
        """The same for a message that is already made."""
        return self._client.embed_message(message, deadline_s=REQUEST_S)

    def vectors(self, answer: Any) -> Vectors:
        found: Vectors = answer.vectors.astype(np.float32)
        return found

    def engine_counters(self) -> Mapping[str, int]:
        """The engine's own, as STATS has them."""
        return self._client.stats().engine_counters

    def counters(self) -> tuple[int, int]:
        counters = self.engine_counters()
        return counters["graph_hits"], counters["graph_plain"] + counters["graph_captures"]

    def close(self) -> None:
        self._client.close()


class GrpcDriver:
    """grpcio's blocking stub, to a front."""

    via = "grpc"
    _LIMIT = 256 << 20

    def __init__(self, target: str, stats: LinkDriver | None = None) -> None:
        import grpc

        from rose.proto import rose_pb2_grpc

        limits = [("grpc.max_receive_message_length", self._LIMIT), ("grpc.max_send_message_length", self._LIMIT)]
        self._channel = grpc.insecure_channel(target, options=limits)
        self._stub: Any = rose_pb2_grpc.RoseStub(self._channel)  # type: ignore[no-untyped-call]
        self._stats = stats

    def prepare(self, sequences: Sequence[Ids]) -> pb.EmbedRequest:
        return pb.EmbedRequest(tokens=tokens_to_proto(list(sequences)))

    def send(self, prepared: pb.EmbedRequest) -> pb.EmbedResponse:
        answer: pb.EmbedResponse = self._stub.Embed(prepared, timeout=REQUEST_S)
        return answer

    def vectors(self, answer: pb.EmbedResponse) -> Vectors:
        return tensor_from_proto(answer.outputs[0].values).astype(np.float32)

    def counters(self) -> tuple[int, int]:
        return self._stats.counters() if self._stats is not None else (0, 0)

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
        self._connection = http.client.HTTPConnection(parts.hostname, parts.port or 80, timeout=REQUEST_S)
        self._connection.connect()
        self._connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @staticmethod
    def body(model: str, inputs: Sequence[str] | Sequence[Sequence[int]]) -> bytes:
        """A request for texts or ids."""
        return json.dumps({"model": model, "input": inputs, "encoding_format": "base64"}).encode()

    def prepare(self, sequences: Sequence[Ids]) -> bytes:
        return self.body(self._model, [s.tolist() for s in sequences])

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

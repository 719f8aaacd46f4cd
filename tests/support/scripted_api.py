"""A server of the embeddings and rerank routes whose answers a test can work out, with faults on request."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

DIMENSION = 8
# Status, body and headers that a fault answers with; None lets the request through.
Fault = tuple[int, dict[str, Any], dict[str, str]] | None


def vector_of(text: str, dimension: int = DIMENSION) -> np.ndarray:
    digest = hashlib.sha256(text.encode()).digest()
    return np.frombuffer(digest, np.uint8)[:dimension].astype(np.float32) / 256


def score_of(query: str, document: str) -> float:
    return float(vector_of(query) @ vector_of(document))


class ScriptedApi:
    """
    Attributes:
        requests: bodies of the POST requests, in order of arrival.
        fault: asked before every POST, with its body.
        gate: a POST waits for it.
        activation: "sigmoid" or "none", what the model puts behind its raw scores.
        score: raw score of a query and a document.
    """

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.fault: Callable[[dict[str, Any]], Fault | str] = lambda body: None
        self.gate = threading.Event()
        self.gate.set()
        self.models = [{"id": "tiny", "owned_by": "rose"}]
        self.url = ""
        self.activation = "none"
        self.score: Callable[[str, str], float] = score_of

    @property
    def texts(self) -> int:
        return sum(len(body["input"]) for body in self.requests)

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/v1/rerank":
            return self._reranked(body)
        data = [self._item(i, text, body) for i, text in enumerate(body["input"])]
        found = {"object": "list", "data": data, "usage": {"prompt_tokens": sum(map(len, body["input"]))}}
        return found | ({"prompt_name": body["prompt_name"]} if body.get("prompt_name") else {})

    def _reranked(self, body: dict[str, Any]) -> dict[str, Any]:
        raw = [(self.score(body["query"], text), i) for i, text in enumerate(body["documents"])]
        activation = "none" if body.get("raw_scores") else self.activation
        results = [
            {"index": i, "relevance_score": 1 / (1 + math.exp(-score)) if activation == "sigmoid" else score}
            for score, i in sorted(raw, reverse=True)
        ]
        method = body.get("method", "cross")
        return {"object": "list", "results": results[: body.get("top_n")], "method": method, "activation": activation}

    def _item(self, index: int, text: str, body: dict[str, Any]) -> dict[str, Any]:
        names = body.get("outputs", ["dense"])
        vector = vector_of(text, body.get("dimensions", DIMENSION))
        item: dict[str, Any] = {"object": "embedding", "index": index, "embedding": None}
        if "dense" in names:
            item["embedding"] = base64.b64encode(vector.tobytes()).decode()
        if "sparse" in names:
            item["sparse"] = {"indices": [len(text), 7], "values": [0.5, 0.25]}
        if "colbert" in names:
            rows = np.arange(len(text) * 2, dtype="<f4")
            data = base64.b64encode(rows.tobytes()).decode()
            item["colbert"] = {"dtype": "float32", "shape": [len(text), 2], "data": data}
        return item


def refusal(status: int, code: str, message: str, **more: Any) -> Fault:
    return status, {"error": {"message": message, "type": "x", "code": code, **more}}, {}


@contextmanager
def scripted_api() -> Iterator[ScriptedApi]:
    api = ScriptedApi()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: Any) -> None:
            """Quiet."""

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self._send(200, {"object": "list", "data": api.models})
            else:
                self._send(404, {"error": {"message": f"no route {self.path}"}})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            fault = api.fault(body)
            api.requests.append(body)
            api.gate.wait(30)
            if fault == "hang up":
                self.close_connection = True
            elif isinstance(fault, tuple):
                self._send(*fault)
            else:
                self._send(200, api.answer(self.path, body))

        def _send(self, status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

    class Server(ThreadingHTTPServer):
        def handle_error(self, *arguments: Any) -> None:
            """A client that went away is what some tests are about."""

    with Server(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        api.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield api
        finally:
            api.gate.set()
            server.shutdown()

"""The contestants of the CPU comparison, each behind one method: texts in, vectors out.

Knows how each is called; knows neither clocks nor tables.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rose.config.own_python import own_python
from rose.errors import StartupError

Vectors = npt.NDArray[np.float32]
READY_TIMEOUT_S = 120.0


class System(Protocol):
    """Something that embeds texts."""

    name: str

    def embed(self, texts: Sequence[str]) -> Vectors:
        """One unit vector a text, in the texts' order: [len(texts), dimension]."""
        ...

    def close(self) -> None: ...


class SentenceTransformers:
    """The reference library, in this process."""

    name = "sentence-transformers"

    def __init__(self, folder: Path) -> None:
        from sentence_transformers import SentenceTransformer

        self._model: Any = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
        self.batch_size = 32  # its default

    def embed(self, texts: Sequence[str]) -> Vectors:
        found: Vectors = self._model.encode(list(texts), batch_size=self.batch_size, show_progress_bar=False)
        return found

    def choose_batch_size(self, texts: Sequence[str], sizes: Sequence[int]) -> dict[int, float]:
        """Settle on the quickest batch size for `texts`, so that the rival runs at its best; seconds by size."""
        seconds = {}
        for size in sizes:
            self.batch_size = size
            started = time.perf_counter()
            self.embed(texts)
            seconds[size] = time.perf_counter() - started
        self.batch_size = min(seconds, key=seconds.__getitem__)
        return seconds

    def close(self) -> None:
        del self._model


class RoseInProcess:
    """ROSE as a library: the front's tokenizer and the engine, in this process."""

    name = "rose, in process"

    def __init__(self, folder: Path, threads: int) -> None:
        import torch

        from rose.config import EngineConfig, read_model_folder
        from rose.convert.load import load_model
        from rose.engine.build import build_engine
        from rose.gateway.tokenizer import TextTokenizer

        facts = read_model_folder(folder)
        self._limit = facts.max_tokens
        self._tokenizer = TextTokenizer(folder)
        model = load_model(facts, "cpu", torch.float32)
        config = EngineConfig(max_tokens=facts.max_tokens)
        self._engine = build_engine(model, config, "cpu", torch.float32, num_threads=threads)
        self._next_id = 0

    def embed(self, texts: Sequence[str]) -> Vectors:
        from rose.engine.request import Request

        sequences = [self._tokenizer.cut(ids, self._limit) for ids in self._tokenizer.encode(texts)]
        self._next_id += 1
        self._engine.add(Request(self._next_id, sequences))
        answers: list[Vectors] = [np.empty(0, np.float32)] * len(texts)
        launched: list[Any] = []
        while not self._engine.idle:
            steps = self._engine.step()
            launched += steps
            if not steps and launched:  # nothing more fits in flight: read the oldest batch
                _take(launched.pop(0), answers)
        for step in launched:
            _take(step, answers)
        return np.stack(answers)

    def close(self) -> None:
        self._engine.close()
        self._tokenizer.close()


def _take(step: Any, answers: list[Vectors]) -> None:
    (values,) = step.outputs.values()
    for item, row in zip(step.items, values.result(), strict=True):
        answers[item.index] = row


class RoseHttp:
    """ROSE as it is served: `rose serve` in processes of its own, asked over one kept HTTP connection."""

    name = "rose, over HTTP"

    def __init__(self, folder: Path, threads: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        command = [
            *own_python("rose.cli"),
            "serve",
            str(folder),
            "--http",
            str(port),
            "--log-level",
            "warning",
            "--num-threads",
            str(threads),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        self._server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline and self._server.poll() is None:
            try:
                self._connection.request("GET", "/ready")
                answer = self._connection.getresponse()
                answer.read()
                if answer.status == 200:
                    return
            except OSError:
                self._connection.close()
            time.sleep(0.2)
        self.close()
        raise StartupError("`rose serve` did not get ready")

    def embed(self, texts: Sequence[str]) -> Vectors:
        body = json.dumps({"input": list(texts), "encoding_format": "base64"})
        try:
            answer = self._post(body)
        except ConnectionError:  # idle for longer than the server keeps a connection
            self._connection.close()
            answer = self._post(body)
        found = json.loads(answer.read())
        if answer.status != 200:
            raise StartupError(f"HTTP {answer.status}: {found}")
        rows = [np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in found["data"]]
        return np.stack(rows)

    def _post(self, body: str) -> http.client.HTTPResponse:
        self._connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
        return self._connection.getresponse()

    def close(self) -> None:
        self._connection.close()
        self._server.send_signal(signal.SIGTERM)
        try:
            self._server.wait(30)
        except subprocess.TimeoutExpired:
            self._server.kill()

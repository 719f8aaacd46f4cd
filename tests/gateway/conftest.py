"""A live front on a port of its own, in a thread of its own, over fake engines that tests can steer."""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop

from rose.config.serving import GatewayConfig
from rose.gateway.carriers import Carriers, Listening
from rose.gateway.front import Front, make_front
from rose.proto import rose_pb2 as pb
from tests.gateway.fake_engine import FakeEngine
from tests.support import tiny_tokenizers

DIMENSION = 64
MAX_TOKENS = 128


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory) -> Path:
    """A model folder as far as a front needs one: a BERT-like tokenizer.json."""
    folder = tmp_path_factory.mktemp("front") / "tiny"
    folder.mkdir()
    tiny_tokenizers.save(tiny_tokenizers.word_piece(), folder)
    return folder


def card_for(folder: Path, **changes: Any) -> pb.ModelCard:
    fields = {
        "model": "tiny/embedder",
        "architecture": "BertModel",
        "outputs": [pb.OutputCard(name="dense", dtype=pb.FLOAT32, dimension=DIMENSION, normalized=True)],
        "default_output": "dense",
        "hidden_size": DIMENSION,
        "vocab_size": 400,
        "max_tokens": MAX_TOKENS,
        "max_batch_tokens": 1024,
        "max_queued_tokens": 1 << 20,
        "max_request_items": 4096,
        "tokenizer_sha256": hashlib.sha256((folder / "tokenizer.json").read_bytes()).digest(),
        "prompts": {"query": "query: ", "passage": "passage: "},
        "pooling": "mean",
        "dtype": "float32",
        "device": "cpu",
    } | changes
    return pb.ModelCard(**fields)


@dataclass
class Live:
    """A running front.

    Attributes:
        url: where it listens.
        engines: the fakes behind it; attributes may be set from the test.
    """

    url: str
    listening: Listening
    engines: list[FakeEngine]
    front: Front
    loop: asyncio.AbstractEventLoop
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = httpx.Client(base_url=self.url, timeout=30)

    def run(self, work: Callable[[], Any]) -> Any:
        """Run a coroutine function on the front's loop."""
        return asyncio.run_coroutine_threadsafe(work(), self.loop).result(30)

    def embed(self, value: Any, **fields: Any) -> httpx.Response:
        return self.client.post("/v1/embeddings", json={"input": value, **fields})

    def metric(self, line: str) -> float:
        """The value of one series of /metrics, or 0 if it is not there."""
        for text in self.client.get("/metrics").text.splitlines():
            if text.startswith(line + " "):
                return float(text.rpartition(" ")[2])
        return 0.0


@contextmanager
def live_front(
    folder: Path,
    *cards: pb.ModelCard,
    wait_ready: bool = True,
    engine: type[FakeEngine] = FakeEngine,
    reading: dict[str, Any] | None = None,
    **config: Any,
) -> Iterator[Live]:
    """A front over one fake engine a card."""
    started: list[Live] = []
    up, done = threading.Event(), threading.Event()
    failed: list[BaseException] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        with tempfile.TemporaryDirectory() as sockets:
            paths = [f"{sockets}/{i}" for i in range(len(cards))]
            settings = {"http_port": 0, "grpc_port": 0} | config
            replicas = tuple(f"unix:{path}" for path in paths)
            async with AsyncExitStack() as stack:
                engines = [
                    await stack.enter_async_context(engine(path, card)) for path, card in zip(paths, cards, strict=True)
                ]
                gateway = GatewayConfig(replicas=replicas, **settings)
                front = await stack.enter_async_context(make_front(gateway, folder, reading=reading))
                carriers = Carriers(front, gateway)
                listening = await carriers.open()
                while wait_ready and len(front.pool.ready) < len(cards):
                    await asyncio.sleep(0.005)
                started.append(Live(f"http://{listening.http}", listening, engines, front, loop))
                up.set()
                await loop.run_in_executor(None, done.wait)
                await carriers.close()

    def run() -> None:
        try:
            uvloop.run(main())
        except BaseException as error:
            failed.append(error)
        finally:
            up.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert up.wait(30)
        if failed:
            raise failed[0]
        with started[0].client:
            yield started[0]
    finally:
        done.set()
        thread.join(30)
    if failed:
        raise failed[0]


@pytest.fixture(scope="module")
def shared(text_folder) -> Iterator[Live]:
    """One front over one well-behaved engine, for a whole module."""
    with live_front(text_folder, card_for(text_folder)) as live:
        yield live

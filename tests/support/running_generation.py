"""A reactor in a thread around a generating engine, for the server's, the clients' and the front's tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from rose.config import ServerConfig
from rose.engine.generation.limits import GenerationLimits
from rose.proto import rose_pb2 as pb
from rose.proto.address import parse_address
from rose.server.listener import Listener
from rose.server.reactor import Reactor
from rose.server.validate_generate import GenerateLimits
from tests.support.fake_generation import END, MAX_TOKENS, VOCAB, FakeGenerationEngine


class RunningGeneration:
    """Serves `engine` until `stop` or the end of the `with` block.

    Args:
        vocab_size, max_tokens: what requests are held to.
        card: fields of the model card that differ, as a front with a tokenizer wants it.
        limits: fields of ServerConfig that differ.
    """

    def __init__(
        self,
        engine: FakeGenerationEngine,
        address: str = "127.0.0.1:0",
        *,
        vocab_size: int = VOCAB,
        max_tokens: int = MAX_TOKENS,
        card: dict[str, Any] | None = None,
        patience_s: float = 60.0,
        device_alive: Callable[[], bool] = lambda: True,
        **limits: Any,
    ) -> None:
        config = replace(ServerConfig(drain_seconds=10.0), **limits)
        self.engine = engine
        fields = {
            "model": "fake",
            "architecture": "FakeForCausalLM",
            "vocab_size": vocab_size,
            "max_tokens": max_tokens,
            "generates": True,
            "end_ids": [END],
            "max_running": engine.max_running,
            "max_queued_tokens": config.max_queued_tokens,
            "max_request_items": 1,
            **(card or {}),
        }
        numbers = GenerationLimits(
            vocab_size=vocab_size, max_tokens=max_tokens, page_size=engine.page_size, num_pages=engine.pages_total + 1
        )
        checked = GenerateLimits(
            served_name=fields["model"], engine=numbers, max_request_tokens=config.max_queued_tokens
        )
        listener = Listener(parse_address(address))
        self.address = str(listener.address)
        self.reactor = Reactor(
            engine,
            checked,
            pb.ModelCard(**fields),
            listener,
            config,
            patience_s=patience_s,
            device_alive=device_alive,
            engine_counters=engine.counters,
        )
        self.reactor.listen()
        self.status: int | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.status = self.reactor.run()

    def stop(self) -> None:
        self.reactor.stop()

    def join(self, timeout_s: float = 15.0) -> int | None:
        """Wait for the reactor to end; its exit status."""
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "the reactor does not end"
        return self.status

    def __enter__(self) -> RunningGeneration:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._thread.is_alive():
            self.reactor.stop()
            self.reactor.stop()
            self.join()
        self.engine.executor.close()


@contextmanager
def serving_generation(
    engine: FakeGenerationEngine | None = None, address: str = "127.0.0.1:0", **options: Any
) -> Iterator[RunningGeneration]:
    with RunningGeneration(engine or FakeGenerationEngine(), address, **options) as server:
        yield server

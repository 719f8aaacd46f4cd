"""A front over fake generating engines, and how to read its streams."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from tokenizers import Tokenizer

from rose.proto import rose_pb2 as pb
from rose.proto.convert import tokens_from_proto
from tests.gateway.conftest import Live, live_front
from tests.gateway.fake_generator import FakeGenerator, generator_card
from tests.support.tiny_language_models import tiny_lm

ANSWER = "The river 猫 meets the sea."
MAX_TOKENS = 512


class Chat:
    """A running front for a tiny chat model; `says` sets what its engines answer."""

    def __init__(self, live: Live, folder: Path) -> None:
        self.live = live
        self.client: httpx.Client = live.client
        self.engines: list[FakeGenerator] = live.engines  # type: ignore[assignment]
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.end = self.tokenizer.token_to_id("<|im_end|>")
        self.says(ANSWER)

    @property
    def engine(self) -> FakeGenerator:
        return self.engines[0]

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def says(self, text: str) -> None:
        ids = self.ids(text)
        for engine in self.engines:
            engine.script = lambda prompt: ids

    def reset(self) -> None:
        """As at the start."""
        for engine in self.engines:
            engine.per_chunk, engine.pause_s = 1, 0.0
            engine.failure, engine.hang_after, engine.drop_after = None, None, None
            engine.generated.clear()
            engine.cancelled.clear()
            engine.arrivals.clear()
        self.says(ANSWER)

    def prompt(self, number: int = -1) -> list[int]:
        """Ids of a prompt as the engine got them."""
        ids: np.ndarray = tokens_from_proto(self.engine.generated[number].tokens)[0]
        return ids.tolist()

    def complete(self, prompt: Any = "hello", **fields: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 100, **fields})

    def chat(self, content: Any = "hi", **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": content}], **fields}
        return self.client.post("/v1/chat/completions", json=body)

    def open(self, path: str, body: dict[str, Any]) -> socket.socket:
        """A request on a connection of its own, with nothing read yet."""
        host, _, port = self.live.url.removeprefix("http://").partition(":")
        connection = socket.create_connection((host, int(port)), timeout=10)
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        connection.sendall(head.encode() + data)
        return connection


@contextmanager
def generating_front(
    folder: Path, engines: int = 1, card: dict[str, Any] | None = None, **config: Any
) -> Iterator[Chat]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    fields = {"vocab_size": tokenizer.get_vocab_size() + 4, "end_ids": [tokenizer.token_to_id("<|im_end|>")]}
    one = generator_card(folder, max_tokens=MAX_TOKENS, **fields | (card or {}))
    with live_front(folder, *[one] * engines, engine=FakeGenerator, **config) as live:
        yield Chat(live, folder)


def make_folder(path: Path) -> Path:
    return tiny_lm(path, "qwen3", max_positions=MAX_TOKENS)


def events(text: str) -> list[Any]:
    """The chunks of a stream, which has to end with [DONE]."""
    found = whole_events(text)
    assert found[-1] == "[DONE]"
    assert "[DONE]" not in found[:-1]
    return found[:-1]


def whole_events(text: str) -> list[Any]:
    assert text.endswith("\n\n")
    lines = text.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


def chat_text(chunks: Sequence[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") for choice in choices)


def wait_for(condition: Any, timeout_s: float = 10.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    return error


__all__ = ["ANSWER", "Chat", "chat_text", "error_of", "events", "generating_front", "make_folder", "pb", "wait_for"]

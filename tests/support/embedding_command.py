"""`rose embed` called on texts whose vectors are known, for the tests of what it writes and of how it goes on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from rose import cli
from tests.support.scripted_api import DIMENSION, vector_of

TEXTS = [f"text {i} {'ünïcode' if i % 3 else '你好'}" for i in range(300)]


def embed(api, *arguments) -> int:
    return cli.main(["embed", *map(str, arguments), "--server", api.url])


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def expected(texts=TEXTS, dimension=DIMENSION) -> np.ndarray:
    return np.stack([vector_of(text, dimension) for text in texts])


def left_behind(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if "partial" in path.name]


def asked_again(api, texts: list[str], command: Callable[[], int]) -> set[str]:
    """Those of `texts` that a command, which has to succeed, sends to the server."""
    time.sleep(0.2)  # requests of the run before that were under way have arrived
    before = len(api.requests)
    assert command() == 0
    return {text for body in api.requests[before:] for text in body["input"]} & set(texts)

"""A server whose answers are known, and a file of texts for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.embedding_command import TEXTS
from tests.support.scripted_api import scripted_api


@pytest.fixture
def api():
    with scripted_api() as served:
        yield served


@pytest.fixture
def texts(tmp_path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("".join(f"{text}\n" for text in TEXTS), encoding="utf-8")
    return path

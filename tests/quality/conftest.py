"""Engines on real weights, one a session, and corpora that are skipped with the reason where they cannot be had."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from rose.bench.systems import RoseInProcess
from tests.support import corpora

T = TypeVar("T")


def or_skip(read: Callable[[], T]) -> T:
    """What `read` reads; skips the test where its corpus cannot be had."""
    try:
        return read()
    except corpora.CannotBeHadError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def udhr() -> Callable[[str], list[str]]:
    """Language -> its 30 articles."""
    or_skip(lambda: corpora.fetch(corpora.UDHR))
    return corpora.udhr_articles


@pytest.fixture(scope="session")
def e5_small(e5_small_folder: Path) -> Iterator[RoseInProcess]:
    system = RoseInProcess(e5_small_folder, torch.get_num_threads())
    yield system
    system.close()

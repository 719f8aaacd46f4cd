"""What every test may ask for: the pulled model, and the rule that GPU tests need a GPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from rose.errors import PullError
from rose.hub import resolve


@pytest.fixture(scope="session")
def minilm_folder() -> Path:
    """The checkpoint folder of the default model; skips, with the reason, where it cannot be had."""
    try:
        return resolve("minilm")
    except PullError as error:
        pytest.skip(error.message)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    reason = _no_cuda()
    if reason is None:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


def _no_cuda() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return "needs a CUDA device: torch is not installed"
    import torch

    return None if torch.cuda.is_available() else "needs a CUDA device: torch sees none"

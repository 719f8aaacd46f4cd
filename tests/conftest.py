"""What every test may ask for: the pulled model, and the rules that GPU tests need a GPU and that transformers is a
reference of plain torch."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from rose.bench.plain_transformers import without_kernels
from rose.errors import PullError
from rose.hub import resolve


def pytest_configure(config: pytest.Config) -> None:
    """transformers imports its models when they are first asked for, in any test: none of them finds other kernels."""
    hidden = without_kernels()
    hidden.__enter__()
    config.add_cleanup(lambda: hidden.__exit__(None, None, None))


@pytest.fixture(scope="session")
def minilm_folder() -> Path:
    """The checkpoint folder of the default model; skips, with the reason, where it cannot be had."""
    return pulled("minilm")


@pytest.fixture(scope="session")
def e5_small_folder() -> Path:
    """multilingual-e5-small as a BERT folder; skips likewise."""
    return pulled("e5-small")


@pytest.fixture(scope="session")
def e5_small_xlmr_folder() -> Path:
    """The same weights in the layout of XLM-RoBERTa; skips likewise."""
    return pulled("e5-small-xlmr")


@pytest.fixture(scope="session")
def xlm_roberta_folder() -> Path:
    """XLM-RoBERTa's tokenizer, without a model; skips likewise."""
    return pulled("xlm-roberta")


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct, a chat model; skips likewise."""
    return pulled("smollm2")


@pytest.fixture(scope="session")
def qwen3_folder() -> Path:
    """Qwen3's tokenizer, without a model; skips likewise."""
    return pulled("qwen3")


@pytest.fixture(scope="session")
def qwen3_5_folder() -> Path:
    """Qwen3.5's tokenizer, without a model; skips likewise."""
    return pulled("qwen3.5")


def pulled(name: str) -> Path:
    """The folder of a short name, pulled if it has to be; skips the test, with the reason, where it cannot be had."""
    try:
        return resolve(name)
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

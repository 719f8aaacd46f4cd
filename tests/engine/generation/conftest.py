"""One tiny Qwen3 and transformers' answers for all generating engines' tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where the engine runs; the reference is on the CPU in fp32, so that nothing may be rounded to tf32."""
    import torch

    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield request.param
    torch.backends.cuda.matmul.allow_tf32 = allowed


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from tests.engine.generation.driving import make_folder

    return make_folder(tmp_path_factory.mktemp("lm"))


@pytest.fixture(scope="session")
def reference(folder: Any) -> Any:
    from tests.engine.generation.driving import Reference

    return Reference(folder)

"""transformers as an independent reference: it computes with its own torch functions, whatever else is installed.

Where flash-linear-attention or causal-conv1d can be imported, transformers' Qwen3.5 calls their kernels instead, for
tensors on the CPU too, which those refuse. It looks for them once, when its module is imported (5.4 to 5.24).
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PACKAGES = ("fla", "causal_conv1d")
_QWEN3_5 = "transformers.models.qwen3_5.modeling_qwen3_5"
# The module as it was imported without them.
_plain: Any = None


@contextmanager
def without_kernels() -> Iterator[None]:
    """Until its end PACKAGES cannot be imported, as where they are not installed; what imported them before keeps
    them."""
    names = {*PACKAGES, *(name for name in sys.modules if name.partition(".")[0] in PACKAGES)}
    held = {name: sys.modules[name] for name in names if name in sys.modules}
    sys.modules.update(dict.fromkeys(names))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
        sys.modules.update(held)


def plain_transformers() -> Any:
    """The package `transformers`, whose Qwen3.5 computes with plain torch.

    Raises:
        RuntimeError: that model was imported before, where one of PACKAGES is installed.
    """
    global _plain
    if (before := sys.modules.get(_QWEN3_5)) is not None and before is not _plain and (found := _installed()):
        raise RuntimeError(
            f"transformers' Qwen3.5 was imported with {' and '.join(found)} installed and is no independent reference: "
            "call plain_transformers() first"
        )
    with without_kernels():
        import transformers

        _plain = importlib.import_module(_QWEN3_5)
    return transformers


def _installed() -> list[str]:
    return [name for name in PACKAGES if sys.modules.get(name) or importlib.util.find_spec(name)]

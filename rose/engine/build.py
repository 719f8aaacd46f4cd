"""From a loaded model to an engine that runs it: device, executor, attention backends.

Knows what goes together; knows neither requests nor checkpoints.
"""

from __future__ import annotations

import torch

from rose.attention_backends.base import load_backend
from rose.config import EngineConfig
from rose.engine.engine import Engine
from rose.engine.execution import CpuExecutor
from rose.errors import StartupError
from rose.models.base import ServedModel


def build_engine(
    model: ServedModel,
    config: EngineConfig,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    backend: str = "auto",
    num_threads: int | None = None,
) -> Engine:
    """An engine with what this device offers.

    Args:
        dtype: dtype of the model's weights.
        backend: name of the attention backend; "auto" chooses by load among those that serve this model here.
        num_threads: threads of torch's operators on the CPU, or None for torch's own choice.

    Raises:
        StartupError: no backend or no executor for this model here, with the reasons.
    """
    device = torch.device(device)
    if device.type != "cpu":
        raise StartupError(f"no executor for device {device}; there is one for cpu")
    attention = load_backend(backend, model.attention_spec(device, dtype))
    return Engine(model, config, CpuExecutor(num_threads=num_threads), attention)

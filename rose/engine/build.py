"""From a loaded model to an engine that runs it: device, executor, attention backends.

Knows what goes together; knows neither requests nor checkpoints.
"""

from __future__ import annotations

import torch

from rose.attention_backends.base import load_backend
from rose.config import EngineConfig
from rose.engine.cuda import CudaCapturer, CudaExecutor
from rose.engine.engine import Engine
from rose.engine.execution import CpuExecutor
from rose.engine.graphs import LazyGraphs
from rose.errors import StartupError
from rose.models.base import ServedModel

# Tokens above which a forward takes the device longer than its some 200 launches take the CPU: 12,800 tokens through 24
# layers took between 17.7 and 24.4 ms launched from Python, where the products alone take 15 (H200).
INFLECTION_TOKENS = 16384


def build_engine(
    model: ServedModel,
    config: EngineConfig,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    backend: str = "auto",
    num_threads: int | None = None,
    type_vocab_size: int | None = None,
) -> Engine:
    """An engine with what this device offers.

    Args:
        dtype: dtype of the model's weights.
        backend: name of the attention backend; "auto" chooses by load among those that serve this model here.
        num_threads: threads of torch's operators on the CPU, or None for torch's own choice.
        type_vocab_size: token types the model has (see ArchitectureConfig); None accepts any.

    On CUDA, `config.graph_bytes` of device memory hold captured graphs; 0 captures none.

    Raises:
        StartupError: no backend or no executor for this model here, with the reasons.
    """
    device = torch.device(device)
    attention = load_backend(backend, model.attention_spec(device, dtype))
    if device.type == "cpu":
        return Engine(model, config, CpuExecutor(num_threads=num_threads), attention, type_vocab_size=type_vocab_size)
    if device.type != "cuda":
        raise StartupError(f"no executor for device {device}; there is one for cpu and one for cuda")
    executor = CudaExecutor(device)
    graphs = LazyGraphs(executor.device, capturer=CudaCapturer(executor.device), max_bytes=config.graph_bytes)
    return Engine(
        model,
        config,
        executor,
        attention,
        graphs=graphs,
        inflection_tokens=INFLECTION_TOKENS,
        type_vocab_size=type_vocab_size,
    )

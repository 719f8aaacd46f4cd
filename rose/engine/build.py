"""From a loaded model to an engine that runs it: device, executor, attention backends.

Knows what goes together; knows neither requests nor checkpoints.
"""

from __future__ import annotations

import logging

import torch

from rose.attention_backends.auto import AutoBackend
from rose.attention_backends.base import AttentionBackend, AttentionSpec, load_backend
from rose.config import EngineConfig
from rose.config.profile_files import Found, find_profile
from rose.engine.buckets import FINE_TOKENS
from rose.engine.cuda import CudaCapturer, CudaExecutor
from rose.engine.engine import Engine
from rose.engine.execution import CpuExecutor
from rose.engine.graphs import LazyGraphs
from rose.engine.profiles import attention_shape, preferred, this_machine
from rose.errors import StartupError
from rose.kernels import tiles
from rose.models.base import ServedModel

# Tokens above which a forward takes the device longer than its some 200 launches take the CPU: 12,800 tokens through 24
# layers took between 17.7 and 24.4 ms launched from Python, where the products alone take 15 (H200).
INFLECTION_TOKENS = 16384

_log = logging.getLogger(__name__)


def build_engine(
    model: ServedModel,
    config: EngineConfig,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    backend: str | AttentionBackend = "auto",
    num_threads: int | None = None,
    type_vocab_size: int | None = None,
    profile: Found | None = None,
) -> Engine:
    """An engine with what this device offers.

    Args:
        dtype: dtype of the model's weights.
        backend: name of the attention backend, or one that is ready; "auto" chooses by load among those that serve this
            model here, as a profile of this device has measured it where there is one.
        num_threads: threads of torch's operators on the CPU, or None for torch's own choice.
        type_vocab_size: token types the model has (see ArchitectureConfig); None accepts any.
        profile: what was found for the model; None looks for its attention alone, as `config.profile` says.

    On CUDA, `config.graph_bytes` of device memory hold captured graphs; 0 captures none.

    Raises:
        StartupError: no backend or no executor for this model here, with the reasons.
    """
    device = torch.device(device)
    spec = model.attention_spec(device, dtype)
    found = profile if profile is not None else profile_of(spec, config.profile)
    attention = _attention(backend, spec, found)
    threads = num_threads
    if device.type == "cpu":
        if threads is None and found.numbers is not None:
            threads = found.numbers.num_threads
        return Engine(model, config, CpuExecutor(num_threads=threads), attention, type_vocab_size=type_vocab_size)
    if device.type != "cuda":
        raise StartupError(f"no executor for device {device}; there is one for cpu and one for cuda")
    if found.products:
        tiles.prefer(preferred(found.products))
    executor = CudaExecutor(device)
    graphs = LazyGraphs(executor.device, capturer=CudaCapturer(executor.device), max_bytes=config.graph_bytes)
    inflection, fine = _measured(found)
    return Engine(
        model,
        config,
        executor,
        attention,
        graphs=graphs,
        inflection_tokens=inflection,
        fine_tokens=fine,
        type_vocab_size=type_vocab_size,
    )


def profile_of(spec: AttentionSpec, asked: str) -> Found:
    """What there is for the attention of a model, its notes told to the log.

    Raises:
        StartupError: the file that was asked for does not exist.
    """
    found = find_profile(asked, this_machine(spec.device), attention_shape(spec))
    for note in found.notes:
        _log.warning("%s", note)
    return found


def _attention(backend: str | AttentionBackend, spec: AttentionSpec, found: Found) -> AttentionBackend:
    if not isinstance(backend, str):
        return backend
    if backend != "auto" or found.grid is None:
        return load_backend(backend, spec)
    return AutoBackend(spec, left_out=found.grid.excluded, measured=found.grid.points)


def _measured(found: Found) -> tuple[int, int]:
    """(tokens up to which there are graphs, tokens up to which they are padded finely); defaults where not measured."""
    numbers = found.numbers
    if numbers is None:
        return INFLECTION_TOKENS, FINE_TOKENS
    return numbers.inflection_tokens or INFLECTION_TOKENS, numbers.fine_tokens or FINE_TOKENS

"""From a loaded generating model to an engine that runs it: device, executor, attention backend, cache, state pools.

Knows what goes together and what fits; knows neither requests nor checkpoints.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from rose.attention_backends.base import (
    AttentionBackend,
    AttentionSpec,
    Paged,
    load_backend,
    paged_backend_names,
    try_backend,
)
from rose.attention_backends.check import check_backend
from rose.attention_backends.choose import best_overall
from rose.attention_backends.kv_cache import KVCache
from rose.config import EngineConfig
from rose.config.profile import AttentionGrid
from rose.config.profile_files import Found
from rose.engine.build import profile_of
from rose.engine.cuda import CudaCapturer, CudaExecutor
from rose.engine.execution import CpuExecutor, Executor
from rose.engine.generation.engine import MAX_IN_FLIGHT, GenerationEngine
from rose.engine.generation.forward import DeviceSide
from rose.engine.generation.limits import GenerationLimits, check_limits
from rose.engine.generation.states import StatePools
from rose.engine.graphs import LazyGraphs
from rose.errors import StartupError
from rose.models.base import GenerativeModel

_log = logging.getLogger(__name__)

# Of the device memory that is free once the weights are there and the graphs have their share. The rest is for
# activations, logits and attention's workspace.
FREE_SHARE = 0.85
CPU_CACHE_BYTES = 1 << 30
CPU_STATE_BYTES = 1 << 28
# Tokens between two states of one sequence that are kept. A prompt's last chunk is cut for one, which costs a step of
# decoding; below some hundred tokens, computing again in the same batch takes no longer.
STATE_TOKENS = 256
# Plain torch, on which the others fall back: where it is wrong, so is the model's every product.
TRUTH = "torch_paged"


def build_generation_engine(
    model: GenerativeModel,
    config: EngineConfig,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    backend: str = "auto",
    num_threads: int | None = None,
    end_ids: Iterable[int] = (),
    vocab_limit: int | None = None,
    profile: Found | None = None,
) -> GenerationEngine:
    """An engine with what this device offers.

    Args:
        dtype: dtype of the model's weights, and of the cache.
        backend: name of the attention backend; "auto" takes the one that a profile of this device finds fastest, or the
            first of those that serve this model here and that it does not exclude, and checks it against the reference
            before.
        num_threads: threads of torch's operators on the CPU, or None for torch's own choice.
        end_ids: tokens that end a sequence by the model's own word.
        vocab_limit: no token at or above it is drawn: the tokenizer has none; None for the model's vocabulary.
        profile: what was found for the model; None looks for its attention, as `config.profile` says.

    On CUDA, `config.graph_bytes` of device memory hold captured graphs; 0 captures none. `max_tokens` is the least of
    what the model takes, what `config` says and what the cache holds: see `GenerationEngine.limits.longest`.

    Raises:
        StartupError: no backend or no executor for this model here, or no room for a cache, with the reasons.
    """
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise StartupError(f"no executor for device {device}; there is one for cpu and one for cuda")
    spec = model.attention_spec(device, dtype)
    found = profile if profile is not None else profile_of(spec, config.profile)
    attention = _attention(backend, spec, found)
    if num_threads is None and device.type == "cpu" and found.numbers is not None:
        num_threads = found.numbers.num_threads
    if not isinstance(attention, Paged):
        raise StartupError(f"attention backend {backend} keeps no pages, and generating needs some")
    for name in ("max_running", "page_size", "max_in_flight"):
        if getattr(config, name) < 1:
            raise StartupError(f"{name} must be at least 1, not {getattr(config, name)}")
    if config.max_in_flight > MAX_IN_FLIGHT:
        raise StartupError(f"max_in_flight is at most {MAX_IN_FLIGHT}, not {config.max_in_flight}")
    lanes = config.max_running + 1
    saved = _saved_states(model, config, device, dtype)
    states = None if model.recurrent is None else StatePools(model.recurrent, lanes + saved, dtype, device)
    limits = GenerationLimits(
        vocab_size=model.vocab_size,
        max_tokens=min(model.max_tokens, config.max_tokens),
        page_size=config.page_size,
        num_pages=_pages(model, spec, config),
        max_running=config.max_running,
        batch_tokens=config.prefill_tokens,
        prefix_cache=config.prefix_cache and (states is None or saved > 0),
        saved_states=saved,
        state_tokens=STATE_TOKENS,
    )
    check_limits(limits)
    cache = KVCache(
        model.kv_layers, limits.num_pages, limits.page_size, spec.num_kv_heads, spec.head_dim, dtype, device
    )
    attention.bind(cache)
    if limits.longest < limits.max_tokens:
        _log.warning(
            "the cache holds %d tokens, and no sequence can be longer; the model takes %d",
            limits.longest,
            limits.max_tokens,
        )
    side = DeviceSide(
        model=model,
        backend=attention,
        latest=torch.zeros(lanes, dtype=torch.int32, device=device),
        states=states,
        page_size=limits.page_size,
        vocab_limit=min(vocab_limit or model.vocab_size, model.vocab_size),
    )
    executor, graphs = _executor(device, config, num_threads)
    return GenerationEngine(side, limits, executor, graphs=graphs, end_ids=end_ids, max_in_flight=config.max_in_flight)


def _attention(backend: str, spec: AttentionSpec, found: Found) -> AttentionBackend:
    """One backend for all loads: a cache is bound to it."""
    if backend != "auto" or spec.layout != "paged":
        return load_backend(backend, spec)
    reasons = paged_exclusions(found.grid)
    for name, reason in reasons.items():
        _log.warning("attention backend %s is left out: %s", name, reason)
    for name in paged_order(found.grid):
        if name in reasons:
            continue
        ready = try_backend(name, spec)
        if isinstance(ready, str):
            reasons[name] = ready
        elif (wrong := None if name == TRUTH else check_backend(name, spec)) is None:
            return ready
        else:
            reasons[name] = wrong
            _log.warning("attention backend %s is left out: %s", name, wrong)
    words = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise StartupError(f"attention backend auto does not serve this model: {words}")


def paged_exclusions(grid: AttentionGrid | None) -> dict[str, str]:
    """What a profile excludes, with the reason: one that was wrong at a load of it may pass the check at start.

    Never the one that all others are measured by: it stays the last resort.
    """
    excluded = {} if grid is None else grid.excluded
    return {
        name: f"a profile of this device excludes it: {excluded[name]}"
        for name in paged_backend_names()
        if name in excluded and name != TRUTH
    }


def paged_order(grid: AttentionGrid | None) -> tuple[str, ...]:
    """The paged backends of this version, best first: as a profile has them, then those it knows nothing good of."""
    known = paged_backend_names()
    if grid is None:
        return known
    measured = (name for name in best_overall(grid.points) if name in known and name not in grid.excluded)
    return tuple(dict.fromkeys((*measured, *known)))


def _executor(
    device: torch.device, config: EngineConfig, num_threads: int | None
) -> tuple[Executor, LazyGraphs | None]:
    if device.type == "cpu":
        return CpuExecutor(num_threads=num_threads), None
    executor = CudaExecutor(device)
    return executor, LazyGraphs(executor.device, capturer=CudaCapturer(executor.device), max_bytes=config.graph_bytes)


def _pages(model: GenerativeModel, spec: AttentionSpec, config: EngineConfig) -> int:
    """Pages that fit, page 0 included: no more than all running sequences could ever fill, and as many again to find
    prompts' beginnings in."""
    layers, size = len(model.kv_layers), config.page_size
    page = KVCache.page_bytes(layers, size, spec.num_kv_heads, spec.head_dim, spec.dtype)
    longest = min(model.max_tokens, config.max_tokens)
    useful = 1 + 2 * config.max_running * -(-longest // size)
    budget = config.kv_cache_bytes or _default_bytes(spec.device, config)
    pages = min(budget // page if page else useful, useful)
    if pages < 2:
        raise StartupError(
            f"kv_cache_bytes of {budget}: one page of {size} tokens takes {page} bytes of this model, and two are the"
            " least"
        )
    return pages


def _saved_states(model: GenerativeModel, config: EngineConfig, device: torch.device, dtype: torch.dtype) -> int:
    """Rows of recurrent state to be found again by prompts that start alike; no more than all running sequences could
    ever save, and as many again."""
    if model.recurrent is None:
        if config.state_cache_bytes:
            raise StartupError("state_cache_bytes: this model keeps no recurrent state; leave it out")
        return 0
    if not config.prefix_cache:
        if config.state_cache_bytes:
            raise StartupError("state_cache_bytes: without the prefix cache no state is found again; leave it out")
        return 0
    row = StatePools.row_bytes(model.recurrent, dtype)
    asked = config.state_cache_bytes
    if asked and asked < row:
        raise StartupError(f"state_cache_bytes of {asked}: one state of this model takes {row} bytes")
    longest = min(model.max_tokens, config.max_tokens)
    useful = 2 * config.max_running * max(1, longest // STATE_TOKENS)
    default = CPU_STATE_BYTES if device.type == "cpu" else 0
    return min((asked or default) // row, useful)


def _default_bytes(device: torch.device, config: EngineConfig) -> int:
    if device.type == "cpu":
        return CPU_CACHE_BYTES
    torch.cuda.empty_cache()  # what loading left in torch's cache is free too
    free, _ = torch.cuda.mem_get_info(device)
    return max(0, int(FREE_SHARE * (free - config.graph_bytes)))

"""Start-up of a generating engine: model → cache and engine → warm-up and self-check → card → reactor.

Everything that can be refused is refused here. Knows what goes together; knows neither frames nor batches.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rose.config import EngineConfig, ModelFolder, ServerConfig
from rose.convert import load_generative
from rose.engine.generation.buckets import GREEDY, Draw
from rose.engine.generation.build import build_generation_engine
from rose.engine.generation.engine import GenerationEngine
from rose.engine.generation.request import GenerateRequest, Sampling
from rose.errors import RoseError, StartupError
from rose.proto import rose_pb2 as pb
from rose.server.card import check_config
from rose.server.device import GRAPH_BYTES, describe_device, device_alive
from rose.server.generation_card import generation_card, generation_table
from rose.server.listener import Listener
from rose.server.profile import profile_of_folder
from rose.server.reactor import Reactor
from rose.server.validate_generate import GenerateLimits

if TYPE_CHECKING:
    from rose.server.run import Serving

_log = logging.getLogger(__name__)

# Budgets of EngineConfig that mean something to one kind of model only.
EMBEDDING_ONLY = ("online_tokens", "bulk_tokens", "max_sequences")
GENERATING_ONLY = ("max_running", "prefill_tokens", "kv_cache_bytes", "page_size", "prefix_cache", "state_cache_bytes")
# A CPU computes a chunk of so many tokens in some tenths of a second for a model of a few hundred million parameters,
# and every running sequence waits for it.
CPU_PREFILL_TOKENS = 512
# Decoding graphs for sequences up to this long are captured before serving; longer ones when they are needed. So are
# those of one prompt, alone up to this long, and beside decoding sequences in batches of up to so many tokens.
WARM_TOKENS = 4096
# Prompts up to a whole default budget: products of more than 1024 tokens have kernels of their own, some of which take
# seconds to compile.
WARM_PROMPT, WARM_BESIDE = 2048, 256
# Tokens of the self-check's prompt, and drawn after it.
CHECK_TOKENS, CHECK_NEW = 8, 2
CHECK_SECONDS = 300.0


def check_asked(asked: Mapping[str, Any], *, generates: bool) -> None:
    """Raises StartupError for a budget that the model served has no use for."""
    for name in EMBEDDING_ONLY if generates else GENERATING_ONLY:
        if name in asked:
            other = "generates" if generates else "embeds or scores"
            raise StartupError(f"{name} is no budget of a model that {other}: leave it out")


@contextlib.contextmanager
def start_generation(
    folder: ModelFolder,
    serving: Serving,
    budgets: Mapping[str, Any],
    config: ServerConfig,
    listener: Listener,
    device: torch.device,
    dtype: torch.dtype,
) -> Iterator[tuple[GenerationEngine, Reactor]]:
    """A language model, loaded, checked and told of, and its reactor; the engine is closed in the end."""
    limits = fit_generation_budgets(budgets, folder, device)
    assert folder.generation is not None
    profile = profile_of_folder(folder, device, dtype, budgets.get("profile", "auto"))
    model = load_generative(folder, device, dtype)
    engine = build_generation_engine(
        model,
        limits,
        device,
        dtype,
        backend=serving.backend,
        num_threads=serving.num_threads,
        end_ids=folder.generation.end_ids,
        vocab_limit=folder.generation.vocab_limit,
        profile=profile,
    )
    with contextlib.closing(engine):
        check_config(config, engine.limits.longest)
        warm_up_generation(engine, device, serving)
        self_check_generation(engine)
        card = generation_card(
            folder,
            engine.limits,
            config,
            served_name=serving.served_name or folder.path.resolve().name,
            dtype=str(dtype).removeprefix("torch."),
            device=describe_device(device),
            backend=", ".join(engine.backend_names),
        )
        _log.info("serving\n%s", generation_table(card, folder, engine.limits, str(listener.address)))
        yield engine, build_generation_reactor(engine, card, listener, config, device)


def build_generation_reactor(
    engine: GenerationEngine, card: pb.ModelCard, listener: Listener, config: ServerConfig, device: torch.device
) -> Reactor:
    """The reactor of a real engine."""
    return Reactor(
        engine,
        GenerateLimits(served_name=card.model, engine=engine.limits, max_request_tokens=config.max_queued_tokens),
        card,
        listener,
        config,
        device_alive=lambda: device_alive(device),
        engine_counters=engine.counters,
    )


def fit_generation_budgets(asked: Mapping[str, Any], folder: ModelFolder, device: torch.device) -> EngineConfig:
    """The budgets with the folder's longest sequence in them, and what was asked for on top.

    Raises:
        StartupError: what was asked for does not fit the model.
    """
    if asked.get("max_tokens", 0) > folder.max_tokens:
        raise StartupError(f"max_tokens of {asked['max_tokens']}: this model takes at most {folder.max_tokens}")
    default = EngineConfig()
    prefill = CPU_PREFILL_TOKENS if device.type == "cpu" else default.prefill_tokens
    # Every running sequence takes a token of each batch, and prompts should not starve behind them.
    prefill = max(prefill, 2 * asked.get("max_running", default.max_running))
    graph_bytes = GRAPH_BYTES if device.type == "cuda" else 0
    fitted: dict[str, Any] = {"max_tokens": folder.max_tokens, "prefill_tokens": prefill, "graph_bytes": graph_bytes}
    limits = replace(default, **{**fitted, **asked})
    if limits.prefill_tokens <= limits.max_running:
        raise StartupError(
            f"prefill_tokens ({limits.prefill_tokens}) must be more than max_running ({limits.max_running}): every"
            " running sequence takes one token of a batch, and prompts need some too"
        )
    return limits


def warm_up_generation(engine: GenerationEngine, device: torch.device, serving: Serving) -> None:
    """Capture what decoding and single prompts need, greedy and drawn, where the device has graphs."""
    if device.type == "cuda" and serving.warm_up:
        draws = (GREEDY, Draw(sampled=True))
        engine.warmup(engine.decode_keys(WARM_TOKENS, draws) + engine.prompt_keys(WARM_PROMPT, WARM_BESIDE, draws))


def self_check_generation(engine: GenerationEngine) -> None:
    """Continue a short prompt.

    Raises:
        StartupError: that fails, or gives logits that are not finite.
    """
    tokens = min(CHECK_TOKENS, engine.limits.longest - CHECK_NEW)
    ids = np.arange(max(tokens, 1), dtype=np.int32) % engine.limits.vocab_size
    sampling = Sampling(max_new_tokens=CHECK_NEW, temperature=0.0, ignore_eos=True)
    give_up = time.monotonic() + CHECK_SECONDS
    try:
        engine.add(GenerateRequest(0, ids, sampling))
        while not engine.idle:
            step = engine.step()
            for error in step.failed.values():
                raise error
            if time.monotonic() > give_up:
                raise StartupError(f"no token came within {CHECK_SECONDS:.0f} s")
            if not step.launched:
                time.sleep(1e-3)
    except RoseError as error:
        raise StartupError(f"the model does not generate here: {error.message}") from error

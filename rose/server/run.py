"""Start-up of the engine process: folder → model → engine → self-check → reactor.

Everything that can be refused is refused here, before a client is let in. Knows what goes together; knows neither
frames nor batches.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from rose.attention_backends.base import workspace_of
from rose.config import EngineConfig, ModelFolder, ServerConfig, read_model_folder
from rose.config.profile import ModelNumbers
from rose.config.reranker import Task
from rose.config.serving import CPU_TOKENS
from rose.convert import load_model
from rose.engine import Engine, build_engine
from rose.errors import StartupError
from rose.models.base import ServedModel
from rose.proto import rose_pb2 as pb
from rose.proto.address import parse_address
from rose.server.card import check_config, model_card, request_limits, table
from rose.server.device import GRAPH_BYTES, describe_device, device_alive, pick_device, pick_dtype
from rose.server.listener import Listener
from rose.server.profile import profile_of_folder, tell_profile
from rose.server.reactor import Reactor
from rose.server.selfcheck import self_check
from rose.server.start_generation import check_asked, start_generation
from rose.server.waiting import sharpen_sleep

_log = logging.getLogger(__name__)

# Single queries up to this long are captured before serving, in the steps their graphs come in.
WARM_TOKENS, WARM_STEP = 1024, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What to serve, beside the limits.

    Attributes:
        served_name: the name clients use; empty: the folder's own.
        device: "auto" (CUDA where there is one), or torch's name of a device.
        dtype: "auto" (bfloat16 on CUDA, else float32), or a key of DTYPES.
        backend: name of an attention backend, or "auto".
        pooling, causal, task, template: settle what the folder leaves open; see read_model_folder. "auto" is None.
        num_threads: threads of torch's operators on the CPU, or None for torch's own choice.
        warm_up: capture the graphs of single queries before serving, where the device has graphs.
    """

    served_name: str = ""
    device: str = "auto"
    dtype: str = "auto"
    backend: str = "auto"
    pooling: str | None = None
    causal: bool | None = None
    task: Task | Literal["auto"] | None = None
    template: str | None = None
    num_threads: int | None = None
    warm_up: bool = True


def serve(
    model_folder: str | Path,
    *,
    serving: Serving | None = None,
    budgets: Mapping[str, Any] | None = None,
    config: ServerConfig | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> int:
    """Serve a model folder until a signal ends it.

    SIGTERM and SIGINT stop accepting, refuse what is new and finish what is open within `drain_seconds`; a second one
    ends at once. Signals are only handled when this runs in the main thread.

    Args:
        budgets: fields of EngineConfig that differ from the defaults; max_tokens is the folder's own if not given.
        config: address and limits.
        on_ready: called with the bound address once clients may connect.

    Returns:
        The exit status: 0 after a clean end, 1 if requests were cut short, 70 if the device was lost.

    Raises:
        StartupError: whatever keeps this model from being served here.
    """
    serving, config = serving or Serving(), config or ServerConfig()
    with contextlib.closing(Listener(parse_address(config.address))) as listener:
        task = None if serving.task == "auto" else serving.task
        folder = read_model_folder(
            model_folder, pooling=serving.pooling, causal=serving.causal, task=task, template=serving.template
        )
        device = pick_device(serving.device)
        dtype = pick_dtype(serving.dtype, device)
        check_asked(budgets or {}, generates=folder.generation is not None)
        start = start_embedding if folder.generation is None else start_generation
        with start(folder, serving, budgets or {}, config, listener, device, dtype) as (engine, reactor):
            address = str(listener.address)
            with engine.executor.owner():
                return _run(reactor, device, lambda: on_ready(address) if on_ready is not None else None)


@contextlib.contextmanager
def start_embedding(
    folder: ModelFolder,
    serving: Serving,
    budgets: Mapping[str, Any],
    config: ServerConfig,
    listener: Listener,
    device: torch.device,
    dtype: torch.dtype,
) -> Iterator[tuple[Engine, Reactor]]:
    """An embedder or reranker, loaded, checked and told of, and its reactor; the engine is closed in the end."""
    profile = profile_of_folder(folder, device, dtype, budgets.get("profile", "auto"))
    limits = fit_budgets(budgets, folder, device, profile.numbers)
    check_config(config, limits.max_tokens)
    model = load_model(folder, device, dtype)
    type_vocab_size = folder.architecture.type_vocab_size
    engine = build_engine(
        model,
        limits,
        device,
        dtype,
        backend=serving.backend,
        num_threads=serving.num_threads,
        type_vocab_size=type_vocab_size,
        profile=profile,
    )
    with contextlib.closing(engine):
        warm_up(engine, limits, device, serving)
        self_check(engine, model)
        card = model_card(
            folder,
            model,
            limits,
            config,
            served_name=serving.served_name or folder.path.resolve().name,
            dtype=str(dtype).removeprefix("torch."),
            device=describe_device(device),
            backend=", ".join(engine.backend_names),
        )
        _log.info("serving\n%s", table(card, folder, limits, str(listener.address)))
        tell_profile(profile, engine.backend, limits)
        yield engine, build_reactor(engine, model, card, listener, limits, config, device, type_vocab_size)


def build_reactor(
    engine: Engine,
    model: ServedModel,
    card: pb.ModelCard,
    listener: Listener,
    limits: EngineConfig,
    config: ServerConfig,
    device: torch.device,
    type_vocab_size: int | None = None,
) -> Reactor:
    """The reactor of a real engine."""
    return Reactor(
        engine,
        request_limits(model, limits, config, card.model, type_vocab_size),
        card,
        listener,
        config,
        device_alive=lambda: device_alive(device),
        engine_counters=lambda: {
            **asdict(engine.metrics),
            **_prefixed("graph_", asdict(engine.graphs.metrics)),
            **_prefixed("attention_", asdict(workspace_of(engine.backend))),
            "device_us": round(engine.device_seconds * 1e6),
        },
    )


def fit_budgets(
    asked: Mapping[str, Any], folder: ModelFolder, device: torch.device, measured: ModelNumbers | None = None
) -> EngineConfig:
    """The budgets with the folder's longest sequence in them, and what was asked for on top.

    Args:
        measured: numbers of a profile, in place of the defaults.

    A sequence longer than a batch goes alone, so a default may be smaller than the longest; what is asked for is taken
    as the most that the device can hold.

    Raises:
        StartupError: what was asked for does not fit the model.
    """
    longest = asked.get("max_tokens", folder.max_tokens)
    if longest > folder.max_tokens:
        raise StartupError(f"max_tokens of {longest}: this model takes at most {folder.max_tokens}")
    if longest > asked.get("bulk_tokens", longest):
        raise StartupError(
            f"bulk_tokens of {asked['bulk_tokens']} hold no sequence of {longest} tokens (max_tokens): "
            "raise one or lower the other"
        )
    on_cpu = device.type == "cpu"
    default = replace(EngineConfig(), **CPU_TOKENS) if on_cpu else EngineConfig()
    if measured is not None:
        default = replace(
            default,
            online_tokens=measured.online_tokens or default.online_tokens,
            bulk_tokens=measured.bulk_tokens or default.bulk_tokens,
        )
    online = asked.get("online_tokens", min(default.online_tokens, asked.get("bulk_tokens", default.online_tokens)))
    budgets: dict[str, Any] = {
        "max_tokens": longest,
        "online_tokens": online,
        # A longer sequence goes alone. Batches as long as a model's longest text were slower a token on an H200: with
        # 25,600 tokens pplx-embed's products run at 691 TFLOP/s, with 8192 at 763; and no graph is that long.
        "bulk_tokens": max(default.bulk_tokens, online),
        "graph_bytes": GRAPH_BYTES if device.type == "cuda" else 0,
        **asked,
    }
    return EngineConfig(**budgets)


def warm_up(engine: Engine, limits: EngineConfig, device: torch.device, serving: Serving) -> None:
    """Compile and capture what single queries and full batches need, where the device has graphs."""
    if device.type != "cuda" or not serving.warm_up:
        return
    longest = min(WARM_TOKENS, limits.max_tokens)
    # A query that fills its bucket runs alone in it, any other beside one dummy sequence: two graphs a bucket.
    singles = [[length - less] for length in range(WARM_STEP, longest + 1, WARM_STEP) for less in (0, 1)]
    sequences = min(limits.bulk_tokens // longest, limits.max_sequences)
    engine.warmup({engine.key_for(lengths) for lengths in (*singles, [longest], [longest] * sequences)})


def _run(reactor: Reactor, device: torch.device, announce: Callable[[], None]) -> int:
    in_main = threading.current_thread() is threading.main_thread()
    if in_main:
        # The wake-up descriptor as well: a signal between two bytecodes would otherwise wait for the next event.
        signal.set_wakeup_fd(reactor.wakeup_fd, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: reactor.stop())
    if device.type == "cuda":
        sharpen_sleep()
    # What was loaded stays: the collector need not walk through it while serving.
    gc.collect()
    gc.freeze()
    reactor.listen()
    announce()
    try:
        return reactor.run()
    finally:
        if in_main:
            signal.set_wakeup_fd(-1)


def _prefixed(prefix: str, counters: Mapping[str, int]) -> dict[str, int]:
    return {prefix + name: value for name, value in counters.items()}


def write_ready(address: str) -> None:
    """The line a parent process waits for."""
    sys.stdout.write(f"rose-server ready {address}\n")
    sys.stdout.flush()

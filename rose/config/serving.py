"""The numbers the engine process and the front process run with.

Knows limits and addresses; knows neither devices nor sockets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from rose.errors import StartupError

# EngineConfig's budgets on a CPU where nothing else is asked for: batches of 2048 tokens, whose activations stay in its
# caches, were measured faster than those of 16384, and a query that arrives waits for the end of one.
CPU_TOKENS: Mapping[str, Any] = {"online_tokens": 512, "bulk_tokens": 2048}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Budgets of the scheduler and of the graphs.

    Attributes:
        online_tokens: most tokens of a batch while single queries wait. A batch grows to this only where so much waits,
            and then all of it ends sooner in few batches than in many: with an H200's times, 16 queries of 512 tokens
            in flight take 9.7 ms each with 8192, 11.7 with 2048.
        single_tokens: a request of several sequences counts as a single query up to so many tokens in all, and up to
            `online_tokens`.
        bulk_tokens: most tokens of a batch otherwise.
        shared_tokens: most tokens of larger requests in a batch while single queries come: within a quarter of a second
            of the last one. A query that arrives waits for the batch under way, so this bounds what it waits: with 256,
            the p99 of queries beside a job of 10,000 passages stays within twice what it is alone, and the job takes
            4.4 s instead of 2.4 while they keep coming (BGE-M3's times on an H200, computed).
        max_sequences: most sequences of a batch.
        max_tokens: longest sequence accepted, in tokens, special tokens included.
        max_in_flight: batches launched and not yet finished, at most.
        graph_bytes: device memory the captured graphs may take; 0 captures none.
        max_running: most sequences that generate at a time.
        prefill_tokens: most tokens of a generating batch; what running sequences leave of it goes to prompts.
        kv_cache_bytes: memory for the keys and values of generating sequences; 0: what the device has left, or 1 GiB
            on the CPU.
        page_size: tokens a page of it.
        prefix_cache: pages are kept for prompts that start alike, as long as nobody else needs them.
        state_cache_bytes: memory for recurrent states kept beside these pages, which a hybrid model's prompts cannot be
            found without; 0: 256 MiB on the CPU, and none on CUDA, where it has not been measured.
        profile: path of what `rose select-backend` measured; "auto" looks for a profile of the device, "none" for none.
    """

    online_tokens: int = 8192
    single_tokens: int = 2048
    bulk_tokens: int = 16384
    shared_tokens: int = 256
    max_sequences: int = 512
    max_tokens: int = 512
    max_in_flight: int = 2
    graph_bytes: int = 0
    max_running: int = 64
    prefill_tokens: int = 2048
    kv_cache_bytes: int = 0
    page_size: int = 16
    prefix_cache: bool = True
    state_cache_bytes: int = 0
    profile: str = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Limits of the engine process.

    Attributes:
        address: "host:port" or "unix:/path" of the light link.
        max_queued_tokens, max_queued_requests: beyond either, requests are answered `overloaded`.
        max_request_items: most sequences of one request.
        max_payload: largest frame accepted, in bytes.
        drain_seconds: how long SIGTERM waits for what is in flight.
        stuck_seconds: a batch that takes longer means a stuck device: the process answers `unavailable` until it ends.
            Far above any batch, since busy is healthy.
    """

    address: str = "127.0.0.1:0"
    max_queued_tokens: int = 1 << 22
    max_queued_requests: int = 4096
    max_request_items: int = 2048
    max_payload: int = 64 << 20
    drain_seconds: float = 30.0
    stuck_seconds: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """Limits of the front process.

    Attributes:
        replicas: light-link addresses of the engine processes.
        replica_names: what answers and metrics call each of them; empty for their addresses.
        replica_silence_seconds: an engine that says nothing for so long loses its connection, and its work goes
            elsewhere. Far above any batch, since busy is healthy.
        replica_spin_seconds: keep the front's core awake for so long while an answer is awaited. A processor that went
            to sleep wakes up late and with cold caches; whoever has a core to spare may rather spend it. 0: sleep.
        host, http_port, grpc_port: where to listen; port 0 picks a free one, None leaves that carrier out.
        max_body_bytes: largest HTTP body or gRPC message, in bytes.
        max_held_bytes: most bytes of bodies and messages held at a time, over all requests; beyond it they are answered
            429. 0: eight of the largest.
        max_items: most inputs of one request, or documents or pairs.
        max_request_tokens: most tokens of one request, over all its inputs.
        max_documents, max_chunks, max_context_tokens: the same of a request for contextual vectors.
        inline_chars: texts up to this many characters in all are tokenised on the event loop; a hop to the pool
            costs more than a short encode. With more than a few requests open, only the shortest are.
        tokenizer_threads: threads of the pool for longer ones, and for a crowd's.
        tokenizer_queue: requests that may wait for that pool or run in it; more are answered 429.
        default_timeout_s: deadline of a request that states none.
        strict_dimensions: refuse `dimensions` the model was not trained for.
        fronts: processes that share the ports, each with these limits for itself. One event loop answers one to two
            thousand requests a second, and a device can be quicker.
        shared_ports: this process is one of several on its ports.
        metrics_folder: where it counts, for the page of metrics of all of them; empty: in memory.
    """

    replicas: tuple[str, ...]
    replica_names: tuple[str, ...] = ()
    replica_silence_seconds: float = 60.0
    replica_spin_seconds: float = 0.0
    host: str = "127.0.0.1"
    http_port: int | None = 8080
    grpc_port: int | None = None
    max_body_bytes: int = 32 << 20
    max_held_bytes: int = 0
    max_items: int = 2048
    max_request_tokens: int = 1 << 20
    max_documents: int = 512
    max_chunks: int = 16_000
    max_context_tokens: int = 120_000
    inline_chars: int = 4096
    tokenizer_threads: int = 2
    tokenizer_queue: int = 256
    default_timeout_s: float = 300.0
    drain_seconds: float = 30.0
    strict_dimensions: bool = False
    fronts: int = 1
    shared_ports: bool = False
    metrics_folder: str = ""


# Option -> field, for those that the command line spells otherwise.
_SPELLED = {"default_timeout_s": "--timeout", "http_port": "--http", "grpc_port": "--grpc"}
# Deadlines travel as 32-bit milliseconds.
_MAX_SECONDS = 0xFFFFFFFF / 1000
_MIN_COUNTS = (
    *("max_body_bytes", "max_items", "max_request_tokens", "max_documents", "max_chunks", "max_context_tokens"),
    *("tokenizer_threads", "tokenizer_queue", "fronts"),
)


def check_gateway_config(config: GatewayConfig) -> None:
    """Raises StartupError naming the option with which nothing, or nothing as it was meant, could be served."""
    for name in _MIN_COUNTS:
        _check(config, name, getattr(config, name) >= 1, "at least 1")
    _check(config, "inline_chars", config.inline_chars >= 0, "at least 0")
    held = config.max_held_bytes
    _check(config, "max_held_bytes", held == 0 or held >= config.max_body_bytes, "0, or at least --max-body-bytes")
    for name in ("default_timeout_s", "replica_silence_seconds"):
        value = getattr(config, name)
        _check(config, name, 0 < value <= _MAX_SECONDS, f"more than 0 and at most {_MAX_SECONDS:.0f} seconds")
    for name in ("drain_seconds", "replica_spin_seconds"):
        value = getattr(config, name)
        _check(config, name, isfinite(value) and value >= 0, "a number of seconds, 0 or more")
    for name in ("http_port", "grpc_port"):
        port = getattr(config, name)
        _check(config, name, port is None or 0 <= port <= 65535, "0 to 65535, or off")
    if config.http_port is None and config.grpc_port is None:
        raise StartupError("both --http and --grpc are off: nothing could be served")
    if config.http_port and config.http_port == config.grpc_port:
        raise StartupError(f"--http and --grpc are both {config.http_port}: each needs a port of its own")
    if not config.host:
        raise StartupError("--host is empty: expected an address to listen on, 0.0.0.0 for all of them")
    if config.replica_names and len(config.replica_names) != len(config.replicas):
        raise StartupError(f"{len(config.replica_names)} replica_names for {len(config.replicas)} replicas")


def _check(config: GatewayConfig, name: str, good: bool, expected: str) -> None:
    if not good:
        option = _SPELLED.get(name, "--" + name.replace("_", "-"))
        raise StartupError(f"{option} must be {expected}, not {getattr(config, name)}")

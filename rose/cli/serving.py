"""`rose serve` and `rose gateway`: the front in this process, with engine processes as its children or elsewhere.

The front's options are fields of GatewayConfig. Those of the engine are handed to its process as they are spelled here,
and checked there. Knows options; knows neither sockets nor models, and loads no torch.
"""

from __future__ import annotations

import argparse
import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rose.cli.shared import DTYPES, Commands, add_command, add_model, add_reading, find_model, reading, resolve_model
from rose.errors import StartupError

if TYPE_CHECKING:
    from rose.config import GatewayConfig
    from rose.gateway.carriers import Listening

_ENGINE_MODEL = {
    "--dtype": "auto (bfloat16 on CUDA, float32 on CPU), float32, bfloat16 or float16",
    "--backend": "attention backend; see rose doctor",
    "--profile": "what rose select-backend measured (default: a profile of the device, where there is one)",
}
_ENGINE_LIMITS = {
    "--num-threads": "threads of torch's operators on the CPU (default: torch's own choice)",
    "--online-tokens": "most tokens of a batch while single queries wait",
    "--bulk-tokens": "most tokens of a batch otherwise",
    "--max-sequences": "most sequences of a batch",
    "--max-in-flight": "most batches launched and not yet finished",
    "--graph-bytes": "device memory that captured graphs may take; 0 captures none",
    "--max-tokens": "longest text, in tokens (default: the model's own)",
    "--max-queued-tokens": "beyond this many waiting tokens, requests are answered 429",
    "--max-queued-requests": "beyond this many waiting requests, requests are answered 429",
    "--max-running": "most sequences that generate at a time (default: 64)",
    "--prefill-tokens": "most tokens of a generating batch; prompts get what running sequences leave of it",
    "--kv-cache-bytes": "memory for keys and values of generating sequences (default: what is left; 1 GiB on the CPU)",
    "--page-size": "tokens a page of it (default: 16)",
    "--state-cache-bytes": "memory for states of hybrid models kept for prompts that start alike (default: 256 MiB on "
    "the CPU, none on CUDA; not with --no-prefix-cache)",
}
# option -> field of GatewayConfig, type, help. What is not given keeps the field's own default.
_FRONT_LIMITS: dict[str, tuple[str, type, str]] = {
    "--fronts": ("fronts", int, "front processes on the same ports, for thousands of requests a second (default: 1)"),
    "--timeout": ("default_timeout_s", float, "deadline of a request that states none, in seconds (default: 300)"),
    "--drain-seconds": ("drain_seconds", float, "how long SIGTERM waits for open requests (default: 30)"),
    "--max-items": ("max_items", int, "most inputs of one request (default: 2048)"),
    "--max-request-tokens": ("max_request_tokens", int, "most tokens of one request (default: 1048576)"),
    "--max-body-bytes": ("max_body_bytes", int, "largest HTTP body or gRPC message (default: 32 MiB)"),
    "--max-held-bytes": ("max_held_bytes", int, "most bytes of all of them at a time (default: eight of the largest)"),
    "--tokenizer-threads": (
        "tokenizer_threads",
        int,
        "threads for texts of over 4 KB, or many (default: 2)",
    ),
    "--replica-silence-seconds": (
        "replica_silence_seconds",
        float,
        "an engine that says nothing for so long loses its work to others (default: 60)",
    ),
    "--replica-spin-seconds": (
        "replica_spin_seconds",
        float,
        "spend a core to answer sooner: stay awake for so long while an answer is awaited (default: 0)",
    ),
}


def add_serve(commands: Commands) -> None:
    examples = (
        "rose serve minilm                                  HTTP on 127.0.0.1:8080",
        "rose serve ./my-model --http 8080 --grpc 9090      HTTP and gRPC",
        "rose serve ./my-llm --task generate                a folder that could be served in several ways",
        "rose serve owner/model --device cuda:0,cuda:1      one engine process a device behind one front",
        "rose serve minilm --host 0.0.0.0                   reachable from other machines",
    )
    parser = add_command(
        commands, "serve", _serve, "serve a model: engine processes and the front, started together", examples
    )
    add_model(parser)
    _add_front(parser)
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--device", type=_devices, default=("auto",), help="auto, cpu, cuda, cuda:N; several, by commas: an engine each"
    )
    add_reading(engine)
    for name, text in _ENGINE_MODEL.items():
        choices = DTYPES if name == "--dtype" else None
        engine.add_argument(name, help=text, choices=choices, metavar=name.removeprefix("--").upper())
    for name, text in _ENGINE_LIMITS.items():
        engine.add_argument(name, type=int, help=text, metavar=name.rpartition("-")[2].upper())
    engine.add_argument("--no-profile", action="store_true", help="use no profile: defaults only")
    engine.add_argument("--no-prefix-cache", action="store_true", help="never reuse what prompts have in common")
    engine.add_argument("--no-warm-up", action="store_true", help="serve at once, capture graphs when they are needed")
    parser.add_argument("--name", help="name clients use (default: as given here)")


def add_gateway(commands: Commands) -> None:
    examples = (
        "rose gateway minilm --replica 10.0.0.5:7000 10.0.0.6:7000",
        "rose gateway ./m --replica unix:/run/rose",
    )
    parser = add_command(
        commands, "gateway", _gateway, "run the front alone, before engine processes that run already", examples
    )
    add_model(parser)
    _add_front(parser)
    add_reading(parser.add_argument_group("model, as its engines were started"))
    parser.add_argument("--replica", nargs="+", required=True, metavar="ADDRESS", help="host:port or unix:/path")


def _add_front(parser: argparse.ArgumentParser) -> None:
    front = parser.add_argument_group("front")
    front.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    front.add_argument("--http", type=_port, default=8080, metavar="PORT", help="0: any free one; off (default: 8080)")
    front.add_argument("--grpc", type=_port, default=None, metavar="PORT", help="0: any free one; off (default: off)")
    for name, (_, kind, text) in _FRONT_LIMITS.items():
        front.add_argument(name, type=kind, metavar=name.rpartition("-")[2].upper(), help=text)
    front.add_argument(
        "--strict-dimensions", action="store_true", help="refuse dimensions the model was not trained for"
    )
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))


def _port(text: str) -> int | None:
    if text == "off":
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is no port: expected 0 to 65535, or off")
    return int(text)


def _devices(text: str) -> tuple[str, ...]:
    devices = tuple(part.strip() for part in text.split(","))
    if not all(devices):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of devices: expected for example cuda:0,cuda:1")
    return devices


def _serve(options: argparse.Namespace) -> int:
    from rose.gateway.supervise import engine_command, serve

    _log_to_stderr(options.log_level)
    folder = find_model(options.model, options.cache)
    engines = [engine_command(folder, _engine_arguments(options, device)) for device in options.device]
    return serve(folder, _front_config(options, ()), engines, reading=reading(options), on_ready=_announce)


def _gateway(options: argparse.Namespace) -> int:
    from rose.gateway.fronts import run_fronts

    _log_to_stderr(options.log_level)
    config = _front_config(options, tuple(options.replica))
    return run_fronts(config, resolve_model(options), reading=reading(options), on_listening=_announce)


def _front_config(options: argparse.Namespace, replicas: tuple[str, ...]) -> GatewayConfig:
    from rose.config import GatewayConfig

    config = GatewayConfig(
        replicas=replicas,
        host=options.host,
        http_port=options.http,
        grpc_port=options.grpc,
        strict_dimensions=options.strict_dimensions,
    )
    given = {field: _value(options, name) for name, (field, _, _) in _FRONT_LIMITS.items()}
    return replace(config, **{field: value for field, value in given.items() if value is not None})


def _value(options: argparse.Namespace, name: str) -> Any:
    return getattr(options, name.removeprefix("--").replace("-", "_"))


def _engine_arguments(options: argparse.Namespace, device: str) -> list[str]:
    """The engine's command line after its folder and address."""
    if options.profile is not None and options.no_profile:
        raise StartupError("--profile and --no-profile exclude each other")
    arguments = ["--device", device, "--served-name", options.name or _model_name(options.model)]
    arguments += ["--log-level", options.log_level]
    for name in ("--pooling", "--task", "--rerank-template", *_ENGINE_MODEL, *_ENGINE_LIMITS):
        if (value := _value(options, name)) is not None:
            arguments += [name, str(value)]
    if options.causal is not None:
        arguments.append("--causal" if options.causal else "--no-causal")
    arguments += [flag for flag in ("--no-prefix-cache", "--no-warm-up", "--no-profile") if _value(options, flag)]
    return arguments


def _model_name(model: str) -> str:
    """A folder is served under its last name, everything else under the name it was asked for by."""
    path = Path(model)
    return path.resolve().name if path.is_dir() else model


def _announce(listening: Listening) -> None:
    if listening.http:
        print(f"http://{listening.http}   API page: http://{listening.http}/docs", flush=True)
    if listening.grpc:
        print(f"grpc://{listening.grpc}", flush=True)


def _log_to_stderr(level: str) -> None:
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(message)s")

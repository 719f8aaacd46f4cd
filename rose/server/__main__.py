"""`python -m rose.server MODEL_FOLDER`: one engine process.

Prints `rose-server ready ADDRESS` on stdout once clients may connect, and everything else on stderr. Knows options;
knows neither models nor sockets.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from rose.config import EngineConfig, ServerConfig
from rose.config.serving import CPU_TOKENS
from rose.errors import RoseError
from rose.server.device import DTYPES
from rose.server.run import Serving, serve, write_ready

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: that of `serve`, or 2 if serving was refused at start-up."""
    options = build_parser().parse_args(arguments)
    logging.basicConfig(level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")
    try:
        return serve(
            options.model_folder,
            serving=Serving(**_given(Serving, options)),
            budgets=_given(EngineConfig, options),
            config=ServerConfig(**_given(ServerConfig, options)),
            on_ready=write_ready,
        )
    except RoseError as error:
        sys.stderr.write(f"rose-server: {error.message}\n")
        return 2


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rose.server",
        description="One engine process: serves a model folder over the light link (docs/light_link.md).",
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("model_folder", help="folder with config.json, weights and sentence-transformers files")
    parser.add_argument("--address", help="host:port (port 0: any free one) or unix:/path; default 127.0.0.1:0")
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    model = parser.add_argument_group("model")
    model.add_argument("--name", "--served-name", dest="served_name", help="name clients use; default: the folder's")
    model.add_argument("--device", help="auto, cpu, cuda, cuda:N; default auto")
    model.add_argument("--dtype", choices=("auto", *DTYPES), help="default auto: bfloat16 on CUDA, else float32")
    model.add_argument("--backend", help="attention backend; default auto")
    model.add_argument("--pooling", choices=("mean", "cls", "last"), help="for a folder that does not state it")
    attention = model.add_mutually_exclusive_group()
    attention.add_argument("--causal", action="store_true", help="each token sees the past, if the folder is unsure")
    attention.add_argument(
        "--bidirectional", "--no-causal", dest="causal", action="store_false", help="each token sees all others"
    )
    model.add_argument(
        "--task",
        choices=("auto", "embed", "rerank", "generate"),
        help="what the folder is served for; default auto: what it says itself",
    )
    model.add_argument(
        "--rerank-template", dest="template", choices=("qwen3", "none"), help="for a reranker that states no template"
    )
    model.add_argument("--num-threads", type=int, help="threads of torch's operators on the CPU")
    model.add_argument("--no-warm-up", dest="warm_up", action="store_false", help="serve at once, capture when needed")
    measured = model.add_mutually_exclusive_group()
    measured.add_argument(
        "--profile", help="what rose select-backend measured; default auto: a profile of this device, if there is one"
    )
    measured.add_argument("--no-profile", dest="profile", action="store_const", const="none", help="defaults only")
    budgets = parser.add_argument_group("budgets")
    for field in fields(EngineConfig):
        if field.name == "profile":
            continue
        default = "the model's own" if field.name == "max_tokens" else field.default
        if field.name in CPU_TOKENS:
            default = f"{default}, on a CPU {CPU_TOKENS[field.name]}"
        if isinstance(field.default, bool):
            option = "--no-" + _option(field.name).removeprefix("--")
            budgets.add_argument(option, dest=field.name, action="store_false", help="default: on")
            continue
        budgets.add_argument(_option(field.name), type=int, help=f"default {default}")
    limits = parser.add_argument_group("limits")
    for field in fields(ServerConfig):
        if field.name != "address":
            kind = float if isinstance(field.default, float) else int
            limits.add_argument(_option(field.name), type=kind, help=f"default {field.default}")
    return parser


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _given(config: type[DataclassInstance], options: argparse.Namespace) -> dict[str, Any]:
    """The options that were spelled out, of those that are fields of `config`."""
    return {field.name: vars(options)[field.name] for field in fields(config) if field.name in vars(options)}


if __name__ == "__main__":
    sys.exit(main())

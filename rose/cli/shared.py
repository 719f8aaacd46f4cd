"""What several commands share: how a command is added, how a model is named and found.

Knows argparse and the hub; knows no command.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from rose.errors import CheckpointError
from rose.hub import CATALOG, DEFAULT_MODEL, Bars, resolve

# argparse gives this type no public name, and it is generic for type checkers only.
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Command = Callable[[argparse.Namespace], int]
# What an engine's --dtype may be; rose.server.device has the same, which is not imported here: it loads torch.
DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_command(
    commands: Commands, name: str, run: Command, summary: str, examples: Sequence[str]
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog="examples:\n" + "\n".join(f"  {example}" for example in examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=run)
    return parser


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        default=DEFAULT_MODEL,
        help="short name (rose pull --list), local folder, or hub id (owner/model); default: %(default)s",
    )
    parser.add_argument("--cache", type=Path, help="where pulled models are kept (default: $ROSE_CACHE, ~/.cache/rose)")


def add_reading(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--pooling", choices=("mean", "cls", "last"), help="for a folder that does not state it")
    attention = parser.add_mutually_exclusive_group()
    attention.add_argument(
        "--causal", dest="causal", action="store_true", default=None, help="each token sees the past"
    )
    attention.add_argument("--bidirectional", dest="causal", action="store_false", help="each token sees all others")
    parser.add_argument(
        "--task",
        choices=("auto", "embed", "rerank", "generate"),
        help="what the folder is for (default: auto, what it says itself)",
    )
    parser.add_argument(
        "--rerank-template", choices=("qwen3", "none"), help="for a reranker that does not say how a pair is written"
    )


def reading(options: argparse.Namespace) -> dict[str, Any]:
    """Options of `add_reading` as keyword arguments of `rose.config.read_model_folder`."""
    return {
        "pooling": options.pooling,
        "causal": options.causal,
        "task": None if options.task == "auto" else options.task,
        "template": options.rerank_template,
    }


def find_model(name: str, cache: Path | None) -> Path:
    """The folder of a model that is to be run or read; pulled first where it is not here yet.

    Raises:
        CheckpointError: it is a tokenizer without a model.
        PullError: as `rose.hub.resolve`.
    """
    known = CATALOG.get(name)
    folder = None if known is not None and known.is_tokenizer else resolve(name, cache=cache, progress=Bars())
    if folder is None or _is_tokenizer(folder):
        raise CheckpointError(
            f"{name} is a tokenizer only, without a model; rose pull --list tells which names have one"
        )
    return folder


def _is_tokenizer(folder: Path) -> bool:
    described = any((folder / name).exists() for name in ("config.json", "modules.json", "adapter_config.json"))
    return (folder / "tokenizer.json").exists() and not described


def resolve_model(options: argparse.Namespace) -> Path:
    """The folder of `add_model`'s options, a tokenizer's as well."""
    return resolve(options.model, cache=options.cache, progress=Bars())


class Bar:
    """How far one step has come, on a terminal; gone once it is done."""

    def __init__(self, name: str, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        columns = (TextColumn(f"{name:<14}"), BarColumn(bar_width=30), TaskProgressColumn(), TimeRemainingColumn())
        console = Console(stderr=True)
        self._bars = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bars.add_task(name, total=total)
        self._total, self._open = total, True
        self._bars.start()

    def __call__(self, done: int) -> None:
        self._bars.update(self._task, completed=done)
        if done >= self._total and self._open:
            self.close()

    def close(self) -> None:
        self._bars.stop()
        self._open = False

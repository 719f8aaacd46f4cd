"""The parser of all commands, and what becomes of a command that fails.

Knows the commands and the exit statuses: 0 done, 1 not as it should be, 2 wrong usage or refused at start-up,
130 interrupted, 141 the reader of its output went away.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import rose
from rose.cli.bench import add_bench
from rose.cli.calibrate import add_calibrate
from rose.cli.convert import add_convert
from rose.cli.doctor import add_doctor
from rose.cli.embed import add_embed
from rose.cli.generate import add_generate
from rose.cli.models import add_info, add_pull
from rose.cli.rerank import add_rerank
from rose.cli.select_backend import add_select_backend
from rose.cli.serving import add_gateway, add_serve
from rose.cli.shared import Command, Commands, add_command
from rose.cli.verify import add_verify
from rose.errors import RoseError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the console script `rose`."""
    options = build_parser().parse_args(arguments)
    command: Command = options.command
    try:
        return command(options)
    except RoseError as error:
        print(f"rose: {error.message}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "rose":
            raise
        print(f"rose: {_missing(error.name)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read standard output has had enough; Python must not try to flush the rest at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _missing(module: str) -> str:
    needed_for = "for Parquet files, install rose-serving[parquet]"
    if module.partition(".")[0] != "pyarrow":
        needed_for = "for serving, install rose-serving[gateway]"
    return f"this command needs the Python module {module}, which is not installed here; {needed_for}"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rose",
        description="Serve embedders, rerankers and LLMs: an engine process per device, a thin HTTP and gRPC front.",
        epilog="examples:\n  rose serve minilm\n  rose serve ./my-model --http 8080 --grpc 9090\n"
        "  rose embed texts.txt -o vectors.npy\n"
        "  rose generate smollm2 --chat 'What is the capital of France?' --temperature 0\n"
        "  rose COMMAND --help    options and examples of one command",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"rose {rose.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    serving = (add_pull, add_serve, add_gateway, add_embed, add_rerank, add_generate)
    making = (add_convert, add_calibrate, add_verify)
    for add in (*serving, *making, add_select_backend, add_info, add_doctor, add_bench, _add_version):
        add(commands)
    return parser


def _add_version(commands: Commands) -> None:
    add_command(commands, "version", _version, "print the version", ("rose version",))


def _version(options: argparse.Namespace) -> int:
    print(rose.__version__)
    return 0

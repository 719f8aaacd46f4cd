"""`rose embed`: a file of texts into a file of vectors.

Knows options and what to print; the work is that of `rose.cli.bulk`.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from rose.cli.bulk.api import Api
from rose.cli.bulk.bar import text_bar
from rose.cli.bulk.forms import FORMS, OutForm, form_for
from rose.cli.bulk.options import add_input, add_server, served_model, server, source_of
from rose.cli.bulk.resume import Partial
from rose.cli.bulk.run import StandardOutput, embed_all, embed_with
from rose.cli.bulk.source import Source
from rose.cli.shared import Commands, add_command
from rose.errors import InvalidInput

_EXAMPLES = (
    "rose embed texts.txt -o vectors.npy",
    "rose embed docs.jsonl --field body --id-field id -o vectors.parquet --model e5-small --prompt-name passage",
    "echo 'a text' | rose embed - --server http://127.0.0.1:8080",
)
# Fields of a request that decide what a row holds: a run with others does not go on with an earlier one's rows.
_DECIDE = ("model", "outputs", "prompt_name", "dimensions", "truncate")


def add_embed(commands: Commands) -> None:
    parser = add_command(commands, "embed", _embed, "turn a file of texts into a file of vectors", _EXAMPLES)
    add_input(parser)
    parser.add_argument("--id-field", help="key or column of an id that is passed on with each row")
    writing = parser.add_argument_group("output")
    writing.add_argument(
        "-o", "--output", type=Path, help=".jsonl, .npy or .parquet (default: JSON lines to standard output)"
    )
    writing.add_argument("--to", dest="out_form", choices=("jsonl", "npy", "parquet"), help="whatever its name says")
    writing.add_argument("--overwrite", action="store_true", help="replace an output that is there already")
    writing.add_argument("--restart", action="store_true", help="begin anew instead of going on with an earlier run")
    asking = parser.add_argument_group("vectors")
    asking.add_argument("--outputs", help="outputs of the model, by commas: dense,sparse (default: its vector)")
    asking.add_argument("--prompt-name", help="prompt of the model that goes before every text; '' for none")
    asking.add_argument("--dimensions", type=int, help="cut vectors to this many numbers")
    add_server(parser)


def _embed(options: argparse.Namespace) -> int:
    form = _form(options)
    source = source_of(options, options.id_field)
    source.check_first()
    started = time.monotonic()
    with ExitStack() as stack:
        api = stack.enter_context(server(options))
        fields = _fields(options, *served_model(api, options))
        if options.output is None:
            return _to_standard_output(api, source, fields, form)
        settings = {"form": form, "id_field": options.id_field, **{name: fields.get(name) for name in _DECIDE}}
        partial = Partial(options.output, settings, restart=options.restart, overwrite=options.overwrite)
        stack.callback(partial.close)
        before = partial.done
        advance = stack.enter_context(text_bar(source.count()))
        try:
            prompt = embed_all(source, embed_with(api, source, fields), form_for(form), partial, advance)
            with partial.writing():
                partial.publish(form_for(form).finish(partial.path, partial.done.rows))
        except BaseException:
            if partial.done.rows and not partial.published:
                print(
                    f"rose: done so far: {_texts(partial.done.rows)}; the same command goes on there", file=sys.stderr
                )
            raise
    seconds = time.monotonic() - started
    rows, tokens = partial.done.rows - before.rows, partial.done.tokens - before.tokens
    earlier = f" ({before.rows} of an earlier run before them)" if before.rows else ""
    shown = f", prompt {prompt!r}" if prompt else ""
    print(f"{_texts(rows)}{earlier}, {tokens} tokens{shown}, {seconds:.1f} s: {options.output}", file=sys.stderr)
    return 0


def _texts(count: int) -> str:
    return "1 text" if count == 1 else f"{count} texts"


def _to_standard_output(api: Api, source: Source, fields: dict[str, object], form: OutForm) -> int:
    embed_all(source, embed_with(api, source, fields), form_for(form), StandardOutput(), lambda rows, tokens: None)
    return 0


def _form(options: argparse.Namespace) -> OutForm:
    """Raises InvalidInput for an output that has no known form, is there already, or cannot go to standard output."""
    if options.output is None:
        if options.out_form in ("npy", "parquet"):
            raise InvalidInput(f"{options.out_form} needs a file to go to: name one with -o")
        return "jsonl"
    suffix = options.output.suffix.lower()
    form: OutForm | None = options.out_form or FORMS.get(suffix)
    if form is None:
        raise InvalidInput(f"what {options.output} is to hold cannot be told from its name: use --to")
    if form == "parquet":
        importlib.import_module("pyarrow")  # fails now, and not after an hour
    if options.output.exists() and not options.overwrite:
        raise InvalidInput(f"{options.output} is there already; --overwrite replaces it")
    return form


def _fields(options: argparse.Namespace, model: str, rose: bool) -> dict[str, object]:
    """The request's fields besides its texts; what is not asked for is left to the server."""
    fields: dict[str, object] = {"model": model, "encoding_format": "base64"}
    if options.outputs is not None:
        fields["outputs"] = [name.strip() for name in options.outputs.split(",")]
    if options.prompt_name is not None:
        fields["prompt_name"] = options.prompt_name
    if options.dimensions is not None:
        fields["dimensions"] = options.dimensions
    if options.truncate:
        fields["truncate"] = True
    if rose:
        fields["priority"] = "bulk"  # single queries of others come first
    return fields

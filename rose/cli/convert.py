"""`rose convert`: a checkpoint or adapters become a folder that is served as it lies.

Knows options and what to print; the convert room does the work.
"""

from __future__ import annotations

import argparse
import signal
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from rose.cli.shared import Commands, add_command, find_model
from rose.errors import CheckpointError, InvalidInput
from rose.hub import Bars

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rose.convert.offline.choices import Choice

_EXAMPLES = (
    "rose convert ./my-llm --to embedder --bidirectional --pooling mean -o ./my-embedder",
    "rose convert ./my-lora --base ./my-llm --to embedder --pooling last -o ./my-embedder --dry-run",
    "rose convert ./my-llm --adapter ./mntp --adapter ./simcse --to embedder --bidirectional -o ./llm2vec",
    "rose convert Qwen/Qwen3-Reranker-0.6B --to reranker -o ./reranker",
    "rose convert ./my-chat-lora --to llm -o ./my-chat --dtype bfloat16",
)


def add_convert(commands: Commands) -> None:
    parser = add_command(
        commands, "convert", _convert, "make a folder that is served of a checkpoint or of adapters", _EXAMPLES
    )
    parser.add_argument("source", help="checkpoint folder, adapter folder, short name or hub id")
    parser.add_argument("--to", required=True, choices=("embedder", "reranker", "llm"))
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder that is made")
    parser.add_argument("--dry-run", action="store_true", help="print what would be done, and do nothing")
    parser.add_argument("--force", action="store_true", help="replace an output that is there already")
    parser.add_argument("--cache", type=Path, help="where pulled models are kept (default: $ROSE_CACHE, ~/.cache/rose)")
    merging = parser.add_argument_group("adapters")
    merging.add_argument("--base", help="of an adapter (default: what its config names)")
    merging.add_argument(
        "--adapter", type=Path, action="append", default=[], help="merged after SOURCE, in the order given"
    )
    deciding = parser.add_argument_group("choices that the files leave open, or that you want otherwise")
    deciding.add_argument("--pooling", choices=("mean", "cls", "last", "max"), help="how tokens become a vector")
    attention = deciding.add_mutually_exclusive_group()
    attention.add_argument("--causal", action="store_true", default=None, help="each token sees the past")
    attention.add_argument("--bidirectional", dest="causal", action="store_false", help="each token sees all others")
    deciding.add_argument("--normalize", action=argparse.BooleanOptionalAction, help="vectors of length 1")
    deciding.add_argument("--prompt", action="append", metavar="NAME=TEXT", help="instead of the folder's prompts")
    deciding.add_argument("--default-prompt", metavar="NAME", help="the one that is used where a request names none")
    deciding.add_argument("--max-tokens", type=int, help="longest text, special tokens included")
    deciding.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: as stored")
    deciding.add_argument("--rerank-template", choices=("qwen3", "none"), help="how a pair is written")
    parser.add_argument("--shard-mb", type=int, default=5000, help="largest file of weights (default: %(default)s)")


def _convert(options: argparse.Namespace) -> int:
    from rose.convert.offline import Wishes, convert, decide, find_source, open_weights
    from rose.convert.offline.write import check_target

    if options.shard_mb < 1:
        raise InvalidInput(f"--shard-mb is {options.shard_mb}, and must be at least 1")
    named = find_model(options.source, options.cache)
    source = find_source(named, base=_base(options, named), adapters=options.adapter)
    wishes = Wishes(
        to=options.to,
        causal=options.causal,
        pooling=options.pooling,
        normalize=options.normalize,
        prompts=None if options.prompt is None else dict(map(_prompt, options.prompt)),
        default_prompt=options.default_prompt,
        max_tokens=options.max_tokens,
        dtype=options.dtype,
        template=options.rerank_template,
    )
    check_target(options.output, source, force=options.force or options.dry_run)
    with open_weights(source, wishes) as weights:
        plan = decide(source, wishes, weights)
        _print_table(plan.choices)
        if options.dry_run:
            return 0
        total = sum(slot.nbytes for slot in plan.slots)
        with _Stop() as stop, Bars().stage("converting", total) as show:

            def advance(done: int) -> None:
                stop.check()
                show(done)

            size = options.shard_mb * 1_000_000
            convert(plan, weights, options.output, force=options.force, shard_bytes=size, advance=advance)
    print(options.output)
    return 0


def _base(options: argparse.Namespace, named: Path) -> Path | None:
    """The base's folder, pulled where it is not one; None where the source is no adapter and none was named."""
    from rose.config.folder import ADAPTER_CONFIG
    from rose.convert.offline.source import named_base

    name = options.base
    if name is None and (named / ADAPTER_CONFIG).exists():
        name = named_base(named)
        if Path(name).is_absolute() and not Path(name).is_dir():
            raise CheckpointError(f"{named} is an adapter, and its base {name} is not there; name it with --base")
    return None if name is None else find_model(name, options.cache)


def _prompt(text: str) -> tuple[str, str]:
    name, found, prompt = text.partition("=")
    if not found or not name:
        raise InvalidInput(f"--prompt {text!r} is not NAME=TEXT")
    return name, prompt


def _print_table(choices: Sequence[Choice]) -> None:
    widths = [max(len(text) for text in column) for column in zip(*((c.name, c.value) for c in choices), strict=True)]
    for choice in choices:
        print(f"{choice.name:<{widths[0]}}  {choice.value:<{min(widths[1], 60)}}  {choice.source}")


class _Stop:
    """Ctrl-C or a kill, heeded between two tensors: an exception inside a library's read may come out as another.

    A second one is raised where it finds the program.
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self._asked = False

    def check(self) -> None:
        if self._asked:
            raise KeyboardInterrupt

    def __enter__(self) -> _Stop:
        self._before = [signal.signal(number, self._note) for number in self._SIGNALS]
        return self

    def __exit__(self, *about: object) -> None:
        for number, handler in zip(self._SIGNALS, self._before, strict=True):
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.check()
        self._asked = True

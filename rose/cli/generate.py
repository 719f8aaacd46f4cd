"""`rose generate`: a prompt continued on the terminal, or a conversation.

Knows options and what to print; the server generates, one that runs or one that is started for the command.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rose.cli.bulk.api import Api
from rose.cli.bulk.local import rose_server
from rose.cli.bulk.options import served_model
from rose.cli.events import events
from rose.cli.intermixed import parse_intermixed
from rose.cli.shared import DTYPES, Commands, add_command, find_model
from rose.errors import InvalidInput

_TEXT = "'The river meets the sea'"
_EXAMPLES = (
    f"rose generate smollm2 {_TEXT} --max-tokens 12 --temperature 0",
    "rose generate smollm2 --chat 'What is the capital of France?' --temperature 0",
    "rose generate smollm2 -i --temperature 0",
    "rose generate --server http://127.0.0.1:8080 --chat - < question.txt",
)
MAX_TOKENS = 256
_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"
# Options of the request that are sent as they were given.
_PASSED_ON = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "min_tokens")
_ENGINE = {
    "--device": (str, "auto, cpu, cuda or cuda:N"),
    "--dtype": (str, "auto, float32, bfloat16 or float16"),
    "--num-threads": (int, "threads of torch's operators on the CPU"),
}
_PROMPT = ">>> "


@dataclass(slots=True)
class _Answer:
    """What came of one request."""

    text: list[str] = field(default_factory=list)
    finish: str | None = None
    stop: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    first_s: float = 0.0
    seconds: float = 0.0


def add_generate(commands: Commands) -> None:
    parser = add_command(commands, "generate", _generate, "continue a prompt, or answer in a chat", _EXAMPLES)
    parse_intermixed(parser)
    parser.add_argument(
        "words",
        nargs="*",
        metavar="MODEL PROMPT",
        help="short name, folder or hub id, and the text (- for standard input); with --server the text alone",
    )
    parser.add_argument("--chat", action="store_true", help="send the text as a user's message, by the chat template")
    parser.add_argument("-i", "--interactive", action="store_true", help="a conversation, until Ctrl-D")
    parser.add_argument("--system", metavar="TEXT", help="system message of a chat")
    parser.add_argument("--no-thinking", action="store_true", help="ask the template for answers without thinking")
    parser.add_argument(
        "--json", action="store_true", help="one line of JSON at the end instead of the text as it comes"
    )
    _add_sampling(parser.add_argument_group("sampling"))
    _add_server(parser)


def _add_sampling(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--max-tokens", type=int, default=MAX_TOKENS, help="most tokens (default: %(default)s)")
    group.add_argument(
        "--temperature", type=float, help="0 takes the most likely token (default: the model's own, or 1)"
    )
    group.add_argument("--top-p", type=float, help="draw among the fewest tokens that add up to it")
    group.add_argument("--top-k", type=int, help="draw among the k most likely")
    group.add_argument("--min-p", type=float, help="leave out tokens less likely than this times the most likely one")
    group.add_argument("--seed", type=int, help="the same seed draws the same answer")
    group.add_argument("--stop", action="append", metavar="TEXT", help="text that ends the answer; may be repeated")
    group.add_argument("--min-tokens", type=int, help="before so many tokens nothing ends it")
    group.add_argument("--ignore-eos", action="store_true", help="go on behind the model's own end tokens")


def _add_server(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("server")
    where.add_argument(
        "--server",
        "--address",
        help="http://HOST:PORT of a server that runs; without it, one is started for this command",
    )
    where.add_argument("--model", help="which model of SERVER, where it serves several")
    where.add_argument("--cache", type=Path, help="where pulled models are kept (default: $ROSE_CACHE, ~/.cache/rose)")
    engine = parser.add_argument_group("engine, where one is started")
    for name, (kind, text) in _ENGINE.items():
        choices = DTYPES if name == "--dtype" else None
        engine.add_argument(name, type=kind, help=text, choices=choices, metavar=name.rpartition("-")[2].upper())


def _generate(options: argparse.Namespace) -> int:
    model, prompt = _words(options)
    if model is not None:
        _check_sampling(options)
    with _server(options, model) as api:
        fields = {"model": served_model(api, options)[0], **_fields(options)}
        if options.interactive:
            _converse(api, options, fields)
            return 0
        answer = _Answer()
        for piece in _pieces(api, _body(options, fields, [*_opening(options), _user(prompt)], prompt), answer):
            if not options.json:
                _show(piece)
    if options.json:
        print(json.dumps(_told(answer), ensure_ascii=False))
        return 0
    _end_line(answer)
    used = answer.usage
    tokens = f"{used.get('prompt_tokens', '?')} + {used.get('completion_tokens', '?')} tokens"
    print(f"{tokens}, {answer.seconds:.1f} s, the first after {answer.first_s:.2f} s: {_why(answer)}", file=sys.stderr)
    return 0


def _words(options: argparse.Namespace) -> tuple[str | None, str]:
    """(model, prompt). Raises InvalidInput for too few or too many of them, or options that contradict each other."""
    wanted = [] if options.server else ["MODEL"]
    wanted += [] if options.interactive else ["PROMPT"]
    words: list[str] = options.words
    if len(words) != len(wanted):
        expected = " and ".join(wanted) or "none, since both are settled"
        where = "--server URL" if options.server else "smollm2"
        example = f"rose generate {where} {'-i' if options.interactive else _TEXT}"
        count = "1 argument" if len(words) == 1 else f"{len(words)} arguments"
        raise InvalidInput(f"{count}: expected {expected}, as in {example}")
    if options.interactive and options.json:
        raise InvalidInput("--json is one answer, and -i a conversation")
    if options.system is not None and not (options.chat or options.interactive):
        raise InvalidInput("--system is part of a chat: add --chat")
    if options.no_thinking and not (options.chat or options.interactive):
        raise InvalidInput("--no-thinking is for the chat template: add --chat")
    model = None if options.server else words[0]
    prompt = "" if options.interactive else words[-1]
    return model, _standard_input() if prompt == "-" else prompt


def _standard_input() -> str:
    """All but the line end behind the last line: editors and `echo` put it there, small models stumble over it."""
    text = sys.stdin.read()
    return text.removesuffix("\n")


def _check_sampling(options: argparse.Namespace) -> None:
    """What a server would say of the options, before one is started for them. Raises InvalidInput."""
    from rose.gateway.sampling import SamplingOptions

    if options.max_tokens < 1:
        raise InvalidInput(f"--max-tokens of {options.max_tokens}: expected 1 or more")
    given = {name: value for name in _PASSED_ON if (value := getattr(options, name)) is not None}
    given["min_new_tokens"] = given.pop("min_tokens", 0)
    if given.get("top_k") == -1:  # all, as 0
        del given["top_k"]
    names = {name: f"--{name.replace('_', '-')}" for name in _PASSED_ON}
    names |= {"max_new_tokens": "--max-tokens", "min_new_tokens": "--min-tokens"}
    SamplingOptions(max_new_tokens=options.max_tokens, names=names, **given).check(vocab_size=0)


@contextlib.contextmanager
def _server(options: argparse.Namespace, model: str | None) -> Iterator[Api]:
    """Raises InvalidInput, PullError, StartupError: a server or model that cannot be had."""
    with contextlib.ExitStack() as stack:
        url: str = options.server
        if model is None:
            for name in _ENGINE:
                if _given(options, name) is not None:
                    raise InvalidInput(
                        f"{name} is for an engine that is started here, and --server names one that runs"
                    )
        else:
            url = stack.enter_context(rose_server(_command(options, model)))
        api = Api(url, tell=lambda line: print(f"rose: {line}", file=sys.stderr))
        stack.callback(api.close)
        yield api


def _command(options: argparse.Namespace, model: str) -> list[str]:
    folder = find_model(model, options.cache)
    name = folder.resolve().name if Path(model).is_dir() else model
    arguments = ["serve", str(folder), "--name", name, "--task", "generate"]
    for option in _ENGINE:
        if (value := _given(options, option)) is not None:
            arguments += [option, str(value)]
    return arguments


def _given(options: argparse.Namespace, name: str) -> str | int | None:
    value: str | int | None = getattr(options, name.removeprefix("--").replace("-", "_"))
    return value


def _fields(options: argparse.Namespace) -> dict[str, Any]:
    """What is not asked for is left to the server."""
    fields: dict[str, Any] = {"max_tokens": options.max_tokens, "stream_options": {"include_usage": True}}
    fields |= {name: value for name in _PASSED_ON if (value := getattr(options, name)) is not None}
    if options.ignore_eos:
        fields["ignore_eos"] = True
    return fields


def _opening(options: argparse.Namespace) -> list[dict[str, str]]:
    return [] if options.system is None else [{"role": "system", "content": options.system}]


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _body(
    options: argparse.Namespace, fields: dict[str, Any], messages: list[dict[str, str]], prompt: str
) -> dict[str, Any]:
    if not (options.chat or options.interactive):
        return {**fields, "prompt": prompt}
    body = {**fields, "messages": messages}
    if options.no_thinking:
        body["chat_template_kwargs"] = {"enable_thinking": False}
    return body


def _pieces(api: Api, body: dict[str, Any], answer: _Answer) -> Generator[str, None, None]:
    """Texts as they come; `answer` is filled on the way. Closing it ends the answer at the server."""
    started = time.monotonic()
    path = _CHAT if "messages" in body else _COMPLETIONS
    with contextlib.closing(events(api.url, path, body)) as stream:
        for event in stream:
            answer.usage = event.get("usage") or answer.usage
            for choice in event.get("choices", ()):
                text = choice.get("text") or choice.get("delta", {}).get("content") or ""
                answer.finish = choice.get("finish_reason") or answer.finish
                answer.stop = choice.get("stop_reason") or answer.stop
                if text:
                    answer.first_s = answer.first_s or time.monotonic() - started
                    answer.text.append(text)
                    yield text
    answer.seconds = time.monotonic() - started


def _converse(api: Api, options: argparse.Namespace, fields: dict[str, Any]) -> None:
    """Question after question; Ctrl-C ends an answer, Ctrl-D the conversation."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (gives input() its history and editing)
    messages = _opening(options)
    while (question := _ask()) is not None:
        if not question.strip():
            continue
        messages.append(_user(question))
        answer = _Answer()
        try:
            with (
                contextlib.suppress(KeyboardInterrupt),  # what has come by then is the answer
                contextlib.closing(_pieces(api, _body(options, fields, messages, question), answer)) as pieces,
            ):
                for piece in pieces:
                    _show(piece)
        except InvalidInput as error:  # too long by now, or nothing the template takes: the conversation goes on
            messages.pop()
            print(f"rose: {error.message}", file=sys.stderr)
            continue
        _end_line(answer)
        messages.append({"role": "assistant", "content": "".join(answer.text)})


def _ask() -> str | None:
    """None at the end of the input."""
    try:
        return input(_PROMPT if sys.stdin.isatty() else "")
    except EOFError:
        return None


def _show(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def _end_line(answer: _Answer) -> None:
    if not "".join(answer.text).endswith("\n"):
        _show("\n")


def _told(answer: _Answer) -> dict[str, Any]:
    stop = {} if answer.stop is None else {"stop_reason": answer.stop}
    return {"text": "".join(answer.text), "finish_reason": answer.finish, **stop, "usage": answer.usage}


def _why(answer: _Answer) -> str:
    if answer.finish == "length":
        return "ended by --max-tokens"
    return "ended by the model" if answer.stop is None else f"ended by {answer.stop!r}"

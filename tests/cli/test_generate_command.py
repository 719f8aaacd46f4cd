"""`rose generate` against a server whose answers are known, and once with an engine of its own."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
import time

import pytest

from rose import cli
from rose.errors import NonFinite, StartupError
from tests.gateway.generating import ANSWER, generating_front, make_folder, wait_for


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("generate") / "tiny")


@pytest.fixture(scope="module")
def shared(folder):
    with generating_front(folder) as chat:
        yield chat


@pytest.fixture
def tiny(shared):
    shared.reset()
    return shared


def generate(tiny, *arguments) -> int:
    return cli.main(["generate", *map(str, arguments), "--server", tiny.live.url])


def decoded(tiny) -> str:
    return tiny.tokenizer.decode(tiny.prompt(), skip_special_tokens=False)


def test_a_text_is_continued(tiny, capsys):
    assert generate(tiny, "hello") == 0
    shown = capsys.readouterr()
    assert shown.out == ANSWER + "\n"
    tokens = f"{len(tiny.ids('hello'))} + {len(tiny.ids(ANSWER)) + 1} tokens, "
    assert shown.err.startswith(tokens)
    assert shown.err.endswith("ended by the model\n")
    assert decoded(tiny) == "hello"
    assert tiny.engine.generated[-1].sampling.max_new_tokens == 256


def test_a_chat(tiny, capsys):
    assert generate(tiny, "--chat", "hi", "--system", "be brief", "--max-tokens", 2) == 0
    assert decoded(tiny) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert "ended by --max-tokens" in capsys.readouterr().err


def test_options_are_passed_on_wherever_they_stand(tiny, capsys):
    options = [
        *("--temperature", 0.5, "--top-p", 0.75, "--top-k", 7, "--min-p", 0.25, "--seed", 3),
        *("--min-tokens", 1, "--ignore-eos", "--stop", "猫", "--stop", "zzz"),
    ]
    assert generate(tiny, *options[:4], "hello", *options[4:]) == 0
    got = tiny.engine.generated[-1].sampling
    assert (got.temperature, got.top_p, got.top_k, got.min_p, got.seed) == (0.5, 0.75, 7, 0.25, 3)
    assert (got.min_new_tokens, got.ignore_eos) == (1, True)
    shown = capsys.readouterr()
    assert shown.out == "The river \n"
    assert shown.err.endswith("ended by '猫'\n")


def test_json(tiny, capsys):
    assert generate(tiny, "hello", "--json", "--stop", "meets") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["text"], told["finish_reason"], told["stop_reason"]) == ("The river 猫 ", "stop", "meets")
    assert told["usage"]["prompt_tokens"] == len(tiny.ids("hello"))
    assert generate(tiny, "hello", "--json") == 0
    assert "stop_reason" not in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("typed", "prompt"), [("salt and\nflour", None), ("salt\n", "salt"), ("salt\n\n", "salt\n"), (" salt ", None)]
)
def test_the_prompt_may_come_from_standard_input(tiny, monkeypatch, typed, prompt):
    """As it is, but for one line end: `echo` and editors put it there, and it would be part of the question."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    assert generate(tiny, "-") == 0
    assert decoded(tiny) == (typed if prompt is None else prompt)


def test_text_is_shown_as_it_comes(tiny, capsys):
    tiny.engine.pause_s = 0.1
    runner = threading.Thread(target=generate, args=(tiny, "hello"))
    runner.start()
    seen = ""
    end = time.monotonic() + 10
    while not seen and time.monotonic() < end:
        time.sleep(0.02)
        seen += capsys.readouterr().out
    assert ANSWER.startswith(seen)
    assert 0 < len(seen) < len(ANSWER)
    runner.join(20)


def test_a_conversation(tiny, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n\nand then?\n"))
    assert generate(tiny, "-i", "--system", "be brief") == 0
    assert capsys.readouterr().out == f"{ANSWER}\n{ANSWER}\n"
    turns = [("system", "be brief"), ("user", "hi"), ("assistant", ANSWER), ("user", "and then?")]
    expected = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    assert decoded(tiny) == expected + "<|im_start|>assistant\n"
    assert len(tiny.engine.generated) == 2


@pytest.fixture
def heeds_ctrl_c():
    """Python ignores SIGINT where it was started so, as a shell starts what runs in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_ends_an_answer_and_not_the_conversation(tiny, monkeypatch, heeds_ctrl_c):
    tiny.engine.pause_s = 0.3

    class Typed:
        """Asks, and asks again."""

        def __init__(self):
            self.left = ["hi\n", "again\n", ""]

        def isatty(self):
            return False

        def readline(self):
            if len(self.left) < 3:
                tiny.engine.pause_s = 0.0
            return self.left.pop(0)

    class Shown(io.StringIO):
        """Interrupted once, when the first piece of the first answer has been shown."""

        interrupted = False

        def write(self, text):
            written = super().write(text)
            if text.strip() and not self.interrupted:
                self.interrupted = True
                threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGINT)).start()
            return written

    shown = Shown()
    monkeypatch.setattr(sys, "stdin", Typed())
    monkeypatch.setattr(sys, "stdout", shown)
    assert generate(tiny, "-i") == 0
    first, second = shown.getvalue().splitlines()
    assert ANSWER.startswith(first)
    assert "" != first != ANSWER
    assert second == ANSWER
    wait_for(lambda: len(tiny.engine.cancelled) == 1)
    assert f"<|im_start|>assistant\n{first.strip()}" in decoded(tiny)


def test_a_message_that_is_refused_does_not_end_the_conversation(tiny, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{'salt ' * 600}\nhi\n"))
    assert generate(tiny, "-i") == 0
    shown = capsys.readouterr()
    assert shown.out == f"{ANSWER}\n"
    assert "the model takes 512" in shown.err
    assert decoded(tiny) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["a", "b"], "2 arguments: expected PROMPT"),
        ([], "0 arguments: expected PROMPT"),
        (["-i", "x"], "1 argument: expected none, since both are settled, as in rose generate --server URL -i"),
        (["-i", "--json"], "--json is one answer"),
        (["x", "--system", "y"], "--system is part of a chat"),
        (["x", "--no-thinking"], "--no-thinking is for the chat template"),
        (["x", "--device", "cpu"], "--device is for an engine that is started here"),
        (["x", "--temperature", "-1"], "temperature of -1.0: expected 0 or more"),
        (["x", "--model", "other"], "the model 'other' is not served here"),
    ],
)
def test_wrong_usage(tiny, capsys, arguments, words):
    assert generate(tiny, *arguments) == 2
    assert words in capsys.readouterr().err


def test_without_a_server_the_model_is_named(capsys):
    assert cli.main(["generate", "only one"]) == 2
    expected = "rose: 1 argument: expected MODEL and PROMPT, as in rose generate smollm2 'The river meets the sea'\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--temperature", "-1"], "--temperature of -1.0: expected 0 or more"),
        (["--top-p", "1.5"], "--top-p of 1.5: expected more than 0"),
        (["--top-k", "-2"], "--top-k of -2: expected 0 (all)"),
        (["--min-p", "2"], "--min-p of 2.0: expected between 0 and 1"),
        (["--max-tokens", "0"], "--max-tokens of 0: expected 1 or more"),
        (["--min-tokens", "9", "--max-tokens", "8"], "--min-tokens of 9: expected 0 to --max-tokens (8)"),
        (["--seed", "-1"], "--seed of -1: expected 0 to"),
        (["--stop", ""], "a stop string is empty"),
    ],
)
def test_options_are_checked_before_a_server_is_started(monkeypatch, capsys, arguments, words):
    monkeypatch.setattr("rose.cli.generate.rose_server", lambda command: pytest.fail("it was started"))
    assert cli.main(["generate", "tiny", "x", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_options_that_a_server_takes_start_one(monkeypatch, tmp_path):
    def started(command):
        raise StartupError("it was started")

    monkeypatch.setattr("rose.cli.generate.rose_server", started)
    arguments = [
        "--temperature",
        "0",
        "--top-k",
        "-1",
        "--top-p",
        "0.5",
        "--min-p",
        "0.1",
        "--seed",
        "3",
        "--stop",
        "a",
    ]
    assert cli.main(["generate", str(tmp_path), "x", *arguments, "--min-tokens", "4", "--max-tokens", "4"]) == 2


def test_failures(tiny, capsys):
    for after in (0, 2):
        tiny.engine.fails(NonFinite("logits are not finite"), after=after)
        assert generate(tiny, "hello") == 2
        shown = capsys.readouterr()
        assert "rose: logits are not finite" in shown.err
        assert shown.out == tiny.tokenizer.decode(tiny.ids(ANSWER)[:after])


@pytest.mark.slow
def test_with_an_engine_of_its_own(folder, capfd):
    """Random weights say nothing, but always the same."""
    answers = []
    for _ in range(2):
        arguments = ["generate", str(folder), "hello", "--temperature", "0", "--max-tokens", "8", "--device", "cpu"]
        assert cli.main([*arguments, "--num-threads", "1", "--json"]) == 0
        answers.append(json.loads(capfd.readouterr().out.splitlines()[-1]))
    assert answers[0] == answers[1]
    assert answers[0]["usage"]["completion_tokens"] <= 8

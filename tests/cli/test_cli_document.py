"""docs/cli.md tells of every command, and of every option of those whose options it lists."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from rose import cli

DOCUMENT = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")


def commands() -> dict[str, argparse.ArgumentParser]:
    (found,) = (a for a in cli.build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(found.choices)


def section(name: str) -> str:
    return DOCUMENT.partition(f"\n## rose {name}\n")[2].partition("\n## ")[0]


def test_the_sections_are_the_commands():
    assert re.findall(r"^## rose ([\w-]+)$", DOCUMENT, re.M) == list(commands())


@pytest.mark.parametrize("name", commands())
def test_every_command_has_an_example(name):
    assert f"\n$ rose {name}" in section(name)


@pytest.mark.parametrize("name", ["pull", "embed", "rerank"])
def test_every_option_is_told(name):
    shared = section("embed") if name == "rerank" else ""
    told = set(re.findall(r"--[a-z-]+", section(name) + shared + DOCUMENT.partition("\n## ")[0]))
    options = {option for action in commands()[name]._actions for option in action.option_strings}
    assert {option for option in options if option.startswith("--")} - {"--help", "--output"} <= told

"""docs/benchmarks.md: every load, every field of a row, and commands that parse."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import re
import shlex
from pathlib import Path

import pytest

from rose.bench import commands, floors
from rose.bench.llm_shapes import LLM_SHAPES
from rose.bench.records import Row
from rose.bench.shapes import SHAPES

DOCUMENT = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^rose bench (\w+) (.*)$", DOCUMENT, re.M)


@pytest.mark.parametrize("load", [load for load in commands.LOADS if load != "all"])
def test_every_load_is_told(load):
    assert f"`rose bench {load}`" in DOCUMENT


@pytest.mark.parametrize(("load", "options"), EXAMPLES, ids=[" ".join(example) for example in EXAMPLES])
def test_examples_parse(load, options):
    module = importlib.import_module(
        "rose.bench." + (load if load in ("throughput", "concurrency", "decode") else "gpu_loads")
    )
    parser = argparse.ArgumentParser(exit_on_error=False)
    module.add_arguments(parser)
    found = parser.parse_args(shlex.split(options))
    for name in found.model:
        assert "=" in name or name in {**SHAPES, **LLM_SHAPES}


def test_every_field_of_a_row_is_told():
    told = set(re.findall(r"`(\w+)`", DOCUMENT.partition("## A row")[2].partition("## Floors")[0]))
    assert {field.name for field in dataclasses.fields(Row)} - told == {"new_tokens"}


def test_every_shape_is_told():
    assert all(f"`{name}`" in DOCUMENT for name in {**SHAPES, **LLM_SHAPES} if not name.startswith("tiny"))


@pytest.mark.parametrize(("name", "model"), [("BGE-M3", "bge-m3"), ("pplx-embed 0.6b", "pplx-embed-0.6b")])
def test_floors_of_batches_are_the_sums(name, model):
    (told,) = re.findall(rf"\| {name}, 100 × 512 / 1024 / 4096 \| (.*) a second", DOCUMENT)
    sums = [1e5 / floors.floor_ms(SHAPES[model].config, n, 100) for n in (512, 1024, 4096)]
    assert told == " / ".join(f"{rate:.0f}" for rate in sums)


@pytest.mark.parametrize("name", ["Qwen3-0.6B", "Qwen3-8B", "Qwen3.5-4B"])
def test_floors_of_decoding_are_the_sums(name):
    (told,) = re.findall(rf"\| {name}, .* \| (.*) ms \|", DOCUMENT)
    sums = [floors.decode_floor_ms(LLM_SHAPES[name.lower()].config, n, 192) for n in (1, 8, 64)]
    assert [float(one) for one in told.split(" / ")] == pytest.approx(sums, abs=0.006)

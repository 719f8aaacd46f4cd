"""benchmarks/kernels/tune_gemm.py: its products are the models' own, and each has tiles to choose from."""

from __future__ import annotations

import dataclasses
import importlib
import multiprocessing
import os
import time
from pathlib import Path

import pytest
import torch

from rose.bench.llm_shapes import LLM_SHAPES
from rose.bench.shapes import SHAPES
from rose.config.architecture import read_architecture
from rose.config.json_file import JsonFile
from rose.kernels import tiles
from rose.layers.linear import GatedLinear, Linear
from rose.models.registry import build_backbone

MODELS = {
    "bge": SHAPES["bge-m3"],
    "pplx": SHAPES["pplx-embed-0.6b"],
    "qwen3-0.6b": LLM_SHAPES["qwen3-0.6b"],
    "pplx-4b": SHAPES["pplx-embed-4b"],
    # The published config.json: as pplx-embed-4b's, from the same base.
    "qwen3-embedding-4b": dataclasses.replace(
        SHAPES["qwen3-embedding-0.6b"],
        config={**SHAPES["pplx-embed-4b"].config, "model_type": "qwen3", "architectures": ["Qwen3Model"]},
    ),
    "qwen3-8b": LLM_SHAPES["qwen3-8b"],
    "qwen3.5-4b": LLM_SHAPES["qwen3.5-4b"],
}
FORK = multiprocessing.get_context("fork")
TOKENS = (16, 32, 64, 128, 256, 512, 1024, 4096)


@pytest.fixture(scope="module")
def tune_gemm():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks" / "kernels"))
        yield importlib.import_module("tune_gemm")


def products_of(shape):
    """(op, outputs, inputs) of every product in the layers, where they are not gated "linear"; and of the head."""
    architecture = read_architecture(JsonFile.of(Path("config.json"), dict(shape.config)))
    with torch.device("meta"):
        model = build_backbone(architecture)
    gated = {module: isinstance(module, GatedLinear) for module in model.modules()}
    linear = [module for module in gated if isinstance(module, GatedLinear | Linear)]
    shapes = [(gated[module], *module.weight.shape) for module in linear]
    layers = {("gated", n // 2, k) if is_gated else ("linear", n, k) for is_gated, n, k in shapes}
    if shape.pooling is not None:
        return layers
    # As causal_lm.py builds it: the token table's matrix, or one of that shape.
    table = model.get_submodule("embed_tokens").weight
    return layers | {("logits", *table.shape)}


def test_every_shape_has_a_model(tune_gemm):
    assert set(MODELS) == set(tune_gemm.SHAPES)


@pytest.mark.parametrize("name", MODELS)
def test_products_are_those_of_the_models_layers(tune_gemm, name):
    tuned = {("linear" if p.op == "partial" else p.op, p.n, p.k) for p in tune_gemm.SHAPES[name]}
    assert tuned == products_of(MODELS[name])


@pytest.mark.parametrize("name", MODELS)
def test_weights_in_turn_are_at_most_8_gib(tune_gemm, name):
    for p in tune_gemm.SHAPES[name]:
        assert p.in_turn * tiles.halves(p.op) * p.n * p.k * p.size <= 8 << 30
        assert p.in_turn == tune_gemm.LAYERS or p.op == "logits"
    turns = {p.k: p.in_turn for p in tune_gemm.SHAPES[name] if p.op == "logits"}
    assert turns == {"qwen3-0.6b": {1024: 24}, "qwen3-8b": {4096: 6}, "qwen3.5-4b": {2560: 6}}.get(name, {})
    assert tune_gemm.Product("logits", 1 << 20, 8192).in_turn == 2


def test_heads_are_tuned_as_they_are_served(tune_gemm, monkeypatch):
    """The library's time and a tile's, both in fp32."""
    asked = []
    monkeypatch.setattr(tune_gemm, "run_tile", lambda *args, **options: asked.append(options["dtype"]))
    tile = tiles.Tile(16, 64, 64, 1, 4, 4)
    for p in tune_gemm.SHAPES["qwen3-8b"]:
        tune_gemm.product(p, torch.ones(1, 1), torch.ones(1, 1), None, tile)
    assert asked == [None, None, None, None, torch.float32]


@pytest.mark.parametrize("name", MODELS)
def test_every_product_has_tiles_to_choose_from_at_every_size(tune_gemm, name):
    for p in tune_gemm.SHAPES[name]:
        for tokens in TOKENS:
            coarse = tune_gemm.possible(p, tune_gemm.coarse(p, tokens))
            assert coarse, f"{tiles.key(p.op, p.n, p.k)} at {tokens}"
            for tile in coarse:
                assert p.n % tile.bn == 0
                assert p.k % (tile.bk * tile.split) == 0
                assert tile.split == 1 or p.op == "partial"
            assert tune_gemm.possible(p, tune_gemm.near(p, tokens, coarse[0]))


def hangs(tasks, results):
    tasks.get()
    time.sleep(600)


def checks(tasks, results):
    while (task := tasks.get()) is not None:
        results.put((*task, None if task[1].split == 1 else "wrong"))


@pytest.fixture
def checkers(tune_gemm, monkeypatch):
    monkeypatch.setattr(tune_gemm.multiprocessing, "get_context", lambda kind: FORK)
    made = []

    def make(work):
        monkeypatch.setattr(tune_gemm, "worker", work)
        made.append(tune_gemm.Checkers(2))
        return made[-1]

    yield make
    for one in made:
        one.stop()
        assert not any(process.is_alive() for process in one.processes)


def test_candidates_that_are_right_are_good(tune_gemm, checkers):
    p, tile = tune_gemm.SHAPES["bge"][0], tiles.Tile(64, 64, 64, 1, 4, 4)
    two = dataclasses.replace(tile, split=2)
    found = checkers(checks)
    idle = found.processes
    found.passed([(p, tile), (p, two), (p, tile)], time.perf_counter() + 20)
    assert found.good(p, [two, tile]) == [tile]
    assert found.processes is idle


def test_nothing_is_compiled_or_hangs_beside_what_is_timed(tune_gemm, checkers, monkeypatch):
    p, tile = tune_gemm.SHAPES["bge"][0], tiles.Tile(64, 64, 64, 1, 4, 4)
    found = checkers(hangs)
    before = found.processes
    monkeypatch.setattr(tune_gemm, "worker", checks)
    found.passed([(p, tile), (p, dataclasses.replace(tile, bk=128))] * 3, time.perf_counter() + 0.3)
    assert found.known == {}
    assert not any(process.is_alive() for process in before)
    found.passed([(p, tile)], time.perf_counter() + 20)  # what was left of the first time does not count
    assert found.good(p, [tile]) == [tile]


def told(task):
    if task == "crashes":
        os._exit(3)
    if task == "hangs":
        time.sleep(600)
    if task == "fails":
        raise ValueError("no")
    return None if task == "right" else f"{task} is wrong"


def test_tasks_side_by_side_end_and_leave_nobody(tune_gemm, monkeypatch):
    timing = importlib.import_module("timing")
    monkeypatch.setattr(timing.multiprocessing, "get_context", lambda kind: FORK)
    assert timing.side_by_side(told, [], 5) == {}
    found = timing.side_by_side(told, ["right", "other", "fails"], 20)
    assert found == {"right": None, "other": "other is wrong", "fails": "ValueError: no"}
    begin = time.monotonic()
    found = timing.side_by_side(told, ["hangs"], 0.5)
    assert found == {"hangs": "not done within 0.5 s"}
    assert time.monotonic() - begin < 30
    found = timing.side_by_side(told, ["crashes"], 20)
    assert found["crashes"].startswith("BrokenProcessPool")
    assert multiprocessing.active_children() == []


def test_writing_the_table_changes_nothing(tune_gemm, tmp_path):
    """What is not tiles stays as well: the library's products, and those with an epilogue."""
    tune_gemm.write(tmp_path / "tiles.json", tiles._table())
    assert (tmp_path / "tiles.json").read_text() == tiles._TABLE.read_text()

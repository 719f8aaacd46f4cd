"""Real models and real kernels: a tiny checkpoint and MiniLM on the CPU, the whole run on a CUDA device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rose.attention_backends import AttentionSpec
from rose.attention_backends.choose import Load, choose
from rose.bench.shapes import build_checkpoint
from rose.config import read_model_folder
from rose.convert import load_model
from rose.select import cpu
from rose.select.grid import GridLoad
from rose.select.layer_ways import LayerWays
from rose.select.measure import Options, measure_heads, measure_model
from rose.select.model_ways import ModelWays
from rose.select.paged_ways import PagedWays, paged_batch
from rose.select.products import Product, measure_products
from rose.select.rows import rows_of, share_within
from rose.select.session import Budget, measure_grid
from tests.support.tiny_checkpoints import tiny_bert

CPU = torch.device("cpu")


def spec(device: torch.device, dtype: torch.dtype, causal: bool, head_dim: int = 64) -> AttentionSpec:
    return AttentionSpec(
        num_heads=8,
        num_kv_heads=4,
        head_dim=head_dim,
        dtype=dtype,
        device=device,
        causal=causal,
        scale=head_dim**-0.5,
    )


def test_an_engine_a_backend_answers_what_the_model_answers(tmp_path: Path) -> None:
    model = load_model(read_model_folder(tiny_bert(tmp_path / "m")))
    ways = ModelWays(model, CPU, torch.float32, max_tokens=64, batch_tokens=512)
    try:
        assert ways.names == ("torch_sdpa",)
        assert set(ways.missing) == {"triton_short", "flash_attention4", "flashinfer3", "flashinfer2"}
        loads = (GridLoad((64,)), GridLoad((64,) * 4), GridLoad((10, 20, 34)))
        found = measure_grid(ways, loads, Budget(20), seed=3, max_rounds=8)
        assert [point.name for point in found.grid.points] == ["1 x 64", "3 of 64", "4 x 64"]
        first, again = (ways.prepare("torch_sdpa", loads[2], seed).answer for seed in (1, 1))
        assert torch.equal(first, again)
        assert not torch.equal(first, ways.prepare("torch_sdpa", loads[2], 2).answer)
        assert first.shape == (3, model.outputs[model.default_output].dimension)
        launched, took = ways.bench("torch_sdpa").launch(ways.bench("torch_sdpa").inputs((64,), 1))
        assert launched > 0
        assert took > 0
        bench = ways.bench("torch_sdpa")
        batches = bench.engine.metrics.batches
        assert bench.follow(bench.inputs((64, 64), 1)) >= 0
        assert bench.engine.metrics.batches == batches + 2  # not one of all four sequences
        assert bench.engine.idle
    finally:
        ways.close()


def test_layers_and_pages_on_the_cpu_agree_with_themselves() -> None:
    layers = LayerWays(spec(CPU, torch.float32, causal=True), layers=2)
    ready = layers.prepare("torch_sdpa", GridLoad((5, 60)), 1)
    assert ready.answer.shape == (65, 8, 64)
    assert ready.sample() > 0
    ready.close()
    pages = PagedWays(replace(spec(CPU, torch.float32, causal=True), layout="paged"), cache_tokens=512, layers=2)
    load = GridLoad((100, 17), "decode")
    ready = pages.prepare("torch_paged", load, 1)
    assert ready.answer.shape == (2, 8 * 64)
    assert torch.equal(ready.answer, pages.prepare("torch_paged", load, 1).answer)
    assert ready.sample() > 0


def test_steps_of_generating_lie_in_pages_of_their_own() -> None:
    batch = paged_batch(GridLoad((33, 16, 1), "decode"), CPU)
    assert batch.paged is not None
    assert batch.paged.page_table.tolist() == [[1, 2, 3, 0], [4, 0, 0, 0], [5, 0, 0, 0]]
    assert batch.paged.slots.tolist() == [3 * 16, 4 * 16 + 15, 5 * 16]
    assert batch.paged.kv_lengths.tolist() == [33, 16, 1]
    assert batch.lengths == (1, 1, 1)
    assert batch.positions.tolist() == [32, 15, 0]


@pytest.mark.weights
def test_minilm_on_the_cpu(minilm_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Eight more rounds of 3 s would repeat these; what they decide is tested in test_cpu_budgets.py.
    monkeypatch.setattr(cpu, "ROUNDS", 2)
    folder = read_model_folder(minilm_folder)
    result = measure_model(folder, CPU, torch.float32, "minilm", Options(seconds=60, batch_tokens=256, max_rounds=4))
    (numbers,) = result.profile.models
    assert numbers.num_threads in {row[1] for row in numbers.threads}
    assert numbers.bulk_tokens in dict(numbers.saturation)
    assert 0 < numbers.online_tokens <= numbers.bulk_tokens  # type: ignore[operator]
    assert {row[0] for row in numbers.threads} == {"float32", "bfloat16"}


@pytest.mark.gpu
def test_a_whole_run_on_a_device(tmp_path: Path) -> None:
    folder = read_model_folder(build_checkpoint("tiny-bge-m3", tmp_path / "m"))
    device = torch.device("cuda")
    options = Options(seconds=60, batch_tokens=4096, max_rounds=12)
    result = measure_model(folder, device, torch.bfloat16, "tiny", options)
    (grid,), (numbers,) = result.profile.grids, result.profile.models
    assert grid.excluded == {}
    assert len(grid.points) > 5
    # Heads of 16 dimensions are served by few: whoever is left out has its reason.
    assert all(point.us for point in grid.points)
    assert numbers.saturation
    assert numbers.launch
    assert numbers.padding
    assert numbers.bulk_tokens is not None
    choice = choose(16, Load(128, 1, 128), {**result.left_out}, grid.points)
    assert choice is not None


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_heads_on_a_device_and_a_check(head_dim: int) -> None:
    device = torch.device("cuda")
    heads = spec(device, torch.bfloat16, causal=True, head_dim=head_dim)
    options = Options(seconds=30, batch_tokens=4096, max_rounds=12)
    runs = measure_heads(heads, options, paged=True)
    assert [run.ways.shape.layout for run in runs] == ["ragged", "paged"]
    for run in runs:
        assert run.excluded == {}
        rows = rows_of(run, run.grid, "first", dict.fromkeys(FACTS, "x"))
        if run.ways.shape.layout == "ragged":
            assert share_within(rows) == 1.0
        assert len(rows) == len(run.measured)


FACTS = ("run_id", "commit", "date", "command", "machine", "model")


@pytest.mark.gpu
def test_products_on_a_device() -> None:
    wanted = (Product("linear", 512, 256), Product("partial", 256, 512), Product("gated", 256, 256))
    found = measure_products(wanted, torch.device("cuda"), torch.bfloat16, Budget(60), None)
    assert set(found) == {product.key for product in wanted}
    for rows in found.values():
        for us in rows.values():
            assert "table" in us
            assert all(0 < taken < 1000 for taken in us.values())

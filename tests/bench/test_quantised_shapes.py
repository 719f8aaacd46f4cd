"""Made weights in 8 bits: every layer, timed and served like any other folder."""

from __future__ import annotations

import argparse
import json

import numpy as np
import pytest
import torch

from rose.bench import gpu_loads
from rose.bench.drivers import EngineDriver
from rose.bench.quantised_shapes import SCHEME_OF, quantised_checkpoint
from rose.bench.reference import cosines
from rose.bench.shapes import build_checkpoint
from rose.bench.targets import add_common_arguments, targets
from rose.config import EngineConfig, read_model_folder
from rose.convert import load_model
from rose.engine import build_engine
from rose.errors import InvalidInput
from rose.layers.linear import GatedLinear, Linear
from rose.layers.quantized import QuantizedLinear


@pytest.mark.parametrize("dtype", SCHEME_OF)
def test_every_layer_is_quantised(tmp_path, dtype):
    plain = build_checkpoint("tiny-bert", tmp_path / "tiny-bert")
    folder = quantised_checkpoint(plain, dtype, torch.device("cpu"))
    assert folder.name == f"tiny-bert-{dtype}"
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert quantised_checkpoint(plain, dtype, torch.device("cpu")) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made  # made once
    model = load_model(read_model_folder(folder))
    kinds = [type(m) for m in model.backbone.modules()]
    # Blocks of 128 end inside of 64-wide q, k and v: those are three products.
    assert kinds.count(QuantizedLinear) == (12 if dtype == "fp8-block" else 8)
    assert Linear not in kinds
    assert GatedLinear not in kinds


def test_rows_tell_the_dtype(tmp_path):
    parser = argparse.ArgumentParser()
    gpu_loads.add_arguments(parser)
    out = tmp_path / "rows.jsonl"
    common = ["--model", "tiny-bert", "--folders", str(tmp_path), "--dtype", "fp8", "--out", str(out)]
    options = [*common, "--via", "engine", "--tokens", "128", "--n", "4"]
    assert gpu_loads.main("latency", parser.parse_args(options), "a command") == 0
    (row,) = map(json.loads, out.read_text(encoding="utf-8").splitlines())
    assert row["dtype"] == "fp8"
    assert 0.97 < row["cosine"] < 0.999999  # to the plain folder in fp32


def test_a_folder_of_ones_own_is_calibrated_first(tmp_path):
    parser = argparse.ArgumentParser()
    add_common_arguments(parser)
    given = parser.parse_args(["--model", f"mine={tmp_path}", "--dtype", "int8"])
    with pytest.raises(InvalidInput, match="mine has a folder of its own"):
        list(targets(given, "a command", []))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", SCHEME_OF)
@pytest.mark.parametrize("name", ["tiny-bge-m3", "tiny-pplx-embed"])
def test_on_a_device(tmp_path, name, dtype):
    """Calibrated there, served in bf16: plainly, captured and replayed, against the same codes in fp32 on the CPU. Few
    tokens take the kernels of few, 4 x 300 the library's where there is one."""
    served_as_on_the_cpu(tmp_path, name, dtype, torch.device("cuda"), torch.bfloat16)


def test_the_test_on_a_device_compares_what_it_should(tmp_path):
    served_as_on_the_cpu(tmp_path, "tiny-bge-m3", "fp8", torch.device("cpu"), torch.bfloat16)


def served_as_on_the_cpu(tmp_path, name, dtype, device, served):
    plain = build_checkpoint(name, tmp_path / name)
    folder = read_model_folder(quantised_checkpoint(plain, dtype, device))
    truth = engine_of(folder, torch.device("cpu"), torch.float32)
    ours = engine_of(folder, device, served)
    chance = np.random.default_rng(3)
    for lengths in ((3, 40, 17), (128,), (300,) * 4):
        sequences = [chance.integers(5, folder.architecture.vocab_size, n, dtype=np.int32) for n in lengths]
        expected = truth.vectors(truth.send(sequences))
        for _ in range(3):
            # bf16 takes values over the edges of their codes: 0.9988 of them on the CPU too.
            assert cosines(ours.vectors(ours.send(sequences)), expected).min() > 0.995
    ours.close()
    truth.close()


def engine_of(folder, device, dtype):
    limits = EngineConfig(max_tokens=512, graph_bytes=1 << 30 if device.type == "cuda" else 0, profile="none")
    return EngineDriver(build_engine(load_model(folder, device, dtype), limits, device, dtype))

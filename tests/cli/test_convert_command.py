"""`rose convert` as it is typed: the table, the dry run, refusals, a kill, and how much memory it takes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from rose import cli
from tests.support.tiny_checkpoints import read_json, tiny_bert, tiny_qwen3, write_json


def test_the_table_is_printed_and_the_folder_is_made(tmp_path, capsys):
    source = tiny_qwen3(tmp_path / "a", pooling=None, prefix="model.")
    target = tmp_path / "b"
    command = [
        "convert",
        str(source),
        "--to",
        "embedder",
        "--bidirectional",
        "--prompt",
        "query=ask: ",
        "-o",
        str(target),
    ]
    assert cli.main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split("  ")[0]: line for line in lines[:-1]}
    assert rows["attention"].split("  ")[-1] == "the flag --bidirectional"
    assert rows["pooling"].endswith("  default of a bidirectional decoder")
    assert rows["prompt"].endswith("  the flag --prompt")
    assert "'ask: '" in rows["prompt"]
    assert lines[-1] == str(target)
    assert (target / "rose.json").exists()


def test_a_dry_run_prints_the_same_table_and_does_nothing(tmp_path, capsys):
    source = tiny_bert(tmp_path / "a")
    command = ["convert", str(source), "--to", "embedder", "-o", str(tmp_path / "b")]
    assert cli.main([*command, "--dry-run"]) == 0
    dry = capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]
    assert cli.main(command) == 0
    assert capsys.readouterr().out == dry + f"{tmp_path / 'b'}\n"


def test_refusals_are_one_line_and_status_2(tmp_path, capsys):
    source = tiny_bert(tmp_path / "a")
    target = str(tmp_path / "b")
    for arguments, message in (
        ([str(source), "--to", "reranker"], "has no head that scores"),
        ([str(source), "--to", "embedder", "--base", str(source)], "--base has no meaning"),
        ([str(source), "--to", "embedder", "--adapter", str(source)], "is no adapter"),
        ([str(source), "--to", "embedder", "--prompt", "query"], "is not NAME=TEXT"),
        ([str(source), "--to", "embedder", "--shard-mb", "0"], "--shard-mb is 0"),
    ):
        assert cli.main(["convert", *arguments, "-o", target]) == 2
        assert message in (line := capsys.readouterr().err)
        assert (line.count("\n"), line[:6]) == (1, "rose: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


def test_the_script_is_the_command(tmp_path):
    source = tiny_bert(tmp_path / "a")
    command = [sys.executable, "scripts/convert.py", str(source), "--to", "embedder", "-o", str(tmp_path / "b")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, str(tmp_path / "b"))


def large_bert(path, layers: int, rows: int = 4_000):
    """A folder whose weights are mostly `layers` matrices of 4000 x 1024 in fp32, 16 MB each."""
    tiny_bert(path, hidden_size=64, intermediate_size=64, num_layers=1)
    width, inner = 1024, rows
    config = read_json(path / "config.json")
    shape = config | {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
    write_json(path / "config.json", shape | {"num_attention_heads": 16, "vocab_size": config["vocab_size"]})
    write_json(path / "1_Pooling/config.json", {"word_embedding_dimension": width, "pooling_mode_mean_tokens": True})
    tensors = {
        "embeddings.word_embeddings.weight": torch.ones(config["vocab_size"], width),
        "embeddings.position_embeddings.weight": torch.ones(128, width),
        "embeddings.token_type_embeddings.weight": torch.ones(2, width),
        "embeddings.LayerNorm.weight": torch.ones(width),
        "embeddings.LayerNorm.bias": torch.ones(width),
    }
    for n in range(layers):
        layer = f"encoder.layer.{n}"
        for part in ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"):
            tensors[f"{layer}.{part}.weight"] = torch.ones(width, width)
            tensors[f"{layer}.{part}.bias"] = torch.ones(width)
        tensors[f"{layer}.intermediate.dense.weight"] = torch.ones(inner, width)
        tensors[f"{layer}.intermediate.dense.bias"] = torch.ones(inner)
        tensors[f"{layer}.output.dense.weight"] = torch.ones(width, inner)
        tensors[f"{layer}.output.dense.bias"] = torch.ones(width)
        for part in ("attention.output.LayerNorm", "output.LayerNorm"):
            tensors[f"{layer}.{part}.weight"], tensors[f"{layer}.{part}.bias"] = torch.ones(width), torch.ones(width)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


_MEASURED = """
import resource, sys
from rose import cli
from rose.convert.offline import convert, decide
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert cli.main(sys.argv[1:]) == 0
print(before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_memory_does_not_grow_with_the_checkpoint(tmp_path):
    """1.5 GB of weights, 16 MB the largest tensor, under a limit of 4 x 16 MB + 1 GB, with room to spare: the mapped
    pages of the source count too, and are given back every 256 MB."""
    source = large_bert(tmp_path / "a", layers=30)
    size = (source / "model.safetensors").stat().st_size
    assert size > 1.4e9
    command = ["convert", str(source), "--to", "embedder", "-o", str(tmp_path / "b"), "--dtype", "bfloat16"]
    done = subprocess.run([sys.executable, "-c", _MEASURED, *command], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.splitlines()[-1].split())
    grown = (after - before) * 1024
    assert grown < 4 * 16_384_000 + 1_000_000_000
    assert grown < size / 2
    assert load_file(tmp_path / "b/model.safetensors")["encoder.layer.29.output.dense.weight"].shape == (1024, 4000)


def test_a_kill_leaves_no_half_folder(tmp_path):
    source = large_bert(tmp_path / "a", layers=12)
    command = [sys.executable, "-m", "rose.cli", "convert", str(source), "--to", "embedder", "-o", str(tmp_path / "b")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as running:
        until = time.monotonic() + 60
        while not list(tmp_path.glob(".b.partial-*/model.safetensors")) and time.monotonic() < until:
            assert running.poll() is None, "it was done before it could be killed"
            time.sleep(0.005)
        running.send_signal(signal.SIGTERM)
        _, said = running.communicate(timeout=60)
    assert running.returncode == 130, said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


@pytest.mark.weights
def test_minilm(tmp_path, minilm_folder, capsys):
    """The real model in and out: every tensor the same, bit for bit."""
    target = tmp_path / "b"
    assert cli.main(["convert", "minilm", "--to", "embedder", "-o", str(target)]) == 0
    before, after = (load_file(path / "model.safetensors") for path in (minilm_folder, target))
    before.pop("embeddings.position_ids", None)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert "1_Pooling/config.json" in capsys.readouterr().out

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


# VmHWM is of this process alone; ru_maxrss begins with what its parent had before the exec.
_MEASURED = """
import sys
from pathlib import Path
from rose import cli
from rose.convert.offline import convert, decide
def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
before = peak()
assert cli.main(sys.argv[1:]) == 0
print(before, peak())
"""


def grown(*command) -> int:
    """Bytes by which `rose COMMAND` makes its process grow at most."""
    done = subprocess.run([sys.executable, "-c", _MEASURED, *command], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.splitlines()[-1].split())
    assert before > 50_000
    return (after - before) * 1024


def test_memory_does_not_grow_with_the_checkpoint(tmp_path):
    """1.5 GB of weights, 16 MB the largest tensor, under a limit of 4 x 16 MB + 1 GB, with room to spare: the mapped
    pages of the source count too, and are given back every 256 MB."""
    source = large_bert(tmp_path / "a", layers=30)
    size = (source / "model.safetensors").stat().st_size
    assert size > 1.4e9
    found = grown("convert", str(source), "--to", "embedder", "-o", str(tmp_path / "b"), "--dtype", "bfloat16")
    assert found < 4 * 16_384_000 + 1_000_000_000
    assert found < size / 2
    assert load_file(tmp_path / "b/model.safetensors")["encoder.layer.29.output.dense.weight"].shape == (1024, 4000)


@pytest.mark.parametrize("merged", [False, True])
def test_a_large_tensor_is_held_once(tmp_path, merged):
    """Two matrices of 205 MB; the file that is read is mapped, and what is cast or merged is held by the block."""
    rows = 50_000
    source, largest = large_bert(tmp_path / "a", layers=1, rows=rows), rows * 1024 * 4
    command = ["convert", str(source), "--to", "embedder", "-o", str(tmp_path / "b"), "--dtype", "bfloat16"]
    name = "encoder.layer.0.intermediate.dense"
    if merged:
        (tmp_path / "lora").mkdir()
        lora = {
            f"base_model.model.{name}.lora_A.weight": torch.ones(2, 1024),
            f"base_model.model.{name}.lora_B.weight": torch.ones(rows, 2),
        }
        save_file(lora, tmp_path / "lora/adapter_model.safetensors")
        write_json(tmp_path / "lora/adapter_config.json", {"peft_type": "LORA", "r": 2, "lora_alpha": 4})
        command += ["--adapter", str(tmp_path / "lora")]
    # Both matrices lie under the 256 MB after which the file is mapped anew; 64 MB are windows of the digests, 60 code.
    assert grown(*command) < 2 * largest + 150_000_000
    written = load_file(tmp_path / "b/model.safetensors")[f"{name}.weight"]
    assert bool((written == (5 if merged else 1)).all())


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

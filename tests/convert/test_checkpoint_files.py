"""Which files hold the tensors, and what a damaged folder is told."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from rose.convert.checkpoint import Checkpoint
from rose.errors import CheckpointError
from tests.support.tiny_checkpoints import edit_json, read_json, save_weights, write_json


def tensors():
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(3, 4, generator=generator) for name in ("a.weight", "b.weight", "c.weight", "d.bias")}


def write_bin(path, state, shards=1, **options):
    if shards == 1:
        torch.save(state, path / "pytorch_model.bin", **options)
        return
    placed = {name: f"pytorch_model-{i % shards}.bin" for i, name in enumerate(state)}
    for file in set(placed.values()):
        torch.save({name: state[name] for name in state if placed[name] == file}, path / file)
    write_json(path / "pytorch_model.bin.index.json", {"weight_map": placed})


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("write", [save_weights, write_bin], ids=["safetensors", "bin"])
def test_every_layout_holds_the_same(tmp_path, write, shards):
    write(tmp_path, tensors(), shards=shards)
    with Checkpoint(tmp_path) as checkpoint:
        assert set(checkpoint.entries) == set(tensors())
        for name, tensor in tensors().items():
            entry = checkpoint.entries[name]
            assert (entry.dtype, entry.shape) == ("F32", (3, 4))
            assert torch.equal(checkpoint.read(name), tensor)


def test_bin_from_before_archives(tmp_path):
    write_bin(tmp_path, tensors(), _use_new_zipfile_serialization=False)
    with Checkpoint(tmp_path) as checkpoint:
        assert torch.equal(checkpoint.read("b.weight"), tensors()["b.weight"])


def test_safetensors_before_bin(tmp_path):
    write_bin(tmp_path, {"old": torch.zeros(1)})
    save_weights(tmp_path, tensors())
    with Checkpoint(tmp_path) as checkpoint:
        assert "old" not in checkpoint.entries


def test_a_pickle_that_runs_code_is_refused(tmp_path):
    marker = tmp_path / "ran"

    class Attack:
        def __reduce__(self):
            return open, (str(marker), "w")

    torch.save({"a": Attack()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin cannot be read"):
        Checkpoint(tmp_path)
    assert not marker.exists()


def test_no_weights(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no weights: neither model\.safetensors nor"):
        Checkpoint(tmp_path)


def test_missing_shard(tmp_path):
    save_weights(tmp_path, tensors(), shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"index\.json names model-00002-of-00003.safetensors, which is missing"):
        Checkpoint(tmp_path)


def test_damaged_file(tmp_path):
    save_weights(tmp_path, tensors())
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-20])  # an interrupted download
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        Checkpoint(tmp_path)


def test_tensor_in_two_shards(tmp_path):
    save_weights(tmp_path, tensors(), shards=2)
    path = tmp_path / "model-00002-of-00002.safetensors"
    save_file({"a.weight": torch.zeros(3, 4), "b.weight": torch.zeros(3, 4), "d.bias": torch.zeros(3, 4)}, path)
    with pytest.raises(CheckpointError, match=r"a\.weight is defined twice: in .*00001-of.* and in .*00002-of"):
        Checkpoint(tmp_path)


def test_index_that_its_files_contradict(tmp_path):
    save_weights(tmp_path, tensors(), shards=2)
    index = tmp_path / "model.safetensors.index.json"
    listed = read_json(index)["weight_map"]
    edit_json(index, weight_map=listed | {"e.weight": "model-00001-of-00002.safetensors"})
    with pytest.raises(
        CheckpointError, match=r"says that e\.weight is in model-00001-of-00002.safetensors, and it is not"
    ):
        Checkpoint(tmp_path)
    edit_json(index, weight_map={name: file for name, file in listed.items() if name != "c.weight"})
    with pytest.raises(CheckpointError, match=r"holds c\.weight, which model\.safetensors\.index\.json does not list"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({"weight_map": {"a": "../model.safetensors"}}, "not a plain file name"),
        ({"weight_map": {}}, "weight_map is missing or empty"),
        ({}, "weight_map is missing or empty"),
        ({"weight_map": {"a": 3}}, "a is 3, and must be a string"),
    ],
)
def test_broken_index(tmp_path, index, words):
    write_json(tmp_path / "model.safetensors.index.json", index)
    with pytest.raises(CheckpointError, match=words):
        Checkpoint(tmp_path)

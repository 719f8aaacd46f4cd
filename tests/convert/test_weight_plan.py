"""The weight stream over small families made up for the purpose."""

from __future__ import annotations

import pytest
import torch

from rose.convert.checkpoint import Checkpoint
from rose.convert.rules import Drop, Family, Fuse, Rename, Split
from rose.convert.stream import plan_weights
from rose.errors import CheckpointError
from tests.support.tiny_checkpoints import save_weights

FAMILY = Family(
    anchor="norm.weight",
    prefixes=("", "model."),
    rules=(
        Fuse(("layers.{n}.q.{kind}", "layers.{n}.k.{kind}"), "layers.{n}.qk.{kind}"),
        Split("layers.{n}.kv.weight", ("layers.{n}.key.weight", "layers.{n}.value.weight")),
        Rename("{path*}.gamma", "{path*}.weight"),
        Drop("{path*}.inv_freq", "computed"),
    ),
    outside=(Drop("lm_head.weight", "unused"),),
    tied=("lm_head.weight", "embed.weight"),
)


def numbered(*names, rows=2):
    return {name: torch.full((rows, 3), float(i)) for i, name in enumerate(names)}


def planned(tmp_path, tensors, *, tied=False, shards=1):
    save_weights(tmp_path, tensors, shards=shards)
    checkpoint = Checkpoint(tmp_path)
    return plan_weights(checkpoint, FAMILY, tied=tied)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_fuse_split_rename_drop(tmp_path, prefix, shards):
    names = ["norm.weight", "layers.0.k.weight", "layers.0.q.weight", "layers.0.kv.weight", "layers.0.ln.gamma"]
    names += ["layers.0.rotary.inv_freq", "other.bias"]
    tensors = {prefix + name: tensor for name, tensor in numbered(*names).items()}
    plan = planned(tmp_path, tensors, shards=shards)
    out = dict(plan.stream())
    assert plan.dropped == [prefix + "layers.0.rotary.inv_freq"]
    assert {name: tuple(t.shape) for name, t in out.items()} == plan.shapes()
    assert set(out) == {
        "norm.weight",
        "layers.0.qk.weight",
        "layers.0.key.weight",
        "layers.0.value.weight",
        "layers.0.ln.weight",
        "other.bias",
    }
    # q above k, as the rule says, although k comes first in the file.
    assert torch.equal(out["layers.0.qk.weight"], torch.tensor([2.0, 2.0, 1.0, 1.0])[:, None].expand(4, 3))
    assert torch.equal(out["layers.0.value.weight"], torch.full((1, 3), 3.0))
    assert torch.equal(out["layers.0.ln.weight"], torch.full((2, 3), 4.0))


def test_stream_reads_one_step_at_a_time(tmp_path, monkeypatch):
    """Loading and offline conversion may hold one target's sources, never the checkpoint."""
    plan = planned(tmp_path, numbered("norm.weight", "layers.0.q.weight", "layers.0.k.weight", "z.weight"))
    read = []
    original = Checkpoint.read
    monkeypatch.setattr(Checkpoint, "read", lambda self, name: read.append(name) or original(self, name))
    stream = plan.stream()
    assert read == []
    for step in plan.steps:
        read.clear()
        assert next(stream)[0] == step.targets[0]
        assert tuple(read) == step.sources
    assert {len(step.sources) for step in plan.steps} == {1, 2}


def test_half_a_group(tmp_path):
    with pytest.raises(CheckpointError, match=r"layers\.0\.k\.weight is missing; layers\.0\.qk\.weight is made of it"):
        planned(tmp_path, numbered("norm.weight", "layers.0.q.weight"))


def test_group_that_does_not_fit(tmp_path):
    tensors = numbered("norm.weight", "layers.0.q.weight") | {"layers.0.k.weight": torch.zeros(2, 5)}
    plan = planned(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=r"layers\.0\.q\.weight \+ layers\.0\.k\.weight in .*do not fit together"):
        plan.shapes()


def test_split_that_does_not_divide(tmp_path):
    plan = planned(tmp_path, numbered("norm.weight", "layers.0.kv.weight", rows=3))
    with pytest.raises(CheckpointError, match=r"layers\.0\.kv\.weight in .* does not divide into 2 parts"):
        plan.shapes()


def test_two_sources_of_one_target(tmp_path):
    with pytest.raises(CheckpointError, match=r"a\.weight is defined twice: by a\.gamma in .* and a\.weight in"):
        planned(tmp_path, numbered("norm.weight", "a.gamma", "a.weight"))


def test_two_prefixes(tmp_path):
    with pytest.raises(CheckpointError, match=r"norm\.weight is defined twice in .*under '' and 'model\.'"):
        planned(tmp_path, numbered("norm.weight", "model.norm.weight"))


def test_no_known_prefix(tmp_path):
    with pytest.raises(CheckpointError, match=r"norm\.weight is missing, under every known prefix, in .*safetensors"):
        planned(tmp_path, numbered("visual.norm.weight"))


def test_stranger_outside_the_prefix(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"score\.weight in .* is not served: the others' names begin with 'model"
    ):
        planned(tmp_path, numbered("model.norm.weight", "score.weight"))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.int64])
def test_weights_of_another_kind(tmp_path, dtype):
    tensors = numbered("norm.weight") | {"a.weight": torch.zeros(2, 3).to(dtype)}
    with pytest.raises(CheckpointError, match=r"a\.weight in .* holds (I8|F8_E4M3|I64), which is not served"):
        planned(tmp_path, tensors)


def test_dropped_tensors_may_be_of_any_kind(tmp_path):
    tensors = numbered("norm.weight") | {"a.inv_freq": torch.zeros(3, dtype=torch.int64)}
    assert planned(tmp_path, tensors).dropped == ["a.inv_freq"]


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize(
    ("held", "tied", "value"),
    [
        (("embed", "lm_head"), True, "embed"),
        (("embed", "lm_head"), False, "embed"),
        (("embed",), True, "embed"),
        (("embed",), False, "embed"),
        (("lm_head",), True, "lm_head"),
        (("lm_head",), False, None),
    ],
)
def test_tied_pair_by_what_the_file_holds(tmp_path, prefix, held, tied, value):
    """Report C90 (transformers#38870): one name of a tied pair was in the file, and the other stayed unset."""
    names = {"embed": f"{prefix}embed.weight", "lm_head": "lm_head.weight"}
    tensors = numbered(f"{prefix}norm.weight", *(names[name] for name in held))
    if value is None:
        with pytest.raises(CheckpointError, match=rf"{prefix}embed\.weight is missing, and lm_head\.weight in .*false"):
            planned(tmp_path, tensors, tied=tied)
        return
    out = dict(planned(tmp_path, tensors, tied=tied).stream())
    assert set(out) == {"norm.weight", "embed.weight"}
    assert torch.equal(out["embed.weight"], tensors[names[value]])

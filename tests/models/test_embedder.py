"""What an embedder offers: outputs and their forms, the attention it asks for, and the table of architectures."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rose.config.architecture import _READERS
from rose.errors import Unsupported
from rose.models.base import OutputSpec
from rose.models.registry import BACKBONES
from tests.support.running import CPU, batch_of, embed, load, random_sequences
from tests.support.tiny_checkpoints import Dense, tiny_bert, tiny_qwen3, tiny_xlm_roberta


def test_dense_output(tmp_path):
    model = load(tiny_bert(tmp_path / "m", dense=[Dense(64, 96)]))
    assert model.outputs == {"dense": OutputSpec(dtype="float32", dimension=96, normalized=True)}
    assert model.default_output == "dense"
    assert model.vocab_size == model.folder.architecture.vocab_size
    assert model.num_layers == 2
    out = embed(model, random_sequences([3, 9], 400))
    assert (out.shape, out.dtype) == ((2, 96), torch.float32)
    torch.testing.assert_close(out.norm(dim=-1), torch.ones(2))


def test_unnormalised(tmp_path):
    model = load(tiny_bert(tmp_path / "m", normalize=False))
    assert not model.outputs["dense"].normalized
    assert not torch.allclose(embed(model, [[5, 6]]).norm(), torch.tensor(1.0), atol=0.1)


def test_unknown_output_is_named(tmp_path):
    model = load(tiny_bert(tmp_path / "m"))
    with pytest.raises(Unsupported, match="no output 'sparse'; there are dense") as caught:
        model(batch_of(model, [[5]]), ["sparse"])
    assert caught.value.param == "outputs"


def test_quantised_forms(tmp_path):
    """round(127 tanh x) and packed sign bits of the unnormalised mean, from one forward."""
    model = load(tiny_qwen3(tmp_path / "m", bidirectional=True))
    assert model.outputs["int8"] == OutputSpec(dtype="int8", dimension=64)
    assert model.outputs["binary"] == OutputSpec(dtype="uint8", dimension=8)
    out = model(batch_of(model, random_sequences([4, 30, 9], 400)), ["dense", "int8", "binary"])
    dense = out["dense"].double()
    assert torch.equal(out["int8"], (dense.tanh() * 127).round().to(torch.int8))
    bits = np.packbits((dense >= 0).numpy(), axis=-1, bitorder="little")
    assert np.array_equal(out["binary"].numpy(), bits)
    assert len(out["int8"].unique()) > 50


def test_binary_needs_whole_bytes(tmp_path):
    model = load(tiny_qwen3(tmp_path / "m", bidirectional=True, dense=[Dense(64, 60)]))
    assert model.outputs["binary"].unavailable == "60 dimensions do not fill whole bytes"


@pytest.mark.parametrize("bidirectional", [False, True])
def test_attention_spec(tmp_path, bidirectional):
    model = load(tiny_qwen3(tmp_path / "m", bidirectional=bidirectional, max_seq_length=99))
    spec = model.attention_spec(CPU, torch.bfloat16)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.scale) == (4, 2, 32, 32**-0.5)
    assert (spec.causal, spec.window, spec.layout, spec.max_length) == (not bidirectional, None, "ragged", 99)
    assert (spec.dtype, spec.device) == (torch.bfloat16, CPU)


def test_result_needs_no_gradient(tmp_path):
    assert not embed(load(tiny_bert(tmp_path / "m")), [[5, 6]]).requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16])
@pytest.mark.parametrize("make", [tiny_bert, tiny_xlm_roberta, tiny_qwen3])
def test_half_precision_stays_close(tmp_path, make, dtype):
    sequences = random_sequences([5, 40], 150)
    path = make(tmp_path / "m")
    half = load(path, dtype=dtype)
    out = half(batch_of(half, sequences, dtype), ["dense"])["dense"]
    assert out.dtype == torch.float32
    assert bool((torch.cosine_similarity(out, embed(load(path), sequences)) > 0.998).all())


def test_table_knows_every_family_the_reader_knows():
    assert set(BACKBONES) == set(_READERS)

"""Which dtypes each architecture runs in: refused by name where it overflows, finite and close where it does not."""

from __future__ import annotations

import pytest
import torch

from rose.config import read_model_folder
from rose.convert import load_model
from rose.errors import CheckpointError
from rose.models.registry import BACKBONES
from tests.support.running import batch_of, embed, encode, load
from tests.support.tiny_checkpoints import tiny_bert, tiny_xlm_roberta
from tests.support.tiny_families import tiny_pplx, tiny_pplx_context, tiny_qwen3_embedding, tiny_qwen3_reranker

WORDS = ["a", "5.2", "sea", "ja", "猫", "!", "Zug", "512"]


@pytest.mark.parametrize("make", [tiny_pplx, tiny_pplx_context, tiny_qwen3_embedding, tiny_qwen3_reranker])
def test_half_precision_that_overflows_is_refused_by_name(tmp_path, make):
    """Report C25 (infinity#328): "5.2" on a decoder in fp16 came back as null, silently."""
    folder = read_model_folder(make(tmp_path / "m"))
    name = folder.architecture.architecture
    words = f"{name} is not served in float16: activations of this family outgrow it.*use bfloat16 or float32"
    with pytest.raises(CheckpointError, match=words):
        load_model(folder, dtype=torch.float16)


@pytest.mark.parametrize("make", [tiny_bert, tiny_xlm_roberta])
def test_short_words_in_half_precision(tmp_path, make):
    """Report C24 (tei#557): single words in fp16, one at a time and together: finite, and close to fp32."""
    path = make(tmp_path / "m")
    half, full = load(path, dtype=torch.float16), load(path)
    ids = encode(half.folder, WORDS)
    expected = embed(full, ids)
    together = half(batch_of(half, ids, torch.float16), ["dense"])["dense"]
    alone = torch.cat([half(batch_of(half, [own], torch.float16), ["dense"])["dense"] for own in ids])
    for out in (together, alone):
        assert out.dtype == torch.float32
        assert bool(torch.isfinite(out).all())
        assert torch.cosine_similarity(out, expected).min() > 0.999


@pytest.mark.parametrize("make", [tiny_bert, tiny_xlm_roberta, tiny_qwen3_embedding, tiny_pplx])
def test_bfloat16_runs_everywhere(tmp_path, make):
    """Report C25 (infinity#328): the same short strings in bf16, which every architecture runs in."""
    path = make(tmp_path / "m")
    half = load(path, dtype=torch.bfloat16)
    ids = encode(half.folder, WORDS)
    out = half(batch_of(half, ids, torch.bfloat16), ["dense"])["dense"]
    assert torch.cosine_similarity(out, embed(load(path), ids)).min() > 0.99


def test_every_row_of_the_table_says_why():
    for name, entry in BACKBONES.items():
        assert {"float32", "bfloat16"} <= set(entry.dtypes), name
        assert ("float16" in entry.dtypes) == (entry.refused == ""), name

"""Embedding sum + LayerNorm against transformers' XLM-RoBERTa and BERT embeddings and against fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from rose.kernels.embed_layer_norm import embed_layer_norm_ref, embed_layer_norm_triton


@pytest.mark.parametrize("width", [48, 384, 1000])
@pytest.mark.parametrize("types", ["none", "zero", "given"])
def test_against_fp64(place, close, width, types):
    word, position, token_type = place.randn(50, width), place.randn(20, width), place.randn(2, width)
    weight, bias = place.randn(width), place.randn(width)
    ids, positions = place.tensor([49, 0, 7, 7, 3]), place.tensor([0, 1, 2, 0, 1])
    type_ids = place.tensor([0, 1, 1, 0, 1]) if types == "given" else None
    table = None if types == "none" else token_type
    args = (ids, positions, type_ids, word, position, table, weight, bias, 1e-5, 2)
    x = word.double()[ids.long()] + position.double()[positions.long() + 2]
    if types == "zero":
        x = x + token_type.double()[0]
    if types == "given":
        x = x + token_type.double()[type_ids.long()]
    expected = F.layer_norm(x, (width,), weight.double(), bias.double(), 1e-5)
    close(embed_layer_norm_triton(*args), expected)
    close(embed_layer_norm_ref(*args), expected)


def test_is_transformers_xlm_roberta(place, close):
    """Positions of the RoBERTa family start at pad id + 1 (here 2)."""
    from transformers import XLMRobertaConfig
    from transformers.models.xlm_roberta.modeling_xlm_roberta import XLMRobertaEmbeddings

    config = XLMRobertaConfig(vocab_size=60, hidden_size=48, max_position_embeddings=30, type_vocab_size=1)
    theirs = XLMRobertaEmbeddings(config).eval().to(place.device, place.dtype)
    ids = torch.tensor([5, 9, 2, 17, 59], dtype=torch.int32, device=place.device)
    out = embed_layer_norm_triton(
        ids,
        torch.arange(5, dtype=torch.int32, device=place.device),
        None,
        theirs.word_embeddings.weight.detach(),
        theirs.position_embeddings.weight.detach(),
        theirs.token_type_embeddings.weight.detach(),
        theirs.LayerNorm.weight.detach(),
        theirs.LayerNorm.bias.detach(),
        config.layer_norm_eps,
        config.pad_token_id + 1,
    )
    with torch.no_grad():
        expected = theirs(input_ids=ids[None].long())[0]
    close(out, expected, factor=3 if place.dtype is not torch.float32 else 1)

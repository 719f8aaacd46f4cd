"""A sequence's answer does not depend on its company; what a token sees depends on the attention mode alone."""

from __future__ import annotations

import random

import pytest
import torch

from tests.support.running import embed, hidden_of, load, random_sequences
from tests.support.tiny_checkpoints import tiny_bert, tiny_qwen3, tiny_xlm_roberta

MODELS = {
    "bert": (tiny_bert, {}),
    "xlm_roberta": (tiny_xlm_roberta, {}),
    "qwen3_causal": (tiny_qwen3, {}),
    "qwen3_bidirectional": (tiny_qwen3, {"bidirectional": True}),
}
LENGTHS = [7, 7, 1, 30, 7, 2, 30, 64]


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    make, arguments = MODELS[request.param]
    return load(make(tmp_path_factory.mktemp(request.param) / "m", **arguments))


def test_alone_and_in_any_company(model):
    sequences = random_sequences(LENGTHS, 150)
    alone = [hidden_of(model, [ids])[0] for ids in sequences]
    vectors = torch.cat([embed(model, [ids]) for ids in sequences])
    for seed in range(6):
        order = random.Random(seed).sample(range(len(sequences)), k=len(sequences) - seed)
        batch = [sequences[i] for i in order]
        for i, rows in zip(order, hidden_of(model, batch), strict=True):
            torch.testing.assert_close(rows, alone[i], rtol=1e-5, atol=1e-5)
        cosine = torch.cosine_similarity(embed(model, batch), vectors[order])
        assert bool((cosine > 0.999999).all())


def test_twins_in_one_batch_are_equal(model):
    ids = random_sequences([9], 150)[0]
    for rows in hidden_of(model, [ids] * 5)[1:]:
        torch.testing.assert_close(rows, hidden_of(model, [ids])[0], rtol=1e-5, atol=1e-5)


def sees_the_last_token(model, lengths: list[int]) -> set[bool]:
    """Whether the first token's hidden row changes with the last token's id, over the sequences of one batch."""
    before = random_sequences(lengths, 150)
    after = [[*ids[:-1], ids[-1] - 1 if ids[-1] > 5 else ids[-1] + 1] for ids in before]
    changed = set()
    for old, new in zip(hidden_of(model, before), hidden_of(model, after), strict=True):
        assert not torch.allclose(old[-1], new[-1], atol=1e-3)
        same = torch.allclose(old[0], new[0], rtol=0, atol=1e-6)
        assert same or not torch.allclose(old[0], new[0], rtol=0, atol=1e-4)
        changed.add(not same)
    return changed


@pytest.mark.parametrize("count", [2, 5])
def test_equal_lengths_keep_the_attention_mode(model, count):
    """Report C01 (tei#882): a causal embedder lost its mask whenever all sequences of a batch were equally long."""
    assert sees_the_last_token(model, [12] * count) == {not model.folder.architecture.causal}


def test_one_sequence_keeps_the_attention_mode(model):
    """Report C05 (llm2vec#74): a bidirectional model fell back to causal attention when a text ran alone."""
    assert sees_the_last_token(model, [12]) == {not model.folder.architecture.causal}


def test_unequal_lengths_keep_the_attention_mode(model):
    assert sees_the_last_token(model, [12, 3, 30]) == {not model.folder.architecture.causal}

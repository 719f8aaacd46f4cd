"""Trained weights: all-MiniLM-L6-v2 against sentence-transformers, over sentences in twenty languages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from sentence_transformers import SentenceTransformer

from tests.support.running import embed, encode, load

pytestmark = pytest.mark.weights
SENTENCES = [
    entry["text"] for entry in json.loads((Path(__file__).parent.parent / "data/sentences.json").read_text("utf-8"))
]


@pytest.fixture(scope="module")
def ours(minilm_folder):
    return load(minilm_folder)


@pytest.fixture(scope="module")
def theirs(minilm_folder):
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return SentenceTransformer(str(minilm_folder), device="cpu")


@pytest.fixture(scope="module")
def expected(theirs):
    return torch.from_numpy(theirs.encode(SENTENCES, batch_size=32))


def test_folder(ours):
    folder = ours.folder
    assert (folder.max_tokens, folder.dimension, folder.normalize) == (256, 384, True)
    assert folder.pooling.modes == ("mean",)


def test_ids(ours, theirs):
    """The tokenizer file itself asks for padding to 128 and a cut at 128; neither may happen."""
    features = theirs.preprocess(SENTENCES)
    pairs = zip(features["input_ids"], features["attention_mask"], strict=True)
    ids = encode(ours.folder, SENTENCES)
    assert ids == [row[mask == 1].tolist() for row, mask in pairs]
    lengths = sorted(len(sequence) for sequence in ids)
    assert lengths[0] == 3
    assert lengths[-2:] == [256, 256]  # two texts are cut


@pytest.mark.parametrize("batch_size", [1, 16, len(SENTENCES)])
def test_vectors(ours, expected, batch_size):
    ids = encode(ours.folder, SENTENCES)
    parts = [embed(ours, ids[i : i + batch_size]) for i in range(0, len(ids), batch_size)]
    cosine = torch.cosine_similarity(torch.cat(parts).double(), expected.double())
    assert len(cosine) >= 200
    assert float(cosine.min()) >= 0.99999
    torch.testing.assert_close(torch.cat(parts), expected, rtol=0, atol=2e-6)

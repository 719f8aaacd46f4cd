"""multilingual-e5-small in both its layouts: the same ids and vectors as sentence-transformers, and as each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rose.bench.embed_cpu import least_cosine
from rose.bench.systems import RoseInProcess, SentenceTransformers
from rose.config import read_model_folder

pytestmark = pytest.mark.weights
PROMPTS = {"query": "query: ", "passage": "passage: "}


@pytest.fixture(scope="module")
def texts(udhr) -> list[str]:
    """A short and a long article in eleven scripts, one text longer than the model, and what is easily got wrong."""
    languages = ("eng", "rus", "cmn_hans", "jpn", "hin", "tha", "arb", "vie", "ell_monotonic", "kor", "heb")
    found = [udhr(language)[article] for language in languages for article in (0, 25)]
    return [PROMPTS["query"] + text for text in [*found, " ".join(udhr("eng")), "  two  spaces ", "ﬁne １２３", "<s>"]]


@pytest.fixture(scope="module")
def vectors(e5_small, texts):
    return e5_small.embed(texts)


@pytest.mark.parametrize("layout", ["e5_small_folder", "e5_small_xlmr_folder"])
def test_the_folder_says_how_it_is_used(layout, request):
    folder = read_model_folder(request.getfixturevalue(layout))
    assert folder.prompts == PROMPTS
    assert (folder.max_tokens, folder.dimension, folder.normalize) == (512, 384, True)
    assert folder.pooling is not None
    assert folder.pooling.modes == ("mean",)


def test_both_layouts_give_the_same_vectors(vectors, texts, e5_small_xlmr_folder):
    system = RoseInProcess(e5_small_xlmr_folder, torch.get_num_threads())
    others = system.embed(texts)
    system.close()
    assert np.abs(vectors - others).max() <= 1e-6


def test_vectors_are_those_of_sentence_transformers(vectors, texts, e5_small_folder):
    reference = SentenceTransformers(e5_small_folder)
    reference.batch_size = 4  # it pads to the longest, and one text has 512 tokens
    expected = reference.embed(texts)
    reference.close()
    assert least_cosine(vectors, expected) >= 0.99999
    assert np.abs(vectors - expected).max() <= 5e-6

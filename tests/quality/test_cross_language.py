"""Does multilingual-e5-small, served by ROSE, find the same article in another language?

Each of the 30 articles of the Universal Declaration is looked for among the 30 of another language. The figures were
measured once with transformers on the same 4-bit weights; one article is 1/30 = 0.034.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.corpora import ARTICLES

pytestmark = pytest.mark.weights
ONE_ARTICLE = 1 / ARTICLES
# Language -> how many of the English articles find theirs, and how many of its articles find the English one.
EXPECTED = {
    "deu_1996": (0.967, 1.0),
    "fra": (1.0, 1.0),
    "spa": (1.0, 1.0),
    "rus": (1.0, 1.0),
    "cmn_hans": (1.0, 0.833),
    "jpn": (0.967, 0.933),
    "hin": (0.933, 0.933),
    "tha": (0.867, 0.933),
    "arb": (0.8, 0.9),
    "swh": (0.667, 0.867),
    "vie": (0.933, 0.967),
}


@pytest.fixture(scope="module")
def queries(e5_small, udhr):
    return e5_small.embed([f"query: {text}" for text in udhr("eng")])


def first_hits(similarities: np.ndarray) -> float:
    """R@1 where row i's answer is column i."""
    return float((similarities.argmax(axis=1) == np.arange(len(similarities))).mean())


@pytest.mark.parametrize("language", EXPECTED)
def test_articles_find_their_translation(e5_small, udhr, queries, language):
    passages = e5_small.embed([f"passage: {text}" for text in udhr(language)])
    similarities = queries @ passages.T
    there, back = EXPECTED[language]
    assert first_hits(similarities) == pytest.approx(there, abs=ONE_ARTICLE + 1e-3)
    assert first_hits(similarities.T) == pytest.approx(back, abs=ONE_ARTICLE + 1e-3)


def test_chance_would_find_one_in_thirty(queries):
    """So that the figures above mean something: shuffled rows score what guessing scores."""
    shuffled = np.random.default_rng(0).permutation(ARTICLES)
    assert first_hits((queries @ queries.T)[shuffled]) <= 0.2

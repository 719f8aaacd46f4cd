"""Do all-MiniLM-L6-v2's cosines, served by ROSE, agree with people about which news texts are alike?

1,225 pairs of 50 texts; the figures were measured once with sentence-transformers on the same weights.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import pearsonr, spearmanr

from rose.bench.systems import RoseInProcess
from tests.quality.conftest import or_skip
from tests.support import corpora

pytestmark = pytest.mark.weights
PEARSON, SPEARMAN, TOLERANCE = 0.656, 0.508, 0.005


def test_cosines_follow_human_judgement(minilm_folder):
    texts, judged = or_skip(corpora.lee_texts), or_skip(corpora.lee_similarities)
    system = RoseInProcess(minilm_folder, torch.get_num_threads())
    vectors = system.embed(texts)
    system.close()
    pairs = np.triu_indices(len(texts), 1)
    cosines, humans = (vectors @ vectors.T)[pairs], judged[pairs]
    assert len(cosines) == 1225
    assert pearsonr(cosines, humans)[0] == pytest.approx(PEARSON, abs=TOLERANCE)
    assert spearmanr(cosines, humans)[0] == pytest.approx(SPEARMAN, abs=TOLERANCE)

"""mteb's own mock tasks give the scores they give with sentence-transformers, in process and over HTTP.

The tasks are mteb's smallest of each kind, made for checking an integration; what counts is that scores are the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

mteb = pytest.importorskip("mteb")

from datasets import Dataset, DatasetDict  # noqa: E402
from mteb.mocks import mock_tasks  # noqa: E402
from mteb.models import ModelMeta  # noqa: E402
from mteb.models.abs_encoder import AbsEncoder  # noqa: E402
from mteb.models.sentence_transformer_wrapper import SentenceTransformerEncoderWrapper  # noqa: E402

from rose.bench.systems import RoseHttp, RoseInProcess, System  # noqa: E402
from tests.quality.conftest import or_skip  # noqa: E402
from tests.support import corpora  # noqa: E402

pytestmark = [pytest.mark.weights, pytest.mark.filterwarnings("ignore::Warning")]  # of tasks with four samples
TASKS = (
    "MockSTSTask",
    "MockRetrievalTask",
    "MockRerankingTask",
    "MockPairClassificationTask",
    "MockClassificationTask",
    "MockMultilabelClassification",
    "MockRegressionTask",
    "MockBitextMiningTask",
    "MockSummarizationTask",
    "LegacyMockClusteringFastTask",
    "MockMultilingualRetrievalTask",
    "MockMultilingualSTSTask",
    "LeeSTS",
)
TOLERANCE = 1e-4


class RoseEncoder(AbsEncoder):
    """ROSE as mteb sees a model: batches of texts in, vectors out."""

    def __init__(self, embed: Callable[[Sequence[str]], np.ndarray]) -> None:
        self.embed = embed
        self.mteb_model_meta = ModelMeta.create_empty(overwrites={"name": "rose/minilm", "revision": "local"})

    def encode(self, inputs: Any, **_: Any) -> np.ndarray:
        return self.embed([text for batch in inputs for text in batch["text"]])


class LeeSTS(mock_tasks.MockSTSTask):
    """mteb's scoring of every pair of ten news texts, against what people said."""

    metadata = mock_tasks.MockSTSTask.metadata.model_copy(update={"name": "LeeSTS"})

    def load_data(self, num_proc: int | None = None, **_: Any) -> None:
        texts, judged = or_skip(corpora.lee_texts), or_skip(corpora.lee_similarities)
        first, second = np.triu_indices(10, 1)
        columns = {
            "sentence1": [texts[i] for i in first],
            "sentence2": [texts[i] for i in second],
            "score": judged[first, second].tolist(),
        }
        self.dataset = DatasetDict({"test": Dataset.from_dict(columns)})
        self.data_loaded = True


@pytest.fixture(scope="module")
def reference(minilm_folder) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformerEncoderWrapper(SentenceTransformer(str(minilm_folder), device="cpu"))


@pytest.fixture(scope="module", params=[RoseInProcess, RoseHttp], ids=["in process", "over HTTP"])
def ours(request, minilm_folder) -> Iterator[RoseEncoder]:
    system: System = request.param(minilm_folder, torch.get_num_threads())
    yield RoseEncoder(system.embed)
    system.close()


@pytest.fixture(scope="module")
def expected(reference) -> Callable[[str], dict[str, float]]:
    found: dict[str, dict[str, float]] = {}

    def scores_of(task: str) -> dict[str, float]:
        if task not in found:
            found[task] = scores(task, reference)
        return found[task]

    return scores_of


def scores(task: str, model: Any) -> dict[str, float]:
    """Every number of a task's result, by its path."""
    logging.getLogger("mteb").setLevel(logging.ERROR)
    kind = LeeSTS if task == "LeeSTS" else getattr(mock_tasks, task)
    result = mteb.evaluate(model, kind(), cache=None, show_progress_bar=False)
    (one,) = result.task_results
    return dict(_numbers(one.scores, ""))


def _numbers(value: Any, path: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(inner, f"{path}/{key}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _numbers(inner, f"{path}/{index}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, float(value)


@pytest.mark.parametrize("task", TASKS)
def test_scores_are_those_of_sentence_transformers(task, expected, ours):
    reference, found = expected(task), scores(task, ours)
    assert len(reference) >= 2
    assert found == pytest.approx(reference, abs=TOLERANCE, nan_ok=True)


@pytest.mark.parametrize("wrong", ["guessed", "cut in half"])
def test_another_encoder_scores_otherwise(wrong, expected, ours):
    """So that equal scores mean something: the mock tasks have two to four samples, LeeSTS has 45."""
    draw = np.random.default_rng(0)

    def embed(texts: Sequence[str]) -> np.ndarray:
        return draw.standard_normal((len(texts), 384)) if wrong == "guessed" else ours.embed(texts)[:, :192]

    reference, found = expected("LeeSTS"), scores("LeeSTS", RoseEncoder(embed))
    assert abs(reference["/test/0/cosine_pearson"] - found["/test/0/cosine_pearson"]) > 10 * TOLERANCE

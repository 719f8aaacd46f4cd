"""Scores of Qwen3.5: a classifier on the last token, and yes minus no of the language model's head."""

from __future__ import annotations

import pytest
import torch
import transformers

from rose.cli import main
from rose.errors import CheckpointError
from tests.support.running import batch_of, encode_pairs, load_reranker, random_sequences, score
from tests.support.tiny_checkpoints import Draw
from tests.support.tiny_qwen3_5 import tiny_qwen3_5

LENGTHS = [11, 1, 64, 65, 2, 130]
PAIRS = [("the ferry", "a boat that carries cars"), ("rain", "the library opens at nine"), ("a", "b")]


@pytest.fixture(autouse=True)
def _quiet():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def classifier(path, labels=1):
    name = "Qwen3_5TextForSequenceClassification"
    named = {str(n): f"label {n}" for n in range(labels)}
    outer = {"architectures": [name], "id2label": named, "label2id": {v: int(k) for k, v in named.items()}}
    head = {"score.weight": Draw(77).matrix(labels, 48)}
    return tiny_qwen3_5(path, "text", outer=outer, extra=head)


@pytest.mark.parametrize("labels", [1, 3])
def test_classifier(tmp_path, labels):
    path = classifier(tmp_path / "m", labels)
    model = load_reranker(path, template="none")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    sequences = random_sequences(LENGTHS, 400)
    found = model(batch_of(model, sequences), ["score"])["score"]
    with torch.inference_mode():
        expected = torch.cat([theirs(input_ids=torch.tensor([ids])).logits for ids in sequences])
    assert found.shape == (len(LENGTHS), labels)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_yes_minus_no(tmp_path):
    """Of transformers' logits after the last token; and what `rose convert --to reranker` makes of the folder scores
    alike."""
    path = tiny_qwen3_5(tmp_path / "lm", tied=False)
    model = load_reranker(path, task="rerank", template="qwen3")
    found = score(model, PAIRS)
    theirs = transformers.Qwen3_5ForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ids, _ = encode_pairs(model.folder, PAIRS)
    with torch.inference_mode():
        logits = torch.stack([theirs(input_ids=torch.tensor([own])).logits[0, -1] for own in ids])
    expected = logits[:, model.folder.reranker.yes_id] - logits[:, model.folder.reranker.no_id]
    torch.testing.assert_close(found[:, 0], expected, rtol=1e-4, atol=1e-4)
    made = ["convert", str(path), "-o", str(tmp_path / "m"), "--to", "reranker", "--rerank-template", "qwen3"]
    assert main(made) == 0
    torch.testing.assert_close(score(load_reranker(tmp_path / "m"), PAIRS), found, rtol=1e-5, atol=1e-5)


def test_a_class_around_a_vision_tower_does_not_rerank(tmp_path):
    with pytest.raises(CheckpointError, match="has no head that scores a pair"):
        load_reranker(tiny_qwen3_5(tmp_path / "m", "multimodal"), task="rerank")

"""Embedders and rerankers built on Llama, Mistral and Qwen2: the same layers under another head, against
sentence-transformers and transformers."""

from __future__ import annotations

import pytest
import torch
import transformers
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer, processors

from rose.config import read_model_folder
from rose.errors import CheckpointError
from tests.support.running import embed, encode, encode_pairs, load, load_reranker, score
from tests.support.tiny_checkpoints import Dense, Draw, edit_json
from tests.support.tiny_language_models import sample_ids, tiny_lm
from tests.support.tiny_tokenizers import CORPUS

TEXTS = [*CORPUS, "a", "5.2", " ".join(CORPUS)]
PAIRS = [("where does the river meet the sea?", text) for text in CORPUS[:6]]
E5_MISTRAL = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: "
FAMILIES = {
    "llama_last": ("llama", {"pooling": "lasttoken"}),
    "llama_mean_dense": ("llama", {"pooling": "mean", "dense": [Dense(64, 48)]}),
    "llama_bare": ("llama", {"kind": "Model", "prefix": "", "pooling": "mean"}),
    "e5_mistral": ("mistral", {"kind": "Model", "prefix": "", "config": {"sliding_window": 20}, "max_seq_length": 128}),
    "gte_qwen2": ("qwen2", {"pooling": "lasttoken", "tied": True}),
}


@pytest.fixture(autouse=True)
def _quiet():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def append_end(path) -> None:
    """The tokenizer ends every text itself, as those of last-token embedders do."""
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    end = ("<|im_end|>", sample_ids(path)["<|im_end|>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="$A <|im_end|>", special_tokens=[end])
    tokenizer.save(str(path / "tokenizer.json"))


@pytest.mark.parametrize(("model_type", "arguments"), FAMILIES.values(), ids=FAMILIES)
def test_embedders(tmp_path, model_type, arguments):
    arguments = {"pooling": "lasttoken", "prompts": {"query": E5_MISTRAL}} | arguments
    path = tiny_lm(tmp_path / "m", model_type, **arguments)
    append_end(path)
    theirs, ours = SentenceTransformer(str(path), device="cpu"), load(path)
    for name in (None, "query"):
        features = theirs.preprocess([(E5_MISTRAL if name else "") + text for text in TEXTS])
        rows = zip(features["input_ids"], features["attention_mask"], strict=True)
        ids = [row[mask == 1].tolist() for row, mask in rows]
        if model_type != "qwen2":  # for which transformers puts Qwen2's own splitting in the tokenizer's place
            assert ids == encode(ours.folder, [(E5_MISTRAL if name else "") + text for text in TEXTS])
        expected = torch.from_numpy(theirs.encode(TEXTS, prompt_name=name, batch_size=7))
        torch.testing.assert_close(embed(ours, ids), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2"])
@pytest.mark.parametrize("labels", [1, 3])
def test_classifiers(tmp_path, model_type, labels):
    """`score.weight` on the last token, in transformers' own class."""
    names = {str(i): f"LABEL_{i}" for i in range(labels)}
    config = {"id2label": names, "label2id": {name: int(i) for i, name in names.items()}, "pad_token_id": 0}
    extra = {"score.weight": Draw(61).matrix(labels, 64) * 3}
    path = tiny_lm(
        tmp_path / "m", model_type, kind="ForSequenceClassification", config=config, extra=extra, max_positions=1024
    )
    with pytest.raises(CheckpointError, match="does not say how a pair is written"):
        read_model_folder(path)
    ours = load_reranker(path, template="qwen3")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    ids, _ = encode_pairs(ours.folder, PAIRS)
    with torch.inference_mode():
        expected = torch.cat([theirs(input_ids=torch.tensor([own])).logits for own in ids])
    torch.testing.assert_close(score(ours, PAIRS), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_yes_and_no_of_a_language_model(tmp_path, model_type, tied):
    path = tiny_lm(tmp_path / "m", model_type, tied=tied, max_positions=1024)
    edit_json(path / "tokenizer_config.json", chat_template=None)
    ours = load_reranker(path, task="rerank", template="qwen3")
    reranker = ours.folder.reranker
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ids, _ = encode_pairs(ours.folder, PAIRS)
    with torch.inference_mode():
        rows = torch.cat([theirs(input_ids=torch.tensor([own])).logits[:, -1] for own in ids])
    expected = rows[:, reranker.yes_id] - rows[:, reranker.no_id]
    torch.testing.assert_close(score(ours, PAIRS)[:, 0], expected, rtol=1e-4, atol=1e-4)

"""Scores of pairs against transformers and sentence-transformers on the same random weights, raw, to 1e-4."""

from __future__ import annotations

import pytest
import torch
import transformers
from safetensors.torch import load_file
from sentence_transformers import CrossEncoder

from rose.convert.checkpoint import Checkpoint
from rose.errors import CheckpointError, Unsupported
from rose.models.base import OutputSpec
from tests.support.running import batch_of, encode_pairs, load_reranker, random_sequences, score
from tests.support.tiny_checkpoints import edit_json, save_weights, tiny_bert, tiny_qwen3
from tests.support.tiny_families import (
    tiny_cross_encoder_bert,
    tiny_cross_encoder_xlmr,
    tiny_qwen3_classifier,
    tiny_qwen3_reranker,
)
from tests.support.tiny_tokenizers import CORPUS

PAIRS = [(CORPUS[i], CORPUS[j]) for i, j in [(0, 1), (1, 0), (4, 5), (7, 9), (12, 13), (10, 10)]] + [
    ("a", "b"),
    ("where?", " ".join(CORPUS[:3])),
    ("yes", "no"),
]
TOLERANCE = {"rtol": 0, "atol": 1e-4}


@pytest.fixture(autouse=True)
def _quiet():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def raw(path, pairs=PAIRS) -> torch.Tensor:
    """sentence-transformers' own logits: [pairs, labels]."""
    model = CrossEncoder(str(path), device="cpu", activation_fn=torch.nn.Identity())
    return torch.from_numpy(model.predict(pairs, batch_size=4)).reshape(len(pairs), -1)


@pytest.mark.parametrize("labels", [1, 2, 3])
@pytest.mark.parametrize("make", [tiny_cross_encoder_bert, tiny_cross_encoder_xlmr])
def test_cross_encoders(tmp_path, make, labels):
    """Report C106 (langchain#22556): several labels stay several raw columns with their names."""
    path = make(tmp_path / "m", labels=labels)
    model = load_reranker(path)
    scores = score(model, PAIRS)
    assert (scores.shape, scores.dtype) == ((len(PAIRS), labels), torch.float32)
    torch.testing.assert_close(scores, raw(path), **TOLERANCE)
    assert scores.std() > 0.1
    names = tuple(f"LABEL_{i}" for i in range(labels))
    assert model.outputs == {"score": OutputSpec(dtype="float32", dimension=labels, kind="score", labels=names)}
    assert model.folder.reranker.activation == ("sigmoid" if labels == 1 else "none")


@pytest.mark.parametrize("model_type", ["roberta", "camembert"])
def test_roberta_family(tmp_path, model_type):
    """Report C81 (vllm#9387): positions begin at pad id + 1 in rerankers too."""
    name = {"roberta": "Roberta", "camembert": "Camembert"}[model_type] + "ForSequenceClassification"
    config = {"model_type": model_type, "architectures": [name]}
    path = tiny_cross_encoder_xlmr(tmp_path / "m", config=config)
    torch.testing.assert_close(score(load_reranker(path), PAIRS), raw(path), **TOLERANCE)


def test_pair_ids_and_token_types(tmp_path):
    """Ids and types equal the library's; a BERT score depends on the types, an XLM-R has none."""
    bert, xlmr = tiny_cross_encoder_bert(tmp_path / "b"), tiny_cross_encoder_xlmr(tmp_path / "x")
    for path in (bert, xlmr):
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        theirs = tokenizer([a for a, _ in PAIRS], [b for _, b in PAIRS])
        ids, types = encode_pairs(load_reranker(path).folder, PAIRS)
        assert ids == theirs["input_ids"]
        if path == bert:
            assert types == theirs["token_type_ids"]
            assert {max(own) for own in types} == {1}
        else:
            assert types is None
    model = load_reranker(bert)
    ids, types = encode_pairs(model.folder, PAIRS[:1])
    typed = model(batch_of(model, ids, type_ids=types), ["score"])["score"]
    assert not torch.allclose(typed, model(batch_of(model, ids), ["score"])["score"], atol=1e-3)


README_PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
README_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
README_TASK = "Given a web search query, retrieve relevant passages that answer the query"


def published_ids(path, pairs) -> list[list[int]]:
    """As the model's authors publish it: prefix, body and suffix tokenised one by one."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)

    def ids(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    bodies = [f"<Instruct>: {README_TASK}\n<Query>: {query}\n<Document>: {document}" for query, document in pairs]
    return [ids(README_PREFIX) + ids(body) + ids(README_SUFFIX) for body in bodies]


@torch.inference_mode()
def published_logits(path, sequences) -> torch.Tensor:
    """(yes, no) logits of the whole language model on the last token: [pairs, 2]."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    words = tokenizer.convert_tokens_to_ids(["yes", "no"])
    return torch.stack([model(input_ids=torch.tensor([ids])).logits[0, -1, words] for ids in sequences])


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("logit_score", [True, False], ids=["logit_score", "older_revision"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_qwen3_reranker(tmp_path, tied, logit_score, shards):
    """Reports C99 (vllm#43062) and C100 (vllm#27857): yes and no of the head, tied or not, in whatever shard.

    The score is the difference of two logits, whose sigmoid is the published softmax over no and yes.
    """
    path = tiny_qwen3_reranker(tmp_path / "Qwen3-Reranker-tiny", tied=tied, logit_score=logit_score, shards=shards)
    model = load_reranker(path)
    ids, types = encode_pairs(model.folder, PAIRS)
    assert types is None
    assert ids == published_ids(path, PAIRS)
    logits = published_logits(path, ids)
    scores = score(model, PAIRS)
    torch.testing.assert_close(scores, logits[:, :1] - logits[:, 1:], **TOLERANCE)
    torch.testing.assert_close(scores.sigmoid()[:, 0], logits.softmax(-1)[:, 0], **TOLERANCE)
    assert scores.std() > 0.05
    assert len(scores.unique()) == len(PAIRS)


def test_qwen3_reranker_against_sentence_transformers(tmp_path):
    """The chat template that newer revisions ship gives the same ids and scores as the text kept here."""
    path = tiny_qwen3_reranker(tmp_path / "m")
    model = load_reranker(path)
    torch.testing.assert_close(score(model, PAIRS), raw(path), **TOLERANCE)
    folder = model.folder
    assert (folder.reranker.source, folder.reranker.activation) == ("1_LogitScore/config.json", "sigmoid")


def test_yes_alone(tmp_path):
    """Without a false token the score is the true token's own logit."""
    path = tiny_qwen3_reranker(tmp_path / "m")
    edit_json(path / "1_LogitScore/config.json", false_token_id=None)
    model = load_reranker(path)
    ids, _ = encode_pairs(model.folder, PAIRS)
    torch.testing.assert_close(score(model, PAIRS), published_logits(path, ids)[:, :1], **TOLERANCE)


@pytest.mark.parametrize("labels", [1, 3])
def test_converted_classifier(tmp_path, labels):
    """Qwen3ForSequenceClassification: `score.weight` on the last token."""
    path = tiny_qwen3_classifier(tmp_path / "m", labels=labels)
    model = load_reranker(path, template="none")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    sequences = random_sequences([30, 1, 7], 400)
    with torch.inference_mode():
        expected = torch.cat([theirs(input_ids=torch.tensor([ids])).logits for ids in sequences])
    torch.testing.assert_close(model(batch_of(model, sequences), ["score"])["score"], expected, **TOLERANCE)


def test_converted_qwen3_reranker_scores_as_the_original(tmp_path):
    """A conversion by the difference of the two rows is the same model."""
    original = tiny_qwen3_reranker(tmp_path / "o")
    config = load_reranker(original).folder.reranker
    rows = load_file(original / "model.safetensors")["model.embed_tokens.weight"]
    converted = tiny_qwen3_classifier(tmp_path / "c", weight=(rows[config.yes_id] - rows[config.no_id])[None])
    model = load_reranker(converted, template="qwen3")
    torch.testing.assert_close(score(model, PAIRS), score(load_reranker(original), PAIRS), **TOLERANCE)


def test_one_row_of_the_head_is_read(tmp_path, monkeypatch):
    """The matrix of 150,000 rows is neither read nor kept."""
    path = tiny_qwen3_reranker(tmp_path / "m", tied=False)
    read: list[str] = []
    whole = Checkpoint.read
    monkeypatch.setattr(Checkpoint, "read", lambda self, name: (read.append(name), whole(self, name))[1])
    model = load_reranker(path)
    assert "lm_head.weight" not in read
    assert [tuple(p.shape) for p in model.head.parameters()] == [(1, 64)]


@pytest.mark.parametrize("make", [tiny_qwen3_reranker, tiny_cross_encoder_bert, tiny_cross_encoder_xlmr])
def test_weights_in_a_torch_file(tmp_path, make):
    path = make(tmp_path / "m")
    before = score(load_reranker(path), PAIRS)
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    assert torch.equal(score(load_reranker(path), PAIRS), before)


@pytest.mark.parametrize("make", [tiny_cross_encoder_bert, tiny_cross_encoder_xlmr, tiny_qwen3_classifier])
def test_as_transformers_saves_it(tmp_path, make):
    """Today's own writer, in shards: config.json and names as the library of this version has them."""
    path = make(tmp_path / "m", labels=3)
    reading = {"template": "none"} if make is tiny_qwen3_classifier else {}
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    theirs.save_pretrained(tmp_path / "saved", max_shard_size="60KB")
    ids = random_sequences([9, 30], 150)
    ours, saved = load_reranker(path, **reading), load_reranker(tmp_path / "saved", **reading)
    assert saved.folder.reranker.labels == ours.folder.reranker.labels
    torch.testing.assert_close(
        saved(batch_of(saved, ids), ["score"])["score"], ours(batch_of(ours, ids), ["score"])["score"]
    )


def test_id_past_the_matrix(tmp_path):
    path = tiny_qwen3_reranker(tmp_path / "m")
    edit_json(path / "1_LogitScore/config.json", true_token_id=9999)
    with pytest.raises(CheckpointError, match=r"model.embed_tokens.weight in .* has shape .*, and no row 9999"):
        load_reranker(path)


def test_scores_stay_apart_in_half_precision(tmp_path):
    """Report C104 (mteb#4934): the difference is one product in fp32, so near scores do not collapse into ties.

    Rounding each logit to bf16 first, as a bf16 head does, leaves fewer distinct values than pairs.
    """
    path = tiny_qwen3_reranker(tmp_path / "m", extra={}, tied=False)
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] += 4 * torch.randn(64, generator=torch.Generator().manual_seed(0))  # shared by all rows
    save_weights(path, tensors)
    pairs = [(f"query {i}", CORPUS[i % len(CORPUS)]) for i in range(60)]
    half = load_reranker(path, dtype=torch.bfloat16)
    scores = score(half, pairs, torch.bfloat16)
    assert scores.dtype == torch.float32
    assert half.head.weight.dtype == torch.float32
    assert len(scores.unique()) == len(pairs)
    exact = score(load_reranker(path), pairs)[:, 0]
    rounded = published_logits(path, encode_pairs(half.folder, pairs)[0]).bfloat16().float()
    assert len((rounded[:, 0] - rounded[:, 1]).unique()) < len(pairs)
    assert torch.corrcoef(torch.stack([scores[:, 0], exact]))[0, 1] > 0.99


def test_company_does_not_matter(tmp_path):
    for make in (tiny_cross_encoder_bert, tiny_cross_encoder_xlmr, tiny_qwen3_reranker):
        model = load_reranker(make(tmp_path / make.__name__))
        alone = torch.cat([score(model, [pair]) for pair in PAIRS])
        torch.testing.assert_close(score(model, PAIRS), alone, rtol=1e-5, atol=1e-5)


def test_only_scores(tmp_path):
    model = load_reranker(tiny_cross_encoder_bert(tmp_path / "m"))
    with pytest.raises(Unsupported, match="no output 'dense'; there are score"):
        model(batch_of(model, [[5]]), ["dense"])


@pytest.mark.parametrize(
    ("make", "lost", "words"),
    [
        (tiny_cross_encoder_bert, "classifier.weight", r"lacks classifier.weight, which a reranker scores with"),
        (tiny_cross_encoder_bert, "bert.pooler.dense.bias", r"lacks pooler.dense.bias, which a reranker"),
        (tiny_cross_encoder_xlmr, "classifier.out_proj.weight", r"lacks classifier.out_proj.weight, which a reranker"),
        (tiny_qwen3_classifier, "score.weight", r"lacks score.weight, which a reranker"),
    ],
)
def test_lost_heads_are_refused(tmp_path, make, lost, words):
    """Report C101 (llama.cpp#25447): a checkpoint without its classifier is not served, rather than scoring 1e-20."""
    path = make(tmp_path / "m")
    tensors = load_file(path / "model.safetensors")
    del tensors[lost]
    save_weights(path, tensors)
    with pytest.raises(CheckpointError, match=words):
        load_reranker(path, **({"template": "qwen3"} if make is tiny_qwen3_classifier else {}))


def test_untied_head_that_is_not_there(tmp_path):
    """Report C100: without lm_head.weight the score would be 0.5 for every pair."""
    path = tiny_qwen3_reranker(tmp_path / "m", tied=True)
    edit_json(path / "config.json", tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"lacks lm_head.weight, of which the score is made, and tie_word_embed"):
        load_reranker(path)


def test_two_different_matrices_that_are_said_to_be_one(tmp_path):
    path = tiny_qwen3_reranker(tmp_path / "m", tied=False)
    edit_json(path / "config.json", tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=r"lm_head.weight and model.embed_tokens.weight differ"):
        load_reranker(path)


@pytest.mark.parametrize("make", [tiny_bert, tiny_qwen3])
def test_a_model_without_a_head_cannot_rerank(tmp_path, make):
    """Report C101 (llama.cpp#25447): refused with the reason."""
    path = make(tmp_path / "m")
    edit_json(path / "config.json", architectures=["BertModel" if make is tiny_bert else "Qwen3Model"])
    with pytest.raises(CheckpointError, match="has no head that scores a pair: neither a classifier nor a language mo"):
        load_reranker(path, task="rerank")

"""Whole folders against sentence-transformers: pooling, Dense chains, prompts, limits."""

from __future__ import annotations

import pytest
import torch
import transformers
from sentence_transformers import SentenceTransformer

from rose.config import read_model_folder
from tests.support.running import embed, encode, load
from tests.support.tiny_checkpoints import Dense, edit_json, tiny_bert, tiny_qwen3, tiny_xlm_roberta
from tests.support.tiny_tokenizers import CORPUS

TEXTS = [*CORPUS, "a", " ".join(CORPUS[:4]), "Ferry, ferry, ferry!", ""]
TANH, GELU = (f"torch.nn.modules.activation.{name}" for name in ("Tanh", "GELU"))
FOLDERS = {
    "mean": (tiny_bert, {}),
    "mean_new_schema": (tiny_bert, {"legacy": False}),
    "unnormalised": (tiny_bert, {"normalize": False}),
    "cls": (tiny_bert, {"pooling": "cls"}),
    "max": (tiny_bert, {"pooling": "max", "legacy": False}),
    "mean_sqrt_len": (tiny_bert, {"pooling": "mean_sqrt_len_tokens"}),
    "weightedmean": (tiny_bert, {"pooling": "weightedmean"}),
    "concatenated": (tiny_bert, {"pooling": ["cls", "mean", "max"], "normalize": False}),
    "concatenated_in_another_order": (tiny_bert, {"pooling": ["mean", "cls"], "legacy": False}),
    "dense": (tiny_bert, {"dense": [Dense(64, 96, activation=TANH)]}),
    "dense_default_activation": (tiny_bert, {"dense": [Dense(64, 96, activation=None)], "normalize": False}),
    "dense_chain": (
        tiny_bert,
        {
            "dense": [
                Dense(64, 96, bias=False, activation="torch.nn.modules.linear.Identity"),
                Dense(96, 96, activation=GELU, residual=True),
                Dense(96, 40, activation=TANH, residual=True),
            ]
        },
    ),
    "dense_after_concatenation": (tiny_bert, {"pooling": ["max", "mean"], "dense": [Dense(128, 32)]}),
    "short_limit": (tiny_bert, {"max_seq_length": 12}),
    "xlm_roberta_cls": (tiny_xlm_roberta, {"legacy": False}),
    "xlm_roberta_mean": (tiny_xlm_roberta, {"pooling": "mean", "shards": 2}),
    "qwen3_last": (tiny_qwen3, {}),
    "qwen3_weightedmean": (tiny_qwen3, {"pooling": "weightedmean"}),
}


@pytest.fixture(autouse=True)
def _quiet():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def reference(path) -> SentenceTransformer:
    return SentenceTransformer(str(path), device="cpu")


def their_ids(model: SentenceTransformer, texts: list[str]) -> list[list[int]]:
    features = model.preprocess(texts)
    return [
        row[mask == 1].tolist() for row, mask in zip(features["input_ids"], features["attention_mask"], strict=True)
    ]


@pytest.mark.parametrize(("make", "arguments"), FOLDERS.values(), ids=FOLDERS)
def test_same_ids_same_vectors(tmp_path, make, arguments):
    path = make(tmp_path / "m", **arguments)
    theirs, ours = reference(path), load(path)
    ids = encode(ours.folder, TEXTS)
    assert ids == their_ids(theirs, TEXTS)
    expected = torch.from_numpy(theirs.encode(TEXTS, batch_size=7))
    assert expected.shape == (len(TEXTS), ours.folder.dimension)
    torch.testing.assert_close(embed(ours, ids), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("default", [None, "query"])
def test_prompts(tmp_path, default):
    """A prompt is put before the text, character by character, before tokenising."""
    prompts = {"query": "query: ", "passage": "passage: "}
    path = tiny_bert(tmp_path / "m", prompts=prompts, default_prompt_name=default)
    theirs, ours = reference(path), load(path)
    for name in (None, *prompts):
        used = name if name is not None else ours.folder.default_prompt_name
        prompt = ours.folder.prompts[used] if used is not None else ""
        expected = torch.from_numpy(theirs.encode(TEXTS, prompt_name=name))
        vectors = embed(ours, encode(ours.folder, [prompt + text for text in TEXTS]))
        torch.testing.assert_close(vectors, expected, rtol=1e-5, atol=1e-5)


def test_limit_from_the_tokenizer(tmp_path):
    path = tiny_bert(tmp_path / "m")
    edit_json(path / "tokenizer_config.json", model_max_length=20)
    theirs, ours = reference(path), load(path)
    assert ours.folder.max_tokens == theirs.max_seq_length == 20
    long = [" ".join(CORPUS)]
    ids = encode(ours.folder, long)
    assert len(ids[0]) == 20
    assert ids == their_ids(theirs, long)


@pytest.mark.parametrize(
    "arguments", [{}, {"normalize": False}, {"dense": [Dense(64, 48)]}, {"pooling": ["mean", "max"]}]
)
def test_vectors_that_the_folder_cuts(tmp_path, arguments):
    """`truncate_dim` of the folder. Cut vectors are of unit length again where the model normalises; the library leaves
    them shorter."""
    path = tiny_bert(tmp_path / "m", prompts={"query": ""}, **arguments)
    edit_json(path / "config_sentence_transformers.json", truncate_dim=16)
    theirs, ours = reference(path), load(path)
    expected = torch.from_numpy(theirs.encode(TEXTS))
    assert expected.shape == (len(TEXTS), 16)
    assert ours.folder.dimension == ours.outputs["dense"].dimension == 16
    if ours.folder.normalize:
        expected = torch.nn.functional.normalize(expected, dim=1)
    torch.testing.assert_close(embed(ours, encode(ours.folder, TEXTS)), expected, rtol=1e-5, atol=1e-5)


def test_similarity_name(tmp_path):
    path = tiny_bert(tmp_path / "m", prompts={})
    assert read_model_folder(path).similarity == reference(path).similarity_fn_name


def test_as_sentence_transformers_saves_it(tmp_path):
    """Today's own writer: module names, pooling schema and file layout as the library of this version has them."""
    original = tiny_bert(tmp_path / "m", pooling=["cls", "mean"], dense=[Dense(128, 48)], prompts={"query": "q: "})
    theirs = reference(original)
    theirs.save(str(tmp_path / "saved"))
    ours = load(tmp_path / "saved")
    assert ours.folder.pooling.modes == ("cls", "mean")
    assert (ours.folder.dense[0].activation, ours.folder.normalize) == ("tanh", True)
    assert ours.folder.prompts["query"] == "q: "
    expected = torch.from_numpy(theirs.encode(TEXTS))
    torch.testing.assert_close(embed(ours, encode(ours.folder, TEXTS)), expected, rtol=1e-5, atol=1e-5)

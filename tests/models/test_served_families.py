"""The embedders people serve, in their authors' layouts, against sentence-transformers: ids first, then vectors."""

from __future__ import annotations

import pytest
import torch
import transformers
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer

from rose.config import read_model_folder
from rose.convert import load_model
from rose.errors import CheckpointError
from rose.kernels.pool import finish
from tests.support.running import embed, encode, hidden_of, load
from tests.support.tiny_checkpoints import Dense, edit_json, save_weights, tiny_bert, tiny_xlm_roberta
from tests.support.tiny_families import QWEN3_QUERY, tiny_bge_m3, tiny_e5, tiny_qwen3_embedding
from tests.support.tiny_tokenizers import CORPUS

TEXTS = [*CORPUS, "a", "test", "", "5.2", " ".join(CORPUS)]
CLS, MEAN = {"pooling": "cls"}, {"pooling": "mean"}
FAMILIES = {
    "qwen3_embedding": (tiny_qwen3_embedding, {}),
    "qwen3_embedding_untied": (tiny_qwen3_embedding, {"tied": False}),
    "qwen3_embedding_under_model": (tiny_qwen3_embedding, {"prefix": "model."}),
    "qwen3_embedding_short": (tiny_qwen3_embedding, {"max_seq_length": 12}),
    "multilingual_e5_small": (tiny_e5, {}),
    "multilingual_e5_large": (tiny_e5, {"xlm_roberta": True, "max_seq_length": 100}),
    "minilm": (tiny_bert, MEAN | {"max_seq_length": 32}),
    "bge_en": (tiny_bert, CLS | {"prompts": {}}),
    "bge_m3": (tiny_bge_m3, {}),
    "gte_base": (tiny_bert, MEAN),
    "arctic_m": (tiny_bert, CLS | {"prompts": {"query": "Represent this sentence for searching relevant passages: "}}),
    "arctic_l_v2": (tiny_xlm_roberta, CLS | {"prompts": {"query": "query: "}}),
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


@pytest.mark.parametrize(("make", "arguments"), FAMILIES.values(), ids=FAMILIES)
def test_family(tmp_path, make, arguments):
    path = make(tmp_path / "m", **arguments)
    theirs, ours = reference(path), load(path)
    for name in (None, *ours.folder.prompts):
        prompted = [ours.folder.prompts.get(name or "", "") + text for text in TEXTS]
        ids = encode(ours.folder, prompted)
        assert ids == their_ids(theirs, prompted)
        expected = torch.from_numpy(theirs.encode(TEXTS, prompt_name=name, batch_size=7))
        assert torch.cosine_similarity(embed(ours, ids).double(), expected.double()).min() > 0.99999
        torch.testing.assert_close(embed(ours, ids), expected, rtol=0, atol=1e-5)


def test_qwen3_embedding_alone_and_beside_a_longer_text(tmp_path):
    """Report C02 (tei#642): the causal flag, the padding side and the index of the last token, alone and in company."""
    path = tiny_qwen3_embedding(tmp_path / "m")
    edit_json(path / "tokenizer_config.json", padding_side="left")
    theirs, ours = reference(path), load(path)
    assert ours.folder.architecture.causal
    for texts in (["this is a test"], ["this is a test", " ".join(CORPUS[:5])]):
        expected = torch.from_numpy(theirs.encode(texts))
        assert torch.cosine_similarity(embed(ours, encode(ours.folder, texts)), expected).min() > 0.99999


def test_qwen3_query_prompt_has_no_space_behind_it(tmp_path):
    folder = read_model_folder(tiny_qwen3_embedding(tmp_path / "m"))
    assert folder.prompts["query"] == QWEN3_QUERY
    assert QWEN3_QUERY.endswith("Query:")
    spaced, plain = encode(folder, [QWEN3_QUERY + " ferry", QWEN3_QUERY + "ferry"])
    assert spaced != plain


@pytest.mark.parametrize("text", ["test", "", " ".join(CORPUS * 3)], ids=["test", "empty", "truncated"])
def test_last_token_is_the_end_token(tmp_path, text):
    """Report C85 (Qwen3-Embedding#54): the tokenizer's own end token closes every text, the empty and the cut one too,
    and it is not the tokenizer's eos."""
    path = tiny_qwen3_embedding(tmp_path / "m", max_seq_length=40)
    edit_json(path / "tokenizer_config.json", eos_token="the")
    ours = load(path)
    ids = encode(ours.folder, [text])
    assert ids == their_ids(reference(path), [text])
    end = transformers.AutoTokenizer.from_pretrained(path).convert_tokens_to_ids("<|endoftext|>")
    assert ids[0][-1] == end
    assert len(ids[0]) <= 40


def test_first_real_token_under_left_padding(tmp_path):
    """Report C09 (sentence-transformers#3208): CLS pooling takes the first token of the text, wherever a padded batch
    would have put it."""
    path = tiny_bert(tmp_path / "m", pooling="cls", normalize=False)
    edit_json(path / "tokenizer_config.json", padding_side="left")
    ours = load(path)
    ids = encode(ours.folder, [CORPUS[0], "a"])
    assert len(ids[0]) > len(ids[1])
    rows = [hidden_of(ours, [own])[0][0] for own in ids]
    torch.testing.assert_close(embed(ours, ids), torch.stack(rows), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [tiny_bert, tiny_xlm_roberta])
def test_short_text_beside_a_long_one(tmp_path, make):
    """Report C11 (ReProver#34): without a mask the answer for "abc" depended on the longest text of its batch."""
    ours = load(make(tmp_path / "m", max_positions=512, pooling="mean"))
    short, long = encode(ours.folder, ["abc", " ".join(CORPUS * 3)])
    assert len(long) >= 400
    torch.testing.assert_close(embed(ours, [short, long])[:1], embed(ours, [short]), rtol=1e-5, atol=1e-5)


def test_dense_module_sets_the_dimension(tmp_path):
    """Report C71 (vllm#15509): the Dense module is applied, and the final dimension is the one that is told."""
    path = tiny_bert(tmp_path / "m", dense=[Dense(64, 96)])
    ours = load(path)
    assert ours.outputs["dense"].dimension == ours.folder.dimension == 96
    expected = torch.from_numpy(reference(path).encode(TEXTS))
    torch.testing.assert_close(embed(ours, encode(ours.folder, TEXTS)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "guess"), [(tiny_bert, "mean"), (tiny_xlm_roberta, "mean"), (tiny_qwen3_embedding, "last")]
)
def test_no_pooling_stated_means_no_pooling_guessed(tmp_path, make, guess):
    """Report C84 (sentence-transformers#2779): a plain backbone is refused with the flag that settles it; settled as
    the reference library guesses, it answers as that does."""
    path = make(tmp_path / "m", pooling=None)
    with pytest.raises(
        CheckpointError, match="does not say how tokens are pooled into a vector; settle it with --pool"
    ):
        load_model(read_model_folder(path))
    ours = load(path, pooling=guess)
    assert ours.folder.pooling.source == "the caller's choice"
    expected = torch.from_numpy(reference(path).encode(TEXTS[:5]))
    torch.testing.assert_close(embed(ours, encode(ours.folder, TEXTS[:5])), expected, rtol=1e-5, atol=1e-5)


def test_language_models_are_told_of_the_other_way_out(tmp_path):
    path = tiny_qwen3_embedding(tmp_path / "m", pooling=None)
    with pytest.raises(CheckpointError, match=r"--pooling mean, cls or last, or say --task rerank if it scores pairs"):
        read_model_folder(path, task="embed")


@pytest.mark.parametrize(
    ("config", "causal", "source"),
    [
        ({}, True, "default of qwen3"),
        ({"is_causal": False}, False, "config.json: is_causal"),
        ({"use_bidirectional_attention": True}, False, "config.json: use_bidirectional_attention"),
        ({"is_causal": True}, True, "config.json: is_causal"),
    ],
)
def test_attention_mode_is_explicit(tmp_path, config, causal, source):
    """Report C86 (vllm#16892): what a token sees, and which line said so, is a recorded fact that the model obeys."""
    ours = load(tiny_qwen3_embedding(tmp_path / "m", config=config))
    shape = ours.folder.architecture
    assert (shape.causal, shape.causal_source) == (causal, source)
    rows = [hidden_of(ours, [ids])[0][0] for ids in ([7, 8, 9], [7, 8, 10])]
    assert torch.allclose(*rows, atol=1e-6) == causal


def test_contradictory_attention_is_refused(tmp_path):
    """Report C86: two keys that disagree are settled by the caller, not by their order."""
    path = tiny_qwen3_embedding(tmp_path / "m", config={"is_causal": True, "use_bidirectional_attention": True})
    with pytest.raises(CheckpointError, match=r"contradictory .*settle it with --causal or --bidirectional"):
        read_model_folder(path)
    assert read_model_folder(path, causal=False).architecture.causal_source == "the caller's choice"


def test_e5_as_bert_and_as_xlm_roberta(tmp_path):
    """The same weights either way: two unused rows before the position table, and one token type instead of two."""
    bert = tiny_e5(tmp_path / "bert")
    xlmr = tiny_e5(tmp_path / "xlmr", xlm_roberta=True)
    tensors = load_file(bert / "model.safetensors")
    table = tensors["embeddings.position_embeddings.weight"]
    tensors["embeddings.position_embeddings.weight"] = torch.cat([torch.zeros(2, 64), table])
    tensors["embeddings.token_type_embeddings.weight"] = tensors["embeddings.token_type_embeddings.weight"][:1].clone()
    save_weights(xlmr, tensors)
    rows = len(tensors["embeddings.word_embeddings.weight"])
    edit_json(xlmr / "config.json", vocab_size=rows, layer_norm_eps=1e-12)
    ids = encode(read_model_folder(bert), ["query: " + text for text in CORPUS])
    assert torch.equal(embed(load(bert), ids), embed(load(xlmr), ids))


def test_norms_of_tiny_and_huge_vectors():
    """Report C27 (model2vec#368): the length is taken in fp32, so neither 1e4 nor 1e-6 breaks it, and zero stays."""
    rows = torch.randn(4, 64).half()
    scaled = torch.stack([rows[0] * 0, rows[1] * 1e4, rows[2].float().mul(1e-6).half(), rows[3]])
    assert bool(torch.isfinite(scaled).all())
    unit = finish(scaled.float(), "l2")
    assert not unit[0].any()
    torch.testing.assert_close(unit[1:].norm(dim=-1), torch.ones(3))

"""Embedders on Qwen3.5: causal as the library runs it, and with attending layers that see both ways."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from sentence_transformers import SentenceTransformer

from rose.cli import main
from rose.config import read_model_folder
from rose.errors import CheckpointError
from tests.support.running import embed, encode, hidden_of, load, random_sequences
from tests.support.tiny_qwen3_5 import tiny_qwen3_5
from tests.support.tiny_tokenizers import CORPUS

LENGTHS = [11, 1, 64, 65, 2, 130]
LAYOUTS = ["text", "bare_text", "multimodal", "bare_multimodal"]


@pytest.fixture(autouse=True)
def _quiet():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def reference(path: Path):
    return transformers.Qwen3_5ForCausalLM.from_pretrained(path, dtype=torch.float32).model.eval()


@torch.inference_mode()
def expected_rows(model, sequences: list[list[int]], *, all_to_all: bool = False) -> list[torch.Tensor]:
    """Each sequence alone, unpadded. A mask of the attending layers alone makes them see both ways."""
    rows = []
    for ids in sequences:
        n = len(ids)
        mask = {"full_attention": torch.zeros(1, 1, n, n), "linear_attention": None} if all_to_all else None
        rows.append(model(input_ids=torch.tensor([ids]), attention_mask=mask).last_hidden_state[0])
    return rows


@pytest.mark.parametrize("all_to_all", [False, True], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("layout", ["text", "multimodal"])
def test_hidden_rows(tmp_path, layout, all_to_all):
    path = tiny_qwen3_5(tmp_path / "m", layout, pooling="lasttoken", config={"is_causal": not all_to_all})
    sequences = random_sequences(LENGTHS, 400)
    expected = expected_rows(reference(path), sequences, all_to_all=all_to_all)
    for mine, their in zip(hidden_of(load(path), sequences), expected, strict=True):
        torch.testing.assert_close(mine, their, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_prefix_loads(tmp_path, layout):
    """The same weights under four prefixes give the same vectors, tower and further heads or not."""
    expected = embed(load(tiny_qwen3_5(tmp_path / "text", pooling="mean")), random_sequences(LENGTHS, 400))
    found = embed(load(tiny_qwen3_5(tmp_path / "m", layout, pooling="mean")), random_sequences(LENGTHS, 400))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("pooling", ["lasttoken", "mean"])
def test_against_sentence_transformers(tmp_path, pooling):
    path = tiny_qwen3_5(tmp_path / "m", "bare_text", pooling=pooling, prompts={"query": "query: "})
    theirs, ours = SentenceTransformer(str(path), device="cpu"), load(path)
    texts = [*CORPUS, "a", "5.2", " ".join(CORPUS)]
    for name in (None, "query"):
        prompted = [ours.folder.prompts.get(name or "", "") + text for text in texts]
        expected = torch.from_numpy(theirs.encode(texts, prompt_name=name, batch_size=5))
        found = embed(ours, encode(ours.folder, prompted))
        assert torch.cosine_similarity(found.double(), expected.double()).min() > 0.99999
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("causal", [True, False])
def test_a_row_is_the_same_alone(tmp_path, causal):
    """Neither convolution, state nor attention of one text reaches another, whatever lies before it in the batch."""
    model = load(tiny_qwen3_5(tmp_path / "m", pooling="mean"), causal=causal)
    sequences = random_sequences([70, 1, 3, 64, 129], 400)
    together = embed(model, sequences)
    for index, ids in enumerate(sequences):
        torch.testing.assert_close(embed(model, [ids])[0], together[index], rtol=1e-5, atol=1e-5)
    turned = embed(model, sequences[::-1]).flip(0)
    torch.testing.assert_close(turned, together, rtol=1e-5, atol=1e-5)


def test_which_way_attention_sees(tmp_path):
    """Causal: an earlier row does not change with what follows. Both ways: behind the first attending layer it does."""
    for causal in (True, False):
        model = load(tiny_qwen3_5(tmp_path / str(causal), pooling="mean"), causal=causal)
        rows = [hidden_of(model, [ids])[0][0] for ids in ([7, 8, 9], [7, 8, 10])]
        assert torch.allclose(*rows, atol=1e-6) == causal


def test_a_folder_for_vectors_needs_its_pooling(tmp_path):
    path = tiny_qwen3_5(tmp_path / "m", "bare_multimodal")
    with pytest.raises(CheckpointError, match="does not say how tokens are pooled"):
        read_model_folder(path)
    assert read_model_folder(path, pooling="last").pooling.modes == ("last",)


@pytest.mark.parametrize("layout", ["text", "multimodal"])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_converted_to_an_embedder(tmp_path, layout, bidirectional):
    """The text model by itself, in a folder that transformers loads too; tower and further heads stay behind."""
    source = tiny_qwen3_5(
        tmp_path / "lm", layout, config={"retrieval_attention_contract": "causal"}, dtype=torch.bfloat16
    )
    ways = ["--bidirectional"] if bidirectional else []
    assert (
        main(["convert", str(source), "-o", str(tmp_path / "m"), "--to", "embedder", "--pooling", "mean", *ways]) == 0
    )
    ours = load(tmp_path / "m")
    shape = ours.folder.architecture
    assert (shape.architecture, shape.model_type) == ("Qwen3_5TextModel", "qwen3_5_text")
    assert shape.causal == (not bidirectional)
    sequences = random_sequences(LENGTHS, 400)
    theirs = transformers.AutoModel.from_pretrained(tmp_path / "m", dtype=torch.float32).eval()
    assert type(theirs).__name__ == "Qwen3_5TextModel"
    expected = expected_rows(theirs, sequences, all_to_all=bidirectional)
    for mine, their in zip(hidden_of(ours, sequences), expected, strict=True):
        torch.testing.assert_close(mine, their, rtol=1e-4, atol=1e-4)

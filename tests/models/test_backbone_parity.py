"""Hidden rows against transformers on the same random weights, in fp32, to 1e-5."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.support.running import batch_of, hidden_of, load, random_sequences
from tests.support.tiny_checkpoints import edit_json, read_json, tiny_bert, tiny_qwen3, tiny_xlm_roberta

LENGTHS = [11, 1, 40, 11, 11, 2]
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(autouse=True)
def _quiet():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def reference(path: Path):
    """transformers' own model of a folder."""
    return transformers.AutoModel.from_pretrained(path, dtype=torch.float32).eval()


def bidirectional_qwen3(path: Path):
    """transformers has no class for pplx-embed: Qwen3Model with its weights, to be run under an all-to-all mask."""
    config = transformers.Qwen3Config.from_dict(read_json(path / "config.json") | {"model_type": "qwen3"})
    model = transformers.Qwen3Model(config)
    model.load_state_dict(load_file(path / "model.safetensors"))
    return model.eval()


@torch.inference_mode()
def expected_rows(model, sequences: list[list[int]], *, all_to_all: bool = False) -> list[torch.Tensor]:
    """Each sequence alone, unpadded."""
    rows = []
    for ids in sequences:
        mask = torch.zeros(1, 1, len(ids), len(ids)) if all_to_all else torch.ones(1, len(ids))
        rows.append(model(input_ids=torch.tensor([ids]), attention_mask=mask).last_hidden_state[0])
    return rows


def assert_rows(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for mine, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, their, **TOLERANCE)


@pytest.mark.parametrize(
    "config",
    [{}, {"hidden_act": "gelu_new"}, {"hidden_act": "relu"}, {"layer_norm_eps": 1e-3}],
    ids=["plain", "gelu_new", "relu", "eps"],
)
def test_bert(tmp_path, config):
    path = tiny_bert(tmp_path / "m", config=config)
    sequences = random_sequences(LENGTHS, 400)
    assert_rows(hidden_of(load(path), sequences), expected_rows(reference(path), sequences))


def test_bert_token_types(tmp_path):
    path = tiny_bert(tmp_path / "m")
    model, theirs = load(path), reference(path)
    ids, types = random_sequences([9], 400)[0], [0] * 4 + [1] * 5
    batch = batch_of(model, [ids])
    batch.type_ids = torch.tensor(types, dtype=torch.int32)
    with torch.inference_mode():
        expected = theirs(input_ids=torch.tensor([ids]), token_type_ids=torch.tensor([types])).last_hidden_state[0]
        torch.testing.assert_close(model.backbone(batch), expected, **TOLERANCE)


def test_bert_as_a_decoder_is_causal(tmp_path):
    path = tiny_bert(tmp_path / "m", config={"is_decoder": True})
    sequences = random_sequences([11, 1, 20], 400)
    assert_rows(hidden_of(load(path), sequences), expected_rows(reference(path), sequences))


@pytest.mark.parametrize("model_type", ["xlm-roberta", "roberta", "camembert"])
def test_roberta_family(tmp_path, model_type):
    """Report C80 (sentence-transformers#3879): in a packed batch every sequence's positions begin at pad id + 1."""
    name = {"xlm-roberta": "XLMRobertaModel", "roberta": "RobertaModel", "camembert": "CamembertModel"}[model_type]
    path = tiny_xlm_roberta(tmp_path / "m", config={"model_type": model_type, "architectures": [name]})
    theirs = reference(path)
    assert type(theirs).__name__ == name
    sequences = random_sequences(LENGTHS, 150)
    assert_rows(hidden_of(load(path), sequences), expected_rows(theirs, sequences))


def test_roberta_positions_by_row(tmp_path):
    """The second sequence of a pack starts at row 2 of the table, as the first does, and its last row is reachable."""
    path = tiny_xlm_roberta(tmp_path / "m", max_positions=16)
    model = load(path)
    sequences = random_sequences([5, 16], 150)
    alone = hidden_of(model, [sequences[1]])[0]
    torch.testing.assert_close(hidden_of(model, sequences)[1], alone, **TOLERANCE)
    position = model.backbone.embeddings.position_embeddings.weight
    assert position.shape[0] == 18
    before = hidden_of(model, sequences)
    position[:2] += 1  # rows that no token reaches
    assert all(torch.equal(a, b) for a, b in zip(before, hidden_of(model, sequences), strict=True))
    position[2] += torch.arange(64.0) / 64
    for a, b in zip(before, hidden_of(model, sequences), strict=True):
        assert not torch.allclose(a, b, atol=1e-3)


def test_padded_reference_agrees_too(tmp_path):
    """The same against one padded batch, which is how the reference library runs in practice."""
    path = tiny_xlm_roberta(tmp_path / "m")
    sequences = random_sequences(LENGTHS, 150)
    longest = max(LENGTHS)
    ids = torch.tensor([ids + [1] * (longest - len(ids)) for ids in sequences])
    with torch.inference_mode():
        out = reference(path)(input_ids=ids, attention_mask=(ids != 1).long()).last_hidden_state
    assert_rows(hidden_of(load(path), sequences), [row[:n] for row, n in zip(out, LENGTHS, strict=True)])


QWEN_SHAPES = {
    "head_dim_above": {"head_dim": 32},  # 4 heads of 32 on a width of 64, as the 0.6B model has 16 of 128 on 1024
    "head_dim_below": {"head_dim": 8},
    "one_kv_head": {"num_kv_heads": 1},
    "no_grouping": {"num_kv_heads": 4},
    "bias": {"config": {"attention_bias": True}},
    "theta": {"config": {"rope_theta": 5000.0}},
}


@pytest.mark.parametrize("shape", QWEN_SHAPES.values(), ids=QWEN_SHAPES)
def test_qwen3_causal(tmp_path, shape):
    path = tiny_qwen3(tmp_path / "m", **shape)
    sequences = random_sequences(LENGTHS, 400)
    assert_rows(hidden_of(load(path), sequences), expected_rows(reference(path), sequences))


@pytest.mark.parametrize("shape", QWEN_SHAPES.values(), ids=QWEN_SHAPES)
def test_qwen3_bidirectional(tmp_path, shape):
    path = tiny_qwen3(tmp_path / "m", bidirectional=True, **shape)
    sequences = random_sequences(LENGTHS, 400)
    expected = expected_rows(bidirectional_qwen3(path), sequences, all_to_all=True)
    assert_rows(hidden_of(load(path), sequences), expected)
    causal = hidden_of(load(path, causal=True), sequences)
    assert_rows(causal, expected_rows(bidirectional_qwen3(path), sequences))
    assert not torch.allclose(causal[0][0], expected[0][0], atol=1e-2)  # the two modes are told apart


def test_qwen3_far_positions(tmp_path):
    """The rotary table is the reference's bit for bit, so that long sequences do not drift."""
    path = tiny_qwen3(tmp_path / "m", max_positions=40960, head_dim=128, num_heads=2, num_kv_heads=1, num_layers=1)
    theirs = reference(path)
    position = torch.arange(40960)[None]
    cos, sin = theirs.rotary_emb(torch.zeros(1), position)
    table = load(path).backbone.rotary.table
    torch.testing.assert_close(table, torch.cat([cos[0, :, :64], sin[0, :, :64]], dim=-1), rtol=0, atol=0)


@pytest.mark.parametrize("make", [tiny_bert, tiny_xlm_roberta, tiny_qwen3])
def test_as_transformers_saves_it(tmp_path, make):
    """config.json in the newest spelling (rope_parameters, dtype), names and shards as save_pretrained writes them."""
    theirs = reference(make(tmp_path / "ours"))
    theirs.save_pretrained(tmp_path / "saved", max_shard_size="60KB")
    assert (tmp_path / "saved/model.safetensors.index.json").exists()
    sequences = random_sequences(LENGTHS, 150)
    ours = load(tmp_path / "saved", pooling="mean")
    assert ours.folder.architecture.rope_theta == (1e6 if make is tiny_qwen3 else None)
    assert_rows(hidden_of(ours, sequences), expected_rows(theirs, sequences))


def test_language_model_as_transformers_saves_it(tmp_path):
    """Prefix "model.", one name of the tied pair."""
    path = tiny_qwen3(tmp_path / "ours")
    lm = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    lm.save_pretrained(tmp_path / "saved")
    assert "model.norm.weight" in load_file(tmp_path / "saved/model.safetensors")
    sequences = random_sequences(LENGTHS, 400)
    ours = load(tmp_path / "saved", pooling="last")
    assert_rows(hidden_of(ours, sequences), expected_rows(lm.model, sequences))


def test_masked_language_model_as_transformers_saves_it(tmp_path):
    path = tiny_bert(tmp_path / "ours")
    lm = transformers.BertForMaskedLM.from_pretrained(path, dtype=torch.float32).eval()
    lm.save_pretrained(tmp_path / "saved")
    edit_json(tmp_path / "saved/config.json", architectures=["BertForMaskedLM"])
    sequences = random_sequences(LENGTHS, 400)
    assert_rows(hidden_of(load(tmp_path / "saved", pooling="mean"), sequences), expected_rows(lm.bert, sequences))

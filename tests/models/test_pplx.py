"""pplx-embed: the backbone under an all-to-all mask, the published head maths, and chunks pooled each by itself."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer

from rose.config import read_model_folder
from rose.errors import CheckpointError, Unsupported
from rose.kernels.pool import finish_ref
from tests.support.running import batch_of, embed, encode, load, random_sequences
from tests.support.tiny_checkpoints import Dense, edit_json, read_json, tiny_bert, tiny_xlm_roberta, write_json
from tests.support.tiny_families import tiny_pplx, tiny_pplx_context, tiny_qwen3_embedding
from tests.support.tiny_tokenizers import CORPUS

FORMS = ["dense", "int8", "binary"]
# Shapes in which head_dim is not hidden_size / num_heads, as in both published sizes (128 on 1024 / 16 and 2560 / 32).
SHAPES = {
    "0.6b": {"hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32},
    "4b": {"hidden_size": 80, "num_heads": 8, "num_kv_heads": 2, "head_dim": 16, "num_layers": 3},
}


@torch.inference_mode()
def reference_rows(path, ids) -> list[torch.Tensor]:
    """Final hidden rows in fp64, by transformers' Qwen3Model; the model's own class is not in any library."""
    config = transformers.Qwen3Config.from_dict(read_json(path / "config.json") | {"model_type": "qwen3"})
    tensors = {name.removeprefix("model."): t for name, t in load_file(path / "model.safetensors").items()}
    model = transformers.Qwen3Model(config)
    model.load_state_dict(tensors)
    model = model.double().eval()
    masks = [torch.zeros(1, 1, len(own), len(own), dtype=torch.float64) for own in ids]
    return [
        model(input_ids=torch.tensor([own]), attention_mask=mask).last_hidden_state[0]
        for own, mask in zip(ids, masks, strict=True)
    ]


def check_forms(out, pooled) -> None:
    """All three forms against the fp64 mean: published tolerances, and at least 99.9 % of the codes equal."""
    assert torch.cosine_similarity(out["dense"].double(), pooled).min() > 0.99999
    codes = np.clip(np.rint(np.tanh(pooled.numpy()) * 127), -128, 127)
    assert out["int8"].dtype == torch.int8
    off = np.abs(out["int8"].numpy().astype(int) - codes)
    assert off.max() <= 1
    assert (off == 0).mean() >= 0.999
    bits = np.unpackbits(out["binary"].numpy(), axis=-1, bitorder="little").astype(bool)
    clear = pooled.abs().numpy() > 1e-4
    assert np.array_equal(bits[clear], (pooled.numpy() >= 0)[clear])


@pytest.mark.parametrize("prefix", ["", "model."], ids=["bare_names", "model_names"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_outputs_against_the_published_maths(tmp_path, shape, prefix):
    """Report C88 (mlx-embeddings#78): head_dim from the config, q/k norm before rotary, tied, no layer causal."""
    path = tiny_pplx(tmp_path / "m", prefix=prefix, **shape)
    model = load(path)
    assert not model.folder.architecture.causal
    ids = random_sequences([40, 3, 17, 1, 64, 30, 22], 400) * 3
    pooled = torch.stack([rows.mean(0) for rows in reference_rows(path, ids)])
    check_forms(model(batch_of(model, ids), FORMS), pooled)


def test_int8_is_the_rounded_tanh_of_an_unnormalised_mean(tmp_path):
    """Report C89 (tei#824): codes in -127..127 that a normalisation would have squeezed into a few."""
    model = load(tiny_pplx(tmp_path / "m"))
    assert not model.folder.normalize
    out = model(batch_of(model, random_sequences([9, 30, 4], 400)), ["int8", "dense"])
    assert not model.outputs["dense"].normalized
    assert int(out["int8"].int().abs().max()) > 60
    squeezed = torch.nn.functional.normalize(out["dense"], dim=-1).tanh() * 127
    assert squeezed.abs().max() < 60


def test_golden_codes(tmp_path):
    """Report C89: values worked out by hand: halves go to the even code, as in numpy and torch; nothing wraps round."""
    model = load(tiny_pplx(tmp_path / "m", hidden_size=8, num_heads=1, num_kv_heads=1, head_dim=8))
    half = np.arctanh(np.float64(2.5) / 127)
    rows = torch.tensor([[0.0, half, -half, 1.0, -1.0, 20.0, -20.0, 0.3]], dtype=torch.float64)
    # 127 tanh(1) = 96.72, 127 tanh(0.3) = 37.00
    assert np.rint(np.tanh(rows.numpy()) * 127).tolist() == [[0, 2, -2, 97, -97, 127, -127, 37]]
    assert finish_ref(rows, "tanh_int8").tolist() == [[0, 2, -2, 97, -97, 127, -127, 37]]
    assert model.folder.quantizer == "tanh_int8"


@pytest.mark.parametrize("kind", ["st_quantize.FlexibleQuantizer", "custom.st_quantize.FlexibleQuantizer"])
def test_quantiser_module_by_its_last_name(tmp_path, kind):
    path = tiny_pplx(tmp_path / "m")
    modules = read_json(path / "modules.json")
    modules[-1]["type"] = kind
    write_json(path / "modules.json", modules)
    assert list(load(path).outputs) == FORMS


def test_prefixes_of_the_codes_are_codes_of_the_prefixes(tmp_path):
    """Quantising goes value by value, so a Matryoshka cut may come before or after it."""
    model = load(tiny_pplx(tmp_path / "m"))
    out = model(batch_of(model, random_sequences([9, 30], 400)), FORMS)
    cut = out["dense"][:, :24].double()
    assert torch.equal(out["int8"][:, :24], (cut.tanh() * 127).round().to(torch.int8))
    bits = np.packbits((cut >= 0).numpy(), axis=-1, bitorder="little")
    assert np.array_equal(out["binary"][:, :3].numpy(), bits)


CHUNKS = [list(CORPUS[:3]), [CORPUS[4]], [CORPUS[5], "", "a", CORPUS[8], CORPUS[9]]]


def late_chunks(folder, documents):
    """As the front joins them: ids of each document with the separator between chunks, and a span a chunk."""
    tokenizer = Tokenizer.from_file(str(folder.backbone_path / "tokenizer.json"))
    sequences, spans = [], []
    for chunks in documents:
        ids: list[int] = []
        own = []
        for index, chunk in enumerate(chunks):
            ids += [folder.separator_id] if index else []
            start = len(ids)
            ids += tokenizer.encode(chunk, add_special_tokens=False).ids
            own.append((start, len(ids)))
        sequences.append(ids)
        spans.append(own)
    return sequences, spans


def test_late_chunking(tmp_path):
    """A vector a chunk out of one sequence a document; separators and empty chunks in no mean."""
    path = tiny_pplx_context(tmp_path / "m")
    model = load(path)
    sequences, spans = late_chunks(model.folder, CHUNKS)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    joined = [tokenizer.sep_token.join(chunks) for chunks in CHUNKS]
    assert sequences == tokenizer(joined, add_special_tokens=False)["input_ids"]
    out = model(batch_of(model, sequences, spans=spans), FORMS)
    expected = []
    for rows, own in zip(reference_rows(path, sequences), spans, strict=True):
        expected += [rows[a:b].mean(0) if b > a else torch.zeros(64, dtype=torch.float64) for a, b in own]
    assert [len(rows) for rows in out.values()] == [9, 9, 9]
    full = [i for i, (a, b) in enumerate(bound for own in spans for bound in own) if b > a]
    check_forms({name: rows[full] for name, rows in out.items()}, torch.stack(expected)[full])
    empty = ({*range(9)} - {*full}).pop()
    assert not out["dense"][empty].any()
    assert not out["int8"][empty].any()
    assert out["binary"][empty].unique().tolist() == [255]  # x >= 0 holds for zero


def test_chunks_see_their_document(tmp_path):
    """That is what late chunking is for: the same chunk beside another one has another vector; alone it is plain."""
    model = load(tiny_pplx_context(tmp_path / "m"))

    def first(document):
        sequences, spans = late_chunks(model.folder, [document])
        return model(batch_of(model, sequences, spans=spans), ["dense"])["dense"][0]

    a = first([CORPUS[0], CORPUS[1]])
    assert not torch.allclose(a, first([CORPUS[0], CORPUS[2]]), atol=1e-3)
    alone = embed(model, encode(model.folder, [CORPUS[0]]))[0]
    torch.testing.assert_close(first([CORPUS[0]]), alone)


def test_separator_is_told_by_place_never_by_id(tmp_path):
    """Padding and separator have one id: a span that holds it counts it, and the rows behind the last span do not
    count, whatever their id is."""
    path = tiny_pplx_context(tmp_path / "m")
    model = load(path)
    folder = model.folder
    config = read_json(path / "tokenizer_config.json")
    assert config["pad_token"] == config["sep_token"] == folder.separator
    ids = [7, 8, folder.separator_id, 9, folder.separator_id, folder.separator_id]
    rows = reference_rows(path, [ids])[0]
    out = model(batch_of(model, [ids], spans=[[(0, 4), (3, 4), (0, 6)]]), ["dense"])["dense"].double()
    expected = torch.stack([rows[:4].mean(0), rows[3:4].mean(0), rows.mean(0)])
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)


def test_context_folder(tmp_path):
    folder = read_model_folder(tiny_pplx_context(tmp_path / "m"))
    assert (folder.contextual, folder.quantizer, folder.normalize) == (True, "tanh_int8", False)
    assert (folder.pooling.modes, folder.pooling.source) == (("mean",), "the code of PPLXQwen3ContextualModel")
    assert folder.separator == "<|endoftext|>"
    assert not read_model_folder(tiny_pplx(tmp_path / "v1")).contextual


def test_context_folder_without_a_separator(tmp_path):
    path = tiny_pplx_context(tmp_path / "m")
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        edit_json(path / name, sep_token=None)
    with pytest.raises(CheckpointError, match="joins chunks by a separator, and its tokenizer's files name no sep_tok"):
        load(path)


def test_added_token_with_flags(tmp_path):
    path = tiny_pplx_context(tmp_path / "m")
    edit_json(path / "tokenizer_config.json", sep_token={"content": "<|endoftext|>", "special": True})
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    expected = [t["id"] for t in tokenizer["added_tokens"] if t["content"] == "<|endoftext|>"]
    assert [read_model_folder(path).separator_id] == expected


def test_ids_listed_beside_the_tokenizer(tmp_path):
    """As older tokenizer files have it; the vocabulary of megabytes then needs no reading."""
    path = tiny_pplx_context(tmp_path / "m")
    expected = read_model_folder(path).separator_id
    listed = {str(expected): {"content": "<|endoftext|>", "special": True}}
    edit_json(path / "tokenizer_config.json", added_tokens_decoder=listed)
    (path / "tokenizer.json").rename(tmp_path / "elsewhere.json")
    assert read_model_folder(path).separator_id == expected


def test_spans_of_any_mean_pooled_model(tmp_path):
    """Dense modules and normalisation follow each chunk's mean as they follow a sentence's."""
    model = load(tiny_bert(tmp_path / "m", dense=[Dense(64, 40)]))
    ids = random_sequences([12, 5], 400)
    whole = [[(0, 12)], [(0, 5)]]
    torch.testing.assert_close(
        model(batch_of(model, ids, spans=whole), ["dense"])["dense"], embed(model, ids), rtol=1e-6, atol=1e-6
    )
    parts = model(batch_of(model, ids, spans=[[(1, 4), (4, 9), (2, 11)], []]), ["dense"])["dense"]
    assert parts.shape == (3, 40)
    torch.testing.assert_close(parts.norm(dim=-1), torch.ones(3))


def test_no_spans_at_all(tmp_path):
    model = load(tiny_pplx_context(tmp_path / "m"))
    out = model(batch_of(model, [[5, 6]], spans=[[]]), FORMS)
    assert {name: tuple(rows.shape) for name, rows in out.items()} == {
        "dense": (0, 64),
        "int8": (0, 64),
        "binary": (0, 8),
    }


@pytest.mark.parametrize(("make", "mode"), [(tiny_xlm_roberta, "cls"), (tiny_qwen3_embedding, "last")])
def test_spans_need_a_mean(tmp_path, make, mode):
    model = load(make(tmp_path / "m"))
    assert model.spans_unavailable == f"parts are pooled by their mean, this model by {mode}"
    with pytest.raises(Unsupported, match="parts are pooled by their mean") as caught:
        model(batch_of(model, [[5, 6, 7]], spans=[[(0, 2)]]), ["dense"])
    assert caught.value.param == "spans"

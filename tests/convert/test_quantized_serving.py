"""Quantised models where they are served: over pages, in company, and with real weights."""

from __future__ import annotations

import json

import pytest
import torch

from rose.cli import main
from rose.config import read_model_folder
from rose.convert import load_generative
from rose.layers.quantized import QuantizedLinear, carry_codes, codes_of
from tests.support.corpora import udhr_paragraphs
from tests.support.paged_session import PagedSession
from tests.support.quantized_folders import quantize_folder
from tests.support.running import embed, load, logits_of, random_sequences
from tests.support.tiny_checkpoints import tiny_bert
from tests.support.tiny_language_models import tiny_lm

WIDE = {"hidden_size": 128, "intermediate_size": 256}


@pytest.mark.parametrize("dialect", ["tensor-static", "channel-token", "fp8-block", "int8"])
def test_token_by_token_is_the_whole_at_once(tmp_path, dialect):
    """A prompt in chunks and its continuation over a cache: a row's scale depends on the row alone."""
    path = tiny_lm(tmp_path / "q", **WIDE)
    quantize_folder(path, dialect)
    model = load_generative(read_model_folder(path))
    (ids,) = random_sequences([13], 150)
    session = PagedSession(model)
    rows = [session.run([(0, ids[:6])]), session.run([(0, ids[6:9])])]
    rows += [session.run([(0, [token])]) for token in ids[9:]]
    whole = logits_of(model, [ids], every_row=True)[[5, 8, 9, 10, 11, 12]]
    similar = torch.nn.functional.cosine_similarity(torch.cat(rows), whole)
    # Sums of other lengths may turn over a code that lies between two.
    assert similar.min() > 0.9995


@pytest.mark.parametrize("dialect", ["tensor-static", "channel-token", "fp8-block", "int8"])
def test_company_changes_nothing(tmp_path, dialect):
    path = tiny_bert(tmp_path / "q", **WIDE)
    quantize_folder(path, dialect)
    model, sequences = load(path), random_sequences([9, 4, 20], 150)
    alone = torch.cat([embed(model, [own]) for own in sequences])
    assert torch.nn.functional.cosine_similarity(embed(model, sequences), alone).min() > 0.9999


def test_codes_travel_with_their_rows_and_with_nothing_else():
    x, codes = torch.randn(3, 4), torch.zeros(3, 4)
    assert codes_of(carry_codes(x, codes)) is codes
    assert codes_of(x[:2]) is None
    assert codes_of(x + 1) is None
    with pytest.raises(ValueError, match="settled beforehand"):
        QuantizedLinear(codes, torch.ones(1), "static", dtype=torch.float32)
    with pytest.raises(ValueError, match="goes with blocks"):
        QuantizedLinear(codes, torch.ones(1), "group", dtype=torch.float32)


@pytest.mark.weights
@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["fp8-tensor", "int8"])
def test_minilm_holds_the_float8_gate_nearly_whole(tmp_path, minilm_folder, capsys, scheme):
    """A fourth of the layers may stay plain at most, and retrieval must not feel it."""
    texts = [text for article in udhr_paragraphs("eng") for text in article if len(text) > 60]
    data = tmp_path / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    judgements = tmp_path / "queries.jsonl"
    queries = [{"query": " ".join(text.split()[:8]), "relevant": [at]} for at, text in enumerate(texts)]
    judgements.write_text("".join(json.dumps(query) + "\n" for query in queries), encoding="utf-8")
    made = tmp_path / "made"
    options = ["--data", str(data), "--scheme", scheme, "-o", str(made), "--json", "--probe-tokens", "512"]
    assert main(["calibrate", str(minilm_folder), *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["layers_quantised"] >= 18
    size = sum(file.stat().st_size for file in made.glob("*.safetensors"))
    saved = 3 * report["parameters_quantised"]  # four bytes were stored for each
    assert size == pytest.approx((minilm_folder / "model.safetensors").stat().st_size - saved, rel=0.005)
    checked = ["--data", str(data), "--judgements", str(judgements), "--json"]
    main(["verify", str(minilm_folder), str(made), *checked])
    verified = json.loads(capsys.readouterr().out)
    assert all(one["passed"] for one in verified["checks"] if one["measure"].endswith("cosine"))
    # 47 queries: one whose text falls to the second place takes 0.008.
    assert verified["measures"]["ndcg_at_10_change"] < 0.04


@pytest.mark.weights
@pytest.mark.slow
def test_smollm2_keeps_its_perplexity_with_a_scale_a_channel(tmp_path, smollm2_folder, capsys):
    """Every product in e4m3 from the first to the last layer: no search, the format's own cost."""
    from rose.bench.quantised_shapes import quantised_checkpoint

    plain = tmp_path / "smollm2"
    plain.symlink_to(smollm2_folder)
    made = quantised_checkpoint(plain, "fp8-channel", torch.device("cpu"), task="generate")
    texts = [text for article in udhr_paragraphs("eng") for text in article if len(text) > 60][:16]
    data = tmp_path / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    main(["verify", str(smollm2_folder), str(made), "--data", str(data), "--json"])
    measures = json.loads(capsys.readouterr().out)["measures"]
    assert measures["perplexity_a"] < 40
    assert measures["perplexity_ratio"] < 1.06
    assert measures["likeliest_same"] > 0.8  # a model of 135 million parameters is seldom sure of its next token

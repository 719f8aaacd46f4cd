"""`rose calibrate` from the command line to a folder that serves; `rose verify` on what it made."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rose.cli import main
from rose.cli.calibrate import SCHEME_NAMES
from rose.cli.verifying.measures import of_tokens
from rose.cli.verifying.ndcg import Judgement, ndcg_at_10, read_judgements
from rose.convert.calibrate import SCHEMES
from rose.errors import InvalidInput
from tests.support.tiny_checkpoints import tiny_bert, tiny_qwen3
from tests.support.tiny_families import tiny_cross_encoder_bert, tiny_qwen3_embedding
from tests.support.tiny_language_models import tiny_lm

TEXTS = [f"text {n} of the {word} by the river" for n in range(6) for word in ("old bridge", "small town", "high wall")]
LOOSE = {"loose": {"min_cosine": {"at_least": 0.5}, "max_score_difference": {"at_most": 0.9}}}
LOOSE["loose"]["perplexity_ratio"] = {"at_most": 2.0}


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    (tmp_path / "gates.json").write_text(json.dumps(LOOSE), encoding="utf-8")
    return path


def run(*arguments, capsys):
    status = main([str(a) for a in arguments])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


def loose(tmp_path):
    return "--gate", "loose", "--gates", tmp_path / "gates.json"


def test_schemes_are_those_of_the_convert_room():
    assert set(SCHEME_NAMES) == set(SCHEMES)


@pytest.mark.parametrize("make", [tiny_bert, tiny_qwen3, tiny_lm])
def test_a_calibrated_folder_is_verified_by_the_float8_gate(tmp_path, data, capsys, make):
    path = make(tmp_path / "plain", hidden_size=128, intermediate_size=256)
    made, plot = tmp_path / "made", tmp_path / "layers.svg"
    options = ("--data", data, "--scheme", "fp8-channel", "-o", made, "--plot", plot, "--json", *loose(tmp_path))
    status, out, _ = run("calibrate", path, *options, capsys=capsys)
    report = json.loads(out)
    assert (status, report["passed"], report["scheme"]) == (0, True, "fp8-channel")
    assert report["texts"] == {"watched": 14, "tried": 14, "held_out": 4}
    assert "</svg>" in plot.read_text(encoding="utf-8")
    assert json.loads((made / "calibration.json").read_text(encoding="utf-8")) == report
    assert "8-bit codes (compressed-tensors)" in run("info", made, capsys=capsys)[1]
    assert "8-bit" not in run("info", path, capsys=capsys)[1]
    _, out, _ = run("verify", path, made, "--data", data, "--json", capsys=capsys)
    verified = json.loads(out)
    assert verified["gate"] == "float8"
    assert verified["token_ids_equal"]
    wanted = {"perplexity_ratio"} if make is tiny_lm else {"min_cosine", "mean_cosine"}
    assert wanted <= {one["measure"] for one in verified["checks"]}
    assert verified["measures"].get("min_cosine", 0.99) > 0.95


def test_a_reranker(tmp_path, data, capsys):
    path = tiny_cross_encoder_bert(tmp_path / "a-reranker", hidden_size=128, intermediate_size=256)
    options = ("--data", data, "--scheme", "fp8-tensor", "-o", tmp_path / "made", *loose(tmp_path))
    status, out, _ = run("calibrate", path, *options, capsys=capsys)
    assert status == 0
    assert "max_score_difference" in out
    assert out.endswith(f"passed\n{tmp_path / 'made'}\n")


def test_a_dry_run_writes_nothing(tmp_path, data, capsys):
    path = tiny_bert(tmp_path / "plain")
    options = ("--data", data, "--scheme", "int8", "-o", tmp_path / "made", "--dry-run", *loose(tmp_path))
    status, out, _ = run("calibrate", path, *options, capsys=capsys)
    assert status == 0
    assert "of 8 layers quantised" in out
    assert "few texts: the gate held on 4, which says little of others" in out
    assert not (tmp_path / "made").exists()
    many = tmp_path / "many.txt"
    many.write_text("".join(f"{text} {i}\n" for i in range(6) for text in TEXTS), encoding="utf-8")
    _, out, _ = run("calibrate", path, "--data", many, *options[2:], capsys=capsys)
    assert "27 texts held out" in out
    assert "few texts" not in out


def test_a_gate_that_never_holds_is_a_status(tmp_path, data, capsys):
    path = tiny_bert(tmp_path / "plain")
    gates = tmp_path / "never.json"
    gates.write_text(json.dumps({"never": {"min_cosine": {"at_least": 1.5}}}), encoding="utf-8")
    options = ("--data", data, "--scheme", "int8", "-o", tmp_path / "made", "--gate", "never", "--gates", gates)
    status, out, _ = run("calibrate", path, *options, capsys=capsys)
    assert status == 1
    assert out.endswith("FAILED: nothing was written\n")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--gate", "tight"), "there is no gate 'tight'"),
        (("--percentile", "5"), "--percentile is 5.0"),
        (("--limit", "0"), "--limit is 0, and must be at least 1"),
        (("--limit", "4"), "4 texts are too few"),
        (("--keep", "*lstm*"), "--keep *lstm* names no layer"),
        (("--field", "body", "--from", "jsonl"), "texts.txt"),
    ],
)
def test_bad_options_are_named(tmp_path, data, capsys, options, message):
    path = tiny_bert(tmp_path / "plain")
    wanted = ("--data", data, "--scheme", "int8", "-o", tmp_path / "made", *options)
    status, _, err = run("calibrate", path, *wanted, capsys=capsys)
    assert status == 2
    assert message in err
    assert not (tmp_path / "made").exists()


def test_a_file_without_texts_is_found_before_the_model_is(tmp_path, capsys):
    (tmp_path / "empty.txt").write_text("")
    wanted = ("--data", tmp_path / "empty.txt", "--scheme", "int8", "-o", tmp_path / "made")
    status, _, err = run("calibrate", "no such model", *wanted, capsys=capsys)
    assert (status, err) == (2, f"rose: {tmp_path / 'empty.txt'}: there is no text in it\n")


def test_targets_that_are_there_or_are_the_source(tmp_path, data, capsys):
    path = tiny_bert(tmp_path / "plain")
    wanted = ("--data", data, "--scheme", "int8", *loose(tmp_path))
    assert "overlaps" in run("calibrate", path, *wanted, "-o", path, capsys=capsys)[2]
    target = tmp_path / "there"
    target.mkdir()
    (target / "mine").write_text("x", encoding="utf-8")
    assert "--force replaces it" in run("calibrate", path, *wanted, "-o", target, capsys=capsys)[2]
    assert (target / "mine").exists()
    assert run("calibrate", path, *wanted, "-o", target, "--force", capsys=capsys)[0] == 0
    assert not (target / "mine").exists()
    status, _, err = run("calibrate", target, *wanted, "-o", tmp_path / "twice", capsys=capsys)
    assert (status, "quantised already" in err) == (2, True)


def test_ndcg_is_the_textbooks(tmp_path, data, capsys):
    """Against sklearn's own, and by hand: the only relevant text second is 1 / log2(3)."""
    sklearn = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    queries, texts = rng.normal(size=(4, 8)), rng.normal(size=(30, 8))
    judged = [
        Judgement("q", {int(t): int(g) for t, g in zip(rng.choice(30, 5, False), rng.integers(1, 4, 5), strict=True)})
        for _ in range(4)
    ]
    similar = (queries / np.linalg.norm(queries, axis=1, keepdims=True)) @ (
        texts / np.linalg.norm(texts, axis=1, keepdims=True)
    ).T
    gains = np.zeros((4, 30))
    for row, one in enumerate(judged):
        for text, grade in one.grades.items():
            gains[row, text] = 2**grade - 1
    assert ndcg_at_10(queries, texts, judged) == pytest.approx(sklearn.ndcg_score(gains, similar, k=10), abs=1e-12)
    line = ndcg_at_10(np.array([[1.0, 0.0]]), np.array([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]]), [Judgement("q", {1: 1})])
    assert line == pytest.approx(1 / np.log2(3))


def test_verify_tells_ndcg(tmp_path, data, capsys):
    path = tiny_qwen3_embedding(tmp_path / "plain")
    judgements = tmp_path / "queries.jsonl"
    judgements.write_text('{"query": "the old bridge", "relevant": [0, 3]}\n{"query": "wall", "relevant": {"2": 3}}\n')
    options = ("--data", data, "--judgements", judgements, "--json")
    status, out, _ = run("verify", path, path, *options, capsys=capsys)
    measures = json.loads(out)["measures"]
    assert status == 0
    assert measures["ndcg_at_10_change"] == 0.0
    assert 0 < measures["ndcg_at_10_a"] == measures["ndcg_at_10_b"] <= 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", ":1 is no JSON"),
        ('{"query": "x"}', ":1 is not"),
        ('{"query": "x", "relevant": [9]}', "text 9 is not one of 0 to 4"),
        ('{"query": "x", "relevant": [true]}', "text True is not one of"),
        ('{"query": "x", "relevant": {"1": 0}}', "grade 0"),
        ("", "has 0 judgements"),
    ],
)
def test_bad_judgements_are_named(tmp_path, line, message):
    path = tmp_path / "j.jsonl"
    path.write_text(line + "\n", encoding="utf-8")
    with pytest.raises(InvalidInput, match=message):
        read_judgements(path, 5)


def test_costs_of_tokens():
    a, b = np.array([[1.0, 3], [2.0, 4]]), np.array([[1.5, 3], [2.0, 5]])
    found = of_tokens(a, b)
    assert found["perplexity_a"] == pytest.approx(np.exp(1.5))
    assert found["perplexity_ratio"] == pytest.approx(np.exp(0.25))
    assert found["likeliest_same"] == 0.5


def test_perplexity_is_transformers(tmp_path, data, capsys):
    import torch
    import transformers
    from tokenizers import Tokenizer

    path = tiny_lm(tmp_path / "plain")
    status, out, _ = run("verify", path, path, "--data", data, "--json", "--gate", "float32", capsys=capsys)
    measures = json.loads(out)["measures"]
    assert status == 0
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    costs = []
    for text in TEXTS:
        ids = torch.tensor([tokenizer.encode(text).ids])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, :-1]
        costs.append(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none"))
    assert measures["perplexity_a"] == pytest.approx(float(torch.cat(costs).mean().exp()), rel=1e-5)


def test_the_script_is_the_command():
    script = Path(__file__).parents[2] / "scripts" / "calibrate.py"
    done = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, check=True)
    assert "--scheme" in done.stdout

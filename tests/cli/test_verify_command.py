"""`rose verify`: measures against references, gates that decide, golden files, and answers that cannot be compared."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.stats import kendalltau

from rose import cli
from rose.cli.verifying.answers import answers_of
from rose.cli.verifying.gates import check, gate_for
from rose.cli.verifying.measures import cosines, kendall_tau, neighbour_overlap, ranking_agreement
from rose.config import read_model_folder
from tests.support.running import embed, encode, load
from tests.support.tiny_checkpoints import edit_json, read_json, tiny_bert, tiny_qwen3
from tests.support.tiny_families import tiny_bge_m3, tiny_cross_encoder_bert, tiny_qwen3_reranker
from tests.support.tiny_language_models import tiny_lm
from tests.support.tiny_tokenizers import CORPUS


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(CORPUS) + "\n", encoding="utf-8")
    return path


def verify(capsys, *arguments) -> tuple[int, dict]:
    status = cli.main(["verify", *map(str, arguments), "--json"])
    return status, json.loads(capsys.readouterr().out)


def bend(source, target, make, by: float, name="encoder.layer.1.output.dense.weight"):
    """The same folder with noise on one tensor."""
    make(target)
    tensors = load_file(source / "model.safetensors")
    noise = torch.randn(tensors[name].shape, generator=torch.Generator().manual_seed(0))
    tensors[name] += by * noise
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_a_model_is_itself(tmp_path, data, capsys):
    path = tiny_bert(tmp_path / "a")
    status, report = verify(capsys, path, path, "--data", data)
    assert (status, report["passed"], report["token_ids_equal"]) == (0, True, True)
    assert (report["gate"], report["texts"]) == ("float32", len(CORPUS))
    assert report["measures"]["min_cosine"] == pytest.approx(1)
    assert report["measures"]["recall_at_10"] == report["measures"]["kendall_tau"] == 1


def test_a_changed_model_fails_and_the_worst_text_is_named(tmp_path, data, capsys):
    a = tiny_bert(tmp_path / "a")
    b = bend(a, tmp_path / "b", tiny_bert, 0.2)
    status, report = verify(capsys, a, b, "--data", data)
    assert (status, report["passed"]) == (1, False)
    one, other = load(a), load(b)
    ids = encode(one.folder, list(CORPUS))
    expected = torch.nn.functional.cosine_similarity(embed(one, ids).double(), embed(other, ids).double())
    assert report["measures"]["min_cosine"] == pytest.approx(expected.min().item(), abs=1e-6)
    assert report["measures"]["mean_cosine"] == pytest.approx(expected.mean().item(), abs=1e-6)
    assert report["worst"]["index"] == int(expected.argmin())
    assert report["measures"]["recall_at_10"] < 1
    assert cli.main(["verify", str(a), str(b), "--data", str(data)]) == 1
    assert capsys.readouterr().out.endswith("FAILED\n")


def test_other_token_ids_fail_whatever_the_vectors(tmp_path, data, capsys):
    a, b = tiny_qwen3(tmp_path / "a"), tiny_qwen3(tmp_path / "b", chat=True)
    shape = read_json(a / "config.json")["vocab_size"]
    tensors = load_file(b / "model.safetensors") | {}
    tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"][:shape].clone()
    save_file(tensors, b / "model.safetensors", metadata={"format": "pt"})
    edit_json(b / "config.json", vocab_size=shape)
    status, report = verify(capsys, a, b, "--data", data)
    assert (status, report["token_ids_equal"]) == (1, False)
    assert report["token_ids_differ_at"][:2] == [0, 1]


def test_a_rounded_copy_is_held_to_the_gate_of_bf16(tmp_path, data, capsys):
    a = tiny_bert(tmp_path / "a")
    command = ["convert", str(a), "--to", "embedder", "--dtype", "bfloat16", "-o", str(tmp_path / "b")]
    assert cli.main(command) == 0
    capsys.readouterr()
    status, report = verify(capsys, a, tmp_path / "b", "--data", data)
    assert (status, report["gate"]) == (0, "bfloat16")
    assert 0.998 <= report["measures"]["min_cosine"] < 1
    bounds = {(one["measure"], one["rule"]): one["bound"] for one in report["checks"]}
    assert bounds == {("min_cosine", "at_least"): 0.998, ("mean_cosine", "at_least"): 0.9995}
    status, report = verify(capsys, a, tmp_path / "b", "--data", data, "--gate", "float32")
    assert status == 1


def test_golden_vectors_are_stored_and_checked_later(tmp_path, data, capsys):
    """Report C87 (sentence-transformers#3513): a model is held to what was stored, not to a library."""
    a = tiny_bert(tmp_path / "a")
    golden = tmp_path / "golden.npz"
    assert cli.main(["verify", str(a), "--data", str(data), "--save-golden", str(golden)]) == 0
    assert capsys.readouterr().out == f"{len(CORPUS)} texts: {golden}\n"
    status, report = verify(capsys, a, golden, "--data", data)
    assert (status, report["b"]) == (0, str(a))
    bent = bend(a, tmp_path / "b", tiny_bert, 0.2)
    assert verify(capsys, golden, bent, "--data", data)[0] == 1


def test_golden_vectors_that_cannot_be_stored_leave_nothing(tmp_path, data, capsys, monkeypatch):
    a = tiny_bert(tmp_path / "a")
    nowhere = tmp_path / "missing" / "golden.npz"
    assert cli.main(["verify", "no such model", "--data", str(data), "--save-golden", str(nowhere)]) == 2
    assert capsys.readouterr().err == f"rose: {nowhere} cannot be written: {nowhere.parent} is no folder\n"

    def full(file, **arrays):
        file.write(b"PK")
        raise OSError(28, "No space left on device")

    golden = tmp_path / "golden.npz"
    golden.write_bytes(b"an older one")
    monkeypatch.setattr(np, "savez", full)
    assert cli.main(["verify", str(a), "--data", str(data), "--save-golden", str(golden)]) == 2
    assert capsys.readouterr().err.endswith(f"rose: {golden} cannot be written: No space left on device\n")
    assert golden.read_bytes() == b"an older one"
    assert not list(tmp_path.glob(".golden*"))


def test_attention_of_the_other_kind_is_found(tmp_path, data, capsys):
    """Report C86 (vllm#16892): a flag that flips the attention is not the same model."""
    a, b = tiny_qwen3(tmp_path / "a"), tiny_qwen3(tmp_path / "b", config={"is_causal": False})
    status, report = verify(capsys, a, b, "--data", data)
    assert (status, report["token_ids_equal"]) == (1, True)


@pytest.mark.parametrize("make", [tiny_cross_encoder_bert, tiny_qwen3_reranker])
def test_rerankers_are_compared_by_their_scores(tmp_path, data, capsys, make):
    """Report C99 (vllm#43062): the converted reranker scores as the language model."""
    a = make(tmp_path / "a")
    assert cli.main(["convert", str(a), "--to", "reranker", "-o", str(tmp_path / "b")]) == 0
    capsys.readouterr()
    status, report = verify(capsys, a, tmp_path / "b", "--data", data)
    assert (status, report["measures"]["kendall_tau"]) == (0, 1)
    assert report["measures"]["max_score_difference"] <= 1e-4
    assert {one["measure"] for one in report["checks"]} == {"max_score_difference"}


def test_what_cannot_be_compared_is_refused(tmp_path, data, capsys):
    a = tiny_bert(tmp_path / "a")
    wide = tiny_bge_m3(tmp_path / "wide", hidden_size=96)
    short = tmp_path / "short.txt"
    short.write_text("one\n")
    golden, broken = tmp_path / "golden.npz", tmp_path / "broken.npz"
    assert cli.main(["verify", str(a), "--data", str(data), "--save-golden", str(golden)]) == 0
    broken.write_bytes(golden.read_bytes()[:100])
    other = tmp_path / "other.txt"
    other.write_text("one\ntwo\n")
    capsys.readouterr()
    for arguments, message in (
        ([a, wide, "--data", data], "vectors of 64, and "),
        ([a, tiny_cross_encoder_bert(tmp_path / "r"), "--data", data], "cannot be compared"),
        ([a, a, "--data", short], "has 1 texts, and neighbours need at least 2"),
        ([a, golden, "--data", other], "answered other texts"),
        ([a, broken, "--data", data], "is no golden file"),
        ([a, a, "--data", tmp_path / "none"], "there is no file"),
        ([a, a, "--data", data, "--gate", "int3"], "there is no gate 'int3'"),
        ([a, "--data", data], "name B"),
    ):
        assert cli.main(["verify", *map(str, arguments)]) == 2
        assert message in capsys.readouterr().err


def test_what_cannot_be_compared_is_refused_before_anything_runs(tmp_path, data, capsys, monkeypatch):
    a, llm = tiny_bert(tmp_path / "a"), tiny_lm(tmp_path / "llm")
    other, wide = tmp_path / "other.txt", tiny_bge_m3(tmp_path / "wide", hidden_size=96)
    other.write_text("one\ntwo\n")
    golden, wrong = tmp_path / "golden.npz", tmp_path / "judgements.jsonl"
    wrong.write_text('{"query": "a", "relevant": [100000]}\n')
    assert cli.main(["verify", str(a), "--data", str(data), "--save-golden", str(golden)]) == 0
    capsys.readouterr()
    monkeypatch.setattr("rose.cli.verify.answers_of", lambda *_, **__: pytest.fail("a model was run"))
    for arguments, message in (
        ([llm, a], f"{llm} gives the costs of tokens, and {a} gives vectors of 64: they cannot be compared"),
        ([llm, golden], f"{llm} gives the costs of tokens, and {a} gives vectors of 64: they cannot be compared"),
        ([a, wide], f"{a} gives vectors of 64, and {wide} gives vectors of 96: they cannot be compared"),
        ([a, tiny_cross_encoder_bert(tmp_path / "r")], "r gives scores of pairs: they cannot be compared"),
        ([a, tmp_path / "typo"], "there is no such folder"),
        ([a, tmp_path / "typo.npz"], "is no golden file"),
        ([a, golden, "--data", other], "answered other texts"),
        ([a, a, "--gate", "int3"], "there is no gate 'int3'"),
        ([a, "--gate", "int3", "--save-golden", tmp_path / "new.npz"], "there is no gate 'int3'"),
        ([a, a, "--judgements", wrong], "text 100000 is not one of 0 to"),
        ([a, golden, "--judgements", wrong], "--judgements needs two models that make vectors"),
    ):
        assert cli.main(["verify", "--data", str(data), *map(str, arguments)]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("make", [tiny_bert, tiny_lm, tiny_cross_encoder_bert])
def test_how_far_a_run_has_come_is_told(tmp_path, monkeypatch, make):
    """In batches of any size the answers stay the same, and the last word is that all are done."""
    folder = read_model_folder(make(tmp_path / "m"))
    whole = answers_of(folder, CORPUS)
    monkeypatch.setattr("rose.cli.verifying.answers._TOKENS", 40)
    told: list[tuple[int, int]] = []
    parts = answers_of(folder, CORPUS, progress=lambda done, total: told.append((done, total)))
    assert told[0] == (0, len(whole.ids))
    assert told[-1] == (len(whole.ids), len(whole.ids))
    assert len(told) > 3
    assert told == sorted(set(told))
    assert (parts.kind, parts.ids) == (whole.kind, whole.ids)
    np.testing.assert_allclose(parts.values, whole.values, rtol=0, atol=1e-5)


def test_kendall_tau_is_scipys():
    draw = np.random.default_rng(0)
    for n, values in ((2, 50), (9, 4), (40, 1000), (40, 6)):
        a, b = draw.integers(0, values, (2, n)).astype(float)
        if len(set(a)) > 1 and len(set(b)) > 1:
            assert kendall_tau(a, b) == pytest.approx(kendalltau(a, b).statistic)
    assert kendall_tau(np.arange(5.0), -np.arange(5.0)) == -1
    assert kendall_tau(np.ones(4), np.ones(4)) == 1
    assert kendall_tau(np.ones(4), np.arange(4.0)) == 0


def test_neighbours_by_hand():
    """Four texts on a circle; in b the second moved to the other side of the first."""
    a = np.array([[1.0, 0.0], [0.9, 0.4], [0.0, 1.0], [-1.0, 0.1]])
    b = a.copy()
    b[1] = [0.9, -2.0]
    assert neighbour_overlap(a, a, 1) == 1
    assert neighbour_overlap(a, b, 1) == 0.75  # 2 had 1 and now has 3; 0 keeps 1, 1 keeps 0, and 3 keeps 2
    assert neighbour_overlap(a, b, 10) == 1  # all others, when there are fewer than ten
    assert ranking_agreement(a, a) == 1
    assert ranking_agreement(a, b) < 1
    assert cosines(a, 3 * a) == pytest.approx(np.ones(4))


def test_gates(tmp_path):
    assert gate_for({"float32"}) == "float32"
    assert gate_for({"float32", "float16"}) == "bfloat16"
    assert gate_for({"float8_e4m3fn", "bfloat16"}) == "float8"
    passed = {one.measure: one.passed for one in check({"min_cosine": 0.9981, "mean_cosine": 0.9994}, "bfloat16")}
    assert passed == {"min_cosine": True, "mean_cosine": False}
    assert not check({"min_cosine": float("nan")}, "bfloat16")[0].passed
    own = tmp_path / "gates.json"
    own.write_text('{"mine": {"recall_at_10": {"at_least": 0.9}}}')
    assert [one.passed for one in check({"recall_at_10": 0.91}, "mine", own)] == [True]

"""BGE-M3's three outputs: an fp64 implementation of the published formulas, and FlagEmbedding where it is installed."""

from __future__ import annotations

import importlib.util
import sys
import types

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from rose.config import read_model_folder
from rose.convert.checkpoint import Checkpoint
from rose.errors import CheckpointError, Unsupported
from rose.models.base import OutputSpec
from tests.support.running import batch_of, embed, encode, load, random_sequences
from tests.support.tiny_checkpoints import Dense, edit_json, tiny_xlm_roberta
from tests.support.tiny_families import tiny_bge_m3
from tests.support.tiny_tokenizers import CORPUS

TEXTS = [*CORPUS, "a", "the the the river", "", "\u2603 unknown"]
ALL = ["dense", "sparse", "colbert"]
SPECIAL = {0, 1, 2, 3}  # <s>, <pad>, </s>, <unk>


@pytest.fixture(autouse=True)
def _quiet():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def run(model, ids, outputs=ALL):
    """Per output, a list of the sequences' rows."""
    out = model(batch_of(model, ids), outputs)
    lengths = [len(own) for own in ids]
    return {
        name: list(rows.split(lengths)) if model.outputs[name].per_token else list(rows) for name, rows in out.items()
    }


@torch.inference_mode()
def published(path, ids):
    """arXiv:2402.03216, section 3: in fp64 on transformers' hidden rows. [(dense, {id: weight}, vectors)] a text."""
    backbone = transformers.AutoModel.from_pretrained(path, dtype=torch.float64).eval()
    sparse, colbert = (torch.load(path / f"{name}_linear.pt", weights_only=True) for name in ("sparse", "colbert"))
    answers = []
    for own in ids:
        rows = backbone(input_ids=torch.tensor([own])).last_hidden_state[0]
        dense = rows[0] / rows[0].norm()
        weights: dict[int, float] = {}
        for token, row in zip(own, rows, strict=True):
            weight = max(0.0, float(sparse["weight"][0].double() @ row + sparse["bias"][0].double()))
            if token not in SPECIAL and weight > 0:
                weights[token] = max(weights.get(token, 0.0), weight)
        vectors = rows[1:] @ colbert["weight"].double().T + colbert["bias"].double()
        answers.append((dense, weights, vectors / vectors.norm(dim=-1, keepdim=True)))
    return answers


def lexical(ids, rows) -> dict[int, float]:
    """What a front makes of one weight a token: the largest of each id, and only those above zero."""
    weights: dict[int, float] = {}
    for token, weight in zip(ids, rows[:, 0].tolist(), strict=True):
        if weight > 0:
            weights[token] = max(weights.get(token, 0.0), weight)
    return weights


@pytest.mark.parametrize("colbert_dim", [None, 24])
def test_published_formulas(tmp_path, colbert_dim):
    """Report C108 (FlagEmbedding#903): one definition. Special tokens weigh nothing, an id counts by its largest
    weight, ColBERT has a row for every token but <s>, each of unit length."""
    path = tiny_bge_m3(tmp_path / "m", colbert_dim=colbert_dim)
    model = load(path)
    ids = encode(model.folder, TEXTS)
    ours = run(model, ids)
    repeated = 0
    for i, (dense, weights, vectors) in enumerate(published(path, ids)):
        assert torch.cosine_similarity(ours["dense"][i].double(), dense, dim=0) > 0.99999
        mine = lexical(ids[i], ours["sparse"][i])
        assert mine.keys() == weights.keys()
        assert all(abs(mine[token] - weight) < 1e-4 for token, weight in weights.items())
        rows = ours["colbert"][i][model.outputs["colbert"].skip_tokens :]
        assert len(rows) == len(ids[i]) - 1
        torch.testing.assert_close(rows.double(), vectors, rtol=0, atol=1e-5)
        repeated += len(ids[i]) - len(set(ids[i]))
    assert repeated > 0
    assert any(3 in own for own in ids)  # <unk> among the texts
    assert not any(SPECIAL & lexical(own, rows).keys() for own, rows in zip(ids, ours["sparse"], strict=True))


@pytest.mark.parametrize("shape", [{}, {"hidden_size": 32, "num_heads": 2}])
def test_scores_between_texts(tmp_path, shape):
    """Report C108 (FlagEmbedding#1515): both scores come from what is returned: the sparse one is the sum over shared
    ids of the products, ColBERT's the mean over the query's rows of the largest product, <s> in neither."""
    path = tiny_bge_m3(tmp_path / "m", **shape)
    model = load(path)
    ids = encode(model.folder, [CORPUS[12], CORPUS[13]])
    ours, theirs = run(model, ids), published(path, ids)
    (_, q, q_rows), (_, d, d_rows) = theirs
    mine = [lexical(own, rows) for own, rows in zip(ids, ours["sparse"], strict=True)]
    shared = sum(q[token] * d[token] for token in q.keys() & d.keys())
    assert shared > 0
    assert abs(sum(mine[0][t] * mine[1][t] for t in mine[0].keys() & mine[1].keys()) - shared) < 1e-4
    expected = float((q_rows @ d_rows.T).amax(dim=1).mean())
    assert abs(float((ours["colbert"][0][1:] @ ours["colbert"][1][1:].T).amax(dim=1).mean()) - expected) < 1e-4


def test_outputs(tmp_path):
    model = load(tiny_bge_m3(tmp_path / "m", colbert_dim=24))
    assert model.outputs == {
        "dense": OutputSpec(dtype="float32", dimension=64, normalized=True),
        "sparse": OutputSpec(dtype="float32", dimension=1, per_token=True, kind="weights"),
        "colbert": OutputSpec(dtype="float32", dimension=24, per_token=True, normalized=True, skip_tokens=1),
    }
    assert model.default_output == "dense"


def test_one_forward_and_only_the_heads_asked_for(tmp_path, monkeypatch):
    model = load(tiny_bge_m3(tmp_path / "m"))
    calls: list[str] = []
    for name in ("backbone", "head", "lexical", "colbert"):
        getattr(model, name).register_forward_hook(lambda *_, name=name: calls.append(name))
    batch = batch_of(model, random_sequences([5, 9], 100))
    together = model(batch, ALL)
    assert calls == ["backbone", "head", "lexical", "colbert"]
    for output, head in (("sparse", "lexical"), ("colbert", "colbert"), ("dense", "head")):
        calls.clear()
        alone = model(batch, [output])
        assert calls == ["backbone", head]
        assert alone.keys() == {output}
        assert torch.equal(alone[output], together[output])


class _Largest(TorchDispatchMode):
    """The most elements any tensor made inside has."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.numel())
        return out


def test_memory_grows_with_tokens_alone(tmp_path):
    """Report C109 (FlagEmbedding#532): no tensor of the sparse head has a vocabulary in its shape."""
    model = load(tiny_bge_m3(tmp_path / "m"))
    ids = torch.randint(0, 100, (500,), dtype=torch.int32)
    with _Largest() as seen:
        weights = model.lexical(torch.randn(500, 64), ids)
    assert weights.shape == (500, 1)
    assert 500 <= seen.elements <= 500 * 64


@pytest.mark.parametrize("lost", ["sparse", "colbert"])
def test_a_missing_head_is_said_to_be_missing(tmp_path, lost):
    """Report C110 (FlagEmbedding#550): without its file an output cannot be had, instead of coming out random."""
    there = "colbert" if lost == "sparse" else "sparse"
    model = load(tiny_bge_m3(tmp_path / "m", heads=(there,)))
    assert model.outputs[lost].unavailable == f"the checkpoint has no {lost}_linear.pt"
    assert model.outputs[there].unavailable is None
    batch = batch_of(model, [[0, 9, 2]])
    with pytest.raises(
        Unsupported, match=f"output '{lost}' cannot be had: the checkpoint has no {lost}_linear.pt"
    ) as e:
        model(batch, ["dense", lost])
    assert e.value.param == "outputs"
    assert model(batch, ["dense", there]).keys() == {"dense", there}


def test_both_heads_missing(tmp_path):
    """A folder that is named bge-m3 says what it lacks; any other XLM-R embedder has no such outputs at all."""
    named = load(tiny_bge_m3(tmp_path / "bge-m3", heads=()))
    assert {name: spec.unavailable is None for name, spec in named.outputs.items()} == {
        "dense": True,
        "sparse": False,
        "colbert": False,
    }
    assert list(load(tiny_xlm_roberta(tmp_path / "other")).outputs) == ["dense"]


def test_special_ids_that_no_file_states(tmp_path):
    path = tiny_bge_m3(tmp_path / "m")
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        edit_json(path / name, unk_token=None)
    model = load(path)
    assert (
        model.outputs["sparse"].unavailable == "the tokenizer's files do not say which ids carry no weight: unk_token"
    )
    assert model.outputs["colbert"].unavailable is None


def test_heads_as_safetensors(tmp_path):
    path = tiny_bge_m3(tmp_path / "m")
    ids = random_sequences([5, 9], 100)
    before = load(path)(batch_of(load(path), ids), ALL)
    for name in ("sparse", "colbert"):
        state = torch.load(path / f"{name}_linear.pt", weights_only=True)
        save_file({key: value.half() for key, value in state.items()}, path / f"{name}_linear.safetensors")
        (path / f"{name}_linear.pt").unlink()
    model = load(path)
    assert {p.dtype for p in [*model.lexical.parameters(), *model.colbert.parameters()]} == {torch.float32}
    after = model(batch_of(model, ids), ALL)
    for name in ALL:
        torch.testing.assert_close(after[name], before[name], rtol=0, atol=3e-3)


def test_heads_run_in_fp32_beside_a_bf16_backbone(tmp_path):
    path = tiny_bge_m3(tmp_path / "m")
    model, exact = load(path, dtype=torch.bfloat16), load(path)
    ids = encode(model.folder, TEXTS)
    half, full = model(batch_of(model, ids, torch.bfloat16), ALL), exact(batch_of(exact, ids), ALL)
    assert {rows.dtype for rows in half.values()} == {torch.float32}
    assert model.colbert.linear.weight.dtype == torch.float32
    assert bool((torch.cosine_similarity(half["colbert"], full["colbert"]) > 0.998).all())
    torch.testing.assert_close(half["colbert"].norm(dim=-1), torch.ones(len(half["colbert"])))


class _Evil:
    def __reduce__(self):
        return (print, ("code ran",))


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"weight": torch.zeros(1, 63), "bias": torch.zeros(1)}, r"has shape \(1, 63\), and the model takes \(1, 64\)"),
        ({"weight": torch.zeros(1, 64)}, "lacks bias"),
        ({"weight": torch.zeros(1, 64), "bias": torch.zeros(1), "more": torch.zeros(1)}, "no place for more"),
        ({"matrix": torch.zeros(1, 64)}, "weight is missing"),
        (_Evil(), "cannot be read"),
    ],
)
def test_damaged_heads_are_refused(tmp_path, capsys, state, words):
    """A head file is a pickle: it is read without running what is in it."""
    path = tiny_bge_m3(tmp_path / "m")
    torch.save(state, path / "sparse_linear.pt")
    with pytest.raises(CheckpointError, match=words):
        load(path)
    assert "code ran" not in capsys.readouterr().out


def test_folder_facts(tmp_path):
    path = tiny_bge_m3(tmp_path / "m")
    sparse, colbert = read_model_folder(path).token_heads
    assert (sparse.file, sparse.unweighted_ids) == ("sparse_linear.pt", (0, 1, 2, 3))
    assert (colbert.file, colbert.unavailable) == ("colbert_linear.pt", None)
    with Checkpoint(path / colbert.file) as checkpoint:
        assert checkpoint.entries["weight"].shape == (64, 64)


def test_dense_module_and_token_heads_are_apart(tmp_path):
    """A Dense module projects the pooled vector; the token heads read the backbone's rows."""
    path = tiny_bge_m3(tmp_path / "m", dense=[Dense(64, 32)])
    model = load(path)
    assert {name: spec.dimension for name, spec in model.outputs.items()} == {"dense": 32, "sparse": 1, "colbert": 64}
    assert embed(model, [[0, 9, 2]]).shape == (1, 32)


def flag_model(path):
    """FlagEmbedding 1.4 imports a module that transformers 5 no longer has, for a reranker that is not used here."""
    name = "transformers.modeling_attn_mask_utils"
    if importlib.util.find_spec(name) is None and name not in sys.modules:
        stub = types.ModuleType(name)
        stub.AttentionMaskConverter = None
        for kind in ("attention_mask", "causal_attention_mask", "causal_attention_mask_for_sdpa"):
            setattr(stub, f"_prepare_4d_{kind}", lambda *_: None)
        sys.modules[name] = stub
    from FlagEmbedding import BGEM3FlagModel

    return BGEM3FlagModel(str(path), use_fp16=False, devices="cpu", pooling_method="cls")


@pytest.mark.skipif(importlib.util.find_spec("FlagEmbedding") is None, reason="FlagEmbedding is not installed")
def test_flag_embedding(tmp_path):
    """The authors' own library: dense, lexical weights by token id, ColBERT rows, and its scores of a pair."""
    path = tiny_bge_m3(tmp_path / "m")
    theirs = flag_model(path)
    texts = [text for text in TEXTS if text]
    answer = theirs.encode(texts, return_dense=True, return_sparse=True, return_colbert_vecs=True)
    model = load(path)
    ids = encode(model.folder, texts)
    ours = run(model, ids)
    for i in range(len(texts)):
        dense = torch.from_numpy(answer["dense_vecs"][i])
        assert torch.cosine_similarity(ours["dense"][i].double(), dense.double(), dim=0) > 0.99999
        expected = {int(token): float(weight) for token, weight in answer["lexical_weights"][i].items()}
        mine = lexical(ids[i], ours["sparse"][i])
        assert mine.keys() == expected.keys()
        assert all(abs(mine[token] - weight) < 1e-4 for token, weight in expected.items())
        torch.testing.assert_close(
            ours["colbert"][i][1:], torch.from_numpy(answer["colbert_vecs"][i]), rtol=0, atol=1e-4
        )
    a, b = 12, 13
    mine = [lexical(ids[i], ours["sparse"][i]) for i in (a, b)]
    score = sum(mine[0][t] * mine[1][t] for t in mine[0].keys() & mine[1].keys())
    reference = theirs.compute_lexical_matching_score(answer["lexical_weights"][a], answer["lexical_weights"][b])
    assert abs(score - float(reference)) < 1e-4
    colbert = float((ours["colbert"][a][1:] @ ours["colbert"][b][1:].T).amax(dim=1).mean())
    assert abs(colbert - float(theirs.colbert_score(answer["colbert_vecs"][a], answer["colbert_vecs"][b]))) < 1e-4

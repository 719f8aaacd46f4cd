"""benchmarks/kernels: every kernel is in one, and its rival does the same work; run here at small sizes, untimed."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "kernels"
# In a benchmark under the name of what calls them, or torch's own operations with no kernel of this project's.
ELSEWHERE = {
    "pool": "pool_finish does both",
    "finish": "pool_finish does both",
    "scaled_mm": "the reference of scaled_linear",
    "logprobs": "torch's operations",
    "paged_attention": "the reference of paged_decode and paged_prefill",
    "quantize_groups": "quantize_token and quantize_group",
}
# bf16 once more on the way, e4m3 with three bits of mantissa.
TOLERANCE = 0.03


@pytest.fixture(scope="module")
def load():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module


def names_in(path: Path) -> set[str]:
    """What a file uses, under the name it has where it comes from."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    imported = [alias for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names]
    return {alias.name for alias in imported if (alias.asname or alias.name) in used}


def operations() -> list[str]:
    """`x` of every `x_ref` in rose/kernels."""
    found = []
    for path in sorted((ROOT / "rose" / "kernels").glob("*.py")):
        names = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
        found += [name.removesuffix("_ref") for name in sorted(names) if name.endswith("_ref")]
    return found


def test_every_operation_has_a_benchmark():
    used = set().union(*(names_in(path) for path in FOLDER.glob("*.py")))
    helpers = {"gates", "unit_heads", "initial_states", "rotate_heads", "kept", "philox", "exponential"}
    missing = [name for name in operations() if name not in used | ELSEWHERE.keys() | helpers]
    assert missing == []


def apart(ours, rival) -> float:
    """Largest relative distance of two answers, of tensors or several of them."""
    if not isinstance(ours, torch.Tensor):
        assert len(ours) == len(rival)
        return max(apart(a, b) for a, b in zip(ours, rival, strict=True))
    assert ours.numel() == rival.numel()
    a, b = ours.double().flatten(), rival.double().flatten()
    assert a.isfinite().all()
    assert b.norm() > 0
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("tokens", [2, 64, 131])
@pytest.mark.parametrize("section", ["embedding", "gated_heads", "parts", "decoding", "codes"])
def test_the_rivals_of_fused_kernels_do_the_same_work(load, section, tokens):
    torch.manual_seed(1)
    bench = load("bench_fused")
    assert set(bench.SECTIONS) == {"embedding", "gated_heads", "parts", "decoding", "codes"}
    cases = list(bench.SECTIONS[section](tokens))
    for case in cases:
        assert apart(case.ours(), case.rival()) < TOLERANCE, case.op
        assert case.moved > 0
    assert len({case.op for case in cases}) == len(cases)


def test_the_rivals_of_recurrent_layers_do_the_same_work(load, monkeypatch):
    torch.manual_seed(1)
    bench = load("bench_gated_delta")
    seen = []

    def case(report, op, shape, ours, rival, moved, flops=0.0):
        seen.append(op)
        assert moved > 0
        if rival is not None:
            assert apart(ours(), rival()) < TOLERANCE, op
        else:
            assert op == "gated_delta_rule", "flash-linear-attention is not here"
            assert ours().isfinite().all()

    monkeypatch.setattr(bench, "case", case)
    bench.whole(None, 70, 1, 16)
    bench.steps(None, 3, 32)
    assert seen == ["causal_conv", "gated_delta_rule", "gated_norm", "causal_conv_step", "gated_delta_step"]


def test_rows_are_told_with_floor_and_rival(load, monkeypatch):
    bench = load("bench_fused")
    rows = []
    monkeypatch.setattr(bench, "graph_us", lambda run, repeats: 24.0 * len(run()))

    class Report:
        def row(self, **values):
            rows.append(values)

    bench.measure(Report(), bench.embedding(16))
    assert [row["op"] for row in rows] == ["embed_rms_norm"]
    assert rows[0]["us"] == rows[0]["rival_us"] == 24.0
    assert rows[0]["floor_us"] == pytest.approx(3 * 16 * 1024 * 2 / 4.21e6)

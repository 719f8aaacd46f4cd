"""The self-check finds what is wrong, names it, and leaves alone what is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rose.attention_backends import AttentionSpec, backend_names, check
from rose.attention_backends.check import check_backend, check_backends
from rose.attention_backends.torch_sdpa import TorchSdpa
from rose.errors import InternalError
from rose.select.ways import attention_ways


class Spoiled(TorchSdpa):
    """torch_sdpa with something done to its answers."""

    def __init__(self, spec: AttentionSpec, spoil: Callable[[Tensor], Tensor]) -> None:
        super().__init__(spec)
        self.spoil = spoil

    def plan(self, batch, slot=0):
        plan, spoil = super().plan(batch, slot), self.spoil

        class Plan:
            def run(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
                return spoil(plan.run(q, k, v, layer))

        return Plan()


@pytest.fixture
def spec(cpu_spec: AttentionSpec) -> AttentionSpec:
    return replace(cpu_spec, num_heads=4, num_kv_heads=2, head_dim=32, scale=32**-0.5, dtype=torch.float32)


@pytest.mark.parametrize(
    ("causal", "dtype", "max_length"),
    [
        (False, torch.float32, None),
        (True, torch.float32, 300),
        (False, torch.bfloat16, 40),
        (True, torch.bfloat16, 127),
        (True, torch.float32, 1),
    ],
)
def test_every_backend_has_a_verdict(spec: AttentionSpec, causal: bool, dtype: torch.dtype, max_length) -> None:
    found = check_backends(replace(spec, causal=causal, dtype=dtype, max_length=max_length))
    assert tuple(found) == backend_names()
    assert {name for name, reason in found.items() if reason is None} == {"torch_sdpa"}
    assert all(found[name] for name in backend_names() if name != "torch_sdpa")


def _spoil(monkeypatch: pytest.MonkeyPatch, spec: AttentionSpec, spoil: Callable[[Tensor], Tensor]) -> str | None:
    monkeypatch.setattr(check, "try_backend", lambda name, narrowed: Spoiled(narrowed, spoil))
    return check_backend("flash_attention4", spec)


def test_a_right_answer_passes(monkeypatch: pytest.MonkeyPatch, spec: AttentionSpec) -> None:
    assert _spoil(monkeypatch, spec, lambda out: out) is None


@pytest.mark.parametrize(
    "spoil",
    [
        lambda out: out.index_fill(0, torch.tensor([out.shape[0] - 1]), torch.nan),
        lambda out: out.index_fill(0, torch.tensor([1]), 0.0),
        lambda out: out * 1.001,
        lambda out: out.flip(1),
    ],
    ids=["one row NaN", "one row zero", "a thousandth too large", "heads swapped"],
)
def test_c129_a_wrong_answer_is_found(monkeypatch, spec: AttentionSpec, spoil: Callable[[Tensor], Tensor]) -> None:
    """Report C129 (flash-attention#2192), Report C130 (flash-attention#2591): wrong on one architecture only."""
    reason = _spoil(monkeypatch, spec, spoil)
    assert reason is not None
    assert "wrong when run plainly on 4/2 heads of 32, float32, bidirectional with lengths 44, 43, 43" in reason


def test_a_lost_causal_mask_is_found(monkeypatch: pytest.MonkeyPatch, spec: AttentionSpec) -> None:
    monkeypatch.setattr(check, "try_backend", lambda name, narrowed: TorchSdpa(replace(narrowed, causal=False)))
    assert "causal with lengths" in str(check_backend("flash_attention4", replace(spec, causal=True)))


def test_a_backend_that_breaks_is_a_reason(monkeypatch: pytest.MonkeyPatch, spec: AttentionSpec) -> None:
    def fail(out: Tensor) -> Tensor:
        raise LookupError("no kernel image")

    assert "LookupError: no kernel image" in str(_spoil(monkeypatch, spec, fail))


@pytest.mark.parametrize(
    "words",
    [
        "JIT compilation is disabled via FLASHINFER_DISABLE_JIT environment variable, but the required module is not",
        "module, which is not included in the default JIT cache. Use equal-stride K/V tensors, enable local JIT",
    ],
)
def test_what_did_not_come_compiled_is_missing_and_not_wrong(monkeypatch, spec: AttentionSpec, words: str) -> None:
    """FlashInfer's two errors; a profile that excluded it for them would keep it from machines that can compile."""

    def fail(out: Tensor) -> Tensor:
        raise InternalError(f"could not plan 3 tokens: {words}")

    reason = str(_spoil(monkeypatch, spec, fail))
    assert reason == "has no kernels for 4/2 heads of 32, float32, bidirectional: JIT compilation is disabled"
    assert attention_ways(("flashinfer2",), lambda name: reason) == ({"flashinfer2": reason}, {})


def test_short_sequences_only_reach_the_short_backend(monkeypatch: pytest.MonkeyPatch, spec: AttentionSpec) -> None:
    asked: dict[str, int | None] = {}

    def remember(name: str, narrowed: AttentionSpec) -> str:
        asked[name] = narrowed.max_length
        return "not today"

    monkeypatch.setattr(check, "try_backend", remember)
    assert set(check_backends(spec).values()) == {"not today"}
    assert asked.pop("triton_short") == 256
    assert set(asked.values()) == {None}


def test_the_full_grid_names_the_shape_that_fails(monkeypatch: pytest.MonkeyPatch, spec: AttentionSpec) -> None:
    seen: list[AttentionSpec] = []

    def verdict(backend, narrowed: AttentionSpec, full: bool) -> str | None:
        seen.append(narrowed)
        return "wrong" if (narrowed.head_dim, narrowed.num_kv_heads, narrowed.causal) == (256, 1, True) else None

    monkeypatch.setattr(check, "_check", verdict)
    assert check_backend("torch_sdpa", spec) is None
    assert seen == [spec]
    assert check_backend("torch_sdpa", spec, full=True) == "wrong"
    grid = {(s.head_dim, s.num_heads // s.num_kv_heads, s.causal) for s in seen[2:]}
    assert len(grid) == 3 * 4 * 2

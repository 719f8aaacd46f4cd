"""The backends without a plan: what they hand to their kernels."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from typing import Any

import pytest
import torch

from rose.attention_backends import AttentionSpec, WarmsUp, can_capture
from rose.attention_backends.flash_attention4 import FlashAttention4
from rose.attention_backends.reference import poisoned_qkv, reference_attention, row_error
from rose.attention_backends.rows import row_offsets
from rose.attention_backends.triton_short import TritonShort
from rose.batch import Batch
from rose.errors import InternalError, StartupError


@pytest.fixture
def fake_fa4(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []

    def flash_attn_varlen_func(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int | None, int | None],
        num_splits: int,
    ) -> tuple[torch.Tensor, None]:
        calls.append(locals() | {"out": torch.zeros_like(q)})
        return calls[-1]["out"], None

    module = types.ModuleType("flash_attn.cute")
    module.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    return calls


def _batch(lengths: tuple[int, ...], max_length: int) -> Batch:
    return replace(Batch.pack([[1] * n for n in lengths]), max_length=max_length, key="k")


def test_flash_attention4_gets_integers_of_the_bucket_and_one_split(fake_fa4, cpu_spec: AttentionSpec) -> None:
    spec = replace(cpu_spec, num_kv_heads=4, causal=True, scale=0.3)
    batch = _batch((5, 9), 4096)
    q, k, v = poisoned_qkv(14, 16, 4, 64, dtype=torch.bfloat16, device=spec.device)
    plan = FlashAttention4(spec).plan(batch)
    out = plan.run(q, k, v, 3)
    (call,) = fake_fa4
    assert out is call["out"]
    assert (call["q"].data_ptr(), call["k"].data_ptr()) == (q.data_ptr(), k.data_ptr())
    assert call["cu_seqlens_q"] is call["cu_seqlens_k"] is batch.cu_seqlens
    assert (call["max_seqlen_q"], call["max_seqlen_k"]) == (4096, 4096)
    assert (call["softmax_scale"], call["causal"], call["num_splits"]) == (0.3, True, 1)
    assert call["window_size"] == (None, None)
    assert can_capture(plan)


@pytest.mark.parametrize(("causal", "window"), [(True, (7, 0)), (False, (7, 7))])
def test_flash_attention4_gets_the_window_to_the_sides_that_are_seen(fake_fa4, causal, window, cpu_spec) -> None:
    backend = FlashAttention4(replace(cpu_spec, causal=causal, window=7))
    backend.plan(_batch((5,), 5)).run(*poisoned_qkv(5, 16, 16, 64, dtype=torch.bfloat16, device=cpu_spec.device), 0)
    assert fake_fa4[0]["window_size"] == window


def test_flash_attention4_has_one_compilation_for_short_and_long_bounds(fake_fa4, cpu_spec: AttentionSpec) -> None:
    backend = FlashAttention4(cpu_spec)
    qkv = poisoned_qkv(5, 16, 16, 64, dtype=torch.bfloat16, device=cpu_spec.device)
    for bound in (5, 64, 192):
        backend.plan(_batch((5,), bound)).run(*qkv, 0)
    # Its tiles have at most 192 query rows: a bound below would be another compile key.
    assert {call["max_seqlen_q"] for call in fake_fa4} == {256}


def test_flash_attention4_warms_up_both_sides_of_its_lookup(fake_fa4, cpu_spec, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    backend = FlashAttention4(cpu_spec)
    assert isinstance(backend, WarmsUp)
    backend.warm_up(256)
    backend.warm_up(257)
    assert [len(call["cu_seqlens_q"]) - 1 for call in fake_fa4] == [1, 1, 257]


def test_a_warm_up_that_fails_names_the_backend(fake_fa4, cpu_spec, monkeypatch) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise KeyError("compiler")

    monkeypatch.setattr(sys.modules["flash_attn.cute"], "flash_attn_varlen_func", broken)
    with pytest.raises(StartupError, match="attention backend flash_attention4 does not run"):
        FlashAttention4(cpu_spec).warm_up(1)


@pytest.mark.parametrize("backend_class", [FlashAttention4, TritonShort])
@pytest.mark.parametrize("lengths", [(4, 0, 3), (0,)])
def test_c128_an_empty_sequence_is_never_handed_on(backend_class, lengths, fake_fa4, cpu_spec) -> None:
    """Report C128 (flash-attention#2568, #2562): head dim 256 hangs or gives NaN on one."""
    batch = Batch(*[torch.zeros(7, dtype=torch.int32)] * 3, lengths, 7)
    with pytest.raises(InternalError, match="empty sequence"):
        backend_class(replace(cpu_spec, max_length=256)).plan(batch)


@pytest.mark.parametrize("causal", [False, True])
def test_triton_short_is_the_kernel_of_this_project(causal: bool, cpu_spec: AttentionSpec) -> None:
    """On the CPU the kernel's own reference runs: the backend must hand it the right rows."""
    spec = replace(cpu_spec, num_kv_heads=8, causal=causal, max_length=256)
    lengths = (1, 2, 64, 65, 256)
    qkv = poisoned_qkv(sum(lengths), 16, 8, 64, dtype=torch.bfloat16, device=spec.device)
    out = TritonShort(spec).plan(_batch(lengths, 256)).run(*qkv, 0)
    expected = reference_attention(*qkv, lengths, causal=causal, scale=spec.scale)
    assert row_error(out, expected) < 2**-8
    assert out.is_contiguous()


def test_triton_short_rounds_the_bound_up_and_refuses_a_longer_one(cpu_spec, monkeypatch) -> None:
    bounds: list[int] = []

    def short_attention(q, k, v, cu_seqlens, max_length, causal, scale, whole):
        bounds.append(max_length)
        return q

    monkeypatch.setattr("rose.kernels.short_attention.short_attention", short_attention)
    backend = TritonShort(replace(cpu_spec, max_length=256))
    for bound in (5, 64, 65, 128, 200, 256):
        backend.plan(_batch((5,), bound)).run(*[torch.zeros(5, 1, 1)] * 3, 0)
    assert bounds == [64, 64, 128, 128, 256, 256]
    with pytest.raises(InternalError, match="at most 256 tokens, this batch is bounded to 257"):
        backend.plan(_batch((5,), 257))


def test_rows_are_checked() -> None:
    assert row_offsets(_batch((3, 1, 4), 4)) == (0, 3, 4, 8)
    with pytest.raises(InternalError, match="sequence 2 has 4 tokens, more than the 3"):
        row_offsets(_batch((3, 1, 4), 3))
    short = replace(_batch((3, 1, 4), 4), ids=torch.zeros(7, dtype=torch.int32))
    with pytest.raises(InternalError, match="8 tokens together, the batch has 7 rows"):
        row_offsets(short)

"""The self-check of paged backends: each fault that it is there for is found and named, and what is right passes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from rose.attention_backends import AttentionSpec, check, paged_backend_names
from rose.attention_backends.check import check_backend, check_backends
from rose.attention_backends.torch_paged import TorchPaged, TorchPagedPlan
from rose.attention_backends.torch_sdpa import TorchSdpa
from rose.attention_backends.triton_paged import TritonPaged
from rose.batch import Batch
from tests.support.served_pages import spec_of

SPEC = spec_of(dtype=torch.float32, head_dim=32, scale=32**-0.5, max_length=None)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_length", [None, 1, 2, 20, 33])
def test_every_paged_backend_has_a_verdict(dtype, window, max_length):
    found = check_backends(replace(SPEC, dtype=dtype, window=window, max_length=max_length))
    assert tuple(found) == paged_backend_names()
    assert found.pop("torch_paged") is None
    assert all(found.values())
    assert "it attends causally only" in str(check_backend("torch_paged", replace(SPEC, causal=False)))


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_on_a_device_roses_own_and_torch_agree_with_the_reference(kv_heads, head_dim):
    spec = spec_of("cuda", num_heads=8, num_kv_heads=kv_heads, head_dim=head_dim)
    found = check_backends(spec)
    assert (found["triton_paged"], found["torch_paged"]) == (None, None)


def test_roses_own_passes_by_its_references(monkeypatch):
    monkeypatch.setattr(TritonPaged, "supports", lambda self, spec: None)
    assert check_backend("triton_paged", spec_of()) is None


def test_it_costs_little():
    """Best of three; the heads of Qwen3-0.6B in fp32. About 60 ms with one thread of a busy machine."""
    spec = replace(SPEC, num_heads=16, num_kv_heads=8, head_dim=128)
    best = 10.0
    for _ in range(3):
        begin = time.perf_counter()
        assert check_backends(spec)["torch_paged"] is None
        best = min(best, time.perf_counter() - begin)
    assert best < 1.0


Make = Callable[[TorchPagedPlan, Batch], object]


def verdict(monkeypatch: pytest.MonkeyPatch, plan: Make, spec: AttentionSpec = SPEC) -> str | None:
    """Of torch_paged, whose plans go through `plan` first."""

    class Spoiled(TorchPaged):
        def plan(self, batch, slot=0):
            made = super().plan(batch, slot)
            return plan(made, batch)

    monkeypatch.setattr(check, "try_backend", lambda name, narrowed: Spoiled(narrowed))
    return check_backend("flashinfer_paged", spec)


def spoiling(where: Callable[[Batch], bool], spoil: Callable[[torch.Tensor], torch.Tensor]) -> Make:
    def plan(made: TorchPagedPlan, batch: Batch) -> TorchPagedPlan:
        if where(batch):
            run = made.run
            made.run = lambda *args: spoil(run(*args))  # type: ignore[method-assign]
        return made

    return plan


def is_decoding(batch: Batch) -> bool:
    return batch.paged.decodes == batch.num_sequences


def is_mixed(batch: Batch) -> bool:
    return 0 < batch.paged.decodes < batch.num_sequences


def is_prompts(batch: Batch) -> bool:
    return batch.paged.kv_lengths.tolist() == list(batch.lengths)


def is_history(batch: Batch) -> bool:
    return batch.paged.decodes == 0 and not is_prompts(batch)


KINDS = [
    (is_prompts, "prompts"),
    (is_history, "chunks behind a history"),
    (is_mixed, "tokens and chunks in one batch"),
    (is_decoding, "decoding"),
]


def test_what_is_right_passes(monkeypatch):
    assert verdict(monkeypatch, lambda made, batch: made) is None


@pytest.mark.parametrize(("where", "what"), KINDS)
@pytest.mark.parametrize(
    "spoil", [lambda out: out * 1.001, lambda out: out.flip(1)], ids=["too large", "heads swapped"]
)
def test_c129_a_wrong_answer_is_found_in_every_kind_of_batch(monkeypatch, where, what, spoil):
    """Report C129 (flash-attention#2192): wrong on one architecture only."""
    reason = verdict(monkeypatch, spoiling(where, spoil))
    assert reason is not None
    assert reason.startswith(f"wrong in {what} on 4/2 heads of 32, float32, causal: a row is off by ")


@pytest.mark.parametrize(("where", "what"), KINDS)
def test_numbers_that_are_not_finite_are_found(monkeypatch, where, what):
    reason = verdict(monkeypatch, spoiling(where, lambda out: out.index_fill(0, torch.tensor([1]), torch.nan)))
    assert reason == f"not finite in {what} on 4/2 heads of 32, float32, causal"


@pytest.mark.parametrize(("where", "what"), KINDS)
def test_a_backend_that_raises_is_a_reason(monkeypatch, where, what):
    def fail(out):
        raise LookupError("no kernel image")

    reason = verdict(monkeypatch, spoiling(where, fail))
    assert reason == "failed on 4/2 heads of 32, float32, causal: LookupError: no kernel image"


def test_reading_beyond_a_sequences_end_is_found_and_named(monkeypatch):
    """Rows with a weight of zero are multiplied all the same, and zero times NaN is NaN: what one request left in its
    pages would spoil the next."""

    class Beyond(TorchPagedPlan):
        def _gather(self, run, pages_k, pages_v):
            size = self.paged.page_size
            table = self.paged.page_table[run.first : run.first + run.size, : -(-run.bound // size)]
            keys, values = (pages[table].flatten(1, 2)[:, : run.bound] for pages in (pages_k, pages_v))
            return keys, values, self._mask(run)[1]

    reason = verdict(monkeypatch, lambda made, batch: Beyond(made.spec, made.cache, batch, batch.paged))
    assert reason is not None
    assert reason.startswith(
        "reads beyond a sequence's end: NaN that another one left in a page comes out (not finite in"
    )


def test_taking_a_row_beyond_the_end_for_a_key_is_wrong_whatever_lies_there(monkeypatch):
    """Two keys too many while decoding, so that it is not the bound's doing."""

    def plan(made, batch):
        if is_decoding(batch):
            paged = replace(
                batch.paged, kv_lengths=batch.paged.kv_lengths + 2, max_kv_length=made.paged.max_kv_length + 2
            )
            return TorchPagedPlan(made.spec, made.cache, batch, paged)
        return made

    assert verdict(monkeypatch, plan) == "not finite in decoding on 4/2 heads of 32, float32, causal"


@pytest.mark.parametrize(("shift", "layer"), [(1, 1), (0, 0)], ids=["the row behind it too", "another layer too"])
def test_storing_where_it_should_not_is_found(monkeypatch, shift, layer):
    def plan(made, batch):
        run = made.run

        def and_elsewhere(q, k, v, at):
            out = run(q, k, v, at)
            last = batch.paged.slots.long()[-1:] + shift
            made.cache.layer(layer)[1].flatten(0, 1)[last] = v[-1:]
            return out

        made.run = and_elsewhere
        return made

    reason = verdict(monkeypatch, plan, replace(SPEC, max_length=3))
    assert reason == "it stores keys or values elsewhere than it should, on 4/2 heads of 32, float32, causal"


def test_a_backend_without_pages_is_none(monkeypatch):
    monkeypatch.setattr(check, "try_backend", lambda name, narrowed: TorchSdpa(narrowed))
    assert check_backend("torch_paged", SPEC) == "it keeps no pages"


def test_the_full_grid_is_causal_only(monkeypatch):
    seen: list[AttentionSpec] = []
    monkeypatch.setattr(check, "try_backend", lambda name, narrowed: seen.append(narrowed) or TorchPaged(narrowed))
    assert check_backend("torch_paged", SPEC, full=True) is None
    assert seen[0] == SPEC
    assert {(s.head_dim, s.num_heads // s.num_kv_heads) for s in seen[1:]} == {
        (d, g) for d in (64, 128, 256) for g in (1, 2, 4, 8)
    }
    assert all(s.causal and s.layout == "paged" for s in seen)

"""FlashInfer over pages: on the CPU with a stand-in that attends by what it was planned with, on a GPU with itself."""

from __future__ import annotations

import sys
import types
from dataclasses import replace

import pytest
import torch

from rose.attention_backends import KeepsPlans, Paged, WarmsUp, can_capture, load_backend
from rose.attention_backends.check import check_backend
from rose.attention_backends.flashinfer_paged import FlashInferPaged
from rose.attention_backends.reference import TOLERANCE, reference_attention, row_error
from rose.batch import PackedAttentionPlan
from rose.errors import InternalError, StartupError
from tests.support.served_pages import PAGE, Served, check, spec_of

MIXED = (
    [(0, 100), (1, 15), (3, 15)],
    [(1, 1), (3, 1), (0, 28), (2, 33)],
    [(1, 1), (2, 1), (0, 1)],
    [(4, 1), (2, 1)],
)


class FakeWrapper:
    """The paged prefill wrapper as far as it is used, with its keyword names and its graph-mode rules. `run` reads its
    buffers, as a replayed graph would, and attends plainly."""

    made: list[FakeWrapper]

    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None,
        paged_kv_last_page_len_buf=None,
        backend="auto",
    ):
        assert kv_layout == "NHD"
        self.backend, self.graph = backend, use_cuda_graph
        self.buffers = [qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf]
        assert all((x is not None) == use_cuda_graph for x in self.buffers)
        self._pin_memory_int_workspace_buffer = torch.empty(8 << 20, dtype=torch.uint8)
        self.rows = None
        self.made.append(self)

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer):
        self.ints = int_workspace_buffer

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        *,
        causal,
        window_left,
        sm_scale,
        q_data_type,
        kv_data_type,
    ):
        given = [qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len]
        assert all(x.dtype == torch.int32 for x in given)
        assert causal
        assert page_size == PAGE
        if self.graph:
            rows = int(qo_indptr[-1])
            self.rows = rows if self.rows is None else self.rows
            if rows > self.rows or len(qo_indptr) != len(self.buffers[0]):
                raise ValueError("The batch size should be fixed")
            for buffer, new in zip(self.buffers, given, strict=True):
                buffer[: len(new)].copy_(new)
        else:
            self.buffers = [x.clone() for x in given]
        self.window, self.scale = (None if window_left < 0 else window_left), sm_scale
        self._plan_info = [self.rows or 0]

    def run(self, q, pages, out):
        rows, indptr, indices, last = self.buffers
        for i in range(len(rows) - 1):
            used = indices[int(indptr[i]) : int(indptr[i + 1])].long()
            total = (len(used) - 1) * PAGE + int(last[i])
            k, v = (x[used].flatten(0, 1)[:total] for x in pages)
            own = q[int(rows[i]) : int(rows[i + 1])]
            # The reference wants a query for each key; those before the batch's own are cut off again.
            whole = torch.cat([torch.zeros_like(k[:, :1]).expand(-1, q.shape[1], -1)[: total - len(own)], own])
            full = reference_attention(whole, k, v, [total], causal=True, scale=self.scale, window=self.window)
            out[int(rows[i]) : int(rows[i + 1])] = full[total - len(own) :].to(out.dtype)
        return out


@pytest.fixture
def fake(monkeypatch):
    wrapper = type("Wrapper", (FakeWrapper,), {"made": []})
    module = types.ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = wrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    return wrapper


@pytest.mark.parametrize("window", [None, 40])
def test_prompts_chunks_and_tokens_in_any_company(fake, window):
    served = Served(spec_of(window=window), [129, 17, 60, 16, 1], FlashInferPaged)
    parts = {i: [] for i in range(5)}
    for chunks in MIXED:
        for (i, _), out in zip(chunks, served.run(chunks), strict=True):
            parts[i].append(out)
    check(served, parts)
    assert [wrapper.graph for wrapper in fake.made] == [False, False]


def test_a_key_has_buffers_of_its_own_that_later_plans_fill(fake):
    served = Served(spec_of(), [200, 50, 30], FlashInferPaged)
    parts = {i: [out] for i, out in enumerate(served.run([(0, 190), (1, 20), (2, 29)]))}
    for chunks in ([(0, 1), (1, 1)], [(1, 1), (2, 1)], [(0, 1)]):
        outs = served.run(chunks, bound=1024, dummies=2 - len(chunks), key="k")
        for (i, _), out in zip(chunks, outs, strict=True):
            parts[i].append(out)
    check(served, parts)
    (keyed,) = [wrapper for wrapper in fake.made if wrapper.graph]
    assert keyed.backend == "fa2"
    backend = served.backend
    assert isinstance(backend, KeepsPlans)
    assert backend.workspace().keys == 1
    with pytest.raises(InternalError, match="was planned for 2 sequences, now for 1"):
        served.run([(1, 1)], bound=1024, key="k")
    used = backend.workspace().used_bytes
    backend.release("k")
    backend.release("never planned")
    assert used - backend.workspace().used_bytes > 1 << 20


def test_another_launch_for_the_same_key_is_refused(fake):
    served = Served(spec_of(), [20], FlashInferPaged)
    served.run([(0, 10)])
    served.run([(0, 1)], bound=64, key="k")
    keyed = next(wrapper for wrapper in fake.made if wrapper.graph)
    keyed.rows = 7
    with pytest.raises(InternalError, match=r"another launch for graph key 'k': \(7,\), was \(1,\)"):
        served.run([(0, 1)], bound=64, key="k")


def test_what_it_needs_of_a_batch(fake):
    served = Served(spec_of(), [40, 20], FlashInferPaged)
    batch, _ = served.batch([(0, 1), (1, 1)])
    plan = served.backend.plan(batch)
    assert can_capture(plan)
    assert isinstance(plan, PackedAttentionPlan)
    assert isinstance(served.backend, Paged)
    assert isinstance(served.backend, WarmsUp)
    assert not can_capture(served.backend.plan(served.batch([(0, 1), (1, 3)])[0]))
    batch.ids = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(InternalError, match="every row to belong to a sequence"):
        served.backend.plan(batch)
    with pytest.raises(InternalError, match="needs a cache"):
        FlashInferPaged(spec_of()).plan(batch)
    with pytest.raises(StartupError, match="has no cache"):
        FlashInferPaged(spec_of()).warm_up(1)
    assert "needs a CUDA device" in FlashInferPaged(spec_of()).supports(spec_of())
    assert "not over ragged" in FlashInferPaged(spec_of()).supports(spec_of(layout="ragged"))


def test_warm_up_runs_a_step_and_a_chunk(fake, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    served = Served(spec_of(), [1], FlashInferPaged, poison=0.0)
    served.backend.warm_up(4)
    assert len(fake.made) == 2


# On a device: rows nobody wrote are finite, as a KVCache starts; whether FlashInfer minds NaN there is its business.


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (16, 8, 128), (16, 4, 256)])
def test_on_a_device(window, heads, kv_heads, head_dim):
    spec = spec_of("cuda", num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, window=window)
    load_backend("flashinfer_paged", spec)
    if (reason := check_backend("flashinfer_paged", spec)) is not None and "JIT compilation is disabled" in reason:
        pytest.skip(reason)
    served = Served(spec, [129, 17, 60, 16, 1], FlashInferPaged, poison=1000.0)
    parts = {i: [] for i in range(5)}
    for chunks in MIXED:
        for (i, _), out in zip(chunks, served.run(chunks), strict=True):
            parts[i].append(out)
    check(served, parts)


@pytest.mark.gpu
def test_a_captured_step_replays_for_other_lengths():
    spec = spec_of("cuda", num_heads=16, num_kv_heads=8, head_dim=128, scale=128**-0.5)
    served = Served(spec, [2060, 100, 17, 40], FlashInferPaged, poison=1000.0)
    served.run([(0, 2040), (1, 5), (2, 2), (3, 20)])
    steps = [[(0, 1), (1, 1), (2, 1), (3, 1)], [(0, 1), (1, 1), (2, 1)], [(1, 1)], [(3, 1), (0, 1)]]
    batch, packed = served.batch(steps[0], bound=4096, key="k")
    plan = served.backend.plan(batch)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        plan.run(*packed.split([16, 8, 8], dim=1), 1)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = plan.run(*packed.split([16, 8, 8], dim=1), 1)
    for number, chunks in enumerate(steps):
        if number:
            fresh, fresh_packed = served.batch(chunks, bound=4096, key="k", dummies=4 - len(chunks))
            batch.paged = replace(batch.paged, host_kv_lengths=fresh.paged.host_kv_lengths)
            packed.copy_(fresh_packed)
            for name in ("page_table", "kv_lengths", "slots"):
                getattr(batch.paged, name).copy_(getattr(fresh.paged, name))
            served.backend.plan(batch, number % 2)
        graph.replay()
        torch.cuda.synchronize()
        for row, (i, _) in enumerate(chunks):
            assert row_error(out[row][None], served.expected(i)[-1:]) <= TOLERANCE[spec.dtype]

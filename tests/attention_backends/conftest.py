"""Stand-ins for the GPU packages: a stream whose work runs when it is told to, and a FlashInfer that queues on it."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rose.attention_backends import AttentionSpec


class FakeStream:
    """Queued work, in order; nothing runs before `run`."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], object]] = []
        self.done = 0

    def push(self, work: Callable[[], object]) -> None:
        self.queue.append(work)

    def run(self, until: int | None = None) -> None:
        while self.done < (len(self.queue) if until is None else until):
            self.queue[self.done]()
            self.done += 1


class FakeFence:
    """torch.cuda.Event as far as staging needs it."""

    def __init__(self, stream: FakeStream) -> None:
        self.stream = stream
        self.at = 0

    def record(self) -> None:
        self.at = len(self.stream.queue)

    def query(self) -> bool:
        return self.stream.done >= self.at

    def synchronize(self) -> None:
        self.stream.run(self.at)


class FakeRaggedWrapper:
    """FlashInfer's ragged wrapper as far as it is used, with its keyword names and its graph-mode rules.

    `plan` writes the offsets into the page-locked buffer and queues their copy, as the real one does; `run` queues a
    read of the device workspace and appends the offsets it finds to `seen`.
    """

    stream: FakeStream
    made: list[FakeRaggedWrapper]
    seen: list[tuple[int, ...]]

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        kv_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        self.backend, self.graph, self.bound = backend, use_cuda_graph, qo_indptr_buf
        self.rows: int | None = None
        self.plans: list[dict[str, Any]] = []
        self.reset_workspace_buffer(float_workspace_buffer, torch.empty(8 << 20, dtype=torch.uint8))
        self.made.append(self)

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        self.float, self.device_ints = float_workspace_buffer, int_workspace_buffer
        self._pin_memory_int_workspace_buffer = torch.empty_like(int_workspace_buffer)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        *,
        causal: bool = False,
        window_left: int = -1,
        sm_scale: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        disable_split_kv: bool = False,
        qo_indptr_cpu: torch.Tensor,
        kv_indptr_cpu: torch.Tensor,
    ) -> None:
        assert qo_indptr_cpu.shape == qo_indptr.shape
        assert qo_indptr.dtype == qo_indptr_cpu.dtype == torch.int32
        assert qo_indptr.data_ptr() != qo_indptr_cpu.data_ptr()
        rows, batch = int(qo_indptr_cpu[-1]), len(qo_indptr_cpu) - 1
        if self.graph:
            assert self.bound is not None
            self.rows = rows if self.rows is None else self.rows
            if rows > self.rows or batch != len(self.bound) - 1:
                raise ValueError("the batch size should be fixed in cudagraph mode")
        pinned, device, count = self._pin_memory_int_workspace_buffer, self.device_ints, 4 * (batch + 1)
        pinned[:count].view(torch.int32).copy_(qo_indptr_cpu)
        self.stream.push(lambda: device[:count].copy_(pinned[:count]))
        self.batch = batch
        self._plan_info = [self.rows if self.graph else rows, batch]
        self.plans.append({"causal": causal, "window_left": window_left, "sm_scale": sm_scale, "dtype": q_data_type})
        self.plans[-1].update(heads=(num_qo_heads, num_kv_heads, head_dim_qk), disable_split_kv=disable_split_kv)

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        device, count = self.device_ints, 4 * (self.batch + 1)
        self.stream.push(lambda: self.seen.append(tuple(device[:count].view(torch.int32).tolist())))
        return torch.zeros(q.shape, dtype=q.dtype)


@pytest.fixture
def fake_stream() -> FakeStream:
    return FakeStream()


@pytest.fixture
def fake_fence(fake_stream: FakeStream) -> Callable[[], FakeFence]:
    return lambda: FakeFence(fake_stream)


@pytest.fixture
def fake_flashinfer(monkeypatch: pytest.MonkeyPatch, fake_stream: FakeStream) -> type[FakeRaggedWrapper]:
    """A module `flashinfer` with a fresh wrapper class on `fake_stream`."""
    wrapper = type("Wrapper", (FakeRaggedWrapper,), {"stream": fake_stream, "made": [], "seen": []})
    module = types.ModuleType("flashinfer")
    module.BatchPrefillWithRaggedKVCacheWrapper = wrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    return wrapper


@pytest.fixture
def cpu_spec() -> AttentionSpec:
    """BGE-M3's heads, on the CPU."""
    return AttentionSpec(
        num_heads=16,
        num_kv_heads=16,
        head_dim=64,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        causal=False,
        scale=0.125,
    )

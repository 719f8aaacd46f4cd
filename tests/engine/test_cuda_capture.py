"""Capturing on CUDA, without a device: what is counted, and every way in which a device says that it is full."""

from __future__ import annotations

import gc

import pytest
import torch

from rose.engine.cuda import CudaCapturer, is_out_of_memory
from rose.engine.graphs import LazyGraphs
from tests.engine.test_graphs import Sum, key, run

FREE = 80 << 30
GRAPH = 28 << 20


class Device:
    """Graphs take GRAPH bytes once they are instantiated, at the end of their capture.

    Attributes:
        error: raised there instead.
        users: of each pool, the graphs that hold it. As in torch, one that had some and has none any more is dead.
    """

    def __init__(self) -> None:
        self.free = FREE
        self.error: Exception | None = None
        self.capturing: object | None = None
        self.users: dict[int, int] = {}
        self.handles = 0

    def handle(self) -> int:
        self.handles += 1
        return self.handles


@pytest.fixture
def device(monkeypatch):
    fake = Device()

    class Graph:
        pool: int | None = None

        def capture_begin(self, pool, capture_error_mode):
            assert fake.capturing is None, "the capture before it was never ended"
            assert not gc.isenabled()
            assert capture_error_mode == "thread_local"
            assert fake.users.get(pool) != 0, "torch: INTERNAL ASSERT FAILED: use_count > 0"
            fake.users[pool] = fake.users.get(pool, 0) + 1
            self.pool = pool
            fake.capturing = self

        def capture_end(self):
            assert fake.capturing is self
            fake.capturing = None
            if fake.error is not None:
                raise fake.error
            fake.free -= GRAPH

        def replay(self):
            pass

        def reset(self):
            fake.free += GRAPH
            self.__del__()

        def __del__(self):
            pool, self.pool = self.pool, None
            if pool is not None:
                fake.users[pool] -= 1

    class Stream:
        def synchronize(self):
            pass

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", fake.handle)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (fake.free, FREE))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream())
    return fake


def graphs() -> LazyGraphs:
    return LazyGraphs(torch.device("cpu"), capturer=CudaCapturer(torch.device("cpu")), max_bytes=1 << 30)


def test_the_bytes_of_a_graph_are_what_the_device_has_less(device):
    place = graphs()
    for tokens in (64, 128):
        for number in range(3):
            run(place, key(tokens), number)
    assert place.metrics.bytes == FREE - device.free + 2 * 8
    assert gc.isenabled()


FULL = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    torch.AcceleratorError("CUDA error: out of memory"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
]


@pytest.mark.parametrize("error", FULL, ids=lambda error: str(error)[:34])
@pytest.mark.parametrize("where", ["forward", "instantiation"])
def test_a_full_device_at_capture_is_met_once_whoever_says_it(device, error, where, caplog):
    """Report C132 (vllm#49224): out of memory while capturing; most of a graph's memory is not the allocator's."""
    place = graphs()
    for number in range(3):
        run(place, key(64), number)

    class Full(Sum):
        def run(self):
            if device.capturing is not None and where == "forward":
                raise error
            return super().run()

    if where == "instantiation":
        device.error = error
    forward = Full()
    assert [run(place, key(128), n, forward) for n in range(4)] == [1, 2, 3, 4], "every batch is answered"
    assert (place.metrics.failed, place.metrics.plain) == (1, 5), "counted, and not tried again"
    assert "no graph for 128 tokens in 1 sequences, it runs plain: out of memory" in caplog.text
    assert gc.isenabled()
    device.error = None
    assert [run(place, key(192), n) for n in range(3)] == [1, 2, 3]
    assert key(192) not in place, "what was held when memory ran out is all there is room for"
    hits = place.metrics.hits
    run(place, key(64), 5)
    assert place.metrics.hits == hits + 1


def test_another_error_at_capture_stays_itself(device):
    device.error = RuntimeError("CUDA error: operation not permitted when stream is capturing")
    with pytest.raises(RuntimeError, match="not permitted") as caught:
        CudaCapturer(torch.device("cpu")).capture(key(64), dict)
    assert caught.value is device.error
    assert not is_out_of_memory(caught.value)
    assert not is_out_of_memory(MemoryError("out of memory")), "the host's memory is another matter"


def test_graphs_share_a_pool_and_the_first_after_the_last_has_a_new_one(device):
    """Whose last graph was let go (the budget held one, or a replay failed) could capture no other ever after."""
    held = graphs()
    for number in range(3):
        run(held, key(64), number)
        run(held, key(128), number)
    assert device.users == {1: 2}
    held.clear()
    assert device.users == {1: 0}
    for number in range(3):
        run(held, key(64), number)
    assert device.users == {1: 0, 2: 1}
    assert (held.metrics.captures, held.metrics.failed) == (3, 0)


def test_a_first_capture_that_fails_leaves_no_dead_pool(device):
    held = graphs()
    device.error = RuntimeError("a passing error")
    for number in range(2):
        run(held, key(64), number)
    gc.collect()
    device.error = None
    for number in range(3):
        run(held, key(64), number)
    assert held.metrics.captures == 1

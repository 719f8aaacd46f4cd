"""The arena's accounts, and the fence of the staging buffer."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rose.attention_backends.workspace import Arena, Staging, WorkspaceFull

CPU = torch.device("cpu")


def _span(block: torch.Tensor) -> range:
    return range(block.data_ptr(), block.data_ptr() + block.numel())


@given(st.lists(st.tuples(st.integers(0, 200_000), st.booleans()), max_size=60))
def test_blocks_never_overlap_and_the_accounts_are_right(steps: list[tuple[int, bool]]) -> None:
    arena = Arena(CPU, limit_bytes=32 << 20)
    held: list[torch.Tensor] = []
    for nbytes, give in steps:
        if give and held:
            arena.give_back(held.pop(nbytes % len(held)))
        else:
            block = arena.take(nbytes)
            assert nbytes <= block.numel() <= nbytes + max(256, nbytes / 4)
            held.append(block)
        spans = sorted((_span(b) for b in held), key=lambda s: s.start)
        assert all(a.stop <= b.start for a, b in pairwise(spans))
        assert arena.used_bytes == sum(b.numel() for b in held) <= arena.device_bytes <= arena.limit_bytes
    for block in held:
        arena.give_back(block)
    assert arena.used_bytes == 0


@given(st.lists(st.integers(1, 50_000), min_size=1, max_size=30))
def test_the_same_requests_again_take_nothing_more_from_the_device(sizes: list[int]) -> None:
    arena = Arena(CPU, limit_bytes=64 << 20)
    held = [arena.take(n) for n in sizes]
    taken = arena.device_bytes
    for block in held:
        arena.give_back(block)
    again = [arena.take(n) for n in reversed(sizes)]
    assert len(again) == len(sizes)
    assert arena.device_bytes == taken


def test_the_limit_is_kept_and_a_larger_free_block_serves_where_no_slab_fits() -> None:
    arena = Arena(CPU, limit_bytes=100_000)
    large = arena.take(90_000)
    with pytest.raises(WorkspaceFull, match="may take 100000 bytes"):
        arena.take(20_000)
    arena.give_back(large)
    small = arena.take(20_000)
    assert small.numel() >= 20_000
    assert arena.device_bytes <= 100_000
    arena.give_back(small)
    with pytest.raises(KeyError):
        arena.give_back(small)


def test_a_device_without_memory_is_a_full_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena(CPU, limit_bytes=1 << 20)

    def no_memory(*args: object, **kwargs: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", no_memory)
        with pytest.raises(WorkspaceFull, match="no 1048576 bytes left"):
            arena.take(10)
    assert arena.take(10).numel() >= 10


def test_poison_reaches_every_byte() -> None:
    arena = Arena(CPU, limit_bytes=16 << 20)
    blocks = [arena.take(n) for n in (100, 5 << 20, 7000)]
    arena.give_back(blocks[0])
    arena.poison()
    assert all(bool((block == 0xFF).all()) for block in blocks)
    assert bool(blocks[1][: 4 << 20].view(torch.bfloat16).isnan().all())


class Fence:
    def __init__(self) -> None:
        self.done = True
        self.log: list[str] = []

    def record(self) -> None:
        self.log.append("record")
        self.done = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.log.append("wait")
        self.done = True


def test_staging_waits_only_for_a_copy_that_is_still_queued() -> None:
    fence = Fence()
    staging = Staging(CPU, 64, lambda: fence)
    staging.acquire()
    staging.release()
    fence.done = True
    staging.acquire()
    assert (staging.waits, fence.log) == (0, ["record"])
    staging.release()
    staging.acquire()
    assert (staging.waits, fence.log) == (1, ["record", "record", "wait"])


def test_staging_without_a_device_needs_no_fence() -> None:
    staging = Staging(CPU, 64)
    for value in range(3):
        staging.acquire().fill_(value)
        staging.release()
    assert staging.waits == 0
    assert int(staging.host[0]) == 2

"""What the FlashInfer backends keep for whom: device memory by key, host memory by slot, fenced."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch

from rose.attention_backends import AttentionSpec, can_capture
from rose.attention_backends.flashinfer2 import FlashInfer2
from rose.attention_backends.flashinfer3 import FlashInfer3
from rose.attention_backends.workspace import Arena, WorkspaceFull
from rose.batch import Batch
from rose.errors import InternalError, StartupError

BACKENDS = [FlashInfer2, FlashInfer3]


def make_batch(lengths: tuple[int, ...], key: Hashable | None = None, rows: int | None = None) -> Batch:
    rows = sum(lengths) if rows is None else rows
    ids = torch.zeros(rows, dtype=torch.int32)
    offsets = torch.tensor([*accumulate(lengths, initial=0)], dtype=torch.int32)
    return Batch(ids, ids, offsets, lengths, max(lengths, default=1) or 1, key=key)


def run_plan(backend: Any, batch: Batch, slot: int = 0) -> None:
    rows = torch.zeros(batch.num_tokens, 1, 1)
    backend.plan(batch, slot).run(rows, rows, rows, 0)


@pytest.mark.parametrize("backend_class", BACKENDS)
def test_asks_flashinfer_for_what_the_model_needs(backend_class, fake_flashinfer, fake_fence, cpu_spec) -> None:
    spec = replace(cpu_spec, num_heads=32, num_kv_heads=8, causal=True, window=100, scale=0.2)
    backend = backend_class(spec, new_fence=fake_fence)
    plan = backend.plan(make_batch((3, 4), key="k"))
    (wrapper,) = fake_flashinfer.made
    assert wrapper.backend == {FlashInfer2: "fa2", FlashInfer3: "fa3"}[backend_class]
    assert wrapper.graph
    assert wrapper.plans == [
        {
            "causal": True,
            "window_left": 100,
            "sm_scale": 0.2,
            "dtype": torch.bfloat16,
            "heads": (32, 8, 64),
            "disable_split_kv": True,
        }
    ]
    assert can_capture(plan)


def test_a_key_keeps_its_wrapper_and_memory_and_the_next_key_gets_its_own(
    fake_flashinfer, fake_fence, fake_stream, cpu_spec
) -> None:
    backend = FlashInfer3(cpu_spec, new_fence=fake_fence)
    run_plan(backend, make_batch((3, 4), key="a"))
    run_plan(backend, make_batch((5, 2), key="a"), slot=1)
    run_plan(backend, make_batch((1, 6), key="b"))
    first, second = fake_flashinfer.made
    assert len(first.plans) == 2
    assert len(second.plans) == 1
    assert first.device_ints.data_ptr() != second.device_ints.data_ptr()
    assert first.bound.data_ptr() != second.bound.data_ptr()
    assert first.float is second.float
    fake_stream.run()
    # An empty sequence stands for the rows past the last one: the number of offsets of a key never changes.
    assert fake_flashinfer.seen == [(0, 3, 7, 7), (0, 5, 7, 7), (0, 1, 7, 7)]
    assert backend.workspace().keys == 2


def test_rows_past_the_last_sequence_become_one_of_their_own(
    fake_flashinfer, fake_fence, fake_stream, cpu_spec
) -> None:
    backend = FlashInfer2(cpu_spec, new_fence=fake_fence)
    run_plan(backend, make_batch((3, 4), key="a", rows=16))
    run_plan(backend, make_batch((3, 4), rows=16))
    run_plan(backend, make_batch((3, 4)))
    fake_stream.run()
    assert fake_flashinfer.seen == [(0, 3, 7, 16), (0, 3, 7, 16), (0, 3, 7)]


def test_plain_batches_of_any_size_share_one_wrapper_a_slot(fake_flashinfer, fake_fence, fake_stream, cpu_spec) -> None:
    backend = FlashInfer3(cpu_spec, new_fence=fake_fence)
    for step in range(20):
        run_plan(backend, make_batch((step + 1, 2)), slot=step % 2)
    assert [w.graph for w in fake_flashinfer.made] == [False, False]
    fake_stream.run()
    assert fake_flashinfer.seen == [(0, n, n + 2) for n in range(1, 21)]
    assert backend.workspace().keys == 0


def test_plans_of_two_slots_may_both_be_run_later(fake_flashinfer, fake_fence, fake_stream, cpu_spec) -> None:
    backend = FlashInfer2(cpu_spec, new_fence=fake_fence)
    rows = torch.zeros(7, 1, 1)
    first, second = backend.plan(make_batch((3, 4)), 0), backend.plan(make_batch((5, 2)), 1)
    first.run(rows, rows, rows, 0)
    second.run(rows, rows, rows, 0)
    fake_stream.run()
    assert fake_flashinfer.seen == [(0, 3, 7), (0, 5, 7)]


def _random_steps(backend: Any, stream: Any, steps: int) -> list[tuple[int, ...]]:
    """`steps` batches of one key in two slots, the device up to two steps behind; the offsets that were meant."""
    chance = random.Random(126)
    meant, ends = [], []
    for step in range(steps):
        if step >= 2:
            # The engine launches a third batch only when the first has finished.
            stream.run(ends[step - 2])
        cut = chance.randint(1, 99)
        run_plan(backend, make_batch((cut, 100 - cut), key="k"), slot=step % 2)
        ends.append(len(stream.queue))
        meant.append((0, cut, 100, 100))
        stream.run(min(len(stream.queue), stream.done + chance.randint(0, 3)))
    stream.run()
    return meant


def test_c126_two_batches_in_flight_never_see_each_others_splits(
    fake_flashinfer, fake_fence, fake_stream, cpu_spec
) -> None:
    """Report C126 (mstar#236): the host overwrote the page-locked buffer before its copy had run."""
    backend = FlashInfer3(cpu_spec, new_fence=fake_fence)
    assert _random_steps(backend, fake_stream, 10_000) == fake_flashinfer.seen
    assert backend.workspace().fence_waits == 0


def test_c126_a_slot_used_too_soon_waits_instead_of_overwriting(
    fake_flashinfer, fake_fence, fake_stream, cpu_spec
) -> None:
    """Report C126 (mstar#236): the same slot again and again while the device does nothing."""
    backend = FlashInfer2(cpu_spec, new_fence=fake_fence)
    for cut in range(1, 50):
        run_plan(backend, make_batch((cut, 100 - cut), key="k"))
    fake_stream.run()
    assert fake_flashinfer.seen == [(0, cut, 100, 100) for cut in range(1, 50)]
    assert backend.workspace().fence_waits == 48


def test_c126_the_test_above_would_see_a_missing_fence(fake_flashinfer, fake_stream, cpu_spec) -> None:
    class NoFence:
        def record(self) -> None: ...

        def query(self) -> bool:
            return True

        def synchronize(self) -> None: ...

    backend = FlashInfer2(cpu_spec, new_fence=NoFence)
    for cut in range(1, 50):
        run_plan(backend, make_batch((cut, 100 - cut), key="k"))
    fake_stream.run()
    assert fake_flashinfer.seen != [(0, cut, 100, 100) for cut in range(1, 50)]


def test_c124_a_key_is_one_shape(fake_flashinfer, fake_fence, cpu_spec) -> None:
    """Report C124 (flashinfer#412, #281): other tokens or sequences under a captured key."""
    backend = FlashInfer3(cpu_spec, new_fence=fake_fence)
    backend.plan(make_batch((3, 4), key="a"))
    with pytest.raises(InternalError, match=r"'a' was planned for 7 tokens in 2 sequences, now for 7 in 3"):
        backend.plan(make_batch((3, 3, 1), key="a"))
    with pytest.raises(InternalError, match="now for 8 in 2"):
        backend.plan(make_batch((3, 5), key="a"))
    backend.plan(make_batch((6, 1), key="a"))


def test_c124_a_changed_launch_is_an_error_and_not_a_wrong_answer(fake_flashinfer, fake_fence, cpu_spec) -> None:
    """Report C124 (flashinfer#639, #411): the grid of the capture no longer fits what was planned."""
    backend = FlashInfer2(cpu_spec, new_fence=fake_fence)
    backend.plan(make_batch((3, 4), key="a"))
    fake_flashinfer.made[0].rows = 9
    with pytest.raises(InternalError, match="another launch"):
        backend.plan(make_batch((4, 3), key="a"))


@pytest.mark.parametrize("lengths", [(3, 0, 4), (0,), ()])
@pytest.mark.parametrize("backend_class", BACKENDS)
def test_empty_sequences_are_refused(backend_class, lengths, fake_flashinfer, fake_fence, cpu_spec) -> None:
    with pytest.raises(InternalError, match="empty sequence: number"):
        backend_class(cpu_spec, new_fence=fake_fence).plan(make_batch(lengths))


def test_released_memory_serves_the_next_key(fake_flashinfer, fake_fence, cpu_spec) -> None:
    backend = FlashInfer3(cpu_spec, new_fence=fake_fence)
    backend.plan(make_batch((3, 4), key="a"))
    before = backend.workspace()
    backend.release("a")
    backend.release("never planned")
    assert backend.workspace().keys == 0
    assert backend.workspace().used_bytes < before.used_bytes
    backend.plan(make_batch((6, 1), key="b"), slot=1)
    after = backend.workspace()
    assert (after.keys, after.used_bytes, after.device_bytes) == (1, before.used_bytes, before.device_bytes)
    assert fake_flashinfer.made[0].device_ints.data_ptr() == fake_flashinfer.made[1].device_ints.data_ptr()


def test_a_full_arena_refuses_a_key_and_keeps_serving_the_others(
    fake_flashinfer, fake_fence, fake_stream, cpu_spec
) -> None:
    backend = FlashInfer3(cpu_spec, arena=Arena(torch.device("cpu"), (1 << 20) + 8000), new_fence=fake_fence)
    run_plan(backend, make_batch((3, 4), key="a"))
    used = backend.workspace().used_bytes
    with pytest.raises(WorkspaceFull, match="bytes of device memory"):
        backend.plan(make_batch((9000, 4), key="b"))
    assert backend.workspace().used_bytes == used
    run_plan(backend, make_batch((6, 1), key="a"))
    fake_stream.run()
    assert fake_flashinfer.seen[-1] == (0, 6, 7, 7)
    backend.release("a")
    run_plan(backend, make_batch((5, 2), key="c"))


def test_a_thousand_keys_take_megabytes_and_no_more_page_locked_memory(fake_flashinfer, fake_fence, cpu_spec) -> None:
    """FlashInfer's own 8 MiB for each wrapper, on the device and page-locked, would be 16 GB."""
    backend = FlashInfer3(cpu_spec, new_fence=fake_fence)
    for number in range(1000):
        tokens = 64 * (number % 32 + 1)
        backend.plan(make_batch((tokens - 7,) + (1,) * 7, key=number), slot=number % 2)
    report = backend.workspace()
    assert report.keys == 1000
    assert report.used_bytes < 16 << 20
    assert report.pinned_bytes == 2 * 9 << 20


def test_a_flashinfer_without_the_staging_attribute_is_refused(
    fake_flashinfer, fake_fence, cpu_spec, monkeypatch
) -> None:
    monkeypatch.setattr(fake_flashinfer, "reset_workspace_buffer", lambda self, floats, ints: None)
    with pytest.raises(StartupError, match="staging buffer elsewhere"):
        FlashInfer2(cpu_spec, new_fence=fake_fence).plan(make_batch((3,), key="a"))


def test_flashinfers_own_complaint_names_the_load(fake_flashinfer, fake_fence, cpu_spec, monkeypatch) -> None:
    def fail(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("Buffer overflow when allocating memory")

    monkeypatch.setattr(fake_flashinfer, "plan", fail)
    with pytest.raises(InternalError, match=r"flashinfer3 could not plan 7 tokens in 2 sequences: Buffer overflow"):
        FlashInfer3(cpu_spec, new_fence=fake_fence).plan(make_batch((3, 4), key="a"))


def _fa2_bytes(lengths: tuple[int, ...], spec: AttentionSpec, sms: int) -> int:
    """The schedule FlashInfer 0.7.4 writes for fa2 in graph mode, restated from its scheduler."""
    group, rows, batch = spec.num_heads // spec.num_kv_heads, sum(lengths), len(lengths)
    longest = (rows - batch + 1) * group
    tile = 128 if longest > 64 and spec.head_dim < 256 else 64 if longest > 16 else 16
    blocks = max(2 * sms // spec.num_kv_heads, -(-rows * group // tile) + batch - 1)
    total = 0
    for size, alignment in [(4 * blocks, 16)] * 3 + [(4 * (batch + 1), 16), (4, 1), (4, 16), (blocks, 16)]:
        total = -(-total // alignment) * alignment + size
    return total


def _fa3_bytes(lengths: tuple[int, ...], spec: AttentionSpec, sms: int) -> int:
    tile = 192 if spec.head_dim == 64 else 128
    tiles = -(-sum(lengths) // tile) + len(lengths) - 1
    items = tiles if tiles > 4096 else tiles * spec.num_heads
    total = 0
    for size in [4 * items] * 6 + [4 * (sms + 1), 4 * items]:
        total = -(-total // 16) * 16 + size
    return total


@pytest.mark.parametrize(("backend_class", "need"), [(FlashInfer2, _fa2_bytes), (FlashInfer3, _fa3_bytes)])
@pytest.mark.parametrize("heads", [(16, 16), (16, 8), (32, 4), (8, 1)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_plan_bytes_hold_every_schedule(
    backend_class: type[FlashInfer2],
    need: Callable[..., int],
    heads: tuple[int, int],
    head_dim: int,
    cpu_spec,
    monkeypatch,
) -> None:
    for module in ("flashinfer2", "flashinfer3"):
        monkeypatch.setattr(f"rose.attention_backends.{module}.sm_count", lambda device: 132)
    spec = replace(cpu_spec, num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim)
    backend = backend_class(spec)
    for lengths in [(1,), (128,), (1,) * 16, (512,) * 100, (16384,), (1, 4095), (1,) * 300, (40,) * 4096, (65536,)]:
        have, wanted = backend.plan_bytes(sum(lengths), len(lengths)), need(lengths, spec, 132)
        assert wanted <= have <= 5 * wanted + 1024

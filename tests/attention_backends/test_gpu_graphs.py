"""Every backend in graphs: other splits, other sizes in between, two batches in flight, memory that is reused.

A replay must give the bits of the plain run of its key, whatever was planned, replayed or freed before it.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Hashable
from functools import cache

import pytest
import torch

from rose.attention_backends import AttentionBackend, AttentionSpec, KeepsPlans, WarmsUp, load_backend
from rose.attention_backends.auto import AutoBackend, spec_for
from rose.attention_backends.base import try_backend
from rose.attention_backends.check import StaticAttention
from rose.attention_backends.reference import (
    TOLERANCE,
    even_split,
    greedy_split,
    poisoned_qkv,
    reference_attention,
    row_error,
)
from rose.errors import InternalError

pytestmark = pytest.mark.gpu

BACKENDS = ["triton_short", "flash_attention4", "flashinfer3", "flashinfer2"]
PLANNED = ["flashinfer3", "flashinfer2"]
DEVICE = torch.device("cuda")
SPEC = AttentionSpec(
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    dtype=torch.bfloat16,
    device=DEVICE,
    causal=False,
    scale=128**-0.5,
)
# Splits of one key each: (tokens, sequences), every one with sequences of 1 to 256 tokens.
SIZES = {"small": (64, 3), "middle": (576, 6), "large": (2048, 12)}


@cache
def splits(size: str) -> list[tuple[int, ...]]:
    tokens, sequences = SIZES[size]
    chance = random.Random(tokens)
    found = [even_split(tokens, sequences), greedy_split(tokens, sequences, 256)]
    found.append(found[1][::-1])
    while len(found) < 6:
        cuts = sorted(chance.sample(range(1, tokens), sequences - 1))
        lengths = tuple(b - a for a, b in itertools.pairwise([0, *cuts, tokens]))
        if max(lengths) <= 256:
            found.append(lengths)
    return found


@cache
def warmed(name: str) -> None:
    found = try_backend(name, spec_for(name, SPEC))
    if isinstance(found, str):
        pytest.skip(f"{name}: {found}")
    if isinstance(found, WarmsUp):
        found.warm_up(1)


def fresh_backend(name: str) -> AttentionBackend:
    """A new one, so that a test sees only its own keys."""
    warmed(name)
    return load_backend(name, spec_for(name, SPEC))


def attention(
    backend: AttentionBackend,
    size: str,
    *,
    calls: int = 1,
    key: Hashable | None = None,
    stream: torch.cuda.Stream | None = None,
) -> StaticAttention:
    tokens, sequences = SIZES[size]
    qkv = poisoned_qkv(
        tokens, SPEC.num_heads, SPEC.num_kv_heads, SPEC.head_dim, dtype=SPEC.dtype, device=DEVICE, seed=tokens
    )
    return StaticAttention(backend, qkv, sequences, 256, size if key is None else key, calls, stream)


def assert_right(out: torch.Tensor, where: StaticAttention, lengths: tuple[int, ...]) -> None:
    expected = reference_attention(*where.qkv, lengths, causal=False, scale=SPEC.scale)
    assert row_error(out, expected) <= TOLERANCE[SPEC.dtype]


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("captured_at", [0, 1, 2])
def test_c124_captured_at_one_split_replayed_at_all_others(name: str, captured_at: int) -> None:
    """Report C124 (flashinfer#412, #281): lengths, grid and tiles that differ between capture and replay."""
    where = attention(fresh_backend(name), "middle")
    plain = {lengths: where.plain(lengths) for lengths in splits("middle")}
    where.capture(splits("middle")[captured_at])
    for turn, lengths in enumerate(2 * splits("middle")):
        out = where.replay(lengths, slot=turn % 2)
        assert torch.equal(out, plain[lengths])
        assert_right(out, where, lengths)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("order", [*itertools.permutations(SIZES)], ids="-".join)
def test_c17_every_order_of_sizes_in_one_pool(name: str, order: tuple[str, ...]) -> None:
    """Report C17 (vllm#57136): graphs of several sizes share a pool, and a smaller batch reads a larger one's rest.

    Between replays another graph of the pool fills the memory they reuse with NaN, and a larger plain batch is planned.
    """
    backend = fresh_backend(name)
    stream = torch.cuda.Stream()
    places = {size: attention(backend, size, calls=3, stream=stream) for size in order}
    plain = {(size, lengths): places[size].plain(lengths) for size in order for lengths in splits(size)}
    other = attention(backend, "large", key="never captured")
    pool = torch.cuda.graph_pool_handle()
    for size in order:
        places[size].capture(splits(size)[0], pool=pool)
    poison = torch.cuda.CUDAGraph()
    with torch.cuda.graph(poison, pool=pool, stream=stream):
        taken = [torch.full_like(places["large"].qkv[0], torch.nan) for _ in range(3)]
    del taken
    for turn, size in enumerate(2 * (*order, *reversed(order))):
        poison.replay()
        other.plain(splits("large")[turn % 6], slot=turn % 2)
        lengths = splits(size)[turn % 6]
        assert torch.equal(places[size].replay(lengths, slot=turn % 2), plain[size, lengths])


@pytest.mark.parametrize("name", PLANNED)
def test_c124_stale_plans_are_never_read(name: str) -> None:
    """Report C124 (flashinfer#5176): what a shorter plan leaves of its workspace is whatever was there before."""
    backend = fresh_backend(name)
    where = attention(backend, "large")
    plain = {lengths: where.plain(lengths) for lengths in splits("large")}
    where.capture(splits("large")[0])
    for byte, lengths in itertools.product((0xFF, 0x00, 0x7F), splits("large")):
        backend._arena.poison(byte)  # type: ignore[attr-defined]
        assert torch.equal(where.replay(lengths), plain[lengths])


@pytest.mark.parametrize("name", BACKENDS)
def test_the_bits_of_a_sequence_do_not_depend_on_its_company(name: str) -> None:
    backend = fresh_backend(name)
    where = attention(backend, "middle")
    tokens, sequences = SIZES["middle"]
    q, k, v = where.qkv
    mine = [x[:65].clone() for x in (q, k, v)]
    where.capture(splits("middle")[0])
    seen = []
    for lengths in (
        (65, 256, 252, 1, 1, 1),
        (65, 103, 102, 102, 102, 102),
        (1, 1, 1, 65, 254, 254),
        (255, 65, 253, 1, 1, 1),
    ):
        assert (sum(lengths), len(lengths)) == (tokens, sequences)
        start = sum(lengths[: lengths.index(65)])
        for x, saved in zip((q, k, v), mine, strict=True):
            x.normal_()
            x[start : start + 65] = saved
        seen.append(where.replay(lengths)[start : start + 65])
    assert all(torch.equal(rows, seen[0]) for rows in seen)


@pytest.mark.parametrize("name", BACKENDS)
def test_c126_ten_thousand_batches_in_two_slots(name: str) -> None:
    """Report C126 (mstar#236): two batches in flight with different splits; the host is never more than two ahead."""
    backend = fresh_backend(name)
    pair = [attention(backend, "middle"), attention(backend, "small")]
    lists = [splits("middle"), splits("small")]
    wanted = [torch.stack([p.plain(lengths) for lengths in s]) for p, s in zip(pair, lists, strict=True)]
    for place, found in zip(pair, lists, strict=True):
        place.capture(found[0])
    torch.cuda.synchronize()
    waits = backend.workspace().fence_waits if isinstance(backend, KeepsPlans) else 0
    chance = random.Random(126)
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    ends: list[torch.cuda.Event] = []
    for step in range(10_000):
        if step >= 2:
            ends[step % 2].synchronize()
        which = chance.random() < 0.3
        split = chance.randrange(6)
        out = pair[which].replay(lists[which][split], slot=step % 2)
        wrong += (out != wanted[which][split]).any()
        if len(ends) < 2:
            ends.append(torch.cuda.Event())
        ends[step % 2].record()
    assert int(wrong) == 0
    if isinstance(backend, KeepsPlans):
        assert backend.workspace().fence_waits == waits


@pytest.mark.parametrize("name", PLANNED)
def test_c126_one_slot_without_waiting_is_slow_but_right(name: str) -> None:
    """Report C126 (mstar#236): a caller that does not keep two slots apart."""
    backend = fresh_backend(name)
    where = attention(backend, "middle")
    plain = {lengths: where.plain(lengths) for lengths in splits("middle")}
    where.capture(splits("middle")[0])
    torch.cuda._sleep(20_000_000)
    outs = [(lengths, where.replay(lengths, slot=0)) for lengths in splits("middle")]
    for lengths, out in outs:
        assert torch.equal(out, plain[lengths])
    assert backend.workspace().fence_waits > 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", BACKENDS)
def test_plan_does_not_wait_for_the_running_batch(name: str) -> None:
    backend = fresh_backend(name)
    where = attention(backend, "large")
    for slot in (0, 1):
        where.plain(splits("large")[0], slot)
    batch = where.batch(splits("large")[1])
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)  # some 50 ms
    end = torch.cuda.Event()
    end.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        begin = time.perf_counter()
        backend.plan(batch, 1)
        took = time.perf_counter() - begin
        still_running = not end.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert still_running
    assert took < 5e-3


@pytest.mark.parametrize("name", PLANNED)
def test_released_keys_make_room_for_others(name: str) -> None:
    backend = fresh_backend(name)
    assert isinstance(backend, KeepsPlans)
    sizes = itertools.cycle(SIZES)
    used = []
    for number in range(30):
        size = next(sizes)
        where = attention(backend, size, key=number)
        lengths = splits(size)[number % 6]
        where.capture(splits(size)[0])
        assert_right(where.replay(lengths, slot=number % 2), where, lengths)
        del where
        backend.release(number)
        used.append(backend.workspace().device_bytes)
    assert used[-1] == used[3]
    assert backend.workspace().keys == 0


@pytest.mark.parametrize("name", PLANNED)
def test_a_key_takes_kilobytes(name: str) -> None:
    """FlashInfer's default is 8 MiB on the device and 8 MiB page-locked for each wrapper."""
    backend = fresh_backend(name)
    assert isinstance(backend, KeepsPlans)
    shared = backend.workspace().used_bytes
    keys = 60
    for number in range(keys):
        where = attention(backend, "large", key=number)
        where.plain(splits("large")[0])
    report = backend.workspace()
    assert report.keys == keys
    assert report.used_bytes - shared < keys * 100_000 + (2 << 20)
    assert report.pinned_bytes <= 20 << 20


@pytest.mark.parametrize("name", PLANNED)
def test_a_key_cannot_change_its_shape(name: str) -> None:
    backend = fresh_backend(name)
    attention(backend, "small", key="one").plain(splits("small")[0])
    with pytest.raises(InternalError, match="'one' was planned for 64 tokens in 3 sequences"):
        attention(backend, "middle", key="one").plain(splits("middle")[0])


@pytest.mark.parametrize(("head_dim", "kv_heads"), [(64, 16), (128, 8)])
def test_the_chosen_backend_serves_every_size(head_dim: int, kv_heads: int) -> None:
    spec = AttentionSpec(
        num_heads=16,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=torch.bfloat16,
        device=DEVICE,
        causal=False,
        scale=head_dim**-0.5,
    )
    backend = AutoBackend(spec)
    for tokens, sequences, bound in ((128, 1, 128), (512, 1, 512), (4096, 1, 4096), (8192, 16, 8192)):
        where = StaticAttention(
            backend,
            poisoned_qkv(tokens, 16, kv_heads, head_dim, dtype=spec.dtype, device=DEVICE),
            sequences,
            bound,
            key=(tokens, sequences, bound),
        )
        lengths = even_split(tokens, sequences)
        if where.captures(lengths):
            where.capture(lengths)
            out = where.replay(lengths, slot=1)
        else:
            out = where.plain(lengths)
        expected = reference_attention(*where.qkv, lengths, causal=False, scale=spec.scale)
        assert row_error(out, expected) <= TOLERANCE[spec.dtype]

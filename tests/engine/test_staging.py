"""What lies in the packed buffer, and who may write it when."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rose.batch import Batch
from rose.engine.buckets import Buckets
from rose.engine.execution import DoneTicket
from rose.engine.open_request import Run, Work
from rose.engine.staging import ALIGN, Staging

BUCKETS = Buckets(inflection_tokens=4096, max_tokens=512, max_sequences=64)
EXACT = Buckets(inflection_tokens=0, max_tokens=512, max_sequences=64)


def work_of(requests: list[list[int]], *, types: tuple[int, ...] = ()) -> Work:
    """Requests of sequences of these lengths; those whose index is in `types` have token types."""
    rng = np.random.default_rng(len(requests))
    runs = []
    for number, lengths in enumerate(requests):
        ids = rng.integers(0, 1000, sum(lengths)).astype(np.int32)
        runs.append(Run(number, 0, lengths, ids, ids % 2 if number in types else None))
    return Work(runs, ("e",))


@given(st.lists(st.lists(st.integers(1, 80), min_size=1, max_size=6), min_size=1, max_size=6), st.booleans(), st.data())
def test_the_batch_is_what_packing_by_hand_gives(requests, padded, data):
    types = tuple(data.draw(st.sets(st.integers(0, len(requests) - 1))))
    work = work_of(requests, types=types)
    key = (BUCKETS if padded else EXACT).key(work.lengths, ("e",), token_types=bool(types))
    staged = Staging(pin=False, pad_id=3).write(0, work, key)
    batch = staged.batch(staged.packed)

    real = np.concatenate([run.ids for run in work.runs])
    lengths = [length for request in requests for length in request]
    assert work.lengths == lengths, "staging only reads"
    padding = key.tokens - len(real)
    assert batch.lengths[: len(lengths)] == tuple(lengths)
    assert (sum(batch.lengths), len(batch.lengths)) == (key.tokens, key.sequences)
    np.testing.assert_array_equal(batch.ids.numpy(), [*real, *[3] * padding])
    np.testing.assert_array_equal(batch.positions.numpy(), [i for n in batch.lengths for i in range(n)])
    np.testing.assert_array_equal(batch.cu_seqlens.numpy(), np.cumsum([0, *batch.lengths]))
    assert {t.dtype for t in (batch.ids, batch.positions, batch.cu_seqlens)} == {torch.int32}
    if types:
        expected = [run.ids % 2 if run.token_types is not None else 0 * run.ids for run in work.runs]
        np.testing.assert_array_equal(batch.type_ids.numpy(), [*np.concatenate(expected), *[0] * padding])
    else:
        assert batch.type_ids is None
    assert (staged.rows, staged.tokens) == (len(lengths), len(real))
    assert batch.max_length == (key.max_length if key.padded else max(lengths))


@given(st.lists(st.tuples(st.integers(1, 300), st.booleans()), min_size=1, max_size=12))
def test_queries_written_one_after_another_are_what_a_fresh_buffer_would_hold(queries):
    """Some lengths again, some with companions or types in between: nothing of an earlier batch shows."""
    staging = Staging(pin=False, pad_id=3)
    for number, (length, alone) in enumerate([*queries, *queries]):
        work = work_of([[length]] if alone else [[length, 2]], types=(0,) if number % 5 == 4 else ())
        work.runs[0].ids += number
        key = BUCKETS.key(work.lengths, ("e",), token_types=work.token_types)
        staged, fresh = staging.write(number % 2, work, key), Staging(pin=False, pad_id=3).write(number % 2, work, key)
        np.testing.assert_array_equal(staged.packed.numpy(), fresh.packed.numpy())
        assert (staged.key, staged.slot, staged.lengths) == (key, number % 2, fresh.lengths)
        assert (staged.max_length, staged.rows, staged.tokens) == (fresh.max_length, fresh.rows, fresh.tokens)


def test_forms_of_queries_do_not_add_up(monkeypatch):
    monkeypatch.setattr("rose.engine.staging.MAX_FORMS", 3)
    staging = Staging(pin=False)
    for length in range(1, 9):
        work = work_of([[length]])
        staging.write(0, work, BUCKETS.key(work.lengths, ("e",)))
    assert len(staging._slots[0].forms) <= 3


def test_rows_of_the_packed_buffer_are_aligned():
    work = work_of([[5, 6]], types=(0,))
    staged = Staging(pin=False).write(0, work, EXACT.key(work.lengths, ("e",), token_types=True))
    batch = staged.batch(staged.packed)
    base = staged.packed.data_ptr()
    for row in (batch.positions, batch.type_ids, batch.cu_seqlens):
        assert (row.data_ptr() - base) % (4 * ALIGN) == 0


def test_a_buffer_used_before_leaves_nothing_behind():
    staging = Staging(pin=False)
    large = work_of([[512] * 20], types=(0,))
    staging.write(0, large, BUCKETS.key(large.lengths, ("e",), token_types=True))
    small = work_of([[3]])
    small.runs[0] = Run(0, 0, [3], np.array([7, 8, 9], np.int32), np.array([1, 1, 1], np.int32))
    staged = staging.write(0, small, BUCKETS.key([3], ("e",), token_types=True))
    batch = staged.batch(staged.packed)
    assert batch.ids.tolist() == [7, 8, 9] + [0] * 61
    assert batch.type_ids.tolist() == [1] * 3 + [0] * 61


def test_a_batch_takes_the_views_of_another_of_its_layout():
    staging = Staging(pin=False)
    works = [work_of([[5, 6]], types=(0,)), work_of([[4, 7]], types=(0,))]
    key = BUCKETS.key([5, 6], ("e",), token_types=True)
    assert key == BUCKETS.key([4, 7], ("e",), token_types=True)
    held = torch.empty(0, dtype=torch.int32)
    first: Batch | None = None
    for slot, work in enumerate(works):
        staged = staging.write(slot, work, key)
        if first is None:
            held = staged.packed.clone()
            first = staged.batch(held, key)
            continue
        held.copy_(staged.packed)
        again, fresh = staged.batch(held, key, first), staged.batch(held, key)
        for name in ("ids", "positions", "cu_seqlens", "type_ids"):
            assert getattr(again, name) is getattr(first, name)
            assert torch.equal(getattr(again, name), getattr(fresh, name))
        assert (again.lengths, again.max_length, again.key) == (fresh.lengths, fresh.max_length, key)


def test_the_two_slots_share_no_memory():
    staging = Staging(pin=False)
    work = work_of([[8]])
    key = EXACT.key([8], ("e",))
    first, second = staging.write(0, work, key), staging.write(1, work, key)
    first.packed.fill_(-1)
    assert (second.batch(second.packed).ids >= 0).all()


def test_a_slot_is_not_written_while_its_last_batch_may_read_it():
    """Report C126 (mstar#236): the host overwrote a pinned buffer before its copy had run."""
    staging = Staging(pin=False)
    work = work_of([[8]])
    key = EXACT.key([8], ("e",))
    staged = staging.write(0, work, key)
    before = staged.packed.clone()
    ticket: DoneTicket[dict] = DoneTicket()
    staging.fence(0, ticket)
    other = Work([Run(1, 0, [8], np.full(8, 999, np.int32))], ("e",))
    writer = threading.Thread(target=lambda: staging.write(0, other, key))
    writer.start()
    staging.write(1, other, key)
    writer.join(0.05)
    assert writer.is_alive()
    assert torch.equal(staged.packed, before)
    ticket.settle({})
    writer.join(5)
    assert not writer.is_alive()
    assert (staged.batch(staged.packed).ids == 999).all()


@pytest.mark.parametrize("tokens", [1 << 11, 1 << 13])
def test_the_buffer_grows_with_the_batch(tokens):
    work = work_of([[tokens // 16] * 16])
    staged = Staging(pin=False).write(1, work, EXACT.key(work.lengths, ("e",)))
    batch = staged.batch(staged.packed)
    np.testing.assert_array_equal(batch.ids.numpy(), work.runs[0].ids)
    assert batch.positions.max() == tokens // 16 - 1

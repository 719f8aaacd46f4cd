"""A staged batch against one written out token by token; lanes that change hands; buckets."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from rose.engine.execution import DoneTicket
from rose.engine.generation.buckets import GREEDY, Draw, GenerationBuckets, round_up
from rose.engine.generation.lanes import Lanes
from rose.engine.generation.layout import ALIGN, device_parts, layout_of
from rose.engine.generation.request import GenerateRequest, Sampling
from rose.engine.generation.sequence import BatchPlan, Chunk, Sequence
from rose.engine.generation.staging import GenerationStaging

PAGE, LONGEST, RUNNING = 4, 3000, 20
ENDS = (2, 3)


def sequence(serial: int, lane: int, prompt: int, known: int, draw: random.Random, **sampling) -> Sequence:
    ids = np.array([draw.randrange(5, 999) for _ in range(known + 50)], np.int32)
    settings = {"max_new_tokens": 50, "temperature": 0.0, "seed": draw.getrandbits(64), **sampling}
    request = GenerateRequest(serial, ids[:prompt], Sampling(**settings))
    pages = draw.sample(range(1, 5000), -(-(known + 1) // PAGE))
    return Sequence(request, ids, known, prompt, serial=serial, drawn=known, pages=pages, lane=lane)


def written_out(plan: BatchPlan) -> dict[str, list]:
    """Real rows of every part, one token after another."""
    found: dict[str, list] = {
        name: [] for name in ("ids", "positions", "slots", "kv_lengths", "lanes", "rows", "steps")
    }
    for chunk in plan.chunks:
        own = chunk.sequence
        for position in range(chunk.start, chunk.start + chunk.length):
            found["ids"].append(-1 - own.lane if chunk.from_device else int(own.ids[position]))
            found["positions"].append(position)
            found["slots"].append(own.pages[position // PAGE] * PAGE + position % PAGE)
        end = chunk.start + chunk.length
        found["kv_lengths"].append(end)
        found["lanes"].append(own.lane)
        found["rows"].append(len(found["ids"]) - 1)
        found["steps"].append(end - own.prompt_length)
    return found


def check(staging: GenerationStaging, plan: BatchPlan, slot: int = 0) -> dict[str, torch.Tensor]:
    staged = staging.write(slot, plan)
    parts = device_parts(staged.packed.clone(), staged.layout)
    key, count, tokens = staged.key, len(plan.chunks), plan.tokens
    for name, expected in written_out(plan).items():
        if name in parts:
            assert parts[name][: len(expected)].tolist() == expected, name
    lengths = [chunk.length for chunk in plan.chunks] + [1] * (key.sequences - count)
    assert staged.lengths == tuple(lengths)
    assert parts["cu_seqlens"].tolist() == [0, *np.cumsum(lengths)]
    assert (staged.rows, len(parts["kv_lengths"])) == (count, key.sequences)
    assert staged.decodes == (key.sequences if key.padded else plan.decodes)
    for row, chunk in enumerate(plan.chunks):
        used = -(-(chunk.start + chunk.length) // PAGE)
        assert parts["table"][row, :used].tolist() == chunk.sequence.pages[:used]
    # Dummies: one token of id 0 at position 0, in page 0, of lane 0.
    assert [int(parts[name][tokens:].abs().sum()) for name in ("ids", "positions", "slots")] == [0, 0, 0]
    assert set(parts["kv_lengths"][count:].tolist()) <= {1}
    assert int(parts["table"][count:].sum()) == int(parts["lanes"][count:].sum()) == 0
    assert parts["rows"].tolist() == (parts["cu_seqlens"][1:] - 1).tolist()
    for part in staged.layout.parts:
        assert part.start % ALIGN == 0
    return parts


@pytest.fixture(params=[False, True], ids=["own shape", "padded"])
def staging(request):
    lanes = Lanes(RUNNING + 1, -(-LONGEST // PAGE), ENDS)
    buckets = GenerationBuckets(captures=request.param, max_running=RUNNING, max_tokens=LONGEST)
    return GenerationStaging(lanes, buckets, PAGE, pin=False)


@pytest.mark.parametrize("seed", range(30))
def test_any_batch_is_as_written_out(staging, seed):
    draw = random.Random(seed)
    lanes = draw.sample(range(1, RUNNING + 1), draw.randrange(1, RUNNING + 1))
    running = [sequence(n, lane, draw.randrange(1, 60), draw.randrange(60, 200), draw) for n, lane in enumerate(lanes)]
    for turn in range(4):
        decodes = draw.randrange(len(running) + 1)
        chunks = []
        for n, own in enumerate(running):
            # Pages come as sequences grow; a sequence that was set back has others.
            if draw.random() < 0.2:
                own.pages, own.preemptions = draw.sample(range(1, 5000), len(own.pages)), own.preemptions + 1
            if n < decodes:
                chunks.append(Chunk(own, own.known - 1, 1, samples=True, from_device=draw.random() < 0.5))
            else:
                start = draw.randrange(own.known)
                length = draw.randrange(1, own.known - start + 1)
                chunks.append(Chunk(own, start, length, samples=start + length == own.known))
        check(staging, BatchPlan(chunks, decodes), slot=turn % 2)
        for own in running:
            own.known += 1
            if own.known > len(own.pages) * PAGE:
                own.pages.append(draw.randrange(1, 5000))


def test_a_lane_that_changes_hands_keeps_nothing(staging):
    draw = random.Random(1)
    first = sequence(
        1, 5, 40, 200, draw, temperature=0.5, top_k=3, top_p=0.5, min_p=0.1, logprobs=4, min_new_tokens=900
    )
    second = sequence(2, 5, 3, 9, draw)
    for own, mode in ((first, Draw(sampled=True, logprobs=4)), (second, GREEDY), (first, Draw(True, 4))):
        plan = BatchPlan([Chunk(own, own.known - 1, 1, samples=True)], 1)
        parts = check(staging, plan)
        staged = staging.write(0, plan)
        assert staged.key.draw._replace(banned=0) == mode
        used = len(own.pages)
        assert int(parts["table"][0, used:].sum()) == 0


def test_how_each_row_is_drawn(staging):
    draw = random.Random(2)
    settings = {"temperature": 0.7, "top_k": 9, "top_p": 0.25, "min_p": 0.125, "seed": (1 << 64) - 5}
    rows = [
        sequence(1, 4, 10, 20, draw, **settings),
        sequence(2, 7, 10, 12, draw, min_new_tokens=4, stop_ids=(9, 2, 8)),
        sequence(3, 9, 10, 14, draw, min_new_tokens=4, ignore_eos=True, stop_ids=(9,)),
        sequence(4, 2, 10, 11, draw, min_new_tokens=4, ignore_eos=True),
    ]
    parts = check(staging, BatchPlan([Chunk(own, own.known - 1, 1, samples=True) for own in rows], 4))
    assert parts["temperature"].tolist()[:4] == pytest.approx([0.7, 0, 0, 0])
    assert parts["top_k"].tolist()[:4] == [9, 0, 0, 0]
    assert parts["top_p"].tolist()[:4] == [0.25, 1, 1, 1]
    assert parts["min_p"].tolist()[:4] == [0.125, 0, 0, 0]
    assert parts["seeds"].tolist()[0] == -5
    assert parts["seeds"].tolist()[1] & (1 << 64) - 1 == rows[1].request.sampling.seed
    # Two tokens are there: the third of at least four is drawn, and no end token. Four are there: no ban any more.
    assert parts["banned"][:4].tolist() == [[0] * 4, [9, 2, 8, 3], [0] * 4, [0] * 4]
    assert parts["penalties"][:4].tolist() == [[0] * 4, [-np.inf] * 4, [0] * 4, [0] * 4]


def test_a_slot_is_written_only_once_its_batch_is_over(staging):
    waited: list[bool] = []

    class Fence(DoneTicket):
        def wait(self) -> None:
            waited.append(True)

    draw = random.Random(3)
    plan = BatchPlan([Chunk(sequence(1, 4, 10, 20, draw), 19, 1, samples=True)], 1)
    staging.write(0, plan)
    staging.fence(0, Fence())
    staging.write(1, plan)
    assert not waited
    staging.write(0, plan)
    assert waited


def test_dummies_alone():
    lanes = Lanes(RUNNING + 1, -(-LONGEST // PAGE))
    buckets = GenerationBuckets(captures=True, max_running=RUNNING, max_tokens=LONGEST)
    staging = GenerationStaging(lanes, buckets, PAGE, pin=False)
    for draw in (GREEDY, Draw(sampled=True, logprobs=4, banned=2)):
        key = buckets.decode_key(16, 2000, draw)
        staged = staging.write_dummies(0, key)
        parts = device_parts(staged.packed, staged.layout)
        assert (key.tokens, key.sequences, key.kv_bound) == (16, 16, 3000)
        assert parts["kv_lengths"].tolist() == [3000] * 16
        assert parts["positions"].tolist() == [2999] * 16
        assert parts["rows"].tolist() == list(range(16))
        for name in ("ids", "slots", "lanes", "table"):
            assert not parts[name].any()
        assert staged.layout == layout_of(key, PAGE)


def test_buckets():
    buckets = GenerationBuckets(captures=True, max_running=64, max_tokens=40_000)
    assert buckets.sequences == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    assert buckets.bounds == [1024, 4096, 16384, 40_000]
    key = buckets.key(33, 0, 33, 1025, GREEDY)
    assert key == buckets.decode_key(40, 4096)
    assert key.padded
    mixed = buckets.key(33, 2, 433, 1025, GREEDY)
    assert (mixed.tokens, mixed.sequences, mixed.kv_bound, mixed.padded) == (433, 35, 1025, False)
    assert not GenerationBuckets(captures=False, max_running=64, max_tokens=40_000).key(33, 0, 33, 9, GREEDY).padded
    assert GenerationBuckets(captures=True, max_running=3, max_tokens=100).sequences == [1, 2, 4]
    assert [round_up(n) for n in (0, 1, 2, 3, 20)] == [0, 1, 2, 4, 32]

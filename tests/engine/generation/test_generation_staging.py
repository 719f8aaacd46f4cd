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


def written_out(plan: BatchPlan, leading: int) -> dict[str, list]:
    """Real rows of every part, one token after another.

    Args:
        leading: decoding sequences, dummies included.
    """
    names = ("ids", "positions", "slots", "kv_lengths", "lanes", "drawn_lanes", "rows", "steps")
    found: dict[str, list] = {name: [] for name in names}
    for number, chunk in enumerate(plan.chunks):
        own = chunk.sequence
        for position in range(chunk.start, chunk.start + chunk.length):
            found["ids"].append(-1 - own.lane if chunk.from_device else int(own.ids[position]))
            found["positions"].append(position)
            found["slots"].append(own.pages[position // PAGE] * PAGE + position % PAGE)
        end = chunk.start + chunk.length
        found["kv_lengths"].append(end)
        found["lanes"].append(own.lane)
        found["rows"].append(len(found["ids"]) - 1 + (leading - plan.decodes if number >= plan.decodes else 0))
        found["steps"].append(end - own.prompt_length)
    found["drawn_lanes"] = found["lanes"]
    return found


def check(staging: GenerationStaging, plan: BatchPlan, slot: int = 0) -> dict[str, torch.Tensor]:
    staged = staging.write(slot, plan)
    parts = device_parts(staged.packed.clone(), staged.layout)
    key, count, decodes = staged.key, len(plan.chunks), plan.decodes
    leading = key.decodes
    assert leading >= decodes
    # Where real ones are: first those that decode, dummies behind them, then the chunks, and dummies again.
    tokens = [*range(decodes), *range(leading, leading + plan.tokens - decodes)]
    sequences = [*range(decodes), *range(leading, leading + count - decodes)]
    of_tokens, of_sequences = ("ids", "positions", "slots"), ("kv_lengths", "lanes")
    for name, expected in written_out(plan, leading).items():
        if name in parts:
            where = tokens if name in of_tokens else sequences if name in of_sequences else range(count)
            assert parts[name][list(where)].tolist() == expected, name
    lengths = [chunk.length for chunk in plan.chunks]
    lengths[decodes:decodes] = [1] * (leading - decodes)
    dummies, missing = key.sequences - len(lengths), key.tokens - sum(lengths)
    assert (dummies > 0) == (missing > 0)
    lengths += [1] * (dummies - 1) + [missing - dummies + 1] if dummies else []
    assert min(lengths) >= 1
    assert staged.lengths == tuple(lengths)
    assert parts["cu_seqlens"].tolist() == [0, *np.cumsum(lengths)]
    assert sum(lengths) == key.tokens == len(parts["ids"])
    assert (staged.rows, len(parts["kv_lengths"]), staged.decodes) == (count, key.sequences, leading)
    assert staged.kv_lengths() == parts["kv_lengths"].tolist()
    assert int(parts["kv_lengths"].max()) <= key.kv_bound
    for row, chunk in zip(sequences, plan.chunks, strict=True):
        used = -(-(chunk.start + chunk.length) // PAGE)
        assert parts["table"][row, :used].tolist() == chunk.sequence.pages[:used]
    # Dummies: tokens of id 0 at position 0, in page 0, of lane 0; each starts in this batch.
    padding = [i for i in range(key.tokens) if i not in set(tokens)]
    strangers = [i for i in range(key.sequences) if i not in set(sequences)]
    assert [int(parts[name][padding].abs().sum()) for name in of_tokens] == [0, 0, 0]
    assert parts["kv_lengths"][strangers].tolist() == [lengths[i] for i in strangers]
    assert int(parts["table"][strangers].sum()) == int(parts["lanes"][strangers].sum()) == 0
    assert sorted(parts["rows"].tolist()) == (parts["cu_seqlens"][1:] - 1).tolist()
    assert ("drawn_lanes" in parts) == (key.padded and 0 < leading < key.sequences)
    if "drawn_lanes" in parts:
        assert not parts["drawn_lanes"][count:].any()
    else:
        assert parts["rows"].tolist() == sorted(parts["rows"].tolist())
    for part in staged.layout.parts:
        assert part.start % ALIGN == 0
    return parts


@pytest.fixture(params=["own shape", "decoding padded", "all padded"])
def staging(request):
    lanes = Lanes(RUNNING + 1, -(-LONGEST // PAGE), ENDS)
    prompts = request.param == "all padded"
    buckets = GenerationBuckets(
        captures=request.param != "own shape", max_running=RUNNING, max_tokens=LONGEST, prompts=prompts
    )
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
    nothing, room = [0] * 16, [0] * 12
    assert parts["banned"][:4].tolist() == [nothing, [9, 2, 8, 3, *room], nothing, nothing]
    assert parts["penalties"][:4].tolist() == [nothing, [-np.inf] * 4 + room, nothing, nothing]


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


@pytest.mark.parametrize("decodes", [0, 1, 4, 16])
def test_dummies_alone_with_chunks(decodes):
    lanes = Lanes(RUNNING + 1, -(-LONGEST // PAGE))
    buckets = GenerationBuckets(captures=True, max_running=RUNNING, max_tokens=LONGEST, prompts=True)
    staging = GenerationStaging(lanes, buckets, PAGE, pin=False)
    key = buckets.key(decodes, 3, decodes + 300, 700, Draw(sampled=True))
    assert (key.decodes, key.sequences - key.decodes, key.tokens, key.kv_bound) == (decodes, 4, 320, 1024)
    staged = staging.write_dummies(0, key)
    parts = device_parts(staged.packed, staged.layout)
    assert sum(staged.lengths) == 320
    assert staged.lengths[:decodes] == (1,) * decodes
    assert max(staged.lengths[decodes:]) - min(staged.lengths[decodes:]) <= 1
    assert parts["kv_lengths"].tolist() == [1024] * decodes + list(staged.lengths[decodes:])
    assert parts["cu_seqlens"].tolist() == [0, *np.cumsum(staged.lengths)]
    for name in ("ids", "slots", "lanes", "table"):
        assert not parts[name].any()


def prompt_buckets(**changes) -> GenerationBuckets:
    settings = {"captures": True, "prompts": True, "max_running": 64, "max_tokens": 40_000, **changes}
    return GenerationBuckets(**settings)


@pytest.mark.parametrize(
    ("decodes", "chunks", "tokens", "longest", "expected"),
    [
        (0, 1, 128, 128, (128, 1, 0, 1024)),  # just full
        (0, 1, 127, 127, (128, 2, 0, 1024)),  # one token is missing
        (0, 1, 1, 1, (64, 2, 0, 1024)),
        (0, 2, 128, 100, (128, 2, 0, 1024)),
        (0, 3, 128, 5000, (192, 4, 0, 16384)),  # full of tokens, not of sequences
        (1, 1, 128, 127, (128, 2, 1, 1024)),
        (2, 1, 129, 127, (192, 6, 4, 1024)),  # 4 + 127 and a dummy
        (5, 1, 53, 90, (64, 17, 16, 1024)),
        (64, 16, 2048, 128, (2048, 80, 64, 1024)),
        (63, 17, 2048, 128, (2112, 96, 64, 1024)),  # a full budget, and 1 + 15 dummies beside it
        (33, 31, 2048, 128, (2112, 96, 64, 1024)),
    ],
)
def test_buckets_of_prompts(decodes, chunks, tokens, longest, expected):
    key = prompt_buckets().key(decodes, chunks, tokens, longest, GREEDY)
    assert (key.tokens, key.sequences, key.decodes, key.kv_bound) == expected
    assert key.padded


def test_what_has_no_bucket_keeps_its_shape():
    for buckets, batch in (
        (prompt_buckets(prompts=False), (3, 1, 40, 90)),
        (prompt_buckets(captures=False), (3, 1, 40, 90)),
        (prompt_buckets(), (3, 1, 2400, 9000)),  # more than the budget and its dummies
        (prompt_buckets(max_tokens=40), (0, 1, 10, 10)),  # the dummy would be longer than any sequence
        (prompt_buckets(max_running=4), (5, 1, 40, 90)),
    ):
        key = buckets.key(*batch, GREEDY)
        decodes, chunks, tokens, longest = batch
        assert key == (tokens, decodes + chunks, decodes, longest, GREEDY, False)


def test_every_batch_fits_the_bucket_it_is_given():
    draw = random.Random(4)
    buckets = prompt_buckets()
    for _ in range(5000):
        decodes, chunks = draw.randrange(65), draw.randrange(1, 20)
        prompt = draw.randrange(chunks, 2049 - decodes)
        longest = draw.randrange(prompt, 40_000)
        key = buckets.key(decodes, chunks, decodes + prompt, longest, GREEDY)
        assert key.padded
        dummies = key.sequences - key.decodes - chunks
        missing = key.tokens - key.decodes - prompt
        assert key.decodes >= decodes
        assert missing >= dummies >= 0
        assert (missing > 0) == (dummies > 0)
        assert missing <= key.kv_bound
        assert key.tokens - decodes - prompt < 64 + 256 + 64
        assert buckets.key(key.decodes, chunks + dummies, key.tokens, key.kv_bound, GREEDY) == key


def test_buckets():
    buckets = GenerationBuckets(captures=True, max_running=64, max_tokens=40_000)
    assert buckets.sequences == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    assert buckets.bounds == [1024, 4096, 16384, 40_000]
    key = buckets.key(33, 0, 33, 1025, GREEDY)
    assert key == buckets.decode_key(40, 4096)
    assert key.padded
    mixed = buckets.key(33, 2, 433, 1025, GREEDY)
    assert mixed == (433, 35, 33, 1025, GREEDY, False)
    assert not GenerationBuckets(captures=False, max_running=64, max_tokens=40_000).key(33, 0, 33, 9, GREEDY).padded
    assert GenerationBuckets(captures=True, max_running=3, max_tokens=100).sequences == [1, 2, 4]
    assert [round_up(n) for n in (0, 1, 2, 3, 20)] == [0, 1, 2, 4, 32]


@pytest.mark.parametrize(("asked", "stated"), [(None, -1), (0, 0), (1, 4), (4, 4), (5, 32), (20, 32)])
def test_few_numbers_of_alternatives_have_graphs(asked, stated):
    """A caller who asks for another number every time does not keep the engine capturing."""
    lanes = Lanes(5, 16, end_ids=(3,))
    lanes.update(sequence(1, 4, 10, 20, random.Random(2), logprobs=asked))
    assert lanes.draw([4], []).logprobs == stated

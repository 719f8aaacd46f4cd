"""The kernels behind rose/kernels/sample.py: a pass over the vocabulary in blocks, and one program a row that finishes.

Without sorting a vocabulary. The draw is the largest x_i - log(e_i) among the tokens that are kept, and what is kept
is a prefix of the ranking (logit, then lower id). So if the largest of *all* falls on a kept token, that token is the
draw, and whether it is kept takes a count and a sum over the tokens ranked before it. If it is not, then nothing ranked
behind it is kept either, and the search goes on among those before it: each round draws from a shorter prefix, and the
first ranked always ends it. A top_k of up to TOP is easier: the k best lie in the k best groups of neighbouring ids, of
which the first pass knows the best, so the search has a few thousand tokens to look at, and those in registers.

The rows of a batch do not meet: each has its own programs. Knows logits; knows no requests.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rose.kernels.greedy import check_rows, first_of, load_block, merge_first
from rose.kernels.launch import Ptr, cdiv, constexpr, jit, launch, next_power_of_2, tl
from rose.kernels.philox import BLOCK, GROUP

# Groups of neighbouring ids of which one program looks at all members, and ids a group.
TOP = 64
_MEMBERS = 64


@jit
def _ordered(x: Ptr) -> Ptr:
    """int32 in the order of the logits."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # + 0: minus zero is no less than zero
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@jit
def _before(x: Ptr, id_: Ptr, x_c: Ptr, id_c: Ptr) -> Ptr:
    """Whether a token is ranked before another one."""
    return (x > x_c) | ((x == x_c) & (id_ < id_c))


@jit
def _exponential(bits: Ptr) -> Ptr:
    """`exponential_ref` of philox.py, of unsigned 32-bit words."""
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.999999940395355224609375)
    near_zero = u * (1.0 + u * (0.5 + u * (0.3333333333333333 + u * 0.25)))
    return tl.where(u < 0.0078125, near_zero, -tl.log(1.0 - u))


@jit
def _score(x: Ptr, temperature: Ptr, bits: Ptr) -> Ptr:
    return x / temperature - tl.log(_exponential(bits))


@jit
def _keep_better(best: Ptr, best_id: Ptr, score: Ptr, id_: Ptr) -> tuple[Ptr, Ptr]:
    """Lane by lane; ids come in growing order, so that an equal score stays with the lower one."""
    better = score > best
    return tl.where(better, score, best), tl.where(better, id_, best_id)


@jit
def _sample_blocks(
    logits: Ptr,
    temperatures: Ptr,
    seeds: Ptr,
    steps: Ptr,
    values: Ptr,
    ids: Ptr,
    scores: Ptr,
    score_ids: Ptr,
    weights: Ptr,
    members: Ptr,
    row_stride: Ptr,
    limit: Ptr,
    GROUP: constexpr,
    MEMBERS: constexpr,
    MIN_TEMPERATURE: constexpr,
    PDL: constexpr,
) -> None:
    """Program (n, s): of 4 GROUP ids of row s the first of the largest logits and of the largest scores, the sum of
    weights under the block's largest logit, and the largest logit of each MEMBERS neighbouring ids."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    block = tl.program_id(0)
    row = tl.program_id(1)
    temperature = tl.load(temperatures + row)
    seed, step = tl.load(seeds + row), tl.load(steps + row)
    lane = tl.arange(0, GROUP)
    if PDL:
        tl.extra.cuda.gdc_wait()
    draws = temperature >= MIN_TEMPERATURE
    heat = tl.where(draws, temperature, 1.0)
    base = logits + row.to(tl.int64) * row_stride
    words = tl.philox(seed, block * GROUP + lane, lane * 0 + step, lane * 0, lane * 0)
    best = tl.full((GROUP,), float("-inf"), tl.float32)
    best_id = lane * 0
    score = tl.full((GROUP,), float("-inf"), tl.float32)
    score_id = lane * 0
    groups: tl.constexpr = GROUP // MEMBERS
    group_at = members + (row * tl.num_programs(0) + block) * (4 * groups) + tl.arange(0, groups)
    for quarter in tl.static_range(4):
        id_ = (4 * block + quarter) * GROUP + lane
        x = load_block(base, id_, limit)
        best, best_id = _keep_better(best, best_id, x, id_)
        score, score_id = _keep_better(score, score_id, _score(x, heat, words[quarter]), id_)
        tl.store(group_at + quarter * groups, tl.max(tl.reshape(x, (groups, MEMBERS)), 1))
    top, first = first_of(best, best_id)
    # Once more over the block, which is still near: weights need its largest logit.
    total = tl.zeros((GROUP,), tl.float32)
    safe = tl.where(top == float("-inf"), 0.0, top)
    for quarter in tl.static_range(4):
        x = load_block(base, (4 * block + quarter) * GROUP + lane, limit)
        total += tl.exp((x - safe) / heat)
    drawn, drawn_id = first_of(score, score_id)
    at = row * tl.num_programs(0) + block
    tl.store(values + at, top)
    tl.store(ids + at, first)
    tl.store(scores + at, drawn)
    tl.store(score_ids + at, drawn_id)
    tl.store(weights + at, tl.sum(total, 0))


@jit
def _first_k(x: Ptr, there: Ptr, k: Ptr, top: Ptr) -> Ptr:
    """Which lanes hold the k largest values, of equal ones the first. `top`: the largest; at least k are there."""
    ordered = _ordered(x)
    low = k.to(tl.int64) * 0 - 2147483648
    high = _ordered(top).to(tl.int64)
    while low < high:
        middle = low + (high - low + 1) // 2
        count = tl.sum(((ordered >= middle.to(tl.int32)) & there).to(tl.int32), 0)
        low = tl.where(count >= k, middle, low)
        high = tl.where(count > k, high, tl.where(count == k, middle, middle - 1))
    least = low.to(tl.int32)
    above = (ordered > least) & there
    equal = ((ordered == least) & there).to(tl.int32)
    return above | ((equal > 0) & (tl.cumsum(equal, 0) <= k - tl.sum(above.to(tl.int32), 0)))


@jit
def _draw_among_few(
    base: Ptr,
    members: Ptr,
    chosen: Ptr,
    limit: Ptr,
    count: Ptr,
    k: Ptr,
    top_p: Ptr,
    min_p: Ptr,
    temperature: Ptr,
    top: Ptr,
    seed: Ptr,
    step: Ptr,
    GROUP: constexpr,
    MEMBERS: constexpr,
    LANES: constexpr,
    TOP: constexpr,
) -> Ptr:
    """The draw where top_k keeps at most TOP tokens. `count`: groups, LANES their room; `chosen`: TOP int32 to use."""
    lane = tl.arange(0, LANES)
    there = lane < count
    best = tl.load(members + lane, mask=there, other=float("-inf"))
    taken = _first_k(best, there, tl.minimum(k, count), top)
    tl.store(chosen + tl.cumsum(taken.to(tl.int32), 0) - 1, lane, mask=taken)
    tl.debug_barrier()
    place = tl.arange(0, TOP)
    group = tl.load(chosen + place, mask=place < tl.minimum(k, count), other=0x1000000)
    id_ = tl.reshape(group[:, None] * MEMBERS + tl.arange(0, MEMBERS)[None, :], (TOP * MEMBERS,))
    x = load_block(base, id_, limit)
    # Groups lie in the order of their ids, so of equal logits the first lane has the lowest id.
    kept = _first_k(x, id_ < limit, k, top)
    weight = tl.where(kept, tl.exp((x - top) / temperature), 0.0)
    most = tl.where(top_p < 1.0, top_p * tl.sum(weight, 0), float("inf"))
    counter = id_ // (4 * GROUP) * GROUP + id_ % GROUP
    w0, w1, w2, w3 = tl.philox(seed, counter, id_ * 0 + step, id_ * 0, id_ * 0)
    word = id_ // GROUP % 4
    bits = tl.where(word == 0, w0, tl.where(word == 1, w1, tl.where(word == 2, w2, w3)))
    score = tl.where(kept, _score(x, temperature, bits), float("-inf"))
    candidate = limit * 0
    searching = True
    while searching:
        _, candidate = first_of(score, tl.where(kept, id_, 0x7FFFFFFF))
        x_c = tl.max(tl.where(id_ == candidate, x, float("-inf")), 0)
        before = _before(x, id_, x_c, candidate)
        ahead = tl.sum(tl.where(before, weight, 0.0), 0)
        kept = kept & before
        found = (tl.max(kept.to(tl.int32), 0) == 0) | ((ahead < most) & (tl.exp((x_c - top) / temperature) >= min_p))
        score = tl.where(kept, score, float("-inf"))
        searching = found == 0
    return candidate


@jit
def _weight_of_the_first(base: Ptr, limit: Ptr, k: Ptr, temperature: Ptr, top: Ptr, SPAN: constexpr) -> Ptr:
    """Sum of the weights of the k largest logits, for k of any size, by passes over the row."""
    lane = tl.arange(0, SPAN)
    low = k.to(tl.int64) * 0 - 2147483648
    high = _ordered(top).to(tl.int64)
    while low < high:
        middle = low + (high - low + 1) // 2
        seen = lane * 0
        for start in range(0, limit, SPAN):
            ordered = _ordered(load_block(base, start + lane, limit))
            seen += ((ordered >= middle.to(tl.int32)) & (start + lane < limit)).to(tl.int32)
        count = tl.sum(seen, 0)
        low = tl.where(count >= k, middle, low)
        high = tl.where(count > k, high, tl.where(count == k, middle, middle - 1))
    least = low.to(tl.int32)
    seen = lane * 0
    mass = tl.zeros((SPAN,), tl.float32)
    equal = tl.zeros((SPAN,), tl.float32)
    for start in range(0, limit, SPAN):
        x = load_block(base, start + lane, limit)
        ordered = _ordered(x)
        weight = tl.exp((x - top) / temperature)
        seen += ((ordered > least) & (start + lane < limit)).to(tl.int32)
        mass += tl.where(ordered > least, weight, 0.0)
        equal = tl.where((ordered == least) & (start + lane < limit), weight, equal)
    return tl.sum(mass, 0) + (k - tl.sum(seen, 0)).to(tl.float32) * tl.max(equal, 0)


@jit
def _draw_searching(
    base: Ptr,
    limit: Ptr,
    k: Ptr,
    most: Ptr,
    min_p: Ptr,
    temperature: Ptr,
    top: Ptr,
    seed: Ptr,
    step: Ptr,
    candidate: Ptr,
    GROUP: constexpr,
    SPAN: constexpr,
) -> Ptr:
    """The draw where many tokens may be kept, from the draw among all, `candidate`. `most`: weight before the last."""
    lane = tl.arange(0, SPAN)
    searching = True
    while searching:
        x_c = tl.load(base + candidate).to(tl.float32)
        seen = lane * 0
        mass = tl.zeros((SPAN,), tl.float32)
        best = tl.full((SPAN,), float("-inf"), tl.float32)
        best_id = lane * 0
        for start in range(0, limit, 4 * SPAN):
            first = start + lane // GROUP * (4 * GROUP) + lane % GROUP
            words = tl.philox(seed, first // (4 * GROUP) * GROUP + lane % GROUP, lane * 0 + step, lane * 0, lane * 0)
            for quarter in tl.static_range(4):
                id_ = first + quarter * GROUP
                x = load_block(base, id_, limit)
                before = _before(x, id_, x_c, candidate) & (id_ < limit)
                seen += before.to(tl.int32)
                mass += tl.where(before, tl.exp((x - top) / temperature), 0.0)
                score = tl.where(before, _score(x, temperature, words[quarter]), float("-inf"))
                best, best_id = _keep_better(best, best_id, score, id_)
        ahead = tl.sum(seen, 0)
        likely = tl.exp((x_c - top) / temperature) >= min_p
        found = (ahead == 0) | ((ahead < k) & (tl.sum(mass, 0) < most) & likely)
        _, other = first_of(best, best_id)
        candidate = tl.where(found, candidate, other)
        searching = found == 0
    return candidate


@jit(do_not_specialize=["blocks"])
def _sample_finish(
    logits: Ptr,
    temperatures: Ptr,
    top_ks: Ptr,
    top_ps: Ptr,
    min_ps: Ptr,
    seeds: Ptr,
    steps: Ptr,
    values: Ptr,
    ids: Ptr,
    scores: Ptr,
    score_ids: Ptr,
    weights: Ptr,
    members: Ptr,
    chosen: Ptr,
    out: Ptr,
    row_stride: Ptr,
    limit: Ptr,
    blocks: Ptr,
    GROUP: constexpr,
    MEMBERS: constexpr,
    LANES: constexpr,
    GROUP_LANES: constexpr,
    SPAN: constexpr,
    TOP: constexpr,
    MIN_TEMPERATURE: constexpr,
    PDL: constexpr,
) -> None:
    """Program s: the token of row s."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    temperature, top_p = tl.load(temperatures + row), tl.load(top_ps + row)
    min_p = tl.minimum(tl.load(min_ps + row), 1.0)
    wanted = tl.load(top_ks + row)
    seed, step = tl.load(seeds + row), tl.load(steps + row)
    k = tl.where((wanted > 0) & (wanted < limit), wanted, limit)
    if PDL:
        tl.extra.cuda.gdc_wait()
    base = logits + row.to(tl.int64) * row_stride
    top, first = merge_first(values, ids, row, blocks, LANES)
    finite = tl.abs(top) < float("inf")
    token = tl.where(finite, first, -1)
    if finite & (temperature >= MIN_TEMPERATURE):
        _, token = merge_first(scores, score_ids, row, blocks, LANES)
        if (k < limit) | (top_p < 1.0) | (min_p > 0.0):
            if k <= TOP:
                count = blocks * (4 * GROUP // MEMBERS)
                mine = members + row * count
                token = _draw_among_few(
                    base,
                    mine,
                    chosen + row * TOP,
                    limit,
                    count,
                    k,
                    top_p,
                    min_p,
                    temperature,
                    top,
                    seed,
                    step,
                    GROUP,
                    MEMBERS,
                    GROUP_LANES,
                    TOP,
                )
            else:
                lane = tl.arange(0, LANES)
                value = tl.load(values + row * blocks + lane, mask=lane < blocks, other=float("-inf"))
                weight = tl.load(weights + row * blocks + lane, mask=lane < blocks, other=0.0)
                total = tl.sum(weight * tl.exp((value - top) / temperature), 0)
                if (k < limit) & (top_p < 1.0):
                    total = _weight_of_the_first(base, limit, k, temperature, top, SPAN)
                most = tl.where(top_p < 1.0, top_p * total, float("inf"))
                token = _draw_searching(base, limit, k, most, min_p, temperature, top, seed, step, token, GROUP, SPAN)
    tl.store(out + row, token)


def sample_triton(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    steps: Tensor,
    vocab_limit: int,
    min_temperature: float,
) -> Tensor:
    """See `sample` of sample.py."""
    check_rows(
        logits,
        vocab_limit,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seeds=seeds,
        steps=steps,
    )
    S, device = logits.shape[0], logits.device
    blocks = cdiv(vocab_limit, BLOCK)
    groups = blocks * (BLOCK // _MEMBERS)
    values, scores, weights = torch.empty(3, S, blocks, device=device)
    ids, score_ids = torch.empty(2, S, blocks, dtype=torch.int32, device=device)
    members = torch.empty(S, groups, device=device)
    out = torch.empty(S, dtype=torch.int32, device=device)
    stride = logits.stride(0)
    found = values, ids, scores, score_ids, weights, members
    launch(
        _sample_blocks,
        (blocks, S),
        logits,
        temperature,
        seeds,
        steps,
        *found,
        stride,
        vocab_limit,
        GROUP=GROUP,
        MEMBERS=_MEMBERS,
        MIN_TEMPERATURE=min_temperature,
        device=device,
        warps=4,
    )
    launch(
        _sample_finish,
        (S,),
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        seeds,
        steps,
        *found,
        torch.empty(S, TOP, dtype=torch.int32, device=device),
        out,
        stride,
        vocab_limit,
        blocks,
        GROUP=GROUP,
        MEMBERS=_MEMBERS,
        MIN_TEMPERATURE=min_temperature,
        LANES=next_power_of_2(blocks),
        GROUP_LANES=max(TOP, next_power_of_2(groups)),
        SPAN=4 * GROUP,
        TOP=TOP,
        device=device,
        warps=16,
    )
    return out

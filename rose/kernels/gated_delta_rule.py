"""The gated delta rule (arXiv:2412.06464) over packed sequences, in chunks of 64 tokens.

For each value head, with a state S [key dim, value dim] that starts at zero or where the sequence left it:

    S = exp(g_t) S;   S = S + k_t (beta_t (v_t - S^T k_t))^T;   o_t = S^T q_t

    beta = sigmoid(b),  g = -exp(A_log) softplus(a + dt_bias),  q and k of unit length, q scaled by key_dim ** -0.5

Within a chunk the updates are one triangular system (I + L) u = beta v, L_ij = beta_i (k_i . k_j) exp(c_i - c_j) for
j < i with c the running sum of g, so that a chunk costs a few products of 64 rows instead of 64 steps. Two kernels:
the first solves the system of every chunk at once, the second walks through the chunks of a sequence with the state in
registers. Chunks are cut from each sequence's own first token, and the grid comes from tokens and sequences alone.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from rose.kernels.carried import Carried, check_carried
from rose.kernels.delta_heads import (
    NORM_EPS,
    DeltaHeads,
    Gates,
    check_heads,
    gates_ref,
    initial_states_ref,
    unit_heads_ref,
)
from rose.kernels.launch import Ptr, constexpr, jit, launch, next_power_of_2, require_contiguous, runs_triton, tl
from rose.kernels.short_attention import sequence_of

CHUNK = 64
# Boundaries looked at in one load, always so many: one compiled kernel for any number of sequences.
_BOUNDS = 1024
# Narrower heads of 16 bits are left to the reference on a GPU: with 16 wide keys the compiled products of _solve_chunks
# reached beyond their memory on an H200 (Triton 3.6). Published models have 128.
_LEAST_DIM = 64
# Rows of queries, keys and values lie multiples of so many values apart, as the convolution writes them. In bf16 on an
# H200 (Triton 3.6) rows 197 to 523 values apart came out wrong by their own size, in all 12 cases of more than two
# tokens; with rows a multiple of 16 apart all were right. The PTX of both is right when it is interpreted: NOTES.md.
_ROW_MULTIPLE = 16
# Of the triangular inverse, which is rounded to the dtype once it is made: 2^-16 in three products of bf16 halves.
_PRECISION = {torch.float32: "ieee", torch.bfloat16: "bf16x3", torch.float16: "tf32x3"}


def gated_delta_rule_ref(
    qkv: Tensor, gates: Gates, cu_seqlens: Tensor, heads: DeltaHeads, carried: Carried | None = None
) -> Tensor:
    bounds = cu_seqlens.tolist()
    lengths = [end - start for start, end in pairwise(bounds)]
    # Short sequences fill smaller chunks; the arithmetic is the same.
    size = min(CHUNK, next_power_of_2(max(lengths)))
    token, place = _chunk_table(bounds, size, len(qkv), qkv.device)
    q, k, v = (_in_chunks(x, token) for x in unit_heads_ref(qkv, heads))
    beta, g = (_in_chunks(x.unsqueeze(-1), token) for x in gates_ref(gates))
    run = g.squeeze(-1).cumsum(-1)
    lower = torch.ones(size, size, dtype=torch.bool, device=qkv.device).tril()
    decay = (run.unsqueeze(-1) - run.unsqueeze(-2)).masked_fill(~lower, -torch.inf).exp()
    system = (beta * k) @ k.transpose(-1, -2) * decay
    right = torch.cat([beta * v, beta * k * run.exp().unsqueeze(-1)], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    fresh, read = solved.split([heads.value_dim, heads.key_dim], dim=-1)
    within = q @ k.transpose(-1, -2) * decay
    q = q * run.exp().unsqueeze(-1)
    k = k * (run[..., -1:] - run).exp().unsqueeze(-1)
    fade = run[..., -1].exp()[..., None, None]
    state = initial_states_ref(carried, torch.tensor(lengths, device=qkv.device), heads, qkv.device)
    rows = torch.empty_like(fresh)
    for step, (sequences, chunks) in enumerate(place):
        if step == 0 and carried is None:  # a state of zeros says nothing: most texts are one chunk
            new = fresh[chunks]
            rows[chunks] = within[chunks] @ new
        else:
            old = state[sequences]
            new = fresh[chunks] - read[chunks] @ old
            rows[chunks] = q[chunks] @ old + within[chunks] @ new
            state[sequences] = old * fade[chunks]
        if step + 1 < len(place) or carried is not None:
            state[sequences] += k[chunks].transpose(-1, -2) @ new
    if carried is not None:
        carried.pool[carried.rows.long()] = state.to(carried.pool.dtype)
    out = qkv.new_zeros(len(qkv) + 1, heads.value_heads, heads.value_dim)
    out[token] = rows.transpose(1, 2).to(qkv.dtype)
    return out[:-1]


def _chunk_table(
    bounds: list[int], size: int, tokens: int, device: torch.device
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """([chunks, size] the token in each place, `tokens` for none; for each round: sequences that have a chunk left, and
    that chunk)."""
    counts = torch.tensor([-(-(end - start) // size) for start, end in pairwise(bounds)], device=device)
    starts, ends = torch.tensor(bounds[:-1], device=device), torch.tensor(bounds[1:], device=device)
    before = counts.cumsum(0) - counts
    owner = torch.repeat_interleave(torch.arange(len(counts), device=device), counts)
    first = starts[owner] + (torch.arange(len(owner), device=device) - before[owner]) * size
    token = first[:, None] + torch.arange(size, device=device)
    token = torch.where(token < ends[owner][:, None], token, tokens)
    rounds = []
    for step in range(int(counts.max())):
        sequences = (counts > step).nonzero()[:, 0]
        rounds.append((sequences, before[sequences] + step))
    return token, rounds


def _in_chunks(x: Tensor, token: Tensor) -> Tensor:
    """[T, Hv, d] -> [chunks, Hv, size, d]; places without a token hold zeros, which change nothing."""
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])])[token].transpose(1, 2)


@jit
def delta_gates(b: Ptr, a: Ptr, a_log: Ptr, dt_bias: Ptr) -> Ptr:
    """(beta, g) of fp32 values. log(1 + e) loses its digits where e is small, and its series there has them."""
    x = a + dt_bias
    e = tl.exp(tl.minimum(x, 20.0))
    soft = tl.where(x > 20.0, x, tl.where(x < -8.0, e - 0.5 * e * e, tl.log(1.0 + e)))
    return 1.0 / (1.0 + tl.exp(-b)), -tl.exp(a_log) * soft


@jit
def inverse_unit_lower(lower: Ptr, row: Ptr, col: Ptr, LEVELS: constexpr, PRECISE: constexpr) -> Ptr:
    """(I + lower)^-1 of a strictly lower [2 ** LEVELS, 2 ** LEVELS] block.

    Blocks on the diagonal are inverted first, and two of them joined by X - X M X, with M what lies between them. Every
    value on the way is one of the result's or a product of two; the powers of a Neumann series would reach 10^18 where
    all keys of a chunk are alike (a text that repeats one token) and leave no digit of the result.
    """
    x = tl.where(row == col, 1.0, 0.0) - tl.where(row // 2 == col // 2, lower, 0.0)
    for level in tl.static_range(1, LEVELS):
        size = 2**level
        between = (row // (2 * size) == col // (2 * size)) & (row // size != col // size)
        m = tl.where(between, lower, 0.0)
        x -= tl.dot(tl.dot(x, m, input_precision=PRECISE), x, input_precision=PRECISE)
    return x


@jit(do_not_specialize=["B", "cu_seqlens"])
def _solve_chunks(
    qkv: Ptr,
    logits: Ptr,
    a_log: Ptr,
    dt_bias: Ptr,
    cu_seqlens: Ptr,
    fresh: Ptr,
    read: Ptr,
    within: Ptr,
    factors: Ptr,
    fades: Ptr,
    B: Ptr,
    qkv_row: Ptr,
    logits_row: Ptr,
    HK: constexpr,
    HV: constexpr,
    DK: constexpr,
    DV: constexpr,
    N: constexpr,
    LEVELS: constexpr,
    SCALE: constexpr,
    EPS: constexpr,
    BOUNDS: constexpr,
    ONE_LOAD: constexpr,
    PRECISE: constexpr,
    PDL: constexpr,
) -> None:
    """Program (slot, h): all of one chunk and value head that does not need the state.

    q, k and v enter the products as they are stored; lengths, scales and decays are factors of the results' rows or of
    the inverse's columns, so that little is rounded twice. Places past the sequence's end hold zeros.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.program_id(0)
    head = tl.program_id(1)
    sequence, start, end = sequence_of(cu_seqlens, slot, B, N, BOUNDS, ONE_LOAD)
    first = start + (slot - start // N - sequence) * N
    gate_log = tl.load(a_log + head).to(tl.float32)
    gate_bias = tl.load(dt_bias + head).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if first < end:
        i = tl.arange(0, N)
        here = first + i < end
        row, col = i[:, None], i[None, :]
        dk, dv = tl.arange(0, DK), tl.arange(0, DV)
        token = (first + i).to(tl.int64)
        q_head = qkv + token[:, None] * qkv_row + (head // (HV // HK)) * DK + dk[None, :]
        b = tl.load(logits + token * logits_row + head, mask=here, other=0.0).to(tl.float32)
        a = tl.load(logits + token * logits_row + HV + head, mask=here, other=0.0).to(tl.float32)
        q = tl.load(q_head, mask=here[:, None], other=0.0)
        k = tl.load(q_head + HK * DK, mask=here[:, None], other=0.0)
        beta, g = delta_gates(b, a, gate_log, gate_bias)
        beta = tl.where(here, beta, 0.0)
        g = tl.where(here, g, 0.0)
        run = tl.cumsum(g, 0)
        total = tl.sum(g, 0)
        q32 = q.to(tl.float32)
        k32 = k.to(tl.float32)
        q_unit = tl.rsqrt(tl.sum(q32 * q32, 1) + EPS) * SCALE
        k_unit = tl.rsqrt(tl.sum(k32 * k32, 1) + EPS)
        kind = qkv.dtype.element_ty
        place = tl.cast(slot, tl.int64) * HV + head
        tile = place * N + row
        # Above the diagonal the exponent is positive, and may overflow.
        decay = tl.exp(tl.where(row >= col, run[:, None] - run[None, :], float("-inf"))) * k_unit[None, :]
        p = tl.dot(q, tl.trans(k), input_precision="ieee") * decay * q_unit[:, None]
        tl.store(within + tile * N + col, p.to(kind))
        tl.store(factors + place * (2 * N) + i, q_unit * tl.exp(run))
        tl.store(factors + place * (2 * N) + N + i, k_unit * tl.exp(total - run))
        tl.store(fades + place, tl.exp(total))
        lower = tl.dot(k, tl.trans(k), input_precision="ieee") * decay * (beta * k_unit)[:, None]
        x = inverse_unit_lower(tl.where(row > col, lower, 0.0), row, col, LEVELS, PRECISE)
        # Loaded here, and k once more, for want of registers while the inverse is made.
        v_head = qkv + token[:, None] * qkv_row + 2 * HK * DK + head * DV + dv[None, :]
        v = tl.load(v_head, mask=here[:, None], other=0.0)
        u = tl.dot((x * beta[None, :]).to(kind), v, input_precision="ieee")
        tl.store(fresh + tile * DV + dv[None, :], u.to(kind))
        k = tl.load(q_head + HK * DK, mask=here[:, None], other=0.0)
        w = tl.dot((x * (beta * k_unit * tl.exp(run))[None, :]).to(kind), k, input_precision="ieee")
        tl.store(read + tile * DK + dk[None, :], w.to(kind))


# Slices of a batch's arrays may begin anywhere, and must not each have a kernel of their own.
@jit(do_not_specialize=["cu_seqlens", "rows", "lengths"])
def _walk_chunks(
    qkv: Ptr,
    cu_seqlens: Ptr,
    fresh: Ptr,
    read: Ptr,
    within: Ptr,
    factors: Ptr,
    fades: Ptr,
    out: Ptr,
    pool: Ptr,
    rows: Ptr,
    lengths: Ptr,
    qkv_row: Ptr,
    pool_row: Ptr,
    HK: constexpr,
    HV: constexpr,
    DK: constexpr,
    DV: constexpr,
    N: constexpr,
    BV: constexpr,
    CARRIED: constexpr,
    PDL: constexpr,
) -> None:
    """Program (v, h, b): BV columns of the state of value head h, through all chunks of sequence b."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    start = tl.load(cu_seqlens + sequence)
    length = tl.load(cu_seqlens + sequence + 1) - start
    i, dk = tl.arange(0, N), tl.arange(0, DK)
    dv = tl.program_id(0) * BV + tl.arange(0, BV)
    own = pool + head * (DK * DV) + dk[:, None] * DV + dv[None, :]
    continues = False
    if CARRIED:
        own += tl.load(rows + sequence).to(tl.int64) * pool_row
        continues = tl.load(lengths + sequence) > length
    if PDL:
        tl.extra.cuda.gdc_wait()
    kind = qkv.dtype.element_ty
    if CARRIED:
        state = tl.load(own, mask=(dk >= 0)[:, None] & continues, other=0.0).to(tl.float32)
    else:
        state = tl.zeros((DK, BV), tl.float32)
    slot = start // N + sequence
    q_head = qkv + tl.cast(start, tl.int64) * qkv_row + (head // (HV // HK)) * DK + dk[None, :]
    to = out + (tl.cast(start, tl.int64) * HV + head) * DV + dv[None, :]
    for first in range(0, length, N):
        token = (first + i).to(tl.int64)
        here = (token < length)[:, None]
        place = tl.cast(slot + first // N, tl.int64) * HV + head
        tile = place * N + i[:, None]
        w = tl.load(read + tile * DK + dk[None, :])
        u = tl.load(fresh + tile * DV + dv[None, :])
        p = tl.load(within + tile * N + i[None, :])
        q = tl.load(q_head + token[:, None] * qkv_row, mask=here, other=0.0)
        k = tl.load(q_head + HK * DK + token[:, None] * qkv_row, mask=here, other=0.0)
        q_factor = tl.load(factors + place * (2 * N) + i)
        k_factor = tl.load(factors + place * (2 * N) + N + i)
        fade = tl.load(fades + place)
        old = state.to(kind)
        new = u.to(tl.float32) - tl.dot(w, old, input_precision="ieee")
        o = tl.dot(q, old, input_precision="ieee") * q_factor[:, None]
        o = tl.dot(p, new.to(kind), o, input_precision="ieee")
        tl.store(to + token[:, None] * (HV * DV), o.to(kind), mask=here)
        state = tl.dot(tl.trans(k), (new * k_factor[:, None]).to(kind), state * fade, input_precision="ieee")
    if CARRIED:
        tl.store(own, state.to(pool.dtype.element_ty))


def state_columns(sequences: int, heads: DeltaHeads) -> int:
    """Columns of the state a program keeps; fewer where sequences and heads alone do not fill the chip."""
    wide = min(64, heads.value_dim)
    return wide if sequences * heads.value_heads * (heads.value_dim // wide) >= 256 else min(32, heads.value_dim)


def gated_delta_rule_triton(
    qkv: Tensor, gates: Gates, cu_seqlens: Tensor, heads: DeltaHeads, carried: Carried | None = None
) -> Tensor:
    check_heads(qkv, gates, heads)
    if qkv.stride(0) % _ROW_MULTIPLE:
        raise ValueError(f"rows of qkv must lie a multiple of {_ROW_MULTIPLE} values apart; they are {qkv.stride(0)}")
    require_contiguous(cu_seqlens=cu_seqlens)
    T, B = qkv.shape[0], cu_seqlens.shape[0] - 1
    HK, HV, DK, DV = heads
    if carried is not None:
        check_carried(carried, B, (HV, DK, DV))
    slots = T // CHUNK + B
    fresh, read, within = (
        torch.empty(slots, HV, CHUNK, d, dtype=qkv.dtype, device=qkv.device) for d in (DV, DK, CHUNK)
    )
    factors = torch.empty(slots, HV, 2, CHUNK, device=qkv.device)
    fades = torch.empty(slots, HV, device=qkv.device)
    out = torch.empty(T, HV, DV, dtype=qkv.dtype, device=qkv.device)
    launch(
        _solve_chunks,
        (slots, HV),
        qkv,
        *gates,
        cu_seqlens,
        fresh,
        read,
        within,
        factors,
        fades,
        B,
        qkv.stride(0),
        gates.logits.stride(0),
        HK=HK,
        HV=HV,
        DK=DK,
        DV=DV,
        N=CHUNK,
        LEVELS=6,
        SCALE=DK**-0.5,
        EPS=NORM_EPS,
        BOUNDS=_BOUNDS,
        ONE_LOAD=B <= _BOUNDS,
        PRECISE=_PRECISION[qkv.dtype],
        device=qkv.device,
        warps=8 if qkv.dtype is torch.float32 else 4,
    )
    pool, rows, lengths = (factors, cu_seqlens, cu_seqlens) if carried is None else carried
    columns = state_columns(B, heads)
    launch(
        _walk_chunks,
        (DV // columns, HV, B),
        qkv,
        cu_seqlens,
        fresh,
        read,
        within,
        factors,
        fades,
        out,
        pool,
        rows,
        lengths,
        qkv.stride(0),
        pool.stride(0),
        HK=HK,
        HV=HV,
        DK=DK,
        DV=DV,
        N=CHUNK,
        BV=columns,
        CARRIED=carried is not None,
        device=qkv.device,
        warps=4,
        stages=1 if qkv.dtype is torch.float32 else 2,
    )
    return out


def gated_delta_rule(
    qkv: Tensor, gates: Gates, cu_seqlens: Tensor, heads: DeltaHeads, carried: Carried | None = None
) -> Tensor:
    """The rule within each packed sequence.

    Args:
        qkv: [T, heads.channels]: queries, keys and values side by side, heads in order. On a GPU rows lie a multiple of
            16 values apart.
        cu_seqlens: [B + 1] int32; rows outside of it are not read.
        carried: pool [rows, Hv, key_dim, value_dim] fp32 of states; None where every sequence is whole.

    Returns:
        [T, Hv, value_dim] in qkv's dtype; the state and its sums in fp32. On a GPU rows outside cu_seqlens are not set.

    Raises:
        ValueError: on a GPU, shapes or layouts that do not belong together.
    """
    wide = qkv.dtype is torch.float32 or min(heads.key_dim, heads.value_dim) >= _LEAST_DIM
    return (gated_delta_rule_triton if runs_triton(qkv) and wide else gated_delta_rule_ref)(
        qkv, gates, cu_seqlens, heads, carried
    )

"""One token of the gated delta rule for each of many sequences: the decode step, with the state updated in its pool.

Bound by reading and writing the state once (2 MiB a sequence and layer at 32 heads of 128 x 128), so gates, unit
lengths, update and answer are one kernel over it.
"""

from __future__ import annotations

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
from rose.kernels.gated_delta_rule import delta_gates
from rose.kernels.launch import Ptr, constexpr, jit, launch, runs_triton, tl

_COLUMNS = 32


def gated_delta_step_ref(qkv: Tensor, gates: Gates, heads: DeltaHeads, carried: Carried) -> Tensor:
    q, k, v = unit_heads_ref(qkv, heads)
    beta, g = gates_ref(gates)
    state = initial_states_ref(carried, torch.ones(len(qkv), device=qkv.device), heads, qkv.device)
    state = state * g.exp()[..., None, None]
    known = (state * k.unsqueeze(-1)).sum(-2)
    state = state + k.unsqueeze(-1) * ((v - known) * beta.unsqueeze(-1)).unsqueeze(-2)
    carried.pool[carried.rows.long()] = state.to(carried.pool.dtype)
    return (state * q.unsqueeze(-1)).sum(-2).to(qkv.dtype)


@jit(do_not_specialize=["rows", "lengths"])
def _gated_delta_step(
    qkv: Ptr,
    logits: Ptr,
    a_log: Ptr,
    dt_bias: Ptr,
    out: Ptr,
    pool: Ptr,
    rows: Ptr,
    lengths: Ptr,
    qkv_row: Ptr,
    logits_row: Ptr,
    pool_row: Ptr,
    HK: constexpr,
    HV: constexpr,
    DK: constexpr,
    DV: constexpr,
    BV: constexpr,
    SCALE: constexpr,
    EPS: constexpr,
    PDL: constexpr,
) -> None:
    """Program (v, h, b): BV columns of the state of value head h of sequence b."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    dk = tl.arange(0, DK)
    dv = tl.program_id(0) * BV + tl.arange(0, BV)
    row = tl.cast(sequence, tl.int64)
    own = pool + tl.load(rows + sequence).to(tl.int64) * pool_row + head * (DK * DV) + dk[:, None] * DV + dv[None, :]
    continues = tl.load(lengths + sequence) > 1
    gate_log = tl.load(a_log + head).to(tl.float32)
    gate_bias = tl.load(dt_bias + head).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    state = tl.load(own, mask=(dk >= 0)[:, None] & continues, other=0.0).to(tl.float32)
    q_head = qkv + row * qkv_row + (head // (HV // HK)) * DK + dk
    q = tl.load(q_head).to(tl.float32)
    k = tl.load(q_head + HK * DK).to(tl.float32)
    v = tl.load(qkv + row * qkv_row + 2 * HK * DK + head * DV + dv).to(tl.float32)
    b = tl.load(logits + row * logits_row + head).to(tl.float32)
    a = tl.load(logits + row * logits_row + HV + head).to(tl.float32)
    beta, g = delta_gates(b, a, gate_log, gate_bias)
    q *= tl.rsqrt(tl.sum(q * q, 0) + EPS) * SCALE
    k *= tl.rsqrt(tl.sum(k * k, 0) + EPS)
    state *= tl.exp(g)
    known = tl.sum(state * k[:, None], 0)
    state += k[:, None] * ((v - known) * beta)[None, :]
    tl.store(own, state.to(pool.dtype.element_ty))
    o = tl.sum(state * q[:, None], 0)
    tl.store(out + (row * HV + head) * DV + dv, o.to(out.dtype.element_ty))


def gated_delta_step_triton(qkv: Tensor, gates: Gates, heads: DeltaHeads, carried: Carried) -> Tensor:
    check_heads(qkv, gates, heads)
    B = qkv.shape[0]
    HK, HV, DK, DV = heads
    check_carried(carried, B, (HV, DK, DV))
    out = torch.empty(B, HV, DV, dtype=qkv.dtype, device=qkv.device)
    columns = min(_COLUMNS, DV)
    launch(
        _gated_delta_step,
        (DV // columns, HV, B),
        qkv,
        *gates,
        out,
        *carried,
        qkv.stride(0),
        gates.logits.stride(0),
        carried.pool.stride(0),
        HK=HK,
        HV=HV,
        DK=DK,
        DV=DV,
        BV=columns,
        SCALE=DK**-0.5,
        EPS=NORM_EPS,
        device=qkv.device,
        warps=4,
    )
    return out


def gated_delta_step(qkv: Tensor, gates: Gates, heads: DeltaHeads, carried: Carried) -> Tensor:
    """One token of each of B sequences; see gated_delta_rule.

    Args:
        qkv: [B, heads.channels], rows may be strided. carried: pool [rows, Hv, key_dim, value_dim] fp32.

    Returns:
        [B, Hv, value_dim] in qkv's dtype.
    """
    return (gated_delta_step_triton if runs_triton(qkv) else gated_delta_step_ref)(qkv, gates, heads, carried)

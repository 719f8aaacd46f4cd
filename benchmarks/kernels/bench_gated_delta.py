"""Kernels of a gated delta net (Qwen3.5) against their floor and a rival, inside CUDA graphs; JSON under --out.

    PYTHONPATH=. python benchmarks/kernels/bench_gated_delta.py --out DIR

One layer's kernels for whole sequences and for decoding steps, with 16 value heads (0.8B, 2B) and 32 (4B, 9B). Floors
are bytes over 4.21 TB/s or operations over 784 TFLOP/s, and leave the launch out. The rule's rival is
flash-linear-attention where it is installed, with its chunk table made outside of the timing; it takes decays as
logarithms and unit keys from its own kernel, as here. The others' is torch; its convolution runs over all rows as over
one sequence.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from timing import Report, floor_us, graph_us, out_argument
from torch import Tensor

from rose.kernels.carried import Carried
from rose.kernels.causal_conv import causal_conv, causal_conv_step
from rose.kernels.delta_heads import DeltaHeads, Gates, gates_ref
from rose.kernels.gated_delta_rule import gated_delta_rule
from rose.kernels.gated_delta_step import gated_delta_step, gated_delta_step_ref
from rose.kernels.gated_norm import gated_norm, gated_norm_ref

CALLS = 12
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def per_call(run: Callable[[], object]) -> float:
    return graph_us(lambda: [run() for _ in range(CALLS)], 20) / CALLS


def case(
    report: Report,
    op: str,
    shape: str,
    ours: Callable[[], object],
    rival: Callable[[], object] | None,
    moved: float,
    flops: float = 0.0,
) -> None:
    row: dict[str, object] = {"op": op, "shape": shape, "floor_us": floor_us(moved, flops)}
    for name, run in (("us", ours), ("rival_us", rival)):
        if run is None:
            continue
        try:
            row[name] = per_call(run)
        except Exception as error:
            row[f"{name}_error"] = f"{type(error).__name__}: {error}"[:200]
    report.row(**row)


def bounds(tokens: int, sequences: int) -> Tensor:
    step = tokens // sequences
    return torch.arange(0, tokens + 1, step, dtype=torch.int32, device=DEVICE)


def layer(tokens: int, value_heads: int) -> tuple[DeltaHeads, Tensor, Tensor, Gates, Tensor]:
    """(heads, the packed product's convolution inputs, its z, gates, taps)."""
    heads = DeltaHeads(16, value_heads, 128, 128)
    C, V = heads.channels, value_heads * 128
    packed = torch.randn(tokens, C + V + 2 * value_heads, device=DEVICE).bfloat16()
    a_log, dt_bias = torch.rand(value_heads, device=DEVICE), torch.randn(value_heads, device=DEVICE) - 3
    gates = Gates(packed[:, C + V :], a_log, dt_bias)
    return heads, packed[:, :C], packed[:, C : C + V], gates, torch.randn(C, 1, 4, device=DEVICE).bfloat16()


def fla_rival(qkv: Tensor, gates: Gates, cu: Tensor, heads: DeltaHeads) -> Callable[[], object] | None:
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.utils.index import prepare_chunk_indices
    except ImportError:
        return None
    K, V = heads.key_heads * heads.key_dim, heads.value_heads * heads.value_dim
    q, k, v = (x.unflatten(1, (-1, 128))[None].contiguous() for x in qkv.split([K, K, V], 1))
    group = heads.value_heads // heads.key_heads
    q, k = (x.repeat_interleave(group, 2) for x in (q, k))
    beta, g = (x[None].contiguous() for x in gates_ref(gates))
    indices = prepare_chunk_indices(cu.long(), 64)
    return lambda: chunk_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta.to(q.dtype),
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=cu.long(),
        chunk_indices=indices,
    )


def whole(report: Report, tokens: int, sequences: int, value_heads: int) -> None:
    heads, x, z, gates, taps = layer(tokens, value_heads)
    cu, weight = bounds(tokens, sequences), torch.ones(128, device=DEVICE)
    shape = f"{sequences}x{tokens // sequences}x{value_heads}"
    qkv, wide = causal_conv(x, taps, cu), tokens * value_heads * 128 * 2
    torch_conv = lambda: F.silu(F.conv1d(F.pad(x.t(), (3, 0)), taps, groups=len(taps))).t()  # noqa: E731
    case(report, "causal_conv", shape, lambda: causal_conv(x, taps, cu), torch_conv, 2 * qkv.nbytes)
    # Products of a chunk and head: keys by keys and queries, the inverse by both sides, and five with the state.
    flops = 2 * tokens * value_heads * (64 * 128 * 5 + 128 * 128 * 3)
    rule = lambda: gated_delta_rule(qkv, gates, cu, heads)  # noqa: E731
    case(report, "gated_delta_rule", shape, rule, fla_rival(qkv, gates, cu, heads), qkv.nbytes + wide, flops)
    o = rule()
    by_torch = lambda: gated_norm_ref(o, z, weight, 1e-6)  # noqa: E731
    case(report, "gated_norm", shape, lambda: gated_norm(o, z, weight, 1e-6), by_torch, 3 * wide)


def steps(report: Report, sequences: int, value_heads: int) -> None:
    heads, x, _, gates, taps = layer(sequences, value_heads)
    rows = torch.arange(1, sequences + 1, dtype=torch.int32, device=DEVICE)
    lengths = torch.full_like(rows, 100)
    inputs = Carried(torch.zeros(sequences + 1, heads.channels, 3, device=DEVICE).bfloat16(), rows, lengths)
    states = Carried(torch.zeros(sequences + 1, value_heads, 128, 128, device=DEVICE), rows, lengths)
    qkv, shape = causal_conv_step(x, taps, inputs), f"{sequences}x{value_heads}"
    again = Carried(inputs.pool.clone(), rows, lengths)

    def torch_step() -> Tensor:
        wide = rows.long()
        window = torch.cat([again.pool[wide], x.unsqueeze(2)], 2)
        again.pool[wide] = window[..., 1:]
        return F.silu((window * taps[:, 0]).sum(-1))

    case(report, "causal_conv_step", shape, lambda: causal_conv_step(x, taps, inputs), torch_step, 8 * qkv.nbytes)
    moved = 2 * sequences * value_heads * 128 * 128 * 4
    other = Carried(states.pool.clone(), rows, lengths)
    by_torch = lambda: gated_delta_step_ref(qkv, gates, heads, other)  # noqa: E731
    case(report, "gated_delta_step", shape, lambda: gated_delta_step(qkv, gates, heads, states), by_torch, moved)


def main() -> None:
    args = out_argument("gated_delta.json").parse_args()
    report = Report(args.out / "gated_delta.json")
    torch.manual_seed(0)
    for value_heads in (16, 32):
        for tokens, sequences in ((128, 1), (512, 1), (2048, 16), (4096, 1), (16384, 32)):
            name = f"whole {tokens} {value_heads}"
            report.section(name, lambda t=tokens, s=sequences, h=value_heads: whole(report, t, s, h))
        for sequences in (1, 8, 64, 256):
            report.section(f"steps {sequences} {value_heads}", lambda s=sequences, h=value_heads: steps(report, s, h))


if __name__ == "__main__":
    main()

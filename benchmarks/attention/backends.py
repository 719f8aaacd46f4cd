"""Attention backends on the published loads: device time of a call in a graph of 24, and what a plan costs the host.

    python benchmarks/attention/backends.py --out DIR [--only bge-m3] [--seconds 95]

One graph holds 24 calls, each with the result of the one before as its queries, so that launch and replay are spread
over them as in a model. Every answer is compared with the float64 reference before it is timed (up to 16,384 tokens).
`floor_us` is max(bytes of q, k, v and the result at 4.21 TB/s, FLOPs at 784 TFLOP/s), what an H200 was measured to do.
torch_sdpa is the rival everybody has; its graph serves one split only. Rows are written as they come.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from rose.attention_backends import AttentionBackend, AttentionSpec, WarmsUp, backend_names
from rose.attention_backends.auto import spec_for
from rose.attention_backends.base import try_backend
from rose.attention_backends.check import StaticAttention
from rose.attention_backends.choose import Load, choose
from rose.attention_backends.reference import TOLERANCE, reference_attention, row_error
from rose.attention_backends.rows import unpack

CALLS = 24
SHAPES = {"bge-m3": (16, 16, 64), "pplx-embed-0.6b": (16, 8, 128)}
LOADS: dict[str, tuple[int, ...]] = {
    **{f"1x{n}": (n,) for n in (128, 256, 512, 1024, 2048, 4096, 16384)},
    **{f"{n}x512": (512,) * n for n in (5, 25, 50, 100)},
    "100x128": (128,) * 100,
    "mixed": (37, 128, 1, 300, 64),
    "mixed bulk": (37, 128, 1, 300, 64, 512, 256, 90) * 11,
}
BYTES_PER_US, FLOPS_PER_US = 4.21e6, 784e6
CHECKED_TOKENS = 16384


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(), help="folder for attention_backends.json")
    parser.add_argument("--only", choices=SHAPES, help="one model's heads instead of both")
    parser.add_argument("--loads", nargs="*", choices=LOADS, help="some loads instead of all")
    parser.add_argument("--seconds", type=float, default=95.0, help="start no further row after this long")
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    report = Report(args.out / "attention_backends.json")
    for shape in [args.only] if args.only else SHAPES:
        backends = warmed_up(shape, report)
        left_out = {name: found for name, found in backends.items() if isinstance(found, str)}
        for load in args.loads or LOADS:
            for name, backend in backends.items():
                if isinstance(backend, str) or not serves(name, LOADS[load]):
                    continue
                if time.monotonic() > end:
                    report.row(shape=shape, load=load, backend=name, skipped="out of time")
                    continue
                try:
                    report.row(shape=shape, load=load, backend=name, **measure(name, shape, load, backend, left_out))
                except Exception as error:
                    report.row(shape=shape, load=load, backend=name, error=f"{type(error).__name__}: {error}"[:300])


def make_spec(shape: str) -> AttentionSpec:
    heads, kv_heads, head_dim = SHAPES[shape]
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=torch.bfloat16,
        device=torch.device("cuda"),
        causal=False,
        scale=head_dim**-0.5,
    )


def serves(name: str, lengths: tuple[int, ...]) -> bool:
    longest = spec_for(name, make_spec("bge-m3")).max_length
    return longest is None or max(lengths) <= longest


def warmed_up(shape: str, report: Report) -> dict[str, AttentionBackend | str]:
    found: dict[str, AttentionBackend | str] = {}
    for name in backend_names():
        began = time.perf_counter()
        found[name] = try_backend(name, spec_for(name, make_spec(shape)))
        backend = found[name]
        if isinstance(backend, str):
            report.row(shape=shape, backend=name, left_out=backend)
        elif isinstance(backend, WarmsUp):
            backend.warm_up(128)
            report.row(shape=shape, backend=name, warm_up_s=time.perf_counter() - began)
    return found


def measure(name: str, shape: str, load: str, backend: AttentionBackend, left_out: dict[str, str]) -> dict[str, Any]:
    spec, lengths = make_spec(shape), LOADS[load]
    tokens, bound = sum(lengths), max(64, 1 << (max(lengths) - 1).bit_length())
    packed = torch.randn(
        tokens, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim, device=spec.device, dtype=spec.dtype
    )
    qkv = unpack(packed, spec.num_heads, spec.num_kv_heads)
    row: dict[str, Any] = {"tokens": tokens, "sequences": len(lengths)}
    if tokens <= CHECKED_TOKENS:
        row["row_error"] = agreement(backend, spec, qkv, lengths, bound)
    attention = StaticAttention(backend, qkv, len(lengths), bound, key=(load, "timed"), calls=CALLS)
    attention.capture(lengths)
    times = replay_times(attention)
    plans = plan_times(backend, attention, lengths)
    choice = choose(spec.head_dim, Load(tokens, len(lengths), bound), left_out)
    return row | {
        "us": statistics.median(times) / CALLS,
        "us_min": min(times) / CALLS,
        "us_max": max(times) / CALLS,
        "n": len(times),
        "floor_us": floor_us(spec, lengths),
        "plan_us": statistics.median(plans),
        "plan_us_p90": sorted(plans)[int(len(plans) * 0.9)],
        "chosen": choice is not None and choice.backend == name,
    }


def agreement(
    backend: AttentionBackend,
    spec: AttentionSpec,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    lengths: tuple[int, ...],
    bound: int,
) -> float:
    out = StaticAttention(backend, qkv, len(lengths), bound, key=None).plain(lengths)
    error = row_error(out, reference_attention(*qkv, lengths, causal=spec.causal, scale=spec.scale))
    if error > TOLERANCE[spec.dtype]:
        raise AssertionError(f"wrong: a row is off by {error:.3g} of its length")
    return error


def replay_times(attention: StaticAttention, seconds: float = 0.3) -> list[float]:
    """Device µs of single replays: as many as fit into `seconds`, 5 to 60."""
    graph, stream = attention.graph, attention.stream
    assert graph is not None
    assert stream is not None
    with torch.cuda.stream(stream):
        began = time.perf_counter()
        for _ in range(3):
            graph.replay()
        stream.synchronize()
        one = (time.perf_counter() - began) / 3
        count = max(5, min(60, int(seconds / one)))
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for start, end in events:
            start.record()
            graph.replay()
            end.record()
        stream.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in events]


def plan_times(backend: AttentionBackend, attention: StaticAttention, lengths: tuple[int, ...]) -> list[float]:
    """Host µs of planning one more batch of a key already known, slots in turn."""
    assert attention.stream is not None
    times = []
    with torch.cuda.stream(attention.stream):
        for turn in range(30):
            batch = attention.batch(lengths)
            attention.stream.synchronize()
            began = time.perf_counter()
            backend.plan(batch, turn % 2)
            times.append((time.perf_counter() - began) * 1e6)
        attention.stream.synchronize()
    return times


def floor_us(spec: AttentionSpec, lengths: tuple[int, ...]) -> float:
    flops = 4 * spec.num_heads * spec.head_dim * sum(n * n for n in lengths)
    elements = sum(lengths) * 2 * (spec.num_heads + spec.num_kv_heads) * spec.head_dim
    return max(flops / FLOPS_PER_US, elements * spec.dtype.itemsize / BYTES_PER_US)


class Report:
    """Rows printed and written as they come."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        self.head = {
            "command": "python benchmarks/attention/backends.py",
            "machine": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "commit": commit.stdout.strip() or "unknown",
            "date": time.strftime("%Y-%m-%d"),
            "calls": CALLS,
        }
        path.parent.mkdir(parents=True, exist_ok=True)

    def row(self, **values: Any) -> None:
        rounded = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in values.items()}
        self.rows.append(rounded)
        print("  ".join(f"{k}={v}" for k, v in rounded.items()), flush=True)
        self.path.write_text(json.dumps(self.head | {"rows": self.rows}, indent=1))


if __name__ == "__main__":
    main()

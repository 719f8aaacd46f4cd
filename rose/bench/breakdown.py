"""Where the device's time goes, kernel by kernel: some requests through an engine of this process, profiled by torch.

The profiler slows what it watches, so shares are told, and gaps between kernels, but no rates. A gap counts for the
pair around it, and only while nothing else runs: kernels that begin before the one ahead ends (dependent launch) have
none. On a CPU operators take the kernels' place. Knows the profiler and names; knows neither clients nor rows.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from rose.bench.drivers import EngineDriver
from rose.bench.loads import Load, requests
from rose.bench.targets import Target
from rose.config import EngineConfig, read_model_folder
from rose.convert import load_model
from rose.engine import build_engine

# First fit counts. Names are the libraries' own (gemm, nvjet, cutlass: cuBLAS and CUTLASS), and those of this project's
# kernels.
KINDS: tuple[tuple[str, str], ...] = (
    ("attention", r"attention|flash|fmha|prefillwith|decodewith|_attn|_paged|^_merge"),
    ("recurrence", r"delta|causal_conv|_solve_chunks|_walk_chunks"),
    ("product", r"gemm|nvjet|cutlass|splitk|linear|addmm|aten::mm|matmul|mkldnn|onednn"),
    ("norm", r"norm"),
    ("rotary", r"rope|rotary"),
    ("activation", r"gelu|silu|activation"),
    ("sampling", r"greedy|argmax|sample|_draw|softmax|topk|sort|latest|_finished"),
    ("embedding", r"embed|index_select|gather"),
    ("pooling", r"pool"),
    ("copy", r"memcpy|memset|copy|aten::to\b|fill"),
)
# As they are printed: all other kinds come together at the end.
GROUPS = {"product": "products", "attention": "attention", "norm": "norms", "activation": "activation"}
_ROUNDS = 2
# Kernels printed of each group, and the least share of the device's time that makes one worth a line.
_PRINTED, _LEAST_SHARE = 8, 0.002
# Gaps that are kept, and those of them that are printed.
_GAPS, _GAPS_PRINTED = 20, 8
GRAPH_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One kernel over all profiled requests.

    Attributes:
        share: of all kernels' time.
    """

    name: str
    kind: str
    calls: int
    ms: float
    share: float


@dataclass(frozen=True, slots=True)
class Gap:
    """The device's idle time between two kernels that follow each other, over all profiled requests."""

    before: str
    after: str
    calls: int
    ms: float


def kind_of(name: str) -> str:
    lower = name.lower()
    return next((kind for kind, pattern in KINDS if re.search(pattern, lower)), "other")


def kernel_times(events: Iterable[tuple[str, int, float]]) -> list[KernelTime]:
    """Longest first.

    Args:
        events: (name, calls, microseconds); the same name may come more than once.
    """
    calls: dict[str, int] = {}
    taken: dict[str, float] = {}
    for name, count, microseconds in events:
        short = shortened(name)
        calls[short] = calls.get(short, 0) + count
        taken[short] = taken.get(short, 0.0) + microseconds
    whole = sum(taken.values()) or 1.0
    order = sorted(taken, key=lambda name: -taken[name])
    return [KernelTime(n, kind_of(n), calls[n], round(taken[n] / 1e3, 4), round(taken[n] / whole, 4)) for n in order]


def gaps(spans: Iterable[tuple[str, int, int]]) -> list[Gap]:
    """Largest first.

    Args:
        spans: (name, start, end) in nanoseconds, in any order.
    """
    calls: dict[tuple[str, str], int] = {}
    idle: dict[tuple[str, str], int] = {}
    last, over = "", 0
    for name, start, end in sorted(spans, key=lambda span: span[1]):
        if last and start > over:
            pair = shortened(last), shortened(name)
            calls[pair] = calls.get(pair, 0) + 1
            idle[pair] = idle.get(pair, 0) + start - over
        if end > over:
            last, over = name, end
    order = sorted(idle, key=lambda pair: -idle[pair])
    return [Gap(*pair, calls[pair], round(idle[pair] / 1e6, 4)) for pair in order]


def shares_by_kind(times: Sequence[KernelTime]) -> dict[str, float]:
    """kind -> share, largest first."""
    found: dict[str, float] = {}
    for one in times:
        found[one.kind] = found.get(one.kind, 0.0) + one.share
    return {kind: round(found[kind], 4) for kind in sorted(found, key=lambda kind: -found[kind])}


def grouped(times: Sequence[KernelTime]) -> dict[str, list[KernelTime]]:
    """Group -> its kernels, longest first; those that `GROUPS` does not name are "other"."""
    found: dict[str, list[KernelTime]] = {name: [] for name in (*GROUPS.values(), "other")}
    for one in times:
        found[GROUPS.get(one.kind, "other")].append(one)
    return found


def shortened(name: str) -> str:
    """Without return type, template arguments and parameters, which run to hundreds of characters."""
    bare = name.removeprefix("void ")
    while (smaller := re.sub(r"<[^<>]*>|\([^()]*\)", "", bare)) != bare:
        bare = smaller
    return bare.strip()[:96] or name[:96]


def profile_model(target: Target, wanted: Sequence[Load], backend: str, out: Path | None) -> list[dict[str, Any]]:
    """Profile two requests of each load in turn, on one engine; every table is printed and written beside `out` as it
    comes. Returns what is written."""
    read = read_model_folder(target.folder)
    model = load_model(read, target.device, target.dtype)
    limits = EngineConfig(max_tokens=read.max_tokens, graph_bytes=GRAPH_BYTES)
    found = []
    with closing(EngineDriver(build_engine(model, limits, target.device, target.dtype, backend=backend))) as driver:
        for load in wanted:
            facts = {"load": load.name, "tokens": load.tokens, "batch": load.batch, "requests": _ROUNDS}
            watched = _profiled(driver, load, read.architecture.vocab_size, target.device)
            found.append(tell(target, facts, watched, out))
    return found


@dataclass(frozen=True, slots=True)
class Watched:
    """What the profiler saw.

    Attributes:
        events: (name, calls, microseconds) of each kernel.
        spans: (name, start, end) of each call in nanoseconds, on a GPU.
        seconds: in all.
    """

    events: list[tuple[str, int, float]]
    spans: list[tuple[str, int, int]]
    seconds: float


def tell(target: Target, facts: Mapping[str, Any], watched: Watched, out: Path | None) -> dict[str, Any]:
    """Print the table of one load and write it beside `out`; returns what is written.

    Args:
        facts: "load", "tokens", "batch", and how often it ran: "requests" or "steps".
    """
    times, between = kernel_times(watched.events), gaps(watched.spans)
    result: dict[str, Any] = {
        **asdict(target.facts),
        **facts,
        "profiled_ms": round(watched.seconds * 1e3, 3),
        "kernels_ms": round(sum(one.ms for one in times), 3),
        "gaps_ms": round(sum(one.ms for one in between), 3),
        "share_by_kind": shares_by_kind(times),
        "kernels": [asdict(one) for one in times],
        "gaps": [asdict(one) for one in between[:_GAPS]],
    }
    _print(result, times, between)
    if out is not None:
        eight = "_fp8" if target.facts.dtype == "fp8" else ""  # beside the same loads in 16 bits
        decode = "_decode" if facts["load"] == "decode" else ""
        path = out.parent / f"kernels_{target.name}{eight}{decode}_{facts['batch']}x{facts['tokens']}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def _profiled(driver: EngineDriver, load: Load, vocab_size: int, device: torch.device) -> Watched:
    prepared = [driver.prepare(sequences) for sequences in requests(load, vocab_size, _ROUNDS)]
    for _ in range(3):  # plain, captured, replayed
        driver.send(prepared[0])

    def send_all(begin: Callable[[], None]) -> None:
        begin()
        for one in prepared:
            driver.send(one)

    return watch(send_all, device)


def watch(run: Callable[[Callable[[], None]], object], device: torch.device) -> Watched:
    """Profile what `run` does from where it calls its argument."""
    from torch.profiler import ProfilerActivity, profile

    on_cpu = device.type == "cpu"
    options: dict[str, Any] = {}
    if on_cpu:  # forwards run in a thread of the executor's
        options["experimental_config"] = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    found = profile(activities=[ProfilerActivity.CPU if on_cpu else ProfilerActivity.CUDA], **options)
    start = 0.0

    def begin() -> None:
        nonlocal start
        found.start()
        start = time.perf_counter()

    run(begin)
    seconds = time.perf_counter() - start
    found.stop()
    averages: Any = found.key_averages()
    if on_cpu:
        taken = [(e.key, e.count, e.self_cpu_time_total) for e in averages if e.self_cpu_time_total > 0]
        return Watched(taken, [], seconds)
    seen: Any = found.profiler
    on_gpu = [e for e in seen.kineto_results.events() if e.device_type().name == "CUDA"]
    spans = [(e.name(), e.start_ns(), e.start_ns() + e.duration_ns()) for e in on_gpu]
    return Watched(
        [(e.key, e.count, e.self_device_time_total) for e in averages if e.self_device_time_total > 0], spans, seconds
    )


def _print(result: Mapping[str, Any], times: Sequence[KernelTime], between: Sequence[Gap]) -> None:
    times_run = f"{result['steps']} steps" if "steps" in result else f"{result['requests']} requests"
    print(
        f"{result['model']} {result['batch']} x {result['tokens']}, {times_run}: "
        f"{result['kernels_ms']:.2f} ms in kernels of {result['profiled_ms']:.2f} ms"
    )
    for group, kernels in grouped(times).items():
        print(f"  {sum(one.share for one in kernels):6.1%} {group}")
        for one in kernels[:_PRINTED]:
            if one.share >= _LEAST_SHARE:
                each = f"{one.ms:9.3f} ms {one.calls:6} x {1e3 * one.ms / one.calls:8.1f} us"
                print(f"    {one.share:6.1%} {each}  {one.name}")
    if between:
        print(f"  {result['gaps_ms']:.2f} ms between kernels")
        for gap in between[:_GAPS_PRINTED]:
            each = f"{gap.ms:9.3f} ms {gap.calls:6} x {1e3 * gap.ms / gap.calls:8.1f} us"
            print(f"           {each}  {gap.before[:48]} -> {gap.after[:48]}")
    sys.stdout.flush()

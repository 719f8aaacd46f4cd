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
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rose.bench.drivers import EngineDriver, Ids
from rose.bench.loads import Load, requests
from rose.bench.quantised_shapes import SCHEME_OF
from rose.bench.targets import Target
from rose.config import EngineConfig, read_model_folder
from rose.convert import load_model
from rose.engine import build_engine

# First fit counts. Names are the libraries' own (gemm, nvjet, cutlass: cuBLAS and CUTLASS), and those of this project's
# kernels.
KINDS: tuple[tuple[str, str], ...] = (
    ("attention", r"attention|flash|fmha|prefillwith|decodewith|_attn|_paged|^_merge|mergestates"),
    ("recurrence", r"delta|causal_conv|_solve_chunks|_walk_chunks"),
    ("product", r"gemm|gemv|nvjet|cutlass|splitk|linear|addmm|aten::mm|matmul|mkldnn|onednn"),
    ("store", r"store_kv|rope_store"),
    ("norm", r"norm"),
    ("rotary", r"rope|rotary"),
    ("activation", r"gelu|silu|sigmoid|activation"),
    ("sampling", r"greedy|argmax|sample|_draw|softmax|topk|sort|latest|_finished"),
    ("embedding", r"embed|index_?select|gather"),
    ("pooling", r"pool"),
    ("quantisation", r"quantiz"),
    ("copy", r"memcpy|memset|copy|aten::to\b|fill"),
)
# As they are printed: all other kinds come together at the end.
GROUPS = {
    "product": "products",
    "attention": "attention",
    "norm": "norms",
    "activation": "activation",
    "recurrence": "recurrence",
    "store": "keys and values stored",
    "sampling": "sampling",
}
_ROUNDS = 2
# Kernels printed of each group, and the least share of the device's time that makes one worth a line.
_PRINTED, _LEAST_SHARE = 8, 0.002
# Gaps that are kept, and those of them that are printed.
GAPS, _GAPS_PRINTED = 20, 8
GRAPH_BYTES = 4 << 30

# (name, start, end) of one kernel's run, in nanoseconds.
Span = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One kernel over all that was profiled.

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
    """The device's idle time between two kernels that follow each other, over all that was profiled."""

    before: str
    after: str
    calls: int
    ms: float


@dataclass(frozen=True, slots=True)
class Watched:
    """What the profiler saw.

    Attributes:
        events: (name, calls, microseconds) of each kernel; on a CPU of each operator, by itself.
        spans: of each kernel's runs, on a GPU.
        seconds: of the clock, in all.
    """

    events: list[tuple[str, int, float]]
    spans: list[Span]
    seconds: float


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


def gaps(spans: Iterable[Span]) -> list[Gap]:
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
            prepared = [
                driver.prepare(sequences) for sequences in requests(load, read.architecture.vocab_size, _ROUNDS)
            ]
            for _ in range(3):  # plain, captured, replayed
                driver.send(prepared[0])
            found.append(_tell(target, load, watch(target.device, partial(_send, driver, prepared)), out))
    return found


def _send(driver: EngineDriver, prepared: list[list[Ids]]) -> None:
    for one in prepared:
        driver.send(one)


def _tell(target: Target, load: Load, seen: Watched, out: Path | None) -> dict[str, Any]:
    times, between = kernel_times(seen.events), gaps(seen.spans)
    result: dict[str, Any] = {
        **asdict(target.facts),
        "load": load.name,
        "tokens": load.tokens,
        "batch": load.batch,
        "requests": _ROUNDS,
        "profiled_ms": round(seen.seconds * 1e3, 3),
        "kernels_ms": round(sum(one.ms for one in times), 3),
        "gaps_ms": round(sum(one.ms for one in between), 3),
        "share_by_kind": shares_by_kind(times),
        "kernels": [asdict(one) for one in times],
        "gaps": [asdict(one) for one in between[:GAPS]],
    }
    print(
        f"{target.name} {load.batch} x {load.tokens}, {_ROUNDS} requests: "
        f"{result['kernels_ms']:.2f} ms in kernels of {result['profiled_ms']:.2f} ms"
    )
    print_kernels(times, between)
    write_kernels(target, f"{load.batch}x{load.tokens}", result, out)
    return result


def write_kernels(target: Target, load: str, result: dict[str, Any], out: Path | None) -> None:
    """To a file of its own beside `out`, where there is one; of 8 bits beside those of the same load in 16."""
    if out is None:
        return
    codes = f"_{target.facts.dtype}" if target.facts.dtype in SCHEME_OF else ""
    path = out.parent / f"kernels_{target.name}{codes}_{load}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def watch(device: torch.device, run: Callable[[], object]) -> Watched:
    """Run it under the profiler. It returns once the device is done with what it was given."""
    from torch.profiler import ProfilerActivity, profile

    on_cpu = device.type == "cpu"
    options: dict[str, Any] = {}
    if on_cpu:  # forwards run in a thread of the executor's
        options["experimental_config"] = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    activity = ProfilerActivity.CPU if on_cpu else ProfilerActivity.CUDA
    with profile(activities=[activity], **options) as found:
        start = time.perf_counter()
        run()
        seconds = time.perf_counter() - start
    averages: Any = found.key_averages()
    if on_cpu:
        operators = [(e.key, e.count, e.self_cpu_time_total) for e in averages if e.self_cpu_time_total > 0]
        return Watched(operators, [], seconds)
    called: Any = found.profiler.kineto_results.events() if found.profiler is not None else []
    on_gpu = [e for e in called if e.device_type().name == "CUDA"]
    spans = [(e.name(), e.start_ns(), e.start_ns() + e.duration_ns()) for e in on_gpu]
    taken = [(e.key, e.count, e.self_device_time_total) for e in averages if e.self_device_time_total > 0]
    return Watched(taken, spans, seconds)


def print_kernels(times: Sequence[KernelTime], between: Sequence[Gap], steps: int = 1) -> None:
    """Each group's share with its longest kernels, then the longest gaps; of several steps, all of it a step."""

    def cost(ms: float, calls: int) -> str:
        each = f"{round(calls / steps, 1):6g} x {1e3 * ms / calls:8.2f} us"
        return f"{1e3 * ms / steps:9.1f} us {each}" if steps > 1 else f"{ms:9.3f} ms {each}"

    for group, kernels in grouped(times).items():
        if not kernels:
            continue
        print(f"  {sum(one.share for one in kernels):6.1%} {group}")
        for one in kernels[:_PRINTED]:
            if one.share >= _LEAST_SHARE:
                print(f"    {one.share:6.1%} {cost(one.ms, one.calls)}  {one.name}")
    if between:
        whole = sum(one.ms for one in between)
        print(f"  {1e3 * whole / steps:.1f} us between kernels" if steps > 1 else f"  {whole:.2f} ms between kernels")
        for gap in between[:_GAPS_PRINTED]:
            print(f"           {cost(gap.ms, gap.calls)}  {gap.before[:48]} -> {gap.after[:48]}")
    sys.stdout.flush()

"""Timing and reporting shared by the benchmarks of this folder: CUDA graphs, events, medians, JSON; compiling ahead."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

import torch

Task = TypeVar("Task")
# Measured on an H200: a device copy (read + write), and an 8192^3 bf16 product on random data.
BYTES_PER_US = 4.21e6
FLOPS_PER_US = 784e6


def floor_us(bytes_moved: float, flops: float) -> float:
    return max(bytes_moved / BYTES_PER_US, flops / FLOPS_PER_US)


def capture(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Two plain runs on a side stream (compilation, workspaces), then one captured run."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph, out


def replay_us(graph: torch.cuda.CUDAGraph, repeats: int = 40, warmup: int = 5) -> float:
    """Median device time of one replay."""
    for _ in range(warmup):
        graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) * 1e3


def graph_us(run: Callable[[], Any], repeats: int = 40) -> float:
    """Median device time of `run` in a graph of its own."""
    graph, _ = capture(run)
    return replay_us(graph, repeats)


def told(error: BaseException) -> str:
    """An error in one short line of a row."""
    return f"{type(error).__name__}: {error}"[:300]


def side_by_side(run: Callable[[Task], str | None], tasks: Sequence[Task], limit_s: float) -> dict[Task, str | None]:
    """What `run` says of each task in processes of their own, None where all is well.

    What compiles there lies in the caches on disk, and loads here. A process that crashes or hangs costs its own tasks
    and those that wait: they have that as their reason. None is left when this returns, so that nothing runs beside
    what is timed next.

    Args:
        run, tasks: can be sent to another process. limit_s: seconds for all of them.
    """
    found: dict[Task, str | None] = dict.fromkeys(tasks, f"not done within {limit_s:g} s")
    workers = min(16, os.cpu_count() or 1, len(found))
    if not workers:
        return found
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))
    processes = pool._processes  # shutdown forgets them
    try:
        futures = {}
        for task in found:
            try:
                futures[pool.submit(run, task)] = task
            except BrokenExecutor as error:  # one of those before it has crashed already
                found[task] = told(error)
        for future in wait(futures, limit_s).done:
            error = future.exception()
            found[futures[future]] = future.result() if error is None else told(error)
    finally:
        for process in list(processes.values()):
            process.kill()
        # The pool's own thread notices and joins them; joining them here as well would leave it to chance who is done.
        pool.shutdown(cancel_futures=True)
    return found


class Report:
    """Rows printed as they come and rewritten to one JSON file after every row; a failing section loses only itself."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self.machine = machine()

    def row(self, **values: Any) -> None:
        rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in values.items()}
        self.rows.append(rounded)
        print("  ".join(f"{k}={v}" for k, v in rounded.items()), flush=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({"machine": self.machine, "rows": self.rows}, indent=1))

    def section(self, name: str, run: Callable[[], None]) -> None:
        began = time.perf_counter()
        try:
            run()
        except Exception as error:
            traceback.print_exc()
            self.row(section=name, error=f"{type(error).__name__}: {error}"[:400])
        print(f"-- {name}: {time.perf_counter() - began:.1f} s", flush=True)


def machine() -> dict[str, str]:
    import triton

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit.stdout.strip() or os.environ.get("ROSE_COMMIT") or "unknown",
        "date": time.strftime("%Y-%m-%d"),
    }


def out_argument(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path(), help=f"folder for {name}")
    return parser

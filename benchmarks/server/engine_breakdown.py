"""Where the time of one query goes inside the engine: Python, copies, the graph's launch, the device.

    python benchmarks/server/engine_breakdown.py --model bge-m3 --tokens 128 --out engine_breakdown.json

Rows, p50 / p99 in µs over `--requests` requests, one at a time, different ids each:
`add`, `step` (staging and everything queued), `wait` (from there to the answer), `whole`, and `device` (between the
events around the batch). Then the parts alone on an idle device: the copy in, the graph's launch as the CPU sees it and
to its end, the same graph back to back (what the device needs), an empty kernel's launch to its end.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from rose.bench.shapes import build_checkpoint, made_folder
from rose.config import EngineConfig, read_model_folder
from rose.convert import load_model
from rose.engine import build_engine
from rose.engine.request import Request


def in_engine(engine, tokens: int, requests: int, vocab_size: int) -> dict[str, list[float]]:
    rng = np.random.default_rng(0)
    now = time.perf_counter
    rows: dict[str, list[float]] = {name: [] for name in ("add", "step", "wait", "whole", "device")}
    last = engine.device_seconds
    for i in range(requests):
        ids = rng.integers(5, vocab_size, tokens, dtype=np.int32)
        begin = now()
        engine.add(Request(i, [ids]))
        added = now()
        (result,) = engine.step()
        stepped = now()
        tensor = next(iter(result.outputs.values()))
        tensor.result()
        end = now()
        last, before = engine.device_seconds, last
        rows["device"].append(last - before)
        for name, value in (("add", added - begin), ("step", stepped - added), ("wait", end - stepped)):
            rows[name].append(value)
        rows["whole"].append(end - begin)
    return {name: values[requests // 5 :] for name, values in rows.items()}


def alone(engine, rounds: int) -> dict[str, list[float]]:
    """Of the graph that ran last."""
    now = time.perf_counter
    held = next(reversed(engine.graphs._held.values()))
    graph, packed = held.graph, held.packed
    host = torch.zeros(packed.shape, dtype=packed.dtype, pin_memory=True)
    end = torch.cuda.Event()
    one = torch.zeros(1, device="cuda")
    output = next(iter(graph.outputs.values()))
    back = torch.empty(output.shape, dtype=output.dtype, pin_memory=True)
    host.copy_(packed)

    def timed(what: Callable[[], object]) -> tuple[float, float]:
        torch.cuda.synchronize()
        begin = now()
        what()
        called = now()
        end.record()
        end.synchronize()
        return called - begin, now() - begin

    def all_of_it() -> None:
        packed.copy_(host, non_blocking=True)
        graph.replay()
        back.copy_(output, non_blocking=True)

    rows: dict[str, list[float]] = {}
    parts = {
        "empty kernel": lambda: one.zero_(),
        "copy in": lambda: packed.copy_(host, non_blocking=True),
        "copy out": lambda: back.copy_(output, non_blocking=True),
        "graph": graph.replay,
        "copy in, graph, copy out": all_of_it,
    }
    for name, part in parts.items():
        called, ended = zip(*(timed(part) for _ in range(rounds)), strict=True)
        rows[f"{name}: the call"] = list(called)
        rows[f"{name}: to its end"] = list(ended)
    begin, finish = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for name, part in (("graph", graph.replay), ("copy in, graph, copy out", all_of_it)):
        torch.cuda.synchronize()
        begin.record()
        for _ in range(100):
            part()
        finish.record()
        finish.synchronize()
        rows[f"{name}: one of a hundred back to back"] = [begin.elapsed_time(finish) * 1e-5]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", nargs="+", default=["bge-m3"], help="a shape, or NAME=FOLDER")
    parser.add_argument("--tokens", type=int, nargs="+", default=[128])
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = []
    for model in args.model:
        name, _, given = model.partition("=")
        read = read_model_folder(given or str(build_checkpoint(name, made_folder() / name)))
        device = torch.device("cuda")
        engine = build_engine(
            load_model(read, device, torch.bfloat16),
            EngineConfig(max_tokens=8192, graph_bytes=4 << 30),
            device,
            torch.bfloat16,
        )
        with engine.executor.owner():
            for tokens in args.tokens:
                rows = in_engine(engine, tokens, args.requests, read.architecture.vocab_size)
                rows |= alone(engine, 300)
                told = {
                    step: [round(float(np.percentile(values, q)) * 1e6, 1) for q in (50, 99)]
                    for step, values in rows.items()
                }
                facts = {"commit": os.environ.get("ROSE_COMMIT", ""), "machine": torch.cuda.get_device_name()}
                results.append({"model": name, "tokens": tokens, **facts, "us_p50_p99": told})
                print(f"{name} {tokens} tokens, µs p50 / p99")
                for step, (middle, high) in told.items():
                    print(f"  {step:48s} {middle:8.1f} {high:8.1f}", flush=True)
                if args.out:
                    args.out.write_text(json.dumps({"command": " ".join(sys.argv), "rows": results}, indent=1) + "\n")
        engine.close()


if __name__ == "__main__":
    main()

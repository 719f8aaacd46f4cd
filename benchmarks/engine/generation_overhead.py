"""What one decoding step of a generating engine costs the thread that owns the sockets, beside a device that is idle.

    python benchmarks/engine/generation_overhead.py --out generation_overhead.json

`step()` takes the tokens of the batch before, plans, stages and launches the next. The graph replays nothing and is
over at once, as far as the host can tell; tokens are what it was captured with. Microseconds, p50 and p99 over
`--steps` steps after a tenth of them as warm-up.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import platform
import pstats
import subprocess
import time
from pathlib import Path

import numpy as np
import torch

from rose.attention_backends.base import AttentionSpec
from rose.batch import Batch
from rose.engine.execution import DoneTicket
from rose.engine.generation.engine import GenerationEngine
from rose.engine.generation.forward import DeviceSide
from rose.engine.generation.limits import GenerationLimits
from rose.engine.generation.request import GenerateRequest, Sampling
from rose.engine.graphs import LazyGraphs

VOCAB = 128
PAGE = 16
# name -> (sequences, tokens of a prompt, sampling of all)
LOADS: dict[str, tuple[int, int, dict[str, object]]] = {
    "1 greedy": (1, 512, {"temperature": 0.0}),
    "1 sampled": (1, 512, {"temperature": 0.7, "top_p": 0.9}),
    "64 greedy": (64, 512, {"temperature": 0.0}),
    "64 sampled": (64, 512, {"temperature": 0.7, "top_p": 0.9}),
    "64 with 5 logprobs": (64, 512, {"temperature": 0.0, "logprobs": 5}),
    "64 of 8192 tokens": (64, 8192, {"temperature": 0.0}),
}


class InlineExecutor:
    """Runs a launch at once, in the caller's thread."""

    device = torch.device("cpu")

    def launch(self, fn, *, expected_seconds=None):
        ticket = DoneTicket()
        ticket.settle(fn(), 0.0)
        return ticket

    def fileno(self):
        return None

    def acknowledge(self):
        pass

    def close(self):
        pass


class Graph:
    bytes = 1

    def __init__(self, outputs) -> None:
        self.outputs = outputs

    def replay(self) -> None:
        pass

    def release(self) -> None:
        pass


class Capturer:
    def capture(self, key, fn):
        return Graph(fn())


class Backend:
    """Plans nothing, as backends do that read lengths on the device."""

    name = "none"
    capturable = True

    def supports(self, spec: AttentionSpec) -> str | None:
        return None

    def plan(self, batch: Batch, slot: int = 0):
        return self

    def run(self, q, k, v, layer):
        return v


class EmptyModel:
    vocab_size = VOCAB
    num_layers = 0
    kv_layers = ()
    recurrent = None
    max_tokens = 1 << 16

    def attention_spec(self, device, dtype):
        raise NotImplementedError("nothing attends here")

    def __call__(self, batch: Batch, rows: torch.Tensor | None) -> torch.Tensor:
        return torch.zeros(len(batch.ids if rows is None else rows), VOCAB)


def build(sequences: int, tokens: int) -> GenerationEngine:
    limits = GenerationLimits(
        vocab_size=VOCAB,
        max_tokens=1 << 15,
        page_size=PAGE,
        num_pages=2 + sequences * (tokens // PAGE + 1024),
        max_running=64,
        batch_tokens=1 << 20,
        prefix_cache=True,
    )
    latest = torch.zeros(65, dtype=torch.int32)
    side = DeviceSide(
        model=EmptyModel(), backend=Backend(), latest=latest, states=None, page_size=PAGE, vocab_limit=VOCAB
    )
    graphs = LazyGraphs(torch.device("cpu"), capturer=Capturer(), max_bytes=1 << 40)
    return GenerationEngine(side, limits, InlineExecutor(), graphs=graphs)


def measure(sequences: int, tokens: int, sampling: dict[str, object], steps: int, profile: bool) -> dict[str, float]:
    engine = build(sequences, tokens)
    generator = np.random.default_rng(0)
    new = steps + steps // 10 + 8
    for i in range(sequences):
        ids = generator.integers(1, VOCAB, tokens, dtype=np.int32)
        sampled = Sampling(max_new_tokens=new, ignore_eos=True, **sampling)
        engine.add(GenerateRequest(i, ids, sampled, deadline=time.monotonic() + 3600))
    took = []
    for _ in range(steps // 10 + 4):
        engine.step()
    profiler = cProfile.Profile()
    if profile:
        profiler.enable()
    for _ in range(steps):
        start = time.perf_counter()
        step = engine.step()
        took.append(time.perf_counter() - start)
        assert step.launched
        assert len(step.tokens) == sequences
    if profile:
        profiler.disable()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
    assert engine.graphs.metrics.hits >= steps
    p50, p99 = np.percentile(np.array(took) * 1e6, (50, 99))
    return {"step_us_p50": round(p50, 1), "step_us_p99": round(p99, 1)}


def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--load", help="one of the loads only")
    parser.add_argument("--profile", action="store_true", help="say where the time goes")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = {}
    print(f"{'load':24} {'step p50':>9} {'p99':>8}   µs")
    for name, load in LOADS.items():
        if arguments.load in (None, name):
            with torch.inference_mode():
                row = rows[name] = measure(*load, arguments.steps, arguments.profile)
            print(f"{name:24} {row['step_us_p50']:9} {row['step_us_p99']:8}")
    if arguments.out is not None:
        machine = {"machine": platform.processor() or platform.machine(), "python": platform.python_version()}
        report = {**machine, "torch": torch.__version__, "commit": commit(), "steps": arguments.steps, "loads": rows}
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""What one step of the engine costs the thread that owns the sockets, with a model that does nothing.

    python benchmarks/engine/step_overhead.py --out step_overhead.json

Per load: add the requests (not counted), then time `step()`: expiry, batching, staging, launch. The forward runs inline
and at once, as kernels queued on a device would return, so that no second thread disturbs the clock.
Microseconds, p50 and p99 over `--steps` steps after a tenth of them as warm-up.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from rose.attention_backends.base import AttentionSpec
from rose.batch import Batch
from rose.config import EngineConfig
from rose.engine import Engine, Priority, Request
from rose.engine.execution import DoneTicket
from rose.models.base import OutputSpec

# name -> (requests, sequences of each, tokens of a sequence)
LOADS: dict[str, tuple[int, int, int]] = {
    "1 x 128": (1, 1, 128),
    "1 x 512": (1, 1, 512),
    "16 queries x 128": (16, 1, 128),
    "1 request of 50 x 512": (1, 50, 512),
    "1 request of 256 x 64": (1, 256, 64),
    "64 queries x 32": (64, 1, 32),
}
DIMENSION = 1024


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


class NoAttention:
    name = "none"

    def supports(self, spec: AttentionSpec) -> str | None:
        return None

    def plan(self, batch: Batch, slot: int = 0):
        return self

    def run(self, q, k, v, layer):
        return v


class EmptyModel:
    """Answers with rows that exist already."""

    outputs = {"embedding": OutputSpec(dtype="float32", dimension=DIMENSION)}  # noqa: RUF012
    default_output = "embedding"
    vocab_size = 250_000
    num_layers = 0

    def __init__(self) -> None:
        self._rows = torch.zeros(1024, DIMENSION)

    def attention_spec(self, device, dtype):
        raise NotImplementedError("nothing attends here")

    def __call__(self, batch: Batch, outputs: Sequence[str]) -> dict[str, torch.Tensor]:
        return {"embedding": self._rows[: batch.num_sequences]}


def measure(requests: int, sequences: int, tokens: int, steps: int) -> dict[str, float]:
    config = EngineConfig(max_tokens=tokens, bulk_tokens=max(16384, sequences * tokens))
    engine = Engine(EmptyModel(), config, InlineExecutor(), NoAttention())
    ids = [np.full(tokens, 7, dtype=np.int32) for _ in range(sequences)]
    took, adding, next_id = [], [], 0
    for _ in range(steps + steps // 10):
        start = time.perf_counter()
        for _ in range(requests):
            priority = Priority.ONLINE if requests * sequences * tokens <= config.online_tokens else Priority.BULK
            engine.add(Request(next_id, ids, priority=priority, deadline=time.monotonic() + 60))
            next_id += 1
        added = time.perf_counter()
        engine.step()
        took.append(time.perf_counter() - added)
        adding.append((added - start) / requests)
        assert engine.idle, "a load must fit into one batch"
    step, add = (np.percentile(np.array(times[steps // 10 :]) * 1e6, (50, 99)) for times in (took, adding))
    return {
        "step_us_p50": round(step[0], 1),
        "step_us_p99": round(step[1], 1),
        "add_us_p50": round(add[0], 1),
        "add_us_p99": round(add[1], 1),
    }


def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--out", type=Path, help="write the numbers as JSON here")
    arguments = parser.parse_args()
    rows = {}
    print(f"{'load':24} {'step p50':>9} {'p99':>8} {'add p50':>9} {'p99':>8}   µs")
    for name, load in LOADS.items():
        row = rows[name] = measure(*load, arguments.steps)
        print(f"{name:24} {row['step_us_p50']:9} {row['step_us_p99']:8} {row['add_us_p50']:9} {row['add_us_p99']:8}")
    if arguments.out is not None:
        machine = {"machine": platform.processor() or platform.machine(), "python": platform.python_version()}
        report = {**machine, "torch": torch.__version__, "commit": commit(), "steps": arguments.steps, "loads": rows}
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

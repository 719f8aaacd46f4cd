#!/usr/bin/env python3
"""What has to be seen on a GPU machine, in parts of at most five minutes each.

    python scripts/gpu_check.py --part tests      numbers and behaviour: everything marked `gpu`, files side by side
    python scripts/gpu_check.py --part kernels    time of every kernel against its floor and a rival
    python scripts/gpu_check.py --part loads      the published loads, in process and over every carrier
    python scripts/gpu_check.py --part models     every family: tiny ones within the parity rules, full sizes timed
    python scripts/gpu_check.py --part throughput    four clients with batches of 100, and where the device's time goes
    python scripts/gpu_check.py --part concurrency   1 to 16 texts in flight over HTTP
    python scripts/gpu_check.py --part decode     language models: first token and each further one
    python scripts/gpu_check.py --part fp8        8-bit products alone, a query and batches beside bf16
    python scripts/gpu_check.py --part select     profiles of four shapes, each checked by a second run (nine minutes)

Results are written as they come, under --out (default: benchmarks/results/h200). Each step is a command of its own,
printed before it runs, so that any of them can be repeated by hand.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PART_SECONDS = 300.0
LOAD_PARTS = ("throughput", "concurrency", "decode")
PARTS = ("tests", "kernels", "loads", "models", *LOAD_PARTS, "fp8", "select")
SELECT_SECONDS = 570.0
SELECTED = ("bge-m3", "pplx-embed-0.6b", "qwen3.5-4b", "pplx-embed-4b")


def steps(part: str, out: Path, quick: bool) -> Iterator[tuple[str, list[str]]]:
    """(name, command) of one part, the most telling first."""
    python = sys.executable
    if part == "tests":
        options = ["-q", "--maxfail=20", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist"]
        for path in gpu_tests():
            yield path, [python, "-m", "pytest", "-m", "gpu and not slow", *options, path]
    elif part == "kernels":
        yield (
            "kernels/encoder",
            [python, "benchmarks/kernels/encoder_probe.py", "--out", str(out)],
        )
        yield "kernels/ops", [python, "benchmarks/kernels/bench_kernels.py", "--out", str(out)]
        yield "attention", [python, "benchmarks/attention/backends.py", "--out", str(out)]
        for name in ("decode", "large_gemm", "bench_fused", "bench_gated_delta"):
            yield f"kernels/{name}", [python, f"benchmarks/kernels/{name}.py", "--out", str(out)]
    elif part == "models":
        yield "tests/models", [python, "-m", "pytest", "-m", "gpu and not slow", "-q", "tests/models"]
        sizes = ["--tokens", "128", "512", "--via", "engine", "--n", "500", "--out", str(out / "loads.jsonl")]
        for model in ("minilm", "e5-small", "qwen3-embedding-0.6b", "bge-m3", "pplx-embed-0.6b", "pplx-embed-4b"):
            yield f"models/{model}", [python, "-m", "rose.bench.gpu_loads", "latency", "--model", model, *sizes]
    elif part == "fp8":
        rows = ["--out", str(out / "loads.jsonl")]
        yield "fp8/products", [python, "benchmarks/kernels/scaled_mm.py", "--out", str(out)]
        for model in ("bge-m3", "pplx-embed-0.6b"):
            query = ["latency", "--model", model, "--dtype", "fp8", "--tokens", "128", "--via", "engine"]
            yield f"fp8/latency/{model}", [python, "-m", "rose.bench.gpu_loads", *query, *rows]
            batches = [
                "throughput",
                "--model",
                model,
                "--dtype",
                "fp8",
                "--tokens",
                "512",
                "--via",
                "link",
                "--profile",
            ]
            yield f"fp8/throughput/{model}", [python, "-m", "rose.bench.commands", *batches, *rows]
    elif part in LOAD_PARTS:
        yield from load_steps(part, out, quick)
    elif part == "select":
        for model in SELECTED:
            yield f"select/{model}", select_command(model, out, quick)
    else:
        rows = ["--out", str(out / "loads.jsonl")]
        short = ["--n", "200"] if quick else []
        for load in ("latency", "scoring"):
            for model in ("bge-m3", "pplx-embed-0.6b"):
                yield (
                    f"loads/{load}/{model}",
                    [python, "-m", "rose.bench.gpu_loads", load, "--model", model, *short, *rows],
                )


def gpu_tests() -> list[str]:
    """Files with tests for a GPU, the largest first; in two folders it is a fixture that takes them there."""
    folders = ("tests/kernels", "tests/engine/generation")
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text()]
    files += [path for folder in folders for path in (ROOT / folder).glob("test_*.py")]
    ordered = sorted(set(files), key=lambda path: (-path.stat().st_size, path.name))
    return [str(path.relative_to(ROOT)) for path in ordered]


def load_steps(part: str, out: Path, quick: bool) -> Iterator[tuple[str, list[str]]]:
    """(name, command) of the loads with several clients and of decoding."""
    bench = [sys.executable, "-m", "rose.bench.commands", part]
    rows = ["--out", str(out / "loads.jsonl")]
    if part == "throughput":
        window = ["--seconds", "2", "--warm", "1"] if quick else ["--seconds", "8", "--warm", "3"]
        for model in ("bge-m3", "pplx-embed-0.6b"):
            yield f"throughput/{model}", [*bench, "--model", model, *window, "--profile", *rows]
        few = ["--tokens", "512", "--via", "http", "grpc"]
        yield "throughput/carriers", [*bench, "--model", "bge-m3", *window, *few, *rows]
    elif part == "concurrency":
        window = ["--seconds", "1", "--warm", "1"] if quick else ["--seconds", "6", "--warm", "2"]
        for model in ("bge-m3", "pplx-embed-0.6b"):
            # One event loop answers fewer texts a second than the device takes, several do not.
            yield f"concurrency/{model}", [*bench, "--model", model, "--fronts", "4", *window, "--profile", *rows]
            yield f"concurrency/{model}/one front", [*bench, "--model", model, "--in-flight", "1", "16", *window, *rows]
    else:
        short = ["--rounds", "2", "--seconds", "1"] if quick else ["--seconds", "3"]
        for model in ("qwen3-0.6b", "qwen3-8b", "qwen3.5-4b"):
            yield f"decode/{model}", [*bench, "--model", model, "--via", "engine", *short, *rows]
        carried = ["--model", "qwen3-0.6b", "--via", "link", "http", "--prompt", "128"]
        yield "decode/carriers", [*bench, *carried, *short, *rows]


def select_command(model: str, out: Path, quick: bool) -> list[str]:
    """Measure, write the profile, its rows and pictures, then once more with fresh inputs."""
    return [
        *(sys.executable, "-m", "rose.cli", "select-backend", "--shape", model, "--check"),
        *("--seconds", "20" if quick else "75", "--out", str(out / "profiles" / f"nvidia_h200_{model}.json")),
        *("--rows", str(out / "select.jsonl"), "--report", str(out / "select" / model)),
    ]


def run(name: str, command: list[str], seconds: float, log: Path) -> dict[str, object]:
    print(f"\n== {name}: {shlex.join(command)}", flush=True)
    started = time.monotonic()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    with log.open("ab") as sink:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=False
        )
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        while True:
            chunk = process.stdout.read() or b""
            sink.write(chunk)
            sys.stdout.buffer.write(chunk)
            sys.stdout.flush()
            if process.poll() is not None and not chunk:
                break
            if time.monotonic() - started > seconds:
                process.kill()
                print(f"\n== {name}: stopped after {seconds:.0f} s", flush=True)
                break
            time.sleep(0.05)
    return {
        "step": name,
        "command": shlex.join(["python", *command[1:]]),
        "status": process.wait(),
        "seconds": round(time.monotonic() - started, 1),
    }


def run_side_by_side(
    commands: list[tuple[str, list[str]]], seconds: float, log: Path, ended: Callable[[dict[str, object]], None]
) -> None:
    """Every command, as many at a time as there are processors: most of a kernel test's time is compiling. What a step
    printed is appended to the log once it is done, and `ended` is told of it, one step at a time; of those that fail,
    pytest's last lines are shown."""
    end = time.monotonic() + seconds

    def one(step: tuple[str, list[str]]) -> None:
        name, command = step
        started = time.monotonic()
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "2"},
                capture_output=True,
                text=True,
                timeout=max(1.0, end - started),
                check=False,
            )
            status, printed = done.returncode, done.stdout + done.stderr
        except subprocess.TimeoutExpired as cut:
            status, printed = -1, (cut.stdout or b"").decode(errors="replace") + f"\nstopped after {seconds:.0f} s\n"
        nothing_here = status == 5  # pytest: no test was selected
        last = printed.strip().splitlines()[-1:] or [""]
        print(f"{'ok  ' if status == 0 or nothing_here else 'FAIL'} {name}: {last[0]}", flush=True)
        failures = [line for line in printed.splitlines() if line.startswith(("FAILED", "ERROR"))]
        print("".join(f"       {line[:200]}\n" for line in failures[:12]), end="", flush=True)
        told: dict[str, object] = {
            "step": name,
            "command": shlex.join(["python", *command[1:]]),
            "status": 0 if nothing_here else status,
            "seconds": round(time.monotonic() - started, 1),
        }
        with lock, log.open("a") as sink:
            sink.write(f"\n== {shlex.join(command)}\n{printed}")
            ended(told)

    lock = threading.Lock()
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(one, commands))  # so that what one raises is raised here


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", required=True, choices=PARTS)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "h200")
    parser.add_argument("--only", nargs="+", default=[], help="steps whose name contains one of these")
    parser.add_argument("--seconds", type=float, help="of the whole part (default: 300, of select 570)")
    parser.add_argument("--quick", action="store_true", help="loads: few requests, to see that everything runs")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    seconds = arguments.seconds or (SELECT_SECONDS if arguments.part == "select" else PART_SECONDS)
    end = time.monotonic() + seconds
    done: list[dict[str, object]] = []
    log = arguments.out / f"{arguments.part}.log"

    def keep(step: dict[str, object]) -> None:
        done.append(step)
        summary = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "part": arguments.part, "steps": done}
        (arguments.out / f"check_{arguments.part}.json").write_text(json.dumps(summary, indent=2) + "\n")

    wanted = [
        (name, command)
        for name, command in steps(arguments.part, arguments.out.resolve(), arguments.quick)
        if not arguments.only or any(part in name for part in arguments.only)
    ]
    if arguments.part == "tests":
        run_side_by_side(wanted, seconds, log, keep)
    else:
        for name, command in wanted:
            keep(run(name, command, max(1.0, end - time.monotonic()), log))
    for step in done:
        print(f"{'ok  ' if step['status'] == 0 else 'FAIL'} {step['seconds']!s:>7} s  {step['step']}")
    return int(any(step["status"] != 0 for step in done))


if __name__ == "__main__":
    raise SystemExit(main())

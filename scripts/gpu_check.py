#!/usr/bin/env python3
"""What has to be seen on a GPU machine, in parts of at most five minutes each.

    python scripts/gpu_check.py --part tests      numbers and behaviour: everything marked `gpu`, files side by side
    python scripts/gpu_check.py --part kernels    time of every kernel against its floor and a rival
    python scripts/gpu_check.py --part loads      the published loads, in process and over every carrier
    python scripts/gpu_check.py --part models     full sizes that loads leaves out, in process (tiny ones are in tests)
    python scripts/gpu_check.py --part throughput    four clients with batches of 100, and where the device's time goes
    python scripts/gpu_check.py --part concurrency   1 to 16 texts in flight over HTTP
    python scripts/gpu_check.py --part decode     language models: first token and each further one
    python scripts/gpu_check.py --part fp8        8-bit products alone, a query and batches beside bf16
    python scripts/gpu_check.py --part select     profiles of four shapes, each checked by a second run (nine minutes)

Results are written as they come, under --out (default: benchmarks/results/h200). Each step is a command of its own,
printed before it runs, so that any of them can be repeated by hand. A step that is stopped takes what it started along.

`--part tests --prepare MODEL ...` makes the loads' checkpoints beside the tests and runs each model once, so that its
kernels are compiled: tests mind no company, and a timed part then spends no time on either.

FlashInfer compiles what did not come compiled with nvcc, for minutes; here it is left out instead, and its tests are
skipped with that reason. FLASHINFER_DISABLE_JIT= (empty) in the environment lets it compile.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PART_SECONDS = 300.0
LOAD_PARTS = ("throughput", "concurrency", "decode")
PARTS = ("tests", "kernels", "loads", "models", *LOAD_PARTS, "fp8", "select")
SELECT_SECONDS = 570.0
# What has no profile yet comes first. Of Qwen3.5's heads of 256 dimensions FlashInfer brings no compiled kernels: two
# paged backends are left, unless its own were compiled before.
SELECTED = ("pplx-embed-0.6b", "pplx-embed-4b", "qwen3.5-4b", "bge-m3", "qwen3-8b")
# Not those of `loads`: their rows of more requests would be replaced.
MODELS = ("minilm", "e5-small", "qwen3-embedding-0.6b", "pplx-embed-4b")
GENERATING = ("qwen3-0.6b", "qwen3-8b", "qwen3.5-4b")
FP8 = ("bge-m3", "pplx-embed-0.6b")
PREPARED = (*FP8, *MODELS, *GENERATING)
# It compiles some 200 kernels, others a tenth: each of its functions is a process of its own.
DIVIDED = "tests/kernels/test_scaled_gemm_sm90.py"
# Folders with a fixture that takes tests to a GPU.
FIXTURES = {"tests/kernels": "place", "tests/engine/generation": "device"}


def steps(part: str, out: Path, quick: bool) -> Iterator[tuple[str, list[str]]]:
    """(name, command) of one part, the most telling first."""
    python = sys.executable
    rows = ["--out", str(out / "loads.jsonl")]
    if part == "tests":
        yield "doctor", [python, "-m", "rose.cli", "doctor"]
        options = ["-q", "--maxfail=20", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist"]
        for name in gpu_tests():
            yield name, [python, "-m", "pytest", "-m", "gpu and not slow", *options, name]
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
        # One process: a start takes longer than a model's loads.
        sizes = ["--tokens", "128", "512", "--via", "engine", "--n", "500"]
        yield "models", [python, "-m", "rose.bench.gpu_loads", "latency", *chosen(MODELS), *sizes, *rows]
    elif part == "fp8":
        query = ["--dtype", "fp8", "--tokens", "128", "--via", "engine", *(["--n", "200"] if quick else [])]
        yield "fp8/latency", [python, "-m", "rose.bench.gpu_loads", "latency", *chosen(FP8), *query, *rows]
        window = ["--seconds", "2", "--warm", "1"] if quick else ["--seconds", "6", "--warm", "3"]
        batches = ["--dtype", "fp8", "--tokens", "512", "--via", "link", *window, "--profile"]
        yield (
            "fp8/throughput",
            [python, "-m", "rose.bench.commands", "throughput", *chosen(FP8), *batches, *rows],
        )
        products = [python, "benchmarks/kernels/scaled_mm.py", "--out", str(out)]
        yield "fp8/products", products
        yield "fp8/codes", [*products, "--codes", "--tokens", "12800", "25600"]
    elif part in LOAD_PARTS:
        yield from load_steps(part, out, quick)
    elif part == "select":
        for model in SELECTED:
            yield f"select/{model}", select_command(model, out, quick)
    else:
        short = ["--n", "200"] if quick else []
        for load in ("latency", "scoring"):
            for model in ("bge-m3", "pplx-embed-0.6b"):
                yield (
                    f"loads/{load}/{model}",
                    [python, "-m", "rose.bench.gpu_loads", load, "--model", model, *short, *rows],
                )


def commit_of(command: Sequence[str], commit: str | None) -> list[str]:
    """What tells it to a command that has such an option."""
    told = ("rose.bench.gpu_loads", "rose.bench.commands", "rose.cli")
    tells = command[2] in told and command[3] != "doctor"
    return ["--commit", commit] if commit and tells else []


def chosen(models: Sequence[str]) -> list[str]:
    return [word for model in models for word in ("--model", model)]


def prepare_steps(models: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """(name, command) that make a model's checkpoint and run it once, without a row; "NAME:fp8" is it in 8 bits."""
    for name in models:
        model, _, dtype = name.partition(":")
        more = ["--dtype", dtype] if dtype else []
        if model in GENERATING:
            sizes = ["--prompt", "128", "--batch", "1", "8", "64", "--rounds", "1", "--new-tokens", "16", "--no-check"]
            bench = ["rose.bench.commands", "decode"]
        else:
            sizes = ["--tokens", "128", "512", "--n", "3"]
            bench = ["rose.bench.gpu_loads", "latency"]
        yield f"prepare/{name}", [sys.executable, "-m", *bench, "--model", model, "--via", "engine", *sizes, *more]


def gpu_tests() -> list[str]:
    """Files with tests for a GPU, those that compile the most first; of one each function by itself."""
    found = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text()]
    for folder, fixture in FIXTURES.items():
        asked_for = re.compile(rf"^def \w+\((?:[^()]*, )?{fixture}\b", re.MULTILINE)
        found += [path for path in (ROOT / folder).glob("test_*.py") if asked_for.search(path.read_text())]
    ordered = sorted(set(found), key=lambda path: (path.parent.name != "kernels", -path.stat().st_size, path.name))
    names = [str(path.relative_to(ROOT)) for path in ordered]
    divided = re.findall(r"^@pytest\.mark\.gpu\n(?:@.*\n)*def (test_\w+)", (ROOT / DIVIDED).read_text(), re.MULTILINE)
    return [*(f"{DIVIDED}::{function}" for function in divided), *(name for name in names if name != DIVIDED)]


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
        for model in GENERATING:
            yield f"decode/{model}", [*bench, "--model", model, "--via", "engine", *short, "--profile", *rows]
        carried = ["--model", "qwen3-0.6b", "--via", "link", "http", "--prompt", "128"]
        yield "decode/carriers", [*bench, *carried, *short, *rows]


def select_command(model: str, out: Path, quick: bool) -> list[str]:
    """Measure, write the profile, its rows and pictures, then once more with fresh inputs."""
    return [
        *(sys.executable, "-m", "rose.cli", "select-backend", "--shape", model, "--check"),
        # Twice, and some 25 s to load and to start: four models fit into the part.
        *("--seconds", "20" if quick else "55", "--out", str(out / "profiles" / f"nvidia_h200_{model}.json")),
        *("--rows", str(out / "select.jsonl"), "--report", str(out / "select" / model)),
    ]


running: set[subprocess.Popen[bytes]] = set()


def started(command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """In a process group of its own, that it can be ended with all it started: a server that outlives its bench would
    load the device under whatever comes next."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0
    )
    running.add(process)
    return process


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Whatever is left of it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    running.discard(process)


def run(name: str, command: list[str], seconds: float, log: Path) -> dict[str, object]:
    print(f"\n== {name}: {shlex.join(command)}", flush=True)
    began = time.monotonic()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    with log.open("ab") as sink:
        process = started(command, environment)
        try:
            assert process.stdout is not None
            os.set_blocking(process.stdout.fileno(), False)
            while True:
                chunk = process.stdout.read() or b""
                sink.write(chunk)
                sink.flush()
                sys.stdout.buffer.write(chunk)
                sys.stdout.flush()
                if process.poll() is not None and not chunk:
                    break
                if time.monotonic() - began > seconds:
                    print(f"\n== {name}: stopped after {seconds:.0f} s", flush=True)
                    break
                time.sleep(0.05)
        finally:
            end_group(process)
    return {
        "step": name,
        "command": shlex.join(["python", *command[1:]]),
        "status": process.wait(),
        "seconds": round(time.monotonic() - began, 1),
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
        began = time.monotonic()
        process = started(command, {**os.environ, "OMP_NUM_THREADS": "2"})
        try:
            out, _ = process.communicate(timeout=max(1.0, end - began))
            status, printed = process.returncode, out.decode(errors="replace")
        except subprocess.TimeoutExpired:
            end_group(process)  # first: whoever holds the pipe keeps it open
            out, _ = process.communicate()
            status, printed = -1, out.decode(errors="replace") + f"\nstopped after {seconds:.0f} s\n"
        finally:
            end_group(process)
        nothing_here = status == 5  # pytest: no test was selected
        last = printed.strip().splitlines()[-1:] or [""]
        print(f"{'ok  ' if status == 0 or nothing_here else 'FAIL'} {name}: {last[0]}", flush=True)
        failures = [line for line in printed.splitlines() if line.startswith(("FAILED", "ERROR"))]
        print("".join(f"       {line[:200]}\n" for line in failures[:12]), end="", flush=True)
        told: dict[str, object] = {
            "step": name,
            "command": shlex.join(["python", *command[1:]]),
            "status": 0 if nothing_here else status,
            "seconds": round(time.monotonic() - began, 1),
        }
        with lock, log.open("a") as sink:
            sink.write(f"\n== {shlex.join(command)}\n{printed}")
            ended(told)

    lock = threading.Lock()
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        try:
            list(pool.map(one, commands))  # so that what one raises is raised here
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(running):
                end_group(process)
            raise


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", required=True, choices=PARTS)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "h200")
    parser.add_argument("--only", nargs="+", default=[], help="steps whose name contains one of these")
    parser.add_argument("--seconds", type=float, help="of the whole part (default: 300, of select 570)")
    parser.add_argument("--quick", action="store_true", help="loads: few requests, to see that everything runs")
    parser.add_argument("--commit", help="for the rows, where the machine has no checkout to ask")
    parser.add_argument("--prepare", nargs="+", default=[], metavar="MODEL", help="tests: beside them, for later parts")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.prepare if name.partition(":")[0] not in PREPARED]:
        parser.error(f"--prepare {' '.join(unknown)}: no such model; there are {', '.join(PREPARED)}")
    # A stopped run ends its step first.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    os.environ.setdefault("FLASHINFER_DISABLE_JIT", "1")
    if arguments.commit:
        os.environ["ROSE_COMMIT"] = arguments.commit  # for benchmarks/kernels
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
        (name, [*command, *commit_of(command, arguments.commit)])
        for name, command in steps(arguments.part, arguments.out.resolve(), arguments.quick)
        if not arguments.only or any(part in name for part in arguments.only)
    ]
    if arguments.part == "tests":
        run_side_by_side([*prepare_steps(arguments.prepare), *wanted], seconds, log, keep)
    else:
        for name, command in wanted:
            keep(run(name, command, max(1.0, end - time.monotonic()), log))
    for step in done:
        print(f"{'ok  ' if step['status'] == 0 else 'FAIL'} {step['seconds']!s:>7} s  {step['step']}")
    return int(any(step["status"] != 0 for step in done))


if __name__ == "__main__":
    raise SystemExit(main())

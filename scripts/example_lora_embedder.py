"""A chat model becomes a served cross-language embedder: every step of docs/worked_example.md, one after another.

    python scripts/example_lora_embedder.py              about half an hour on one core
    python scripts/example_lora_embedder.py --dry-run    only print the commands

The work of each step is that of `rose` and of examples/lora_embedder; this knows their order.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ".out/lora_embedder"
RESULTS = "benchmarks/results/cpu/worked_example.json"
CONVERT = "--to embedder --bidirectional --pooling mean --max-tokens 1024"


@dataclass(frozen=True, slots=True)
class Step:
    """One command; `into` is the file its standard output goes to."""

    name: str
    command: str
    into: str | None = None

    def __str__(self) -> str:
        return self.command + (f" > {self.into}" if self.into else "")


STEPS = (
    Step("pull", "rose pull smollm2"),
    Step("texts", f"python -m examples.lora_embedder.texts --out {WORK}"),
    Step("untrained", f"rose convert smollm2 {CONVERT} --force -o {WORK}/untrained"),
    Step(
        "train",
        f"python -m examples.lora_embedder.train smollm2 --served {WORK}/untrained --data {WORK}/train.jsonl "
        f"--out {WORK}/adapter",
    ),
    Step("convert", f"rose convert {WORK}/adapter --base smollm2 {CONVERT} --force -o {WORK}/embedder"),
    Step(
        "golden",
        f"python -m examples.lora_embedder.golden smollm2 --adapter {WORK}/adapter --data {WORK}/verify.txt "
        f"--out {WORK}/peft.npz",
    ),
    Step(
        "verify",
        f"rose verify {WORK}/embedder {WORK}/peft.npz --data {WORK}/verify.txt --json",
        into=f"{WORK}/verified.json",
    ),
    Step(
        "calibrate",
        f"rose calibrate {WORK}/embedder --data {WORK}/calibrate.txt --scheme fp8-channel --force "
        f"-o {WORK}/embedder-fp8 --json",
        into=f"{WORK}/calibrated.json",
    ),
    Step(
        "measure",
        f"python -m examples.lora_embedder.measure untrained={WORK}/untrained trained={WORK}/embedder "
        f"calibrated={WORK}/embedder-fp8 --data {WORK}/eval.jsonl --training {WORK}/adapter/training.json "
        f"--verified {WORK}/verified.json --calibration {WORK}/calibrated.json --out {RESULTS}",
    ),
    Step("report", "python -m examples.lora_embedder.report"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [step.name for step in STEPS]
    parser.add_argument("--first", choices=names, default=names[0], help="skip the steps before this one")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, run none")
    options = parser.parse_args()
    # Several threads on a busy machine make small products slower, not faster.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    for step in STEPS[names.index(options.first) :]:
        print(f"$ {step}", flush=True)
        if not options.dry_run and (status := run(step, environment)):
            print(f"example: {step.name} ended with exit status {status}", file=sys.stderr)
            return status
    return 0


def run(step: Step, environment: dict[str, str]) -> int:
    program, *arguments = shlex.split(step.command)
    command = [sys.executable, *(["-m", "rose.cli"] if program == "rose" else []), *arguments]
    if step.into is None:
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    with (ROOT / step.into).open("wb") as sink:
        return subprocess.run(command, cwd=ROOT, env=environment, stdout=sink, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

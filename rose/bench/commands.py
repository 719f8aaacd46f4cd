"""From the name of a load and its options to a run, for `rose bench LOAD` and for machines without the command:

    python -m rose.bench.commands throughput --model bge-m3

Knows names; imports a load only when it is asked for.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from functools import partial

from rose.config.ending import ended

LOADS = ("latency", "scoring", "all", "throughput", "concurrency", "decode")


def run_load(load: str, options: Sequence[str], command: str, *, prog: str, about: str) -> int:
    """Run one load; returns the exit status.

    Args:
        command: as the rows shall tell it.
        prog, about: for --help.

    Raises:
        RoseError: the load cannot be run, or answers are not the reference's.
    """
    parser = argparse.ArgumentParser(prog=prog, description=about)
    if load == "throughput":
        from rose.bench import throughput

        throughput.add_arguments(parser)
        main = throughput.main
    elif load == "concurrency":
        from rose.bench import concurrency

        concurrency.add_arguments(parser)
        main = concurrency.main
    elif load == "decode":
        from rose.bench import decode

        decode.add_arguments(parser)
        main = decode.main
    else:
        from rose.bench import gpu_loads

        gpu_loads.add_arguments(parser)
        main = partial(gpu_loads.main, load)
    return main(parser.parse_args(options), command)


def _standalone() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in LOADS:
        sys.stderr.write(f"python -m rose.bench.commands {{{','.join(LOADS)}}} ...\n")
        return 2
    load, *options = sys.argv[1:]
    command = shlex.join(["python", "-m", "rose.bench.commands", load, *options])
    started = time.perf_counter()
    status = ended(lambda: run_load(load, options, command, prog=f"rose.bench.commands {load}", about=load))
    if status < 2:
        print(f"done in {time.perf_counter() - started:.0f} s")
    return status


if __name__ == "__main__":
    raise SystemExit(_standalone())

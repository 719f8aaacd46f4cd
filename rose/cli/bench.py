"""`rose bench`: hands over to the measurements of the bench room, each of which has options of its own.

Knows their names; imports one only when it is asked for, since they load torch.
"""

from __future__ import annotations

import argparse
import shlex

from rose.cli.shared import Commands, add_command

_LOADS = {
    "cpu": "ROSE and sentence-transformers on the same weights, on the CPU",
    "latency": "one sequence at a time, in process and over every carrier",
    "scoring": "requests of many sequences, in process and over the light link",
    "all": "latency and scoring in one run",
    "throughput": "client processes side by side, each sending batches of 100",
    "concurrency": "1 to 16 texts of 512 tokens in flight, over HTTP, tokenising included",
    "decode": "time to the first token and per token, at batch 1, 8 and 64",
}


def add_bench(commands: Commands) -> None:
    examples = (
        "rose bench cpu --rounds 5",
        "rose bench latency --model bge-m3",
        "rose bench throughput --tokens 512 --profile",
        "rose bench concurrency --help",
    )
    parser = add_command(commands, "bench", _bench, "measure: the published loads, and comparisons", examples)
    loads = "; ".join(f"{name}: {text}" for name, text in _LOADS.items())
    parser.add_argument("load", choices=tuple(_LOADS), metavar="LOAD", help=loads)
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="options of that load; see LOAD --help")


def _bench(options: argparse.Namespace) -> int:
    if options.load == "cpu":
        from rose.bench import embed_cpu

        return embed_cpu.main(options.rest)
    from rose.bench.commands import run_load

    command = shlex.join(["rose", "bench", options.load, *options.rest])
    return run_load(options.load, options.rest, command, prog=f"rose bench {options.load}", about=_LOADS[options.load])

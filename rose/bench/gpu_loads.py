"""`rose bench latency`, `rose bench scoring`, or both: model folder → reference → each way in turn → rows, file.

Knows the order of things; loads, drivers and rows are other files' business.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import cache

import torch

from rose.attention_backends.auto import AutoBackend
from rose.attention_backends.base import AttentionSpec
from rose.attention_backends.choose import Load as AttentionLoad
from rose.bench import loads
from rose.bench.drivers import Driver, EngineDriver, GrpcDriver, HttpDriver, LinkDriver
from rose.bench.failures import failed as told_failed
from rose.bench.failures import over_models
from rose.bench.processes import served
from rose.bench.records import write_rows
from rose.bench.reference import Reference
from rose.bench.stages import stage
from rose.bench.targets import Target, add_common_arguments, targets
from rose.config import EngineConfig, ModelFolder, read_model_folder
from rose.config.ending import ended
from rose.convert import load_model
from rose.engine import build_engine
from rose.engine.build import profile_of
from rose.engine.cuda import CudaCapturer
from rose.engine.engine import Engine
from rose.models.base import attention_spec

WAYS = ("engine", "link", "grpc", "http")
# Where no way is asked for. Scoring goes to the engine as one request whatever carries it: two ways tell it.
USUAL = {"latency": WAYS, "scoring": ("engine", "link")}
GRAPH_BYTES = 4 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser)
    parser.add_argument("--via", nargs="+", choices=WAYS, help="default: all; of scoring engine and link")
    parser.add_argument("--tokens", nargs="+", type=int, help="latency: only these sequence lengths")
    parser.add_argument("--batch", nargs="+", type=int, help="scoring: only these batch sizes")
    parser.add_argument("--n", type=int, help="requests a load, instead of the published numbers")
    parser.add_argument(
        "--backend", nargs="+", default=["auto"], help="attention backends, in turn; auto chooses by load"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="most seconds a load may take")
    parser.add_argument(
        "--spin-seconds",
        type=float,
        default=0.0,
        help="over the link the client, over HTTP and gRPC the front asks for an answer so long before it sleeps",
    )


def main(load_name: str, arguments: argparse.Namespace, command: str) -> int:
    """Run the loads of one name, or of both ("all"); returns the exit status: 1 if a load failed.

    Raises:
        DisagreementError: a load's answers are not the reference's; nothing further is run of that model, and with one
            model alone this is raised.
    """
    wanted = [
        loads.Load(load.name, load.tokens, load.batch, arguments.n or load.n)
        for load in (*loads.LATENCY, *loads.SCORING)
        if load_name in (load.name, "all")
        and (not arguments.tokens or load.tokens in arguments.tokens)
        and (not arguments.batch or load.batch in arguments.batch)
    ]
    models = arguments.model or ["bge-m3", "pplx-embed-0.6b"]
    found = targets(arguments, command, models)
    return int(over_models(found, lambda one: _run_model(one, wanted, arguments), alone=len(models) == 1) > 0)


def _run_model(target: Target, wanted: Sequence[loads.Load], arguments: argparse.Namespace) -> int:
    """How many loads failed."""
    read = read_model_folder(target.folder)

    @cache
    def reference() -> Reference:
        with stage("reference", arguments.verbose):
            return Reference(target.plain, target.device)

    failed = 0
    for driver, backends in _drivers(target, read, wanted, arguments, reference):
        for load in wanted:
            if not arguments.url and driver.via not in _ways(load, arguments):
                continue
            try:
                row = loads.run(
                    driver,
                    load,
                    reference(),
                    vocab_size=read.architecture.vocab_size,
                    facts=target.facts,
                    backend=backends[load.tokens, load.batch],
                    seconds_at_most=arguments.seconds,
                    least_cosine=target.least_cosine,
                )
            except loads.DisagreementError:
                raise  # wrong answers are not timed, nor anything else of a model that gives them
            except Exception as error:  # noqa: BLE001  one load that cannot be served must not cost the others
                failed += 1
                told_failed(f"{target.name} {load.batch} x {load.tokens} via {driver.via}", error)
                continue
            if arguments.out is not None:
                write_rows(arguments.out, [row])
    return failed


def _ways(load: loads.Load, arguments: argparse.Namespace) -> Sequence[str]:
    asked: Sequence[str] | None = arguments.via
    return asked or USUAL[load.name]


def _drivers(
    target: Target,
    read: ModelFolder,
    wanted: Sequence[loads.Load],
    arguments: argparse.Namespace,
    meanwhile: Callable[[], object],
) -> Iterator[tuple[Driver, dict[tuple[int, int], str]]]:
    """Each way in turn, ready; closed when the next one is asked for.

    Args:
        meanwhile: called while the server starts, where there is one.
    """
    name, device, dtype = target.name, target.device, target.dtype
    if arguments.url:
        with closing(HttpDriver(arguments.url, name)) as rival:
            yield rival, {(load.tokens, load.batch): "unknown" for load in wanted}
        return
    spec = attention_spec(read, device, dtype)
    via = [way for way in WAYS if any(way in _ways(load, arguments) for load in wanted)]
    if "engine" in via:
        with stage("model in this process", arguments.verbose):
            model = load_model(read, device, dtype)
        limits = EngineConfig(max_tokens=read.max_tokens, graph_bytes=GRAPH_BYTES)
        for backend in arguments.backend:
            engine = build_engine(model, limits, device, dtype, backend=backend)
            with closing(EngineDriver(engine)) as driver:
                yield driver, backends_of(spec, wanted, backend)
                _print_graphs(engine)
            del engine, driver
        del model
        if device.type == "cuda":
            torch.cuda.empty_cache()
    auto = backends_of(spec, wanted, arguments.backend[0])
    others = [way for way in via if way != "engine"]
    if not others:
        return
    options = ["--backend", arguments.backend[0]] + ([] if arguments.warm_up else ["--no-warm-up"])
    spin = arguments.spin_seconds
    front = ["--replica-spin-seconds", str(spin)] if spin else []
    started = served(target.folder, name, options, front, meanwhile=meanwhile, verbose=arguments.verbose)
    with started as where, closing(LinkDriver(where.link, spin)) as link:
        if "link" in others:
            yield link, auto
        if "grpc" in others:
            with closing(GrpcDriver(where.grpc, link)) as grpc_driver:
                yield grpc_driver, auto
        if "http" in others:
            with closing(HttpDriver(where.http, name, link)) as http_driver:
                yield http_driver, auto


def backends_of(spec: AttentionSpec, wanted: Sequence[loads.Load], backend: str) -> dict[tuple[int, int], str]:
    """(tokens, batch) -> the backend that serves it: the choice of profile and table, or the one asked for."""
    if backend != "auto":
        return {(load.tokens, load.batch): backend for load in wanted}
    grid = profile_of(spec, "auto").grid
    auto = AutoBackend(spec) if grid is None else AutoBackend(spec, grid.excluded, grid.points)
    return {
        (load.tokens, load.batch): auto.explain(
            AttentionLoad(load.tokens * load.batch, load.batch, load.tokens)
        ).backend
        for load in wanted
    }


def _print_graphs(engine: Engine) -> None:
    metrics, capturer = engine.graphs.metrics, engine.graphs.capturer
    if isinstance(capturer, CudaCapturer) and metrics.captures:
        took = sorted(capturer.seconds)[len(capturer.seconds) // 2] * 1e3
        each = metrics.bytes / metrics.captures / 2**20
        print(f"{metrics.captures} graphs captured: {took:.1f} ms and {each:.1f} MiB each; {metrics.hits} replays")


def _standalone() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("load", choices=("latency", "scoring", "all"))
    add_arguments(parser)
    arguments = parser.parse_args()
    started = time.perf_counter()
    command = shlex.join(["python", "-m", "rose.bench.gpu_loads", *sys.argv[1:]])
    status = ended(lambda: main(arguments.load, arguments, command))
    if status < 2:
        print(f"done in {time.perf_counter() - started:.0f} s")
    return status


if __name__ == "__main__":
    raise SystemExit(_standalone())

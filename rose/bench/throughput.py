"""`rose bench throughput`: client processes side by side, each sending batches of texts one after another.

The published load: four clients, 100 sequences a request, 512, 1024, 4096 tokens. Knows the order of things; clients,
windows and rows are other files' business.
"""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache

import torch

from rose.bench import loads
from rose.bench.carriers import HttpDriver, Ids
from rose.bench.failures import failed as told_failed
from rose.bench.failures import over_models
from rose.bench.fleet import Window, run_fleet
from rose.bench.floors import floor_ms
from rose.bench.gpu_loads import backends_of
from rose.bench.loads import Load
from rose.bench.meter import Meter
from rose.bench.places import Place, places
from rose.bench.records import Row, percentiles, write_rows
from rose.bench.reference import Reference
from rose.bench.stages import stage
from rose.bench.targets import Target, add_common_arguments, add_window_arguments, targets
from rose.config import ModelFolder, read_model_folder
from rose.models.base import attention_spec
from rose.proto import rose_pb2 as pb
from rose.proto.convert import tokens_to_proto
from rose.server.profile import profile_of_folder
from rose.server.run import fit_budgets

WAYS = ("link", "grpc", "http")
TOKENS = (512, 1024, 4096)
# Other requests a client has to send; then it begins anew.
DISTINCT = 4
# Four requests of 100 x 4096 tokens are more than a server lets wait unless told so.
QUEUE_TOKENS = 1 << 22


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser)
    parser.add_argument("--via", nargs="+", choices=WAYS, default=["link"])
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS), help="of each sequence")
    parser.add_argument("--batch", type=int, default=100, help="sequences of one request")
    parser.add_argument("--clients", type=int, default=4, help="client processes")
    parser.add_argument("--backend", default="auto", help="attention backend")
    add_window_arguments(parser, seconds=10.0, warm=4.0)


def main(arguments: argparse.Namespace, command: str) -> int:
    """Run every load asked for; returns the exit status: 1 if one failed.

    Raises:
        DisagreementError: answers are not the reference's, where there is one model; of several the others are run.
    """

    def one(target: Target) -> int:
        # First, so that a run which is cut short has it; the engine of this process is gone before a server starts.
        wanted = [_load(tokens, arguments.batch) for tokens in arguments.tokens]
        failed = int(arguments.profile and not profiled(target, wanted, arguments))
        return failed + _run_model(target, arguments)

    models = arguments.model or ["bge-m3", "pplx-embed-0.6b"]
    return int(over_models(targets(arguments, command, models), one, alone=len(models) == 1) > 0)


def profiled(target: Target, wanted: Sequence[Load], arguments: argparse.Namespace) -> bool:
    """Profile requests of these loads; whether it worked: it must not cost the loads themselves."""
    from rose.bench.breakdown import profile_model

    try:
        with stage("profile", arguments.verbose):
            profile_model(target, wanted, arguments.backend, arguments.out)
            if target.device.type == "cuda":
                torch.cuda.empty_cache()  # the server's now
    except Exception:  # noqa: BLE001
        print(f"{target.name}: profile failed:\n{traceback.format_exc()}", flush=True)
        return False
    return True


def _load(tokens: int, batch: int) -> Load:
    return Load(f"throughput-{tokens}", tokens, batch, DISTINCT)


def _run_model(target: Target, arguments: argparse.Namespace) -> int:
    """How many loads failed."""
    read = read_model_folder(target.folder)

    @cache
    def reference() -> Reference:
        with stage("reference", arguments.verbose):
            return Reference(target.plain, target.device)

    queue = ["--max-queued-tokens", str(QUEUE_TOKENS)]
    failed = 0
    for place in places(target, arguments.via, arguments, queue, meanwhile=reference):
        for tokens in arguments.tokens:
            load = _load(tokens, arguments.batch)
            try:
                row = run(place, load, target, read, reference(), arguments)
            except loads.DisagreementError:
                raise
            except Exception as error:  # noqa: BLE001  one load that cannot be served must not cost the others
                failed += 1
                told_failed(f"{target.name} {load.name} via {place.driver.via}", error)
                continue
            if arguments.out is not None:
                write_rows(arguments.out, [row])
    return failed


def run(
    place: Place, load: Load, target: Target, read: ModelFolder, reference: Reference, arguments: argparse.Namespace
) -> Row:
    """The row of one load, printed.

    Raises:
        DisagreementError, ClientFailedError, NotSteadyError, EmptyWindowError.
    """
    vocab_size = read.architecture.vocab_size
    via = place.driver.via
    with stage(f"check, {load.name} via {via}", arguments.verbose):
        cosine = loads.check(place.driver, reference, load, vocab_size, target.least_cosine)
    sent = [packed_requests(via, target.name, load, vocab_size, client) for client in range(arguments.clients)]
    found, meter = timed_window(place, sent, target, arguments)
    backend = backend_name(target, read, load, arguments.backend) if place.engine else "unknown"
    row = window_row(found, meter, load, target, via=via, in_flight=arguments.clients, backend=backend, cosine=cosine)
    print_row(row)
    return row


def timed_window(
    place: Place, requests: Sequence[Sequence[bytes]], target: Target, arguments: argparse.Namespace
) -> tuple[Window, Meter]:
    """A window of a load that has settled, and what the engine did in it; a client for each list of requests.

    Raises:
        ClientFailedError, NotSteadyError, EmptyWindowError.
    """
    meter = Meter(place.counters, nvml=target.device.type == "cuda")
    with stage(f"{len(requests)} clients via {place.driver.via}, settling and window", arguments.verbose):
        found = run_fleet(
            place.driver.via,
            place.address,
            requests,
            seconds=arguments.seconds,
            settle=lambda: meter.settle(arguments.warm, arguments.steady_within),
            meanwhile=meter.watch,
        )
    return found, meter


def window_row(
    found: Window, meter: Meter, load: Load, target: Target, *, via: str, in_flight: int, backend: str, cosine: float
) -> Row:
    """What a window comes to, against the floor of the shape."""
    per_s = found.requests * load.batch / found.length
    share = None
    if target.made is not None and target.device.type == "cuda" and target.facts.dtype == "bfloat16":
        share = round(per_s * floor_ms(target.made.config, load.tokens, load.batch) / 1e3 / load.batch, 4)
    return Row(
        **asdict(target.facts),
        load=load.name,
        tokens=load.tokens,
        batch=load.batch,
        in_flight=in_flight,
        via=via,
        backend=backend,
        graph_hit_share=meter.graph_share,
        **{**asdict(percentiles(found.seconds)), "max_ms": round(found.longest * 1e3, 3)},
        per_s=round(per_s, 1),
        n=len(found.seconds),
        cosine=cosine,
        tokens_per_s=round(per_s * load.tokens),
        floor_share=share,
        busy_share=meter.busy_share,
        gpu_util=meter.gpu and meter.gpu.util,
        gpu_mhz=meter.gpu and meter.gpu.mhz,
        gpu_watts=meter.gpu and meter.gpu.watts,
        settled_s=meter.settled_s,
        first_runs=meter.first_runs,
    )


def print_row(row: Row) -> None:
    shares = {"floor": row.floor_share, "busy": row.busy_share, "NVML": row.gpu_util, "graph": row.graph_hit_share}
    told = "  ".join(f"{name} {share:4.0%}" for name, share in shares.items() if share is not None)
    if row.gpu_mhz is not None:
        told += f"  {row.gpu_mhz:.0f} MHz {row.gpu_watts:.0f} W"
    told += f"  settled in {row.settled_s or 0:.1f} s"
    if row.first_runs:
        told += f", {row.first_runs} first runs in the window"
    print(
        f"{row.model:16} {row.load:16} {row.in_flight:2} x {row.batch:3} x {row.tokens:<5} {row.via:5} "
        f"{row.per_s:9.1f} /s {row.tokens_per_s or 0:9.0f} tok/s  p50 {row.p50_ms:9.2f}  p90 {row.p90_ms:9.2f}  "
        f"p99 {row.p99_ms:9.2f}  max {row.max_ms:9.2f} ms  {told}",
        flush=True,
    )


def packed_requests(via: str, model: str, load: Load, vocab_size: int, client: int) -> list[bytes]:
    """What one client sends: DISTINCT requests as they travel, other ids for every client."""
    made = loads.requests(load, vocab_size, load.n, seed=loads.SEED + 100 + client)
    return [_packed(via, model, sequences) for sequences in made]


def _packed(via: str, model: str, sequences: Sequence[Ids]) -> bytes:
    if via == "http":
        return HttpDriver.body(model, [s.tolist() for s in sequences])
    return pb.EmbedRequest(tokens=tokens_to_proto(list(sequences))).SerializeToString()


def backend_name(target: Target, read: ModelFolder, load: Load, asked: str) -> str:
    """The attention backend that serves this load's full batches, by the profile that the server finds too."""
    found = profile_of_folder(read, target.device, target.dtype, "auto")
    budget = fit_budgets({}, read, target.device, found.numbers).bulk_tokens
    full = Load(load.name, load.tokens, max(1, min(load.batch, budget // load.tokens)), 0)
    return backends_of(attention_spec(read, target.device, target.dtype), [full], asked)[full.tokens, full.batch]

"""`rose bench concurrency`: texts of 512 tokens, one a request, 1 to 16 of them in flight, over HTTP.

What a user of the HTTP route waits for: JSON, tokenising, the front, the link, the engine and the way back. Each client
is a process with one kept connection, as the published load has it. Knows the order of things; texts, clients and rows
are other files' business.
"""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Iterator
from contextlib import closing

from rose.bench import loads
from rose.bench.carriers import HttpDriver
from rose.bench.fleet import run_fleet
from rose.bench.loads import Load
from rose.bench.meter import Meter
from rose.bench.pseudo_texts import exact_texts, words
from rose.bench.records import Row, write_rows
from rose.bench.reference import Reference, cosines
from rose.bench.targets import Target, add_common_arguments, targets
from rose.bench.texts import english_words
from rose.bench.throughput import Place, backend_name, places, print_row, window_row
from rose.config import ModelFolder, read_model_folder
from rose.gateway.tokenizer import TextTokenizer

IN_FLIGHT = (1, 2, 4, 8, 16)
# Other texts a client has to send; then it begins anew.
DISTINCT = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser)
    parser.add_argument("--tokens", type=int, default=512, help="of each text, special tokens included")
    parser.add_argument("--in-flight", nargs="+", type=int, default=list(IN_FLIGHT), help="client processes, in turn")
    parser.add_argument("--backend", default="auto", help="attention backend")
    parser.add_argument("--seconds", type=float, default=8.0, help="length of the window")
    parser.add_argument("--warm", type=float, default=2.0, help="seconds under load before the window")


def main(arguments: argparse.Namespace, command: str) -> int:
    """Run every load asked for; returns the exit status: 1 if one failed.

    Raises:
        DisagreementError: answers are not the reference's; nothing further is run.
    """
    failed = 0
    for target in targets(arguments, command, ["bge-m3", "pplx-embed-0.6b"]):
        failed += _run_model(target, arguments)
    return int(failed > 0)


def _run_model(target: Target, arguments: argparse.Namespace) -> int:
    """How many loads failed."""
    read = read_model_folder(target.folder)
    texts = make_texts(target, read, arguments.tokens, DISTINCT * max(arguments.in_flight))
    failed = 0
    for place in places(target, ["http"], arguments):
        cosine = _check(place, target, read, texts[0])
        for in_flight in arguments.in_flight:
            load = Load(f"concurrency-{in_flight}", arguments.tokens, 1, DISTINCT)
            try:
                row = run(place, load, target, read, texts, in_flight, cosine, arguments)
            except Exception:  # noqa: BLE001  one load that cannot be served must not cost the others
                failed += 1
                print(f"{target.name} {load.name} failed, no row:\n{traceback.format_exc()}")
                continue
            if arguments.out is not None:
                write_rows(arguments.out, [row])
    return failed


def run(
    place: Place,
    load: Load,
    target: Target,
    read: ModelFolder,
    texts: list[str],
    in_flight: int,
    cosine: float,
    arguments: argparse.Namespace,
) -> Row:
    """The row of one number of clients, printed.

    Raises:
        ClientFailedError: a request failed.
    """
    meter = Meter(place.engine.engine_counters if place.engine else None, nvml=target.device.type == "cuda")
    own = [texts[client * DISTINCT : (client + 1) * DISTINCT] for client in range(in_flight)]
    found = run_fleet(
        "http",
        place.address,
        [[HttpDriver.body(target.name, [text]) for text in some] for some in own],
        warm_up_s=arguments.warm,
        seconds=arguments.seconds,
        meanwhile=meter.watch,
    )
    backend = backend_name(target, read, load, arguments.backend) if place.engine else "unknown"
    row = window_row(found, meter, load, target, via="http", in_flight=in_flight, backend=backend, cosine=cosine)
    print_row(row)
    return row


def make_texts(target: Target, read: ModelFolder, tokens: int, count: int) -> list[str]:
    """Texts of exactly `tokens` tokens by the folder's tokenizer: English for a real one, else of the made words."""
    source: Iterator[str] = english_words(loads.SEED) if target.made is None else words(loads.SEED)
    with closing(TextTokenizer(read.backbone_path, lower_case=read.do_lower_case)) as tokenizer:
        return exact_texts(tokens, count, lambda text: len(tokenizer.encode([text])[0]), source)


def _check(place: Place, target: Target, read: ModelFolder, text: str) -> float:
    """Cosine of the answer to a text and the reference's to its ids.

    Raises:
        DisagreementError: it is under the limit.
    """
    with closing(TextTokenizer(read.backbone_path, lower_case=read.do_lower_case)) as tokenizer:
        expected = Reference(target.plain, target.device).embed(tokenizer.encode([text]))
    least = 1.0
    for _ in range(3):  # plain, captured, replayed
        answer = place.driver.vectors(place.driver.send(HttpDriver.body(target.name, [text])))
        least = min(least, float(cosines(answer, expected).min()))
    if least < target.least_cosine:
        raise loads.DisagreementError(f"concurrency over HTTP: cosine {least:.5f} is under {target.least_cosine}")
    return round(least, 6)

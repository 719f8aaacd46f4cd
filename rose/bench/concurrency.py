"""`rose bench concurrency`: texts of 512 tokens, one a request, 1 to 16 of them in flight, over HTTP.

What a user of the HTTP route waits for: JSON, tokenising, the front, the link, the engine and the way back. Each client
is a process with one kept connection, as the published load has it. One server, warmed up as one is in service, takes
all numbers of clients in turn. Knows the order of things; texts, clients and rows are other files' business.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import cache

from rose.bench import loads
from rose.bench.carriers import HttpDriver, LinkDriver
from rose.bench.failures import failed as told_failed
from rose.bench.failures import over_models
from rose.bench.loads import Load
from rose.bench.places import Place, places
from rose.bench.pseudo_texts import exact_texts, words
from rose.bench.records import Row, write_rows
from rose.bench.reference import Reference, Vectors, cosines
from rose.bench.stages import stage
from rose.bench.targets import Target, add_common_arguments, add_window_arguments, targets
from rose.bench.texts import english_words
from rose.bench.throughput import backend_name, print_row, profiled, timed_window, window_row
from rose.config import ModelFolder, read_model_folder
from rose.gateway.tokenizer import TextTokenizer

IN_FLIGHT = (1, 2, 4, 8, 16)
# Other texts a client has to send; then it begins anew.
DISTINCT = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, warm_up=True)
    parser.add_argument("--tokens", type=int, default=512, help="of each text, special tokens included")
    parser.add_argument("--in-flight", nargs="+", type=int, default=list(IN_FLIGHT), help="client processes, in turn")
    parser.add_argument("--fronts", type=int, default=1, help="front processes (rose serve --fronts)")
    parser.add_argument(
        "--spin-seconds", type=float, default=0.0, help="fronts stay awake so long for an answer (0: sleep at once)"
    )
    parser.add_argument("--backend", default="auto", help="attention backend")
    add_window_arguments(parser, seconds=8.0, warm=2.0)


def main(arguments: argparse.Namespace, command: str) -> int:
    """Run every load asked for; returns the exit status: 1 if one failed.

    Raises:
        DisagreementError: answers are not the reference's, where there is one model; of several the others are run.
    """

    def one(target: Target) -> int:
        # What the device does when all clients' texts fall into one batch.
        together = [_load(max(arguments.in_flight), arguments, together=True)]
        failed = int(arguments.profile and not profiled(target, together, arguments))
        return failed + _run_model(target, arguments)

    models = arguments.model or ["bge-m3", "pplx-embed-0.6b"]
    return int(over_models(targets(arguments, command, models), one, alone=len(models) == 1) > 0)


def _load(in_flight: int, arguments: argparse.Namespace, *, together: bool = False) -> Load:
    return Load(f"concurrency-{in_flight}", arguments.tokens, in_flight if together else 1, DISTINCT)


def _run_model(target: Target, arguments: argparse.Namespace) -> int:
    """How many loads failed."""
    read = read_model_folder(target.folder)

    @cache
    def made() -> tuple[list[str], Vectors]:
        return _make(target, read, arguments)

    failed = 0
    front_options = ["--fronts", str(arguments.fronts)]
    if arguments.spin_seconds:
        front_options += ["--replica-spin-seconds", str(arguments.spin_seconds)]
    for place in places(target, ["http"], arguments, meanwhile=made, front_options=front_options):
        texts, expected = made()
        if place.engine is not None:
            with stage("every shape of batch", arguments.verbose):
                _run_shapes(place.engine, read, arguments)
        with stage("check", arguments.verbose):
            cosine = _check(place, target, texts[0], expected)
        for in_flight in arguments.in_flight:
            load = _load(in_flight, arguments)
            try:
                row = run(place, load, target, read, texts, in_flight, cosine, arguments)
            except Exception as error:  # noqa: BLE001  one load that cannot be served must not cost the others
                failed += 1
                told_failed(f"{target.name} {load.name}", error)
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
        NotSteadyError, EmptyWindowError: no window to tell of.
    """
    own = [texts[client * DISTINCT : (client + 1) * DISTINCT] for client in range(in_flight)]
    sent = [[HttpDriver.body(target.name, [text]) for text in some] for some in own]
    found, meter = timed_window(place, sent, target, arguments)
    backend = backend_name(target, read, load, arguments.backend) if place.engine else "unknown"
    row = window_row(found, meter, load, target, via="http", in_flight=in_flight, backend=backend, cosine=cosine)
    if place.engine is not None and arguments.fronts > 1:
        row = replace(row, fronts=arguments.fronts)
    print_row(row)
    return row


def _run_shapes(engine: LinkDriver, read: ModelFolder, arguments: argparse.Namespace) -> None:
    """Every number of texts that may come together, plain, captured and replayed.

    Some come once in many seconds, so that a window meets them for the first time however long the load ran before.
    To be called before any single text: the engine cuts larger requests while those are expected.
    """
    for count in range(max(arguments.in_flight), 0, -1):
        load = _load(count, arguments, together=True)
        for some in loads.requests(load, read.architecture.vocab_size, 3):
            engine.send(some)


def _make(target: Target, read: ModelFolder, arguments: argparse.Namespace) -> tuple[list[str], Vectors]:
    """The texts, and the reference's vectors of the first: [1, hidden]."""
    with closing(TextTokenizer(read.backbone_path, lower_case=read.do_lower_case)) as tokenizer:
        with stage("texts", arguments.verbose):
            texts = make_texts(target, tokenizer, arguments.tokens, DISTINCT * max(arguments.in_flight))
        with stage("reference", arguments.verbose):
            return texts, Reference(target.plain, target.device).embed(tokenizer.encode(texts[:1]))


def make_texts(target: Target, tokenizer: TextTokenizer, tokens: int, count: int) -> list[str]:
    """Texts of exactly `tokens` tokens: English for a real tokenizer, else of the made words."""
    source: Iterator[str] = english_words(loads.SEED) if target.made is None else words(loads.SEED)
    return exact_texts(tokens, count, lambda some: list(map(len, tokenizer.encode(some))), source)


def _check(place: Place, target: Target, text: str, expected: Vectors) -> float:
    """Cosine of the answer to a text and the reference's.

    Raises:
        DisagreementError: it is under the limit.
    """
    least = 1.0
    for _ in range(3):  # plain, captured, replayed
        answer = place.driver.vectors(place.driver.send(HttpDriver.body(target.name, [text])))
        least = min(least, float(cosines(answer, expected).min()))
    if least < target.least_cosine:
        raise loads.DisagreementError(f"concurrency over HTTP: cosine {least:.5f} is under {target.least_cosine}")
    return round(least, 6)

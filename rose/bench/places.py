"""From a model to the ways that lead to it: one server for all of them, or another server's address.

Knows options and drivers; knows neither loads nor rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

from rose.bench.carriers import Driver, GrpcDriver, HttpDriver, LinkDriver
from rose.bench.meter import Counters
from rose.bench.processes import Served, served
from rose.bench.targets import Target


@dataclass(frozen=True, slots=True)
class Place:
    """One way to what is measured.

    Attributes:
        address: for client processes. engine: where the engine tells its counters; None for another server.
    """

    driver: Driver
    address: str
    engine: LinkDriver | None

    @property
    def counters(self) -> Callable[[], Counters] | None:
        """The engine's own, if it tells any."""
        return None if self.engine is None else self.engine.engine_counters


def places(
    target: Target,
    ways: Sequence[str],
    arguments: argparse.Namespace,
    engine_options: Sequence[str] = (),
    meanwhile: Callable[[], object] = lambda: None,
    front_options: Sequence[str] = (),
) -> Iterator[Place]:
    """Each way in turn, ready; closed when the next one is asked for.

    Args:
        meanwhile: called once, while the server starts.
    """
    if arguments.url:
        meanwhile()
        with closing(HttpDriver(arguments.url, target.name)) as rival:
            yield Place(rival, arguments.url, None)
        return
    options = ["--backend", arguments.backend, *engine_options] + ([] if arguments.warm_up else ["--no-warm-up"])
    with (
        served(target.folder, target.name, options, front_options, meanwhile, arguments.verbose) as where,
        closing(LinkDriver(where.link)) as engine,
    ):
        for via in ways:
            with _place(via, where, target.name, engine) as place:
                yield place


@contextmanager
def _place(via: str, where: Served, name: str, engine: LinkDriver) -> Iterator[Place]:
    if via == "link":
        yield Place(engine, where.link, engine)
    elif via == "grpc":
        with closing(GrpcDriver(where.grpc, engine)) as grpc_driver:
            yield Place(grpc_driver, where.grpc, engine)
    else:
        with closing(HttpDriver(where.http, name, engine)) as http_driver:
            yield Place(http_driver, where.http, engine)

"""What the front counts: requests, stages, tokens, replicas, and the engines' own counters passed on.

Gauges are read when the page is asked for, so they cannot drift from what they describe. Several fronts on one port
count in files of one folder: whichever is asked adds up what lies there, and each writes its gauges twice a second for
the others. Every label has a bounded set of values. Knows numbers; knows neither requests nor replicas beyond the few
attributes it reads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from rose.proto import rose_pb2 as pb

# From a fifth of a millisecond (one short encode) to a minute; sixteen buckets a series.
SECONDS = (
    *(0.0002, 0.0005, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05),
    *(0.1, 0.25, 1.0, 5.0, 20.0, 60.0),
)
# A second series for every counter and histogram, with nothing in it but when this process made it.
disable_created_metrics()  # type: ignore[no-untyped-call]
# How old the gauges of other fronts may be.
SHARE_S = 0.5
TOKENS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536, 262144)


class ReplicaView(Protocol):
    """What the metrics read of a replica."""

    name: str
    outstanding_tokens: int
    outstanding_parts: int
    stats: pb.ServerStats | None

    @property
    def ready(self) -> bool: ...


class Metrics:
    """One registry a front, so that several can live in one process.

    Args:
        folder: where several fronts count together; empty: this one counts for itself. prometheus_client must have been
            told of it before it was imported (PROMETHEUS_MULTIPROC_DIR).
    """

    def __init__(self, folder: str = "") -> None:
        self._folder = folder
        self._own = CollectorRegistry()
        to = self._own
        self.requests = Counter("rose_requests", "Finished requests.", ("carrier", "route", "status"), registry=to)
        self._durations = Histogram(
            "rose_request_seconds",
            "From arrival to the answer.",
            ("carrier", "route"),
            buckets=SECONDS,
            registry=to,
        )
        stages = Histogram(
            "rose_stage_seconds",
            "Stages of a request: tokenize and encode here, queue and compute in the engine.",
            ("stage",),
            buckets=SECONDS,
            registry=to,
        )
        self.tokenize = stages.labels("tokenize")
        self.queue = stages.labels("queue")
        self.compute = stages.labels("compute")
        self.encode = stages.labels("encode")
        self.tokens = Counter("rose_tokens", "Tokens of answered requests.", registry=to)
        self.items = Counter("rose_items", "Inputs of answered requests.", registry=to)
        self.request_tokens = Histogram("rose_request_tokens", "Tokens of a request.", buckets=TOKENS, registry=to)
        self.generated = Counter("rose_generated_tokens", "Tokens drawn, of answers cut off too.", registry=to)
        self.first_token = Histogram(
            "rose_first_token_seconds", "From the prompt's tokens to the answer's first.", buckets=SECONDS, registry=to
        )
        self.retries = Counter("rose_part_retries", "Parts sent to another replica after one failed.", registry=to)
        self.cancelled = Counter("rose_cancelled", "Requests whose caller left before the answer.", registry=to)
        # Of several fronts: their sum, or the least of them; those that have ended do not count.
        self._in_flight = Gauge(
            "rose_requests_in_flight", "Requests not yet answered.", registry=to, multiprocess_mode="livesum"
        )
        self._tokenizer = Gauge(
            "rose_tokenizer_pool_depth",
            "Lists of texts in the tokenizer pool.",
            registry=to,
            multiprocess_mode="livesum",
        )
        self._ready = Gauge("rose_ready", "1 while requests are taken.", registry=to, multiprocess_mode="livemin")
        self._replica_ready = Gauge(
            "rose_replica_ready",
            "1 while parts are sent to it.",
            ("replica",),
            registry=to,
            multiprocess_mode="livemin",
        )
        self._outstanding = {
            kind: Gauge(
                f"rose_replica_outstanding_{kind}",
                "Sent, not yet answered.",
                ("replica",),
                registry=to,
                multiprocess_mode="livesum",
            )
            for kind in ("tokens", "parts")
        }
        self._read: Callable[[], None] = lambda: None
        self._engines = _Engines(())
        self._cached: dict[tuple[str, str, str], tuple[Counter, Histogram]] = {}

    def finished(self, carrier: str, route: str, status: str, seconds: float) -> None:
        key = (carrier, route, status)
        found = self._cached.get(key)
        if found is None:  # looking labels up costs more than counting
            found = self._cached[key] = (self.requests.labels(*key), self._durations.labels(carrier, route))
        found[0].inc()
        found[1].observe(seconds)

    def watch(
        self,
        *,
        replicas: Sequence[ReplicaView],
        in_flight: Callable[[], float],
        tokenizer_pool: Callable[[], float],
        ready: Callable[[], float],
    ) -> None:
        """Connect the gauges to what they show."""

        def read() -> None:
            self._in_flight.set(in_flight())
            self._tokenizer.set(tokenizer_pool())
            self._ready.set(ready())
            for replica in replicas:
                self._replica_ready.labels(replica.name).set(float(replica.ready))
                self._outstanding["tokens"].labels(replica.name).set(replica.outstanding_tokens)
                self._outstanding["parts"].labels(replica.name).set(replica.outstanding_parts)

        self._read = read
        self._engines = _Engines(replicas)

    def collected(self) -> CollectorRegistry:
        """All there is to tell now, of all fronts that share a folder."""
        self._read()
        page = CollectorRegistry()
        if self._folder:
            MultiProcessCollector(page, path=self._folder)  # type: ignore[no-untyped-call]
        else:
            page.register(self._own)
        page.register(self._engines)
        return page

    async def share(self) -> None:
        """Keep this front's gauges where the others find them, for ever."""
        while True:
            self._read()
            await asyncio.sleep(SHARE_S)


class _Engines(Collector):
    """Each engine's counters as it last gave them: the same to every front."""

    def __init__(self, replicas: Sequence[ReplicaView]) -> None:
        self._replicas = replicas

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for replica in self._replicas:
            if replica.stats is None:
                continue
            for name, kind, value, labels in _flat(replica.stats):
                family = families.setdefault(name, Metric(name, "As the engine process counts it.", kind))
                suffix = "_total" if kind == "counter" else ""
                family.add_sample(name + suffix, {"replica": replica.name, **labels}, value)
        yield from families.values()


def _flat(stats: pb.ServerStats) -> Iterator[tuple[str, str, float, dict[str, str]]]:
    """Name, type, value and further labels of every number in the message; fields ending in _total are counters."""
    for field in stats.DESCRIPTOR.fields:
        value = getattr(stats, field.name)
        counted = field.name.endswith("_total")
        name = "rose_engine_" + field.name.removesuffix("_total").removeprefix("engine_")
        if isinstance(value, Mapping):
            # What an engine counts under names of its own is mostly, but not only, counters: graph bytes shrink too.
            kind = "counter" if counted else "unknown"
            yield from ((name, kind, float(number), {"kind": label}) for label, number in value.items())
        else:
            yield name, "counter" if counted else "gauge", float(value), {}

"""The published loads, one request at a time: `latency` (one sequence) and `scoring` (5, 25 or 50 of 512 tokens).

folder → answers agree with transformers in fp32? → warm up → time → rows. A disagreement stops the run before any
clock starts. Knows sizes and clocks; what a request is, the drivers know.
"""

from __future__ import annotations

import gc
import time
from dataclasses import asdict, dataclass

import numpy as np

from rose.bench.drivers import Driver, Ids
from rose.bench.records import Facts, Row, percentiles
from rose.bench.reference import Reference, Vectors, cosines
from rose.errors import RoseError

# bf16 answers may differ from fp32 ones by this much, the published comparison's own limit.
LEAST_COSINE = 0.999
# The first requests of a size run plain and are captured; some more settle clocks and caches.
WARM_UP = 20
_FIRST_ID, SEED = 5, 7


class DisagreementError(RoseError):
    """Answers that are not the reference's: nothing was timed."""


@dataclass(frozen=True, slots=True)
class Load:
    """What one row measures."""

    name: str
    tokens: int
    batch: int
    n: int


LATENCY = (Load("latency", 128, 1, 10_000), Load("latency", 512, 1, 2_000), Load("latency", 4096, 1, 300))
SCORING = (Load("scoring", 512, 5, 300), Load("scoring", 512, 25, 100), Load("scoring", 512, 50, 60))


def requests(load: Load, vocab_size: int, n: int, seed: int = SEED) -> list[list[Ids]]:
    """`n` requests of other random ids each."""
    generator = np.random.default_rng([seed, load.tokens, load.batch])
    ids = generator.integers(_FIRST_ID, vocab_size, size=(n, load.batch, load.tokens), dtype=np.int32)
    return [list(block) for block in ids]


def check(
    driver: Driver, reference: Reference, load: Load, vocab_size: int, least_cosine: float = LEAST_COSINE
) -> float:
    """The least cosine between the driver's answer and the reference's over one request and two of single items.

    Raises:
        DisagreementError: it is under `least_cosine`.
    """
    sequences = requests(load, vocab_size, 1, seed=SEED + 1)[0]
    answered: list[Vectors] = []
    for _ in range(3):  # plain, captured, replayed: each must be right
        answered.append(driver.vectors(driver.send(driver.prepare(sequences))))
    sample = slice(0, 5)
    expected = reference.embed(sequences[sample])
    least = min(float(cosines(vectors[sample], expected).min()) for vectors in answered)
    if least < least_cosine:
        raise DisagreementError(
            f"{load.name} {load.batch} x {load.tokens} via {driver.via}: cosine {least:.5f} to transformers in fp32 is "
            f"under {least_cosine}"
        )
    return round(least, 6)


def measure(driver: Driver, load: Load, vocab_size: int, seconds_at_most: float) -> tuple[list[float], float, float]:
    """(seconds of each request, seconds in all, share of batches replayed from a graph); no ids are sent twice.

    Args:
        seconds_at_most: ends the load early; the row then says how many requests it had.
    """
    prepared = [driver.prepare(s) for s in requests(load, vocab_size, load.n)]
    for one in requests(load, vocab_size, min(WARM_UP, load.n), seed=SEED + 2):
        driver.send(driver.prepare(one))
    taken: list[float] = []
    hits_before, others_before = driver.counters()
    gc.collect()
    gc.disable()  # the client's collector is not what is measured
    try:
        begin = time.perf_counter()
        for one in prepared:
            start = time.perf_counter()
            driver.send(one)
            end = time.perf_counter()
            taken.append(end - start)
            if end - begin > seconds_at_most:
                break
        whole = time.perf_counter() - begin
    finally:
        gc.enable()
    hits, others = (
        after - before for after, before in zip(driver.counters(), (hits_before, others_before), strict=True)
    )
    return taken, whole, hits / max(1, hits + others)


def run(
    driver: Driver,
    load: Load,
    reference: Reference,
    *,
    vocab_size: int,
    facts: Facts,
    backend: str,
    seconds_at_most: float,
    least_cosine: float = LEAST_COSINE,
) -> Row:
    """The row of one load, printed.

    Args:
        facts: what all rows of the run share.
        backend: the attention backend that serves it.
        least_cosine: of the answers and the reference's.

    Raises:
        DisagreementError: the answers are not the reference's.
    """
    cosine = check(driver, reference, load, vocab_size, least_cosine)
    taken, whole, share = measure(driver, load, vocab_size, seconds_at_most)
    row = Row(
        **asdict(facts),
        load=load.name,
        tokens=load.tokens,
        batch=load.batch,
        in_flight=1,
        via=driver.via,
        backend=backend,
        graph_hit_share=round(share, 4),
        **asdict(percentiles(taken)),
        per_s=round(len(taken) * load.batch / whole, 1),
        n=len(taken),
        cosine=cosine,
    )
    print(
        f"{row.model:16} {load.name:8} {load.batch:3} x {load.tokens:<5} {driver.via:6} {row.backend:16} "
        f"p50 {row.p50_ms:8.3f}  p90 {row.p90_ms:8.3f}  p99 {row.p99_ms:8.3f}  max {row.max_ms:8.3f} ms  "
        f"graph {share:4.0%}  cosine {cosine:.5f}",
        flush=True,
    )
    return row

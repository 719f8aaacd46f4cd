"""Mixed requests, cancelled and expired at random: each comes back exactly once, right and in order; memory stays flat.

On a pretended device with a clock of its own, and through a real server process with a real model.
`python -m tests.support.mixed_load` runs a hundred thousand of them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from rose.bench.shapes import build_checkpoint
from rose.client import AsyncClient
from rose.errors import DeadlineExceeded
from rose.proto import rose_pb2 as pb
from tests.support.bulk_company import MIXES, lengths_of, poisson, simulate
from tests.support.mixed_load import MixedLoad
from tests.support.running import embed, load
from tests.support.virtual_device import BATCH_SECONDS, TOKEN_SECONDS

REQUESTS = 5_000


@pytest.mark.parametrize("graphs", [False, True], ids=["plain", "graphs"])
def test_every_request_ends_once_right_and_in_order(graphs):
    report = MixedLoad(REQUESTS, graphs=graphs).run()
    check(report, REQUESTS)
    if graphs:
        assert report.graph_hits > report.batches / 10, "graphs hardly replayed, so this showed nothing of them"


def check(report, requests):
    assert sum(report.ended.values()) == requests
    assert min(report.ended[kind] for kind in ("answered", "cancelled", "expired")) > requests / 20
    assert report.kept_objects == 0, "requests or batches are kept after their end"
    # What grows with the requests would be at least a hundred bytes for each.
    assert report.memory_growth < 8 << 20, f"{report.memory_growth >> 20} MiB more after the second half"


@pytest.mark.parametrize("name", [mix[0] for mix in MIXES])
def test_padding_of_bulk_jobs_is_under_three_percent(name):
    seen = simulate([], lengths_of(name, 3_000), graphs=True)
    assert seen.padding / (seen.padding + seen.tokens) < 0.03


def test_sixteen_queries_in_flight_beside_ten_thousand_passages():
    """The published concurrency load keeps its p99 within twice of what it is alone."""
    alone = simulate([], clients=16, tokens=512, until=1.0)
    beside = simulate([], lengths_of("passages", 10_000), clients=16, tokens=512, until=1.0)
    assert beside.percentile(99) <= 2 * alone.percentile(99)
    assert len(beside.singles) > len(alone.singles) / 2


@pytest.mark.parametrize("per_s", [100, 200, 400])
def test_queries_at_random_beside_ten_thousand_passages(per_s):
    """What runs when a query comes is bounded: p99 stays within twice what it is alone."""
    alone = simulate(poisson(per_s, 1.5, (16, 512)), [])
    beside = simulate(poisson(per_s, 1.5, (16, 512)), lengths_of("passages", 10_000))
    assert beside.percentile(99) <= 2 * alone.percentile(99)


def test_the_first_query_in_a_while_waits_for_two_batches_at_most():
    beside = simulate(poisson(2, 1.5, (16, 512)), lengths_of("passages", 10_000))
    full, own = BATCH_SECONDS + 16384 * TOKEN_SECONDS, BATCH_SECONDS + 2048 * TOKEN_SECONDS
    assert beside.percentile(100) <= 1.05 * (2 * full + own)


def test_a_server_process_under_mixed_load(tmp_path):
    """A real model behind the light link: 240 requests on three connections, cancelled and expired at random."""
    folder = build_checkpoint("tiny-bge-m3", tmp_path / "model")
    rng = np.random.default_rng(3)
    with served(folder, tmp_path) as (process, address):
        ended, wrong = asyncio.run(send_all(address, rng, load(folder)))
        stats = asyncio.run(stats_of(address))
        assert process.poll() is None
    assert wrong == []
    assert sum(ended.values()) == 240
    assert ended["answered"] > 140
    assert min(ended["cancelled"], ended["expired"]) > 5
    assert (stats.open_requests, stats.queued_tokens, stats.queued_requests) == (0, 0, 0)
    assert stats.failed_batches_total == 0
    assert stats.engine_counters["device_us"] > 0
    assert process.returncode == 0


@contextmanager
def served(folder: Path, scratch: Path):
    socket = scratch / "engine.sock"
    command = [sys.executable, "-m", "rose.server", str(folder), "--address", f"unix:{socket}", "--num-threads", "1"]
    with (scratch / "log").open("wb") as log:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environment)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"rose-server ready"), (scratch / "log").read_text()
        yield process, f"unix:{socket}"
        process.send_signal(signal.SIGTERM)
        process.wait(30)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        process.stdout.close()


async def send_all(address: str, rng, model) -> tuple[Counter, list]:
    """(how requests ended, the answers that were wrong)."""
    ended, wrong, asked = Counter(), [], []
    clients = [await AsyncClient.connect(address) for _ in range(3)]

    async def one(client, sequences, deadline_s, cancel_after, priority):
        task = asyncio.ensure_future(client.embed(sequences, deadline_s=deadline_s, priority=priority))
        if cancel_after is not None:
            await asyncio.sleep(cancel_after)
            task.cancel()
        try:
            asked.append((sequences, (await task).vectors))
            ended["answered"] += 1
        except asyncio.CancelledError:
            ended["cancelled"] += 1
        except DeadlineExceeded:
            ended["expired"] += 1

    tasks = []
    for number in range(240):
        lengths = np.exp(rng.uniform(0, np.log(8192 if number % 60 == 0 else 600), rng.choice([1, 1, 1, 2, 9])))
        sequences = [rng.integers(5, 1000, int(n), dtype=np.int32) for n in lengths]
        deadline = float(rng.exponential(0.03)) if rng.random() < 0.15 else None
        cancel = float(rng.exponential(0.02)) if rng.random() < 0.15 else None
        priority = pb.BULK if rng.random() < 0.2 else pb.ONLINE
        tasks.append(asyncio.ensure_future(one(clients[number % 3], sequences, deadline, cancel, priority)))
        await asyncio.sleep(float(rng.exponential(0.004)))
    await asyncio.gather(*tasks)
    for client in clients:
        await client.close()
    with torch.inference_mode():
        for sequences, vectors in asked:
            expected = embed(model, [ids.tolist() for ids in sequences]).numpy()
            if not np.allclose(vectors, expected, atol=1e-5):
                wrong.append([len(ids) for ids in sequences])
    return ended, wrong


async def stats_of(address: str):
    async with await AsyncClient.connect(address) as client:
        return await client.stats()

"""Single queries alone and in company of a bulk job, on the pretended device: what each of them waits for.

    python -m tests.support.bulk_company

Knows arrivals and latencies; knows nothing of how the scheduler does it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rose.config import EngineConfig
from rose.engine import Engine, Priority, Request, StepResult
from rose.engine.graphs import LazyGraphs
from tests.support.virtual_device import Capturer, EchoModel, NoAttention, VirtualClock, VirtualExecutor

CONFIG = EngineConfig(max_tokens=8192)
BULK_ID = 1 << 40
# Of a front: parts of one job that are under way at a time, and tokens of each.
PARTS_UNDER_WAY, PART_TOKENS = 3, 16384


@dataclass(frozen=True, slots=True)
class Seen:
    """Latencies of the single queries in seconds, and how long the bulk job took; tokens as the engine counts them."""

    singles: np.ndarray
    bulk_seconds: float
    tokens: int
    padding: int

    def percentile(self, q: float) -> float:
        return float(np.percentile(self.singles, q))


def simulate(
    arrivals: Sequence[tuple[float, int]],
    bulk_lengths: Sequence[int] = (),
    *,
    priority: Priority = Priority.ONLINE,
    in_parts: bool = False,
    graphs: bool = False,
    config: EngineConfig = CONFIG,
    clients: int = 0,
    tokens: int = 512,
    until: float = 1.0,
) -> Seen:
    """
    Args:
        arrivals: (time, tokens) of each single query, in order.
        clients: so many send queries of `tokens` tokens, each its next when it has its answer, for `until` seconds.
        bulk_lengths: of the texts of one job that comes at 10 ms; empty for none.
        in_parts: the job comes as a front sends it, three parts of a budget at a time, instead of as one request.
    """
    clock, model = VirtualClock(), EchoModel()
    executor = VirtualExecutor(clock, model)
    place = LazyGraphs(executor.device, capturer=Capturer() if graphs else None, max_bytes=1 << 30)
    engine = Engine(model, config, executor, NoAttention(), graphs=place, inflection_tokens=16384, clock=clock)
    parts = deque(_parts(bulk_lengths) if in_parts else [list(bulk_lengths)] if bulk_lengths else [])
    asked = [*arrivals, *[(0.0, tokens)] * clients]
    latencies: dict[int, float] = {}
    open_parts: dict[int, int] = {}
    flights = deque[StepResult]()
    sent, bulk_end, next_part, bulk_at = 0, 0.0, BULK_ID, 0.010
    while len(latencies) < len(asked) or parts or open_parts:
        while sent < len(asked) and asked[sent][0] <= clock.now:
            engine.add(Request(sent, [np.zeros(asked[sent][1], np.int32)]))
            sent += 1
        while parts and clock.now >= bulk_at and len(open_parts) < PARTS_UNDER_WAY:
            lengths = parts.popleft()
            engine.add(Request(next_part, [np.zeros(n, np.int32) for n in lengths], priority=priority))
            open_parts[next_part] = len(lengths)
            next_part += 1
        while results := engine.step():
            flights.extend(result for result in results if result.items)
        times = [executor.next_end, engine.wake_at(), asked[sent][0] if sent < len(asked) else None]
        if parts and clock.now < bulk_at:
            times.append(bulk_at)
        due = [at for at in times if at is not None and at > clock.now]
        assert due, "requests wait and nothing will ever happen"
        clock.now = min(due)
        executor.settle()
        while flights and next(iter(flights[0].outputs.values())).ready():
            for item in flights.popleft().items:
                if item.request_id < BULK_ID:
                    latencies[item.request_id] = clock.now - asked[item.request_id][0]
                    if clients and clock.now < until:
                        asked.append((clock.now, tokens))
                    continue
                open_parts[item.request_id] -= 1
                if not open_parts[item.request_id]:
                    del open_parts[item.request_id]
                    bulk_end = clock.now
    singles = np.array([latencies[number] for number in range(len(asked))])
    return Seen(singles, bulk_end - bulk_at, engine.metrics.tokens, engine.metrics.padding_tokens)


def _parts(lengths: Sequence[int]) -> list[list[int]]:
    parts: list[list[int]] = [[]]
    for length in lengths:
        if sum(parts[-1]) + length > PART_TOKENS:
            parts.append([])
        parts[-1].append(length)
    return parts


def poisson(per_s: float, seconds: float, tokens: tuple[int, int], seed: int = 3) -> list[tuple[float, int]]:
    """Single queries at random times."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / per_s, int(per_s * seconds * 1.3)))
    times = times[times < seconds]
    return [(float(at), int(n)) for at, n in zip(times, rng.integers(*tokens, len(times)), strict=True)]


# Tokens of texts as corpora have them: (name, median, spread of the logarithm, longest).
MIXES = (
    ("queries", 12, 0.6, 64),
    ("sentences", 28, 0.5, 128),
    ("passages", 140, 0.5, 512),
    ("chunks of 512", 470, 0.25, 512),
    ("pages", 900, 0.8, 8192),
    ("all of these", 150, 1.4, 8192),
)


def lengths_of(name: str, count: int, seed: int = 5) -> list[int]:
    _, median, spread, longest = next(mix for mix in MIXES if mix[0] == name)
    rng = np.random.default_rng(seed)
    return [int(n) for n in np.clip(np.exp(rng.normal(np.log(median), spread, count)), 3, longest)]


def main() -> None:
    bulk = lengths_of("passages", 10_000)
    print("p50 / p99 of single queries of 16 to 512 tokens, ms: alone, and beside 10,000 passages")
    for per_s in (20, 100, 200, 400):
        arrivals = poisson(per_s, 3.0, (16, 512))
        alone = simulate(arrivals)
        told = [f"{per_s:4} /s  alone {alone.percentile(50) * 1e3:6.2f} {alone.percentile(99) * 1e3:6.2f}"]
        ways = {
            "one request": {},
            "in parts": {"in_parts": True},
            "class bulk": {"priority": Priority.BULK},
            "bulk budget 4096": {"config": replace(CONFIG, online_tokens=4096, bulk_tokens=4096)},
            "bulk budget 2048": {"config": replace(CONFIG, online_tokens=2048, bulk_tokens=2048)},
        }
        for name, options in ways.items():
            seen = simulate(arrivals, bulk, **options)
            told.append(
                f"{name} {seen.percentile(50) * 1e3:6.2f} {seen.percentile(99) * 1e3:6.2f} ({seen.bulk_seconds:.2f} s)"
            )
        print("   ".join(told), flush=True)
    for clients in (1, 4, 16):
        alone = simulate([], clients=clients)
        beside = simulate([], bulk, clients=clients)
        pairs = "  ".join(f"{one.percentile(50) * 1e3:6.2f} {one.percentile(99) * 1e3:6.2f}" for one in (alone, beside))
        print(f"{clients:4} in flight of 512 tokens  {pairs}  ({beside.bulk_seconds:.2f} s)", flush=True)
    print("padding of bulk jobs, of all tokens")
    for name, *_ in MIXES:
        lengths = lengths_of(name, 10_000)
        seen = simulate([], lengths, graphs=True)
        print(f"{name:14} {seen.padding / (seen.padding + seen.tokens):6.2%}", flush=True)


if __name__ == "__main__":
    main()

"""Long loads on a pretend device: pages run out all the time, and still everybody is served, in order and in time."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from rose.engine.generation.bulk import BULK_PATIENCE
from rose.engine.generation.limits import GenerationLimits
from rose.engine.generation.request import Finish, GenerateRequest, Sampling
from rose.engine.generation.scheduler import GenerationScheduler
from rose.engine.request import Priority
from tests.engine.generation.pretend_device import END, VOCAB, PretendDevice, expected_tokens


class Server:
    """A scheduler and a device with `depth` batches in flight, and what came out.

    Attributes:
        plans: batches planned so far, the clock of this file.
        began, ended: plan at which a request's first chunk was planned, and at which its last token arrived.
    """

    def __init__(self, limits: GenerationLimits, *, depth: int = 2, recurrent: bool = False) -> None:
        self.scheduler = GenerationScheduler(limits, [END])
        self.device = PretendDevice(limits, recurrent=recurrent)
        self.depth = depth
        self.plans = 0
        self.tokens: dict[int, list[int]] = {}
        self.began: dict[int, int] = {}
        self.ended: dict[int, int] = {}

    def add(self, number: int, prompt: list[int], new: int, *, bulk: bool = False, ignore_eos: bool = False):
        request = GenerateRequest(
            number,
            np.array(prompt, dtype=np.int32),
            Sampling(max_new_tokens=new, ignore_eos=ignore_eos),
            priority=Priority.BULK if bulk else Priority.ONLINE,
        )
        self.scheduler.add(request)
        self.tokens[number] = []
        return request

    def step(self) -> None:
        """Launch one batch if that is possible, and finish the oldest if there are too many."""
        plan = self.scheduler.next_batch() if self.scheduler.has_work else None
        if plan is not None:
            self.plans += 1
            self.device.launch(plan)
            for number in plan.started:
                assert number not in self.began
                self.began[number] = self.plans
        if self.scheduler.in_flight >= self.depth or (self.scheduler.in_flight and plan is None):
            for new in self.scheduler.commit(*self.device.run()):
                if new is not None:
                    self.tokens[new.request_id].append(new.token)
                    if new.finish is not Finish.NONE:
                        self.ended[new.request_id] = self.plans

    def drain(self, most_steps: int = 100_000) -> None:
        steps = 0
        while self.scheduler.open_requests or self.scheduler.in_flight:
            self.step()
            steps += 1
            assert steps < most_steps, "it does not end"
        pages = self.scheduler.pages
        assert pages.available == pages.total


@pytest.mark.parametrize("kind", ["reuse", "no reuse", "recurrent"])
def test_every_request_gets_its_own_tokens_once_while_pages_run_out_all_the_time(kind):
    """A dozen worlds a kind, each with many times more wants than pages; what is planned ahead differs too."""
    seen: Counter[str] = Counter()
    for seed in range(12):
        rng = random.Random(seed)
        size, lanes = rng.choice([1, 2, 4]), rng.randint(2, 8)
        limits = GenerationLimits(
            vocab_size=VOCAB,
            max_tokens=80,
            page_size=size,
            num_pages=80 // size + rng.randint(1, 40 // size),
            max_running=lanes,
            batch_tokens=lanes + rng.randint(1, 24),
            prefix_cache=kind == "reuse",
        )
        server = Server(limits, depth=rng.choice([1, 2]), recurrent=kind == "recurrent")
        beginnings = [[rng.randrange(1, VOCAB) for _ in range(24)] for _ in range(2)]
        wanted = {}
        for number in range(60):
            prompt = rng.choice(beginnings)[: rng.randint(1, 24)] + [rng.randrange(VOCAB)] * rng.randint(0, 9)
            request = server.add(
                number, prompt, rng.randint(1, 40), bulk=rng.random() < 0.3, ignore_eos=rng.random() < 0.7
            )
            wanted[number] = expected_tokens(request)
            for _ in range(rng.choice([0, 0, 1, 6])):
                server.step()
        server.drain()
        assert server.tokens == wanted
        metrics, reused = server.scheduler.metrics, server.scheduler.pages.metrics
        seen.update(
            preemptions=metrics.preemptions,
            hits=reused.hits,
            evictions=reused.evictions,
            wasted=metrics.wasted_tokens,
            recomputed=metrics.recomputed_tokens,
        )
    # So that passing means something: these loads do what they are for.
    assert seen["preemptions"] > 100
    assert seen["recomputed"] > 1000
    assert seen["wasted"] > 20
    assert (seen["hits"] > 100) == (seen["evictions"] > 100) == (kind == "reuse")


LIMITS = GenerationLimits(vocab_size=VOCAB, max_tokens=64, page_size=4, num_pages=65, max_running=8, batch_tokens=32)


def test_equals_start_in_the_order_of_their_arrival():
    server = Server(LIMITS)
    rng = random.Random(1)
    for number in range(100):
        server.add(number, [1] * rng.randint(1, 40), rng.randint(1, 20))
    server.drain()
    order = sorted(server.began, key=lambda number: (server.began[number], number))
    assert order == list(range(100))


def test_a_long_prompt_shares_batches_with_those_who_decode():
    """Their tokens come with every batch while it is read in chunks."""
    server = Server(LIMITS, depth=1)
    for number in range(4):
        server.add(number, [number + 1], 30, ignore_eos=True)
    server.step()
    server.add(9, list(range(1, 39)) + [1] * 20, 2)
    while 9 not in server.began or not server.tokens[9]:
        before = [len(server.tokens[number]) for number in range(4)]
        server.step()
        assert [len(server.tokens[number]) for number in range(4)] == [count + 1 for count in before]
    # 58 tokens, 28 a batch beside four decoding ones.
    assert server.plans == 1 + 3


@pytest.mark.parametrize(("pages", "running"), [(200, 8), (33, 4)])
def test_an_online_request_goes_before_bulk_that_fills_every_lane_or_page(pages, running):
    server = Server(replace(LIMITS, num_pages=pages))
    for number in range(40):
        server.add(number, [number % 30 + 1] * 20, 20, bulk=True, ignore_eos=True)
    for _ in range(12):
        server.step()
    assert server.scheduler.running == running
    now = server.plans
    server.add(100, [2] * 20, 5, ignore_eos=True)
    server.step()
    assert server.began[100] == now + 1, "it is in the very next batch"
    while 100 not in server.ended:
        server.step()
    assert server.ended[100] <= now + 1 + 5 + 2
    server.drain()
    assert all(len(server.tokens[number]) == 20 for number in range(40))


@pytest.mark.parametrize("recurrent", [False, True])
def test_bulk_is_served_under_endless_online_load(recurrent):
    limits = GenerationLimits(
        vocab_size=VOCAB,
        max_tokens=64,
        page_size=4,
        num_pages=33,
        max_running=4,
        batch_tokens=16,
        prefix_cache=not recurrent,
    )
    server = Server(limits, recurrent=recurrent)
    jobs = [server.add(number, [number + 1] * 25, 12, bulk=True, ignore_eos=True) for number in range(3)]
    number = 100
    while any(job.id not in server.ended for job in jobs):
        # As many as there are lanes, always.
        while server.scheduler.open_requests < 4 + sum(job.id not in server.ended for job in jobs):
            server.add(number, [number % 30 + 1] * 20, 8, ignore_eos=True)
            number += 1
        server.step()
        assert server.plans < 3 * BULK_PATIENCE + 300
    for job in jobs:
        assert server.tokens[job.id] == expected_tokens(job)
    assert server.scheduler.promotions == 3
    online = [n for n in server.ended if n >= 100]
    assert len(online) > 100, "and nearly all the time goes to the others"
    server.drain()


def test_bulk_that_is_pushed_out_again_and_again_gets_through():
    """Online requests come and go one by one; each takes the place of a job that never stays long enough to end."""
    limits = GenerationLimits(
        vocab_size=VOCAB,
        max_tokens=64,
        page_size=4,
        num_pages=17,
        max_running=2,
        batch_tokens=8,
        prefix_cache=False,
    )
    server = Server(limits)
    job = server.add(0, [1] * 50, 10, bulk=True, ignore_eos=True)
    number = 1
    while 0 not in server.ended:
        if server.plans % 6 == 0:
            server.add(number, [2] * 30, 2, ignore_eos=True)
            number += 1
        server.step()
        assert server.plans < 1000
    assert server.tokens[0] == expected_tokens(job)
    assert server.scheduler.promotions == 1
    server.drain()


@pytest.mark.parametrize("bulk", [False, True])
def test_nobody_waits_longer_than_those_before_them_take(bulk):
    """Overload for as long as it takes: what a request waits is bounded by the work in front of it, not behind it."""
    server = Server(LIMITS)
    rng = random.Random(3)
    arrived: dict[int, int] = {}
    work_before: dict[int, int] = {}
    number = 0
    while number < 150:
        if server.scheduler.open_requests < 30:
            work_before[number] = server.scheduler.open_requests
            arrived[number] = server.plans
            server.add(number, [rng.randrange(1, VOCAB)] * rng.randint(1, 30), rng.randint(1, 30), bulk=bulk)
            number += 1
        server.step()
    server.drain()
    for one, ahead in work_before.items():
        # Two prompts a batch at the least, 8 lanes, 30 tokens each; several times over for starting again.
        assert server.ended[one] - arrived[one] <= 30 * (ahead / 8 + 2) * 3

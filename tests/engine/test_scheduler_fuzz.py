"""Random loads against a model of the queue: nothing lost, doubled, starved, reordered or over budget."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rose.config import EngineConfig
from rose.engine.request import Priority, Request
from rose.engine.scheduler import BULK_PATIENCE, Scheduler

CONFIG = EngineConfig(online_tokens=32, bulk_tokens=96, max_sequences=6, max_tokens=120)
LENGTHS = st.one_of(st.integers(1, 12), st.integers(1, CONFIG.max_tokens))


@dataclass
class Known:
    """What the test knows of one open request."""

    request: Request
    outputs: tuple[str, ...]
    next: int = 0
    batches_waited: int = 0
    served_tokens: list[int] = field(default_factory=list)

    @property
    def left(self) -> list[int]:
        return [len(ids) for ids in self.request.sequences[self.next :]]

    @property
    def single(self) -> bool:
        lengths = [len(ids) for ids in self.request.sequences]
        online = self.request.priority is Priority.ONLINE
        return online and (len(lengths) == 1 or sum(lengths) <= CONFIG.online_tokens)


class Queue(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(CONFIG, vocab_size=1 << 30)
        self.known: dict[int, Known] = {}
        self.now = 0.0
        self.count = 0
        self.most_open = 0

    @rule(
        lengths=st.lists(LENGTHS, min_size=1, max_size=12),
        outputs=st.sampled_from([("a",), ("a",), ("b",)]),
        bulk=st.booleans(),
        alone=st.sampled_from([False, False, False, True]),
        patience=st.one_of(st.none(), st.floats(0.5, 20)),
        typed=st.booleans(),
    )
    def add(self, lengths, outputs, bulk, alone, patience, typed):
        self.count += 1
        # Every token of every sequence ever added is another one.
        ids = [self.count * 10_000 + i * 200 + np.arange(n, dtype=np.int32) for i, n in enumerate(lengths)]
        request = Request(
            self.count,
            ids,
            deadline=None if patience is None else self.now + patience,
            priority=Priority.BULK if bulk else Priority.ONLINE,
            alone=alone,
            token_types=[array % 2 for array in ids] if typed else None,
        )
        self.scheduler.add(request, outputs)
        self.known[self.count] = Known(request, outputs)
        self.most_open = max(self.most_open, len(self.known))

    @rule()
    def next_batch(self):
        single = any(known.single for known in self.known.values())
        work = self.scheduler.next_batch()
        if work is None:
            assert not self.known, "something waits and nothing is served"
            return
        budget = CONFIG.online_tokens if single else CONFIG.bulk_tokens
        assert 1 <= work.sequences <= CONFIG.max_sequences
        assert work.tokens <= budget or work.sequences == 1
        assert work.tokens == sum(work.lengths) == sum(len(run.ids) for run in work.runs)
        for run in work.runs:
            self._served(run, work)
        self._nobody_starves({run.request_id for run in work.runs})

    def _served(self, run, work):
        known = self.known[run.request_id]
        assert known.outputs == work.outputs
        assert run.first == known.next, "a sequence was lost, doubled or put out of order"
        stop = run.first + len(run.lengths)
        np.testing.assert_array_equal(run.ids, np.concatenate(known.request.sequences[run.first : stop]))
        if known.request.token_types is None:
            assert run.token_types is None
        else:
            np.testing.assert_array_equal(run.token_types, run.ids % 2)
        assert [len(ids) for ids in known.request.sequences[run.first : stop]] == run.lengths
        if known.request.alone:
            assert work.sequences == 1
        known.next = stop
        if not known.left:
            del self.known[run.request_id]

    def _nobody_starves(self, served):
        for number, known in self.known.items():
            known.batches_waited = 0 if number in served else known.batches_waited + 1
            bulk = known.request.priority is Priority.BULK
            # One batch for each request in front of it in the round; BULK's rounds are so much slower.
            bound = (self.most_open + 1) * (BULK_PATIENCE + 2 if bulk else 2)
            assert known.batches_waited <= bound, f"request {number} starves"

    @rule(seconds=st.floats(0.1, 5))
    def time_passes(self, seconds):
        self.now += seconds
        due = {n for n, k in self.known.items() if k.request.deadline is not None and k.request.deadline <= self.now}
        assert set(self.scheduler.expire(self.now)) == due
        for number in due:
            del self.known[number]

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def abort(self, data):
        number = data.draw(st.sampled_from(sorted(self.known)))
        assert self.scheduler.abort(number)
        assert not self.scheduler.abort(number)
        del self.known[number]

    @invariant()
    def gauges_are_the_queue(self):
        left = [known.left for known in self.known.values()]
        assert self.scheduler.queued_requests == len(left)
        assert self.scheduler.queued_sequences == sum(map(len, left))
        assert self.scheduler.queued_tokens == sum(map(sum, left))
        assert self.scheduler.single_waits == any(known.single for known in self.known.values())

    @invariant()
    def the_next_deadline_is_the_earliest(self):
        deadlines = [k.request.deadline for k in self.known.values() if k.request.deadline is not None]
        assert self.scheduler.next_deadline() == min(deadlines, default=None)

    def teardown(self):
        for _ in range(1000):
            if not self.known:
                break
            self.next_batch()
        assert not self.known, "the queue does not drain"
        assert self.scheduler.next_batch() is None


TestQueue = Queue.TestCase
TestQueue.settings = settings(
    max_examples=120, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)

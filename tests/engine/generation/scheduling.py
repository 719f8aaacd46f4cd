"""A scheduler driven by hand: requests of made prompts, and plans as tuples to compare."""

from __future__ import annotations

import numpy as np

from rose.engine.generation.limits import GenerationLimits
from rose.engine.generation.request import Finish, GenerateRequest, Sampling
from rose.engine.generation.scheduler import GenerationScheduler
from rose.engine.generation.sequence import BatchPlan
from rose.engine.request import Priority

END = 0
LIMITS = {"vocab_size": 1000, "max_tokens": 200, "page_size": 4, "num_pages": 51, "max_running": 8, "batch_tokens": 16}


def make(**changes) -> GenerationScheduler:
    return GenerationScheduler(GenerationLimits(**{**LIMITS, **changes}), [END])


def add(scheduler: GenerationScheduler, number: int, prompt: list[int] | int, new: int = 10, **kwargs) -> None:
    """`prompt`: ids, or how many; then they are made from the request's number."""
    ids = [number % 99 * 10 + 1] * prompt if isinstance(prompt, int) else prompt
    priority = Priority.BULK if kwargs.pop("bulk", False) else Priority.ONLINE
    deadline = kwargs.pop("deadline", None)
    sampling = Sampling(max_new_tokens=new, **kwargs)
    scheduler.add(GenerateRequest(number, np.array(ids, dtype=np.int32), sampling, deadline, priority))


def plan_of(scheduler: GenerationScheduler) -> BatchPlan:
    plan = scheduler.next_batch()
    assert plan is not None
    return plan


def shape(plan: BatchPlan) -> list[tuple[int, int, int, bool, bool]]:
    return [(c.sequence.request.id, c.start, c.length, c.samples, c.from_device) for c in plan.chunks]


def told(scheduler: GenerationScheduler, plan: BatchPlan, tokens: list[int]) -> list[tuple[int, int, Finish] | None]:
    news = scheduler.commit(plan, tokens)
    return [None if new is None else (new.request_id, new.token, new.finish) for new in news]


def finish(scheduler: GenerationScheduler, token: int = 5) -> None:
    """Everything open runs to its end, one batch at a time."""
    while scheduler.open_requests:
        plan = plan_of(scheduler)
        scheduler.commit(plan, [token] * plan.draws)

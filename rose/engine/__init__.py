"""Requests in, lazy results out: scheduler, staging, execution, graphs, and the `step()` that joins them.

Knows token ids and devices; knows neither text nor carriers.
"""

from rose.engine.build import build_engine
from rose.engine.engine import Engine
from rose.engine.lazy_tensor import LazyTensor
from rose.engine.request import Item, Priority, Request, StepResult

__all__ = ["Engine", "Item", "LazyTensor", "Priority", "Request", "StepResult", "build_engine"]

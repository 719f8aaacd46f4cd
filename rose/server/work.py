"""What an engine process does: embed and score, or generate. The one place that puts the parts of either together.

Knows which parts belong to each other; knows neither frames nor sockets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

from rose.config import ServerConfig
from rose.proto import rose_pb2 as pb
from rose.server.batches import Batches
from rose.server.embedding import EmbedService
from rose.server.generating import GenerateService
from rose.server.generations import Generations
from rose.server.ports import EnginePort, GenerationPort
from rose.server.service import Service
from rose.server.validate import Limits
from rose.server.validate_generate import GenerateLimits


class Work(Protocol):
    """What is launched and on its way: Batches or Generations."""

    def __len__(self) -> int:
        """Batches in flight."""
        ...

    @property
    def pending(self) -> bool:
        """Whether `launch` may have something to do."""
        ...

    @property
    def running_for(self) -> float:
        """Seconds the oldest batch has been running; 0 if there is none."""
        ...

    @property
    def expected_end(self) -> float | None:
        """time.monotonic() at which the oldest batch should end, or None where nothing like it was timed yet."""
        ...

    def is_ready(self) -> bool:
        """Whether the oldest batch has finished."""
        ...

    def launch(self) -> bool:
        """Let the engine launch what it can. Returns whether it did anything."""
        ...

    def collect(self) -> object:
        """Answer what can be answered."""
        ...


def work_of(
    engine: EnginePort | GenerationPort,
    limits: Limits | GenerateLimits,
    card: pb.ModelCard,
    config: ServerConfig,
    *,
    clock: Callable[[], float],
    fill_stats: Callable[[pb.ServerStats], None],
    device_alive: Callable[[], bool],
) -> tuple[Service[Any], Work]:
    """The service and the work of an engine; `limits` say which kind it is."""

    def running_for() -> float:
        return work.running_for

    work: Work
    if isinstance(limits, GenerateLimits):
        generating = cast("GenerationPort", engine)
        generate = GenerateService(
            generating, limits, card, config, clock=clock, fill_stats=fill_stats, running_for=running_for
        )
        work = Generations(generating, generate, clock=clock, device_alive=device_alive)
        return generate, work
    embedding = cast("EnginePort", engine)
    embed = EmbedService(embedding, limits, card, config, clock=clock, fill_stats=fill_stats, running_for=running_for)
    work = Batches(embedding, embed, limits.outputs, clock=clock, device_alive=device_alive)
    return embed, work

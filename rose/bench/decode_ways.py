"""Ways to continue prompts and see each token come: in process, light link, any OpenAI-compatible server.

All prompts of a call are sent at once, each a request of its own. Knows carriers and clocks; knows no loads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from rose.bench.carriers import Ids
from rose.bench.completions import GENERATION_S, CompletionsClient
from rose.client import AsyncClient
from rose.engine.generation.engine import GenerationEngine
from rose.engine.generation.request import GenerateRequest, Sampling
from rose.errors import RoseError

# How long a loop with nothing to do sleeps where forwards run in a thread of this process; on a GPU it asks again.
CPU_PAUSE_S = 50e-6


class WrongAnswerError(RoseError):
    """Another number of tokens than asked for: what was timed is not what was meant."""


@dataclass(slots=True)
class Stream:
    """One continued prompt.

    Attributes:
        start: when it was sent. times: when each token came; tokens that come together have the same time. All of
            time.perf_counter().
        ids: of the tokens; empty where only text comes back.
    """

    start: float
    times: list[float] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)


class DecodeWay(Protocol):
    """One way to a generating model; greedy, end tokens ignored."""

    via: str

    def generate(self, prompts: Sequence[Ids], new_tokens: int) -> list[Stream]:
        """
        Raises:
            WrongAnswerError: a prompt was not continued by `new_tokens` tokens.
            RoseError: whatever it was refused for.
        """
        ...

    def counters(self) -> Mapping[str, int]:
        """The engine's own, as STATS has them; empty for another server."""
        ...

    def close(self) -> None: ...


class EngineWay:
    """The engine in this process: add, step, and look at the clock."""

    via = "engine"

    def __init__(self, engine: GenerationEngine) -> None:
        self._engine = engine
        self._next = 0
        self._pause = CPU_PAUSE_S if engine.executor.device.type == "cpu" else 0.0
        # As the server's thread does: stream and inference mode are kept, not entered for every batch.
        self._owner = engine.executor.owner()
        self._owner.__enter__()

    def generate(self, prompts: Sequence[Ids], new_tokens: int) -> list[Stream]:
        streams = self.begin(prompts, new_tokens)
        self.advance(streams, len(prompts) * new_tokens)
        self.settle()
        return checked(list(streams.values()), new_tokens)

    def begin(self, prompts: Sequence[Ids], new_tokens: int) -> dict[int, Stream]:
        """Send them all; request id -> stream."""
        sampling = Sampling(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        streams: dict[int, Stream] = {}
        for ids in prompts:
            self._next += 1
            streams[self._next] = Stream(time.perf_counter())
            self._engine.add(GenerateRequest(self._next, ids, sampling))
        return streams

    def advance(self, streams: Mapping[int, Stream], tokens: int) -> None:
        """Step until so many more have come, or none of the streams is open."""
        clock = time.perf_counter
        while tokens > 0 and self._engine.open_requests:
            step = self._engine.step()
            now = clock()
            for error in step.failed.values():
                raise error
            for token in step.tokens:
                stream = streams[token.request_id]
                stream.times.append(now)
                stream.ids.append(token.token)
            tokens -= len(step.tokens)
            if self._pause and not step.tokens and not step.launched:
                time.sleep(self._pause)

    def wait(self) -> None:
        """Until the device has done what was launched; nothing more is."""
        self._engine.executor.launch(lambda: None).result()

    def settle(self, streams: Iterable[int] = ()) -> None:
        """Give these up, and step until nothing is on its way: not even a token too many."""
        for request_id in streams:
            self._engine.abort(request_id)
        while not self._engine.idle:
            self._engine.step()

    @property
    def longest(self) -> int:
        """Tokens of a sequence at most, its prompt's included."""
        return self._engine.limits.longest

    def counters(self) -> Mapping[str, int]:
        return self._engine.counters()

    def close(self) -> None:
        self._owner.__exit__(None, None, None)
        self._engine.close()
        del self._engine  # whoever still holds this way holds no cache of most of the device's memory


class LinkWay:
    """The asyncio client of the light link: one connection, a stream a prompt.

    Attributes:
        backend: the attention backend, as the model card has it.
    """

    via = "link"

    def __init__(self, address: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._client = self._loop.run_until_complete(AsyncClient.connect(address))
        self.backend = self._loop.run_until_complete(self._client.info()).backend

    def generate(self, prompts: Sequence[Ids], new_tokens: int) -> list[Stream]:
        return checked(self._loop.run_until_complete(self._all(prompts, new_tokens)), new_tokens)

    async def _all(self, prompts: Sequence[Ids], new_tokens: int) -> list[Stream]:
        return await together([self._one(ids, new_tokens) for ids in prompts])

    async def _one(self, ids: Ids, new_tokens: int) -> Stream:
        stream = Stream(time.perf_counter())
        tokens = self._client.generate(
            ids, max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True, deadline_s=GENERATION_S
        )
        async with aclosing(tokens):
            async for some in tokens:
                stream.times += [time.perf_counter()] * len(some.tokens)
                stream.ids += some.tokens
        return stream

    def counters(self) -> Mapping[str, int]:
        return dict(self._loop.run_until_complete(self._client.stats()).engine_counters)

    def close(self) -> None:
        self._loop.run_until_complete(self._client.close())
        self._loop.close()


class HttpWay:
    """POST /v1/completions of any OpenAI-compatible server, ids in and an event a token out; a connection a prompt."""

    via = "http"

    def __init__(self, url: str, model: str, engine: LinkWay | None = None) -> None:
        """
        Args:
            url: of the server, with the path before /completions ("http://127.0.0.1:8080/v1").
            engine: where ROSE's engine tells its counters; None for another server.
        """
        self._loop = asyncio.new_event_loop()
        self._client = CompletionsClient(url, model)
        self._engine = engine

    def generate(self, prompts: Sequence[Ids], new_tokens: int) -> list[Stream]:
        return checked(self._loop.run_until_complete(self._all(prompts, new_tokens)), new_tokens)

    async def _all(self, prompts: Sequence[Ids], new_tokens: int) -> list[Stream]:
        async def one(ids: Ids) -> Stream:
            start = time.perf_counter()
            answer = await self._client.stream(ids.tolist(), new_tokens)
            return Stream(start, answer.token_times())

        return await together([one(ids) for ids in prompts])

    def counters(self) -> Mapping[str, int]:
        return {} if self._engine is None else self._engine.counters()

    def close(self) -> None:
        self._loop.run_until_complete(self._client.close())
        self._loop.close()


async def together(runs: Sequence[Coroutine[None, None, Stream]]) -> list[Stream]:
    """What all of them return, in order. The first that fails ends the others, and its error is the one that is raised:
    none goes on in the next round, or is told of when the loop is closed."""
    tasks = [asyncio.ensure_future(run) for run in runs]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def checked(streams: list[Stream], new_tokens: int) -> list[Stream]:
    for number, stream in enumerate(streams):
        if len(stream.times) != new_tokens:
            raise WrongAnswerError(f"prompt {number} was continued by {len(stream.times)} tokens, not {new_tokens}")
    return streams

"""A run's deltas as one JSON answer, or as server-sent events; the dialect says what each looks like.

    events: data: {chunk}\n\n ... data: [DONE]\n\n

A stream begins with the first token: what fails before has the status of the error table. A failure after that is an
event {"error": ...}, and no [DONE] follows. Knows the order of things; knows neither dialect's fields nor replicas.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from rose.errors import PayloadTooLarge
from rose.gateway.answer import STOP, Delta, TokenInfo
from rose.gateway.asgi import Call, Reply, StreamReply
from rose.gateway.generating import Run
from rose.gateway.schemas_generate import Finish, GenerateUsage, PromptDetails
from rose.gateway.timing import server_timing

_encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"
# Log probabilities of an answer that is no stream: at some 110 bytes each as objects and 80 as JSON, less than 1 GB.
MAX_LOGPROBS_HELD = 1 << 22


@dataclass(slots=True)
class Whole:
    """An answer put together."""

    text: str = ""
    infos: list[TokenInfo] = field(default_factory=list)
    finish: Finish = "stop"


class Dialect(Protocol):
    """How one request's answers are written."""

    def whole(self, run: Run, answers: list[Whole], usage: GenerateUsage) -> msgspec.Struct:
        """The answer that is no stream."""
        ...

    def opening(self, run: Run, number: int) -> Iterable[msgspec.Struct]:
        """Chunks before an answer's first text."""
        ...

    def chunks(self, run: Run, number: int, delta: Delta) -> Iterable[msgspec.Struct]:
        """Chunks of a delta that has something to show."""
        ...

    def closing(self, usage: GenerateUsage) -> Iterable[msgspec.Struct]:
        """Chunks after all answers."""
        ...


async def whole_reply(call: Call, run: Run, dialect: Dialect, tokenize_s: float) -> Reply:
    """Once the last token is there. Raises PayloadTooLarge, and whatever the run fails with."""
    _check_held(run)
    answers = [Whole() for _ in run.answers]
    texts: list[list[str]] = [[] for _ in run.answers]
    async with aclosing(run.deltas()) as deltas:
        async for number, delta in deltas:
            texts[number].append(delta.text)
            answers[number].infos += delta.infos
            if delta.finish:
                answers[number].finish = finish_name(delta)
    for answer, pieces in zip(answers, texts, strict=True):
        answer.text = "".join(pieces)
    started = time.perf_counter()
    body = _encode(dialect.whole(run, answers, usage_of(run)))
    return Reply(200, body, server_timing(call, tokenize_s, run.timing, time.perf_counter() - started))


def _check_held(run: Run) -> None:
    """Raises PayloadTooLarge: texts are small, but a number of the caller's choosing for each token has to be held."""
    wanted = run.job.sampling.logprobs
    if wanted is None:
        return
    held = run.longest_answers * (1 + wanted)
    if held > MAX_LOGPROBS_HELD:
        raise PayloadTooLarge(
            f"{run.longest_answers} tokens at most, each with {1 + wanted} log probabilities, make {held}; the limit of"
            f" an answer that is no stream is {MAX_LOGPROBS_HELD}: ask for fewer tokens, or for a stream",
            param=run.job.sampling.names.get("logprobs", "logprobs"),
        )


async def stream_reply(run: Run, dialect: Dialect) -> StreamReply:
    """Once the first token is there. Raises what failed before."""
    events = _events(run, dialect)
    first = await anext(events)
    return StreamReply(first, events)


async def _events(run: Run, dialect: Dialect) -> AsyncGenerator[bytes, None]:
    opened = [False] * len(run.answers)
    async with aclosing(run.deltas()) as deltas:
        async for number, delta in deltas:
            if not (delta.text or delta.infos or delta.finish):
                continue
            chunks: list[msgspec.Struct] = []
            if not opened[number]:
                opened[number] = True
                chunks += dialect.opening(run, number)
            chunks += dialect.chunks(run, number, delta)
            yield b"".join(map(_event, chunks))
    yield b"".join(map(_event, dialect.closing(usage_of(run)))) + DONE


def usage_of(run: Run) -> GenerateUsage:
    return GenerateUsage(
        prompt_tokens=run.prompt_tokens,
        completion_tokens=run.completion_tokens,
        total_tokens=run.prompt_tokens + run.completion_tokens,
        prompt_tokens_details=PromptDetails(run.cached_tokens),
    )


def finish_name(delta: Delta) -> Finish:
    return "stop" if delta.finish == STOP else "length"


def _event(chunk: msgspec.Struct) -> bytes:
    return b"data: %b\n\n" % _encode(chunk)

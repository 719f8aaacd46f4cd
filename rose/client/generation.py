"""Generate requests and chunks as a client sees them; shared by the sync and the async client.

Knows token ids and messages; knows neither texts nor sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from google.protobuf.message import DecodeError

from rose.client.messages import one_sequence
from rose.client.result import Timing
from rose.errors import InternalError, InvalidInput
from rose.proto import rose_pb2 as pb
from rose.proto.convert import AnyArray, tokens_to_proto

Finish = Literal["stop", "length"]

_FINISHES: dict[int, Finish] = {pb.STOP: "stop", pb.LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """What one token was worth to the model.

    Attributes:
        logprob: of the token itself, a natural logarithm.
        top: (id, logprob) of the most likely tokens, best first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """What a generation took; known once it has ended.

    Attributes:
        prompt_tokens: tokens of the prompt.
        completion_tokens: tokens drawn, an end token included.
        cached_tokens: of the prompt, found in the engine's cache.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    timing: Timing


@dataclass(frozen=True, slots=True)
class Generated:
    """The tokens that have come since the last one of these.

    Attributes:
        tokens: their ids; an end token is among them.
        logprobs: one a token, where asked for.
        finish: in the last one, why it is the last: "stop" (an end token) or "length"; else None.
        usage: in the last one; else None.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: Finish | None = None
    usage: Usage | None = field(default=None, repr=False)

    @staticmethod
    def from_message(chunk: pb.GenerateChunk) -> Generated:
        finish = _FINISHES.get(chunk.finish)
        usage = None
        if finish is not None:
            spent = chunk.timing
            timing = Timing(spent.queue_us / 1e6, spent.compute_us / 1e6, spent.batches)
            usage = Usage(chunk.prompt_tokens, chunk.completion_tokens, chunk.cached_tokens, timing)
        logprobs = tuple(
            TokenLogprobs(each.logprob, tuple((one.token, one.logprob) for one in each.top)) for each in chunk.logprobs
        )
        return Generated(tuple(chunk.tokens), logprobs, finish, usage)


def generate_request(
    ids: Sequence[int] | AnyArray,
    *,
    model: str = "",
    max_new_tokens: int = 0,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int | None = None,
    stop_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    min_new_tokens: int = 0,
    logprobs: int | None = None,
    priority: pb.Priority.ValueType = pb.ONLINE,
) -> pb.GenerateRequest:
    """The message for one prompt; what the fields mean is told at AsyncClient.generate.

    Raises:
        InvalidInput: a prompt that is no list of int32 numbers, or a number that its field cannot hold.
    """
    prompt = one_sequence(ids, "prompt")
    sampling = pb.Sampling()
    numbers = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
        "ignore_eos": ignore_eos,
        "min_new_tokens": min_new_tokens,
        "logprobs": logprobs,
    }
    for name, value in numbers.items():
        if value is not None:
            _put(name, value, partial(setattr, sampling, name, value))
    _put("stop_ids", stop_ids, partial(sampling.stop_ids.extend, stop_ids))
    return pb.GenerateRequest(model=model, tokens=tokens_to_proto([prompt]), sampling=sampling, priority=priority)


def _put(name: str, value: object, put: Callable[[], None]) -> None:
    """Protobuf says that a value is out of range, but not of which field."""
    try:
        put()
    except (TypeError, ValueError):
        raise InvalidInput(f"{name} of {value!r} is outside what the field holds", param=name) from None


def parse_chunk(payload: bytes) -> pb.GenerateChunk:
    """One chunk, or several one after another: their bytes joined are the chunk of all their tokens."""
    try:
        return pb.GenerateChunk.FromString(payload)
    except DecodeError as error:
        raise InternalError(f"the server's answer is no GenerateChunk: {error}") from None

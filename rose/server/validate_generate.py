"""The one validator of generate requests, whichever carrier brought them.

Turns a message into work the engine can never trip over, or into an error that names the field and the limit. What a
prompt and its sampling must be is the engine's to say; here it is read off the message. Knows messages and the model's
limits; knows neither sockets nor the engine.
"""

from __future__ import annotations

from dataclasses import dataclass

from rose.engine.generation.limits import GenerationLimits
from rose.engine.generation.request import GenerateRequest, Sampling
from rose.engine.generation.validation import check_generate, new_tokens_left
from rose.engine.request import Priority
from rose.errors import InvalidInput, PayloadTooLarge, UnknownModel, Unsupported
from rose.proto import rose_pb2 as pb
from rose.proto.convert import IntArray, sequence_from_proto

_PRIORITIES = {int(priority): priority for priority in Priority}
_GATEWAY = "this is an engine process and holds no tokenizer: "
# What only a front can do, by the field that asks for it.
_FRONTS_ONLY = {
    "text": "send token ids, or send texts to a gateway",
    "messages": "a chat's messages are put into the model's template by a gateway; send token ids here",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateLimits:
    """What one request may ask of the served model.

    Attributes:
        served_name: the name clients may use; an empty name in a request means the same.
        engine: the engine's own limits.
        max_request_tokens: most tokens of a prompt; more would not fit an empty queue.
    """

    served_name: str
    engine: GenerationLimits
    max_request_tokens: int


@dataclass(slots=True)
class GenerateWork:
    """A valid request."""

    ids: IntArray
    sampling: Sampling
    priority: Priority


def validate_generate(request: pb.GenerateRequest, limits: GenerateLimits) -> GenerateWork:
    """
    Raises:
        UnknownModel, Unsupported, PayloadTooLarge, InvalidInput.
    """
    if request.model and request.model != limits.served_name:
        raise UnknownModel(f"model {request.model!r} is not served here, {limits.served_name!r} is", param="model")
    priority = _PRIORITIES.get(request.priority)
    if priority is None:
        raise InvalidInput(f"priority {request.priority} is neither ONLINE (0) nor BULK (1)", param="priority")
    ids = _prompt(request, limits)
    if request.sampling.stop:
        raise Unsupported(
            _GATEWAY + "stop strings are looked for by a gateway; send stop_ids, or cancel when the text has them",
            param="stop",
        )
    work = GenerateWork(ids, _sampling(request.sampling, len(ids), limits), priority)
    check_generate(GenerateRequest(0, ids, work.sampling), limits.engine)
    return work


def _prompt(request: pb.GenerateRequest, limits: GenerateLimits) -> IntArray:
    kind = request.WhichOneof("prompt")
    if kind in _FRONTS_ONLY:
        raise Unsupported(_GATEWAY + _FRONTS_ONLY[kind], param="prompt")
    if kind is None:
        raise InvalidInput("the request has no prompt", param="prompt")
    ids = sequence_from_proto(request.tokens, "prompt")
    if len(ids) > limits.max_request_tokens:
        raise PayloadTooLarge(
            f"the prompt has {len(ids)} tokens, over the queue's limit of {limits.max_request_tokens}", param="prompt"
        )
    return ids


def _sampling(message: pb.Sampling, prompt_tokens: int, limits: GenerateLimits) -> Sampling:
    """Unset fields take the schema's defaults."""
    return Sampling(
        max_new_tokens=message.max_new_tokens or new_tokens_left(prompt_tokens, limits.engine),
        temperature=message.temperature if message.HasField("temperature") else 1.0,
        top_k=message.top_k,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        min_p=message.min_p,
        seed=message.seed if message.HasField("seed") else None,
        stop_ids=tuple(message.stop_ids),
        ignore_eos=message.ignore_eos,
        min_new_tokens=message.min_new_tokens,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
    )

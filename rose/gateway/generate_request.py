"""The bodies of /v1/completions and /v1/chat/completions, read and checked into what to draw, and how.

Knows JSON values and the model card; knows neither tokenising nor answers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rose.errors import InvalidInput, PayloadTooLarge
from rose.gateway.chat_template import REASONING, RESERVED
from rose.gateway.inputs import SHOWN_CHARS, kind_of_value, show
from rose.gateway.misfits import either, show_value
from rose.gateway.sampling import HTTP_NAMES, SamplingOptions
from rose.gateway.schemas_generate import ChatMessage, ChatRequest, CompletionRequest, SampledRequest

completion_decoder = msgspec.json.Decoder(CompletionRequest)
chat_decoder = msgspec.json.Decoder(ChatRequest)
# Answers of one request, over all its prompts: each is a sequence that the engine runs.
MAX_ANSWERS = 128
# What completions without max_tokens have: OpenAI's own default.
COMPLETION_TOKENS = 16
ROLES = frozenset({"system", "user", "assistant", "tool"})
# Known and not served, with the values that change nothing.
_NOTHING: Mapping[str, Sequence[Any]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "use_beam_search": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "web_search_options": (),
    "documents": ([],),
    "chat_template": (),
    "continue_final_message": (False,),
}
_INSTEAD = {"reasoning_effort": "; chat_template_kwargs reaches the model's template"}


def check_served(request: SampledRequest) -> None:
    """Raises InvalidInput naming a field that would change the answer and is not served."""
    for name, nothing in _NOTHING.items():
        value = getattr(request, name, None)
        if value is None or value in nothing or (name == "best_of" and value == request.n):
            continue
        same = ", or send " + either([json.dumps(one) for one in nothing]) if nothing else ""
        raise InvalidInput(
            f"{name} is not served, and {show_value(value)} would change the answer: leave it out{same}"
            f"{_INSTEAD.get(name, '')}",
            param=name,
        )
    if request.stream_options is not None and not request.stream:
        raise InvalidInput("stream_options goes with stream=true", param="stream_options")


def choices_of(request: SampledRequest, prompts: int) -> int:
    """Answers to each prompt. Raises InvalidInput, PayloadTooLarge."""
    choices = 1 if request.n is None else request.n
    if choices < 1:
        raise InvalidInput(f"n of {show(choices)}: expected 1 or more", param="n")
    if choices * prompts > MAX_ANSWERS:
        raise PayloadTooLarge(
            f"{show(choices * prompts)} answers in one request, the limit is {MAX_ANSWERS} over all prompts", param="n"
        )
    return choices


def sampling_of(request: SampledRequest, defaults: Mapping[str, float]) -> SamplingOptions:
    """
    Args:
        defaults: temperature, top_p, top_k and min_p where the model's own files state them.

    Raises:
        InvalidInput: logprobs that contradict each other, or a length of 0.
    """
    asked, field = _length(request)
    top_k = _either(request.top_k, defaults, "top_k", 0)
    stop = request.stop
    return SamplingOptions(
        max_new_tokens=asked,
        temperature=_either(request.temperature, defaults, "temperature", 1.0),
        top_k=0 if top_k == -1 else int(top_k),
        top_p=_either(request.top_p, defaults, "top_p", 1.0),
        min_p=_either(request.min_p, defaults, "min_p", 0.0),
        seed=request.seed,
        stop_ids=tuple(request.stop_token_ids or ()),
        stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
        ignore_eos=bool(request.ignore_eos),
        min_new_tokens=request.min_tokens or 0,
        logprobs=_logprobs(request),
        may_be_fewer=asked > 0 and request.max_tokens is None and not isinstance(request, ChatRequest),
        names={**HTTP_NAMES, "max_new_tokens": field, "logprobs": _logprobs_field(request)},
    )


def _length(request: SampledRequest) -> tuple[int, str]:
    """(tokens asked for, or 0, and the field that says so)."""
    field, asked = "max_tokens", request.max_tokens
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        field, other, asked = "max_completion_tokens", asked, request.max_completion_tokens
        if other is not None and other != asked:
            raise InvalidInput(
                f"max_completion_tokens of {show(asked)} beside max_tokens of {show(other)}: they are two names of one "
                "limit, send one of them, or both alike",
                param=field,
            )
    if asked is None:
        return (0 if isinstance(request, ChatRequest) else COMPLETION_TOKENS), field
    if asked < 1:
        raise InvalidInput(f"{field} of {show(asked)}: expected 1 or more", param=field)
    return asked, field


def _either(asked: float | None, defaults: Mapping[str, float], name: str, otherwise: float) -> float:
    return defaults.get(name, otherwise) if asked is None else asked


def _logprobs(request: SampledRequest) -> int | None:
    if isinstance(request, CompletionRequest):
        if request.echo and request.logprobs is not None:
            raise InvalidInput("log probabilities of a prompt are not served: echo or logprobs", param="logprobs")
        return request.logprobs
    assert isinstance(request, ChatRequest)
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidInput("top_logprobs goes with logprobs=true", param="top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else None


def _logprobs_field(request: SampledRequest) -> str:
    return "top_logprobs" if isinstance(request, ChatRequest) else "logprobs"


def template_variables(asked: dict[str, Any] | None) -> dict[str, Any]:
    """Raises InvalidInput for a variable that the request has a field for."""
    variables = asked or {}
    for name in variables:
        if name in RESERVED or name.startswith("rose_"):
            raise InvalidInput(f"{name[:SHOWN_CHARS]!r} is no variable to set", param="chat_template_kwargs")
    return variables


def chat_messages(messages: Sequence[ChatMessage]) -> list[dict[str, str]]:
    """What the template reads of each message.

    Raises:
        InvalidInput: no message, or one, by its index, of another role or with other content than text.
    """
    if not messages:
        raise InvalidInput("the list is empty: expected at least one message", param="messages")
    return [_message(message, index) for index, message in enumerate(messages)]


def _message(message: ChatMessage, index: int) -> dict[str, str]:
    # OpenAI's newer name: templates that do not know it would leave the message out without a word.
    role = "system" if message.role == "developer" else message.role
    if role not in ROLES:
        raise InvalidInput(
            f"the role is {role[:SHOWN_CHARS]!r}: expected one of developer, {', '.join(sorted(ROLES))}",
            param="messages",
            index=index,
        )
    for name in ("tool_calls", "function_call", "audio"):
        if getattr(message, name) not in (None, []):
            raise InvalidInput(f"{name} of a message is not served, only its text", param="messages", index=index)
    plain = {"role": role, "content": _content(message.content, index)}
    if message.name is not None:
        plain["name"] = message.name
    if message.reasoning_content is not None:
        plain[REASONING] = message.reasoning_content
    return plain


def _content(content: Any, index: int) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidInput(
            f"the content is {kind_of_value(content)}: expected a text, or a list of parts",
            param="messages",
            index=index,
        )
    return "".join(_part(part, place, index) for place, part in enumerate(content))


def _part(part: Any, place: int, index: int) -> str:
    if not isinstance(part, dict):
        raise InvalidInput(
            f"part {place} of the content is {kind_of_value(part)}: expected {{type, text}}",
            param="messages",
            index=index,
        )
    kind, text = part.get("type"), part.get("text")
    if kind != "text" or not isinstance(text, str):
        shown = repr(kind[:SHOWN_CHARS]) if isinstance(kind, str) else kind_of_value(kind)
        what = "has no text" if kind == "text" else f"is of type {shown}, and only text is served"
        raise InvalidInput(f"part {place} of the content {what}", param="messages", index=index)
    return text

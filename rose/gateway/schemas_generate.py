"""The JSON of /v1/completions and /v1/chat/completions, as msgspec types, in OpenAI's shape.

Unknown fields are ignored, as everywhere; fields that would change the answer and cannot be served are known, so that
they can be refused. Knows shapes; knows neither limits nor models.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

Finish = Literal["stop", "length"]
_REFUSED = Meta(description="Not served: anything but null, or what has no effect, is refused.", extra_json_schema={})
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "minItems": 1, "items": {"type": "string"}},
        {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
        {
            "type": "array",
            "minItems": 1,
            "items": {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
        },
    ]
}


class StreamOptions(Struct, kw_only=True):
    include_usage: Annotated[
        bool | None, Meta(description="One more chunk at the end, with no choices and the usage.")
    ] = None


class SampledRequest(Struct, kw_only=True):
    """What both routes take."""

    model: Annotated[str | None, Meta(description="The served name; may be left out.")] = None
    max_tokens: Annotated[
        int | None, Meta(description="Most tokens of an answer.", extra_json_schema={"minimum": 1})
    ] = None
    temperature: Annotated[
        float | None,
        Meta(
            description="0 takes the most likely token. null is the model's own default, or 1.",
            extra_json_schema={"minimum": 0},
        ),
    ] = None
    top_p: Annotated[float | None, Meta(description="Draw among the fewest tokens that add up to it.")] = None
    top_k: Annotated[int | None, Meta(description="Draw among the k most likely; 0 and -1 are all.")] = None
    min_p: Annotated[
        float | None, Meta(description="Leave out tokens less likely than this times the most likely one.")
    ] = None
    seed: Annotated[
        int | None, Meta(description="The same seed draws the same answer; further choices count up from it.")
    ] = None
    stop: Annotated[
        str | list[str] | None, Meta(description="Texts that end the answer, which stops before them; at most 16.")
    ] = None
    stop_token_ids: Annotated[list[int] | None, Meta(description="Tokens that end it, beside the model's own.")] = None
    ignore_eos: Annotated[bool | None, Meta(description="The model's own end tokens do not end it.")] = None
    min_tokens: Annotated[int | None, Meta(description="Before so many tokens nothing ends it.")] = None
    n: Annotated[int | None, Meta(description="Answers to each prompt.", extra_json_schema={"minimum": 1})] = None
    stream: Annotated[bool | None, Meta(description="Server-sent events, ended by `data: [DONE]`.")] = None
    stream_options: StreamOptions | None = None
    priority: Annotated[Literal["online", "bulk"] | None, Meta(description="bulk yields to everything else.")] = None
    user: Annotated[Any, Meta(description="Accepted and ignored.", extra_json_schema={"type": ["string", "null"]})] = (
        None
    )
    frequency_penalty: Annotated[Any, _REFUSED] = None
    presence_penalty: Annotated[Any, _REFUSED] = None
    repetition_penalty: Annotated[Any, _REFUSED] = None
    logit_bias: Annotated[Any, _REFUSED] = None
    response_format: Annotated[Any, _REFUSED] = None
    structured_outputs: Annotated[Any, _REFUSED] = None
    guided_json: Annotated[Any, _REFUSED] = None
    guided_regex: Annotated[Any, _REFUSED] = None
    guided_choice: Annotated[Any, _REFUSED] = None
    guided_grammar: Annotated[Any, _REFUSED] = None
    use_beam_search: Annotated[Any, _REFUSED] = None
    best_of: Annotated[Any, _REFUSED] = None


class CompletionRequest(SampledRequest, kw_only=True):
    """What POST /v1/completions takes. max_tokens is 16 where it is left out, as with OpenAI."""

    prompt: Annotated[
        Any,
        Meta(
            description="A text, a list of texts, a list of token ids, or a list of token id lists. Control tokens "
            "written in a text count; token ids are used as they are.",
            extra_json_schema=_PROMPT_SCHEMA,
        ),
    ]
    logprobs: Annotated[
        int | None, Meta(description="Log probabilities of the tokens and of so many alternatives each; at most 20.")
    ] = None
    echo: Annotated[bool | None, Meta(description="The answer begins with its prompt; not beside logprobs.")] = None
    add_special_tokens: Annotated[
        bool | None, Meta(description="Of texts: put the tokenizer's own around them, as by default.")
    ] = None
    split_special_tokens: Annotated[
        bool | None, Meta(description="Control tokens written in a text are ordinary text.")
    ] = None
    suffix: Annotated[Any, _REFUSED] = None


class ChatMessage(Struct, kw_only=True):
    role: Annotated[str, Meta(extra_json_schema={"enum": ["system", "developer", "user", "assistant", "tool"]})]
    content: Annotated[
        Any,
        Meta(
            description="A text, or a list of parts {type: text, text}, which are put together as they are.",
            extra_json_schema={"anyOf": [{"type": "string"}, {"type": "array"}]},
        ),
    ] = None
    name: str | None = None
    reasoning_content: Annotated[str | None, Meta(description="An assistant's thinking, for templates.")] = None
    tool_calls: Annotated[Any, _REFUSED] = None
    function_call: Annotated[Any, _REFUSED] = None
    audio: Annotated[Any, _REFUSED] = None


class ChatRequest(SampledRequest, kw_only=True):
    """What POST /v1/chat/completions takes."""

    messages: Annotated[list[ChatMessage], Meta(extra_json_schema={"minItems": 1})]
    max_completion_tokens: Annotated[
        int | None,
        Meta(description="Another name of max_tokens. Without either, as many as the model's limit leaves."),
    ] = None
    logprobs: Annotated[bool | None, Meta(description="Log probabilities of the tokens.")] = None
    top_logprobs: Annotated[int | None, Meta(description="And of so many alternatives each; at most 20.")] = None
    add_generation_prompt: Annotated[
        bool | None, Meta(description="false: the template does not open an assistant's message.")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Meta(description="Variables of the model's template, such as enable_thinking.")
    ] = None
    tools: Annotated[Any, _REFUSED] = None
    tool_choice: Annotated[Any, _REFUSED] = None
    functions: Annotated[Any, _REFUSED] = None
    function_call: Annotated[Any, _REFUSED] = None
    modalities: Annotated[Any, _REFUSED] = None
    audio: Annotated[Any, _REFUSED] = None
    prediction: Annotated[Any, _REFUSED] = None
    reasoning_effort: Annotated[Any, _REFUSED] = None
    web_search_options: Annotated[Any, _REFUSED] = None
    documents: Annotated[Any, _REFUSED] = None
    chat_template: Annotated[Any, _REFUSED] = None
    continue_final_message: Annotated[Any, _REFUSED] = None


class PromptDetails(Struct):
    cached_tokens: Annotated[int, Meta(description="Of the prompt, found in the engine's cache.")]


class GenerateUsage(Struct, kw_only=True):
    """Each prompt counts once, however many answers it has; an end token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class CompletionLogprobs(Struct):
    """Beside each other, one entry a token. A token that is no whole character is spelled `bytes:\\xe7\\x8c`."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class CompletionChoice(Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Finish | None = None
    stop_reason: Annotated[
        str | UnsetType, Meta(description="The stop string that ended it; absent where none did.")
    ] = UNSET


class CompletionResponse(Struct, kw_only=True):
    """The whole answer, and each chunk of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: GenerateUsage | UnsetType | None = UNSET


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct):
    token: str
    logprob: float
    bytes: Annotated[list[int], Meta(description="UTF-8 of the token, which may be a part of a character.")]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprob]
    refusal: None = None


class AnswerMessage(Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(Struct, kw_only=True):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish
    stop_reason: Annotated[
        str | UnsetType, Meta(description="The stop string that ended it; absent where none did.")
    ] = UNSET


class ChatResponse(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: GenerateUsage


class ChatDelta(Struct, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish | None = None
    stop_reason: str | UnsetType = UNSET


class ChatChunk(Struct, kw_only=True):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: GenerateUsage | UnsetType | None = UNSET

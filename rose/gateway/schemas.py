"""The JSON that goes in and out, as msgspec types; the OpenAPI document is made from them.

Unknown fields are ignored: generic clients send fields of other servers. Knows shapes; knows neither limits nor models.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

_TEXTS_OR_IDS = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
        {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
        {
            "type": "array",
            "minItems": 1,
            "items": {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
        },
    ]
}
_BASE64 = (
    "The vector as a list of numbers, or base64 of the bytes that were asked for; null where `outputs` leaves it out."
)


class EmbeddingRequest(Struct, kw_only=True):
    """What POST /v1/embeddings takes."""

    input: Annotated[
        Any,
        Meta(
            description="A text, a list of texts, a list of token ids, or a list of token id lists. Texts are used "
            "unchanged; token ids are used as they are, with no special tokens added.",
            extra_json_schema=_TEXTS_OR_IDS,
        ),
    ]
    model: Annotated[str | None, Meta(description="The served name; may be left out.")] = None
    encoding_format: Annotated[
        str | None,
        Meta(
            description="null is float: a list of numbers. base64 is the bytes of output_dtype, little-endian "
            "float32 for float. base64_int8 is signed bytes and base64_binary one bit a dimension, least significant "
            "bit first; both only from models with such outputs.",
            extra_json_schema={"enum": ["float", "base64", "base64_int8", "base64_binary", None]},
        ),
    ] = None
    output_dtype: Annotated[
        str | None,
        Meta(
            description="float (also for null). int8 and uint8 (int8 + 128): only from models with a quantiser of "
            "their own. ubinary: one bit a dimension, set where the number is above zero, eight to a byte, most "
            "significant bit first; binary: the same bytes - 128, signed.",
            extra_json_schema={"enum": ["float", "int8", "uint8", "binary", "ubinary", None]},
        ),
    ] = None
    outputs: Annotated[
        list[str] | None,
        Meta(
            description="What each item carries, of the outputs in GET /v1/models. null is the default one, which is "
            "always called `embedding`; others have their own names: `sparse`, `colbert`.",
            extra_json_schema={"minItems": 1},
        ),
    ] = None
    sparse_format: Annotated[
        Literal["ids", "tokens"] | None,
        Meta(
            description="ids (also for null): {indices, values}. tokens: {token: weight}, as the vocabulary spells it."
        ),
    ] = None
    dimensions: Annotated[
        int | None,
        Meta(
            description="Cut vectors to this many numbers, then normalise again if the model normalises. "
            "null keeps all of them.",
            extra_json_schema={"minimum": 1},
        ),
    ] = None
    user: Annotated[Any, Meta(description="Accepted and ignored.", extra_json_schema={"type": ["string", "null"]})] = (
        None
    )
    prompt_name: Annotated[
        str | None,
        Meta(
            description="A prompt of the model card, put before every text verbatim. null is the model's default "
            "prompt (most have none), the empty string is no prompt. Texts only."
        ),
    ] = None
    prompt: Annotated[
        str | None,
        Meta(description="A prompt in words, put before every text verbatim, instead of one of the card."),
    ] = None
    truncate: Annotated[
        bool | None,
        Meta(description="Cut over-long inputs to the model's limit, special tokens kept, instead of refusing them."),
    ] = None
    truncate_prompt_tokens: Annotated[
        int | None,
        Meta(
            description="Cut inputs to at most this many tokens, special tokens included; -1 is the model's limit.",
            extra_json_schema={"minimum": -1},
        ),
    ] = None
    split_long_inputs: Annotated[
        bool | None,
        Meta(
            description="Embed over-long inputs in pieces and average their vectors by tokens, normalised again if the "
            "model normalises, instead of refusing them."
        ),
    ] = None
    split_special_tokens: Annotated[
        bool | None,
        Meta(description="Treat control tokens written in a text as ordinary text (for untrusted input)."),
    ] = None
    priority: Annotated[
        Literal["online", "bulk"] | None,
        Meta(description="bulk yields to everything else."),
    ] = None


class Usage(Struct):
    """Tokens, special tokens and prompts included."""

    prompt_tokens: int
    total_tokens: int


class Base64Array(Struct, kw_only=True):
    """An array in base64, little-endian, row after row."""

    dtype: str
    shape: list[int]
    data: str


class Embedding(Struct, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: Annotated[int, Meta(description="Position of the input this vector belongs to.")]
    embedding: Annotated[list[float] | str | None, Meta(description=_BASE64)]
    dtype: Annotated[
        Literal["int8", "uint8", "binary", "ubinary"] | UnsetType,
        Meta(description="What `embedding` is made of; absent for float32."),
    ] = UNSET
    bit_order: Annotated[
        Literal["msb", "lsb"] | UnsetType, Meta(description="Of packed bits: which bit of a byte comes first.")
    ] = UNSET
    sparse: Annotated[
        dict[str, Any] | UnsetType,
        Meta(
            description="Lexical weights: {indices, values}, token ids ascending; or {token: weight} as asked. The "
            "largest of each token, only above zero, special tokens left out."
        ),
    ] = UNSET
    colbert: Annotated[
        list[list[float]] | Base64Array | UnsetType, Meta(description="A vector a token; in base64 with its shape.")
    ] = UNSET


class EmbeddingResponse(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: Usage
    prompt_name: Annotated[
        str | UnsetType, Meta(description="The prompt that was put before the texts; absent if none was.")
    ] = UNSET
    prompt: Annotated[str | UnsetType, Meta(description="The same, where it was sent in words.")] = UNSET


class OutputInfo(Struct, kw_only=True):
    """One thing the model can give for an input."""

    name: str
    dtype: str
    dimension: int
    per_token: bool
    normalized: bool
    kind: Annotated[Literal["vector", "weights", "score"], Meta(description="weights: one a token.")] = "vector"
    unavailable: Annotated[str | None, Meta(description="Why it cannot be had; null if it can.")] = None


class Model(Struct, kw_only=True):
    """One served model, with the limits that requests are checked against."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "rose"
    task: Annotated[Literal["embed", "rerank", "generate"], Meta(description="Which routes it serves.")]
    max_model_len: Annotated[
        int,
        Meta(description="Longest input in tokens, special tokens included; where it generates, with the answer."),
    ]
    max_items: Annotated[int, Meta(description="Most inputs of one request.")]
    max_body_bytes: int
    dimension: Annotated[
        int | None, Meta(description="Length of the vector when `dimensions` is not given; null where there is none.")
    ]
    matryoshka_dimensions: Annotated[
        list[int], Meta(description="Lengths the model was trained to be cut to; empty: not stated.")
    ]
    prompts: dict[str, str]
    default_prompt_name: str | None = None
    include_prompt: Annotated[bool, Meta(description="Whether a prompt's own tokens are pooled with the text's.")] = (
        True
    )
    outputs: list[OutputInfo]
    architecture: str
    pooling: str
    dtype: str
    device: str
    backend: str
    chat: Annotated[bool, Meta(description="Whether it has a chat template, for /v1/chat/completions.")] = False
    end_token_ids: Annotated[list[int], Meta(description="Tokens that end an answer.")] = []
    max_running: Annotated[int, Meta(description="Answers that one engine writes at a time.")] = 0


class ModelList(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


class ReplicaState(Struct, kw_only=True):
    address: str
    ready: bool
    reason: Annotated[str, Meta(description="Why it is not ready; empty if it is.")]
    outstanding_tokens: int


class Readiness(Struct, kw_only=True):
    """Whether the next request would be taken, and if not, why."""

    ready: bool
    reasons: list[str]
    replicas: list[ReplicaState]


class Liveness(Struct, kw_only=True):
    status: Literal["alive"] = "alive"
    version: str


class ErrorDetail(Struct, kw_only=True):
    message: str
    type: Annotated[str, Meta(description="The family, as OpenAI clients know it.")]
    param: Annotated[str | None, Meta(description="The request field at fault.")] = None
    code: Annotated[str, Meta(description="Which error of the table it is.")]
    index: Annotated[int | None, Meta(description="The item at fault, in a list input.")] = None


class ErrorResponse(Struct):
    error: ErrorDetail

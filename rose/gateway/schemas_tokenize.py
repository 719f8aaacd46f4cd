"""The JSON of /v1/tokenize and /v1/detokenize, as msgspec types; the OpenAPI document is made from them.

Unknown fields are ignored, as in schemas.py. Knows shapes; knows neither limits nor models.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from rose.gateway.schemas_generate import ChatMessage

_TEXT = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_TEXT_OR_TEXTS = {"anyOf": [_TEXT, {"type": "array", "minItems": 1, "items": _TEXT}]}
_IDS_OR_LISTS = {"anyOf": [_IDS, {"type": "array", "minItems": 1, "items": _IDS}]}


class TokenizeRequest(Struct, kw_only=True):
    """What POST /v1/tokenize takes: `prompt` or `messages`."""

    prompt: Annotated[Any, Meta(description="A text, or a list of texts.", extra_json_schema=_TEXT_OR_TEXTS)] = None
    messages: Annotated[
        list[ChatMessage] | None,
        Meta(description="Instead of a prompt, for models with a chat template.", extra_json_schema={"minItems": 1}),
    ] = None
    model: Annotated[str | None, Meta(description="The served name; may be left out.")] = None
    prompt_name: Annotated[
        str | None,
        Meta(description="Prompt of the card, put before every text as embedding does; null is none."),
    ] = None
    add_special_tokens: Annotated[
        bool | None, Meta(description="false: without the special tokens the model has around a text.")
    ] = None
    split_special_tokens: Annotated[
        bool | None, Meta(description="true: control tokens written in a text are ordinary text.")
    ] = None
    add_generation_prompt: Annotated[
        bool | None, Meta(description="Of messages. false: the template does not open an assistant's message.")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Meta(description="Of messages: variables of the model's template.")
    ] = None
    return_token_strs: Annotated[bool | None, Meta(description="true: the vocabulary's own spellings as well.")] = None


class TokenizeResponse(Struct, kw_only=True):
    """Of a list of texts every field but the limit is a list, in the order of the texts."""

    count: int | list[int]
    max_model_len: Annotated[int, Meta(description="Tokens that the model takes.")]
    tokens: list[int | list[int]]
    token_strs: list[str | list[str]] | UnsetType = UNSET


class DetokenizeRequest(Struct, kw_only=True):
    """What POST /v1/detokenize takes."""

    tokens: Annotated[
        Any, Meta(description="Token ids, or a list of lists of them.", extra_json_schema=_IDS_OR_LISTS)
    ] = None
    model: Annotated[str | None, Meta(description="The served name; may be left out.")] = None
    skip_special_tokens: Annotated[bool | None, Meta(description="true: they are left out of the text.")] = None


class DetokenizeResponse(Struct, kw_only=True):
    """A list of texts where lists of ids came."""

    prompt: str | list[str]

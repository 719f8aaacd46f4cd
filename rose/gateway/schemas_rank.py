"""The JSON of /v1/rerank and /v1/score, as msgspec types; the OpenAPI document is made from them.

Unknown fields are ignored, as in schemas.py. Knows shapes; knows neither limits nor models.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from rose.gateway.methods import METHODS
from rose.gateway.schemas import Usage

_TEXT = {"type": "string", "minLength": 1}
_TEXT_OBJECT = {"type": "object", "properties": {"text": _TEXT}, "required": ["text"]}
_DOCUMENTS = {"type": "array", "minItems": 1, "items": {"anyOf": [_TEXT, _TEXT_OBJECT]}}
_TEXT_OR_TEXTS = {"anyOf": [_TEXT, {"type": "array", "minItems": 1, "items": _TEXT}]}
_RAW = (
    "true: the model's logits. false: their sigmoid (with a label: its probability). null: what the model's own files "
    "apply, which is the sigmoid for one label unless they say otherwise. All of that is about method cross: scores of "
    "texts that are compared are no logits, and stay as they are whatever is sent; activation is then none."
)


class PairFields(Struct, kw_only=True):
    """What scoring of pairs takes on every route."""

    model: Annotated[str | None, Meta(description="The served name; may be left out.")] = None
    raw_scores: Annotated[bool | None, Meta(description=_RAW)] = None
    instruction: Annotated[
        str | None, Meta(description="The task in words, for models with a template; null is the model's own.")
    ] = None
    method: Annotated[
        str | None,
        Meta(
            description="cross: one pass over both texts. dense: cosine. sparse: lexical weights. colbert: MaxSim. "
            "combined: weighted mean of the last three. null: cross where the model scores pairs, else dense.",
            extra_json_schema={"enum": [*METHODS, None]},
        ),
    ] = None
    weights: Annotated[
        dict[str, float] | None,
        Meta(description="For method combined: of dense, sparse and colbert; null is 1 each. Zero leaves one out."),
    ] = None
    label: Annotated[
        str | int | None,
        Meta(description="The label to score by, by name or number, for models with several. Required for those."),
    ] = None
    truncate: Annotated[
        bool | None,
        Meta(description="Cut documents that are too long, instead of refusing them. Queries are never cut."),
    ] = None
    max_tokens_per_doc: Annotated[
        int | None,
        Meta(description="Cut every document to this many tokens first.", extra_json_schema={"minimum": 1}),
    ] = None
    split_special_tokens: Annotated[
        bool | None,
        Meta(
            description="Control tokens written in a text are ordinary text, unless this is false. Models with a "
            "template refuse false."
        ),
    ] = None
    query_prompt_name: Annotated[
        str | None,
        Meta(description="Prompt of the card for queries that are compared; null: its `query`, else its default."),
    ] = None
    document_prompt_name: Annotated[
        str | None,
        Meta(description="The same for documents; null: its `document`, `passage` or `corpus`, else its default."),
    ] = None
    priority: Annotated[Literal["online", "bulk"] | None, Meta(description="bulk yields to everything else.")] = None
    user: Annotated[Any, Meta(description="Accepted and ignored.", extra_json_schema={"type": ["string", "null"]})] = (
        None
    )


class RerankRequest(PairFields, kw_only=True):
    """What POST /v1/rerank takes."""

    query: Annotated[Any, Meta(description="A text, or {text}.", extra_json_schema={"anyOf": [_TEXT, _TEXT_OBJECT]})]
    documents: Annotated[Any, Meta(description="Texts, or objects with a text.", extra_json_schema=_DOCUMENTS)]
    top_n: Annotated[
        int | None, Meta(description="Only so many of the best; null is all.", extra_json_schema={"minimum": 1})
    ] = None
    return_documents: Annotated[bool | None, Meta(description="Send the texts back. Off by default.")] = None


class DocumentText(Struct):
    text: str


class RankedResult(Struct, kw_only=True):
    index: Annotated[int, Meta(description="Position in `documents`.")]
    relevance_score: float
    document: Annotated[DocumentText | UnsetType, Meta(description="With return_documents.")] = UNSET


class TokenCount(Struct):
    input_tokens: int


class RerankMeta(Struct):
    tokens: TokenCount


class RerankResponse(Struct, kw_only=True):
    id: Annotated[str, Meta(description="The request's X-Request-Id.")]
    object: Literal["list"] = "list"
    model: str
    results: Annotated[list[RankedResult], Meta(description="Best first; equal ones in the order of the request.")]
    usage: Usage
    meta: RerankMeta
    method: str
    activation: Annotated[Literal["sigmoid", "none"], Meta(description="What the scores have been through.")]
    label: Annotated[str | int | UnsetType, Meta(description="As asked, for models with several.")] = UNSET
    prompts: Annotated[
        dict[str, str] | UnsetType, Meta(description="Prompts put before `query` and `document`, by name.")
    ] = UNSET


class ScoreRequest(PairFields, kw_only=True):
    """What POST /v1/score takes: one text with one or many, or many with as many."""

    text_1: Annotated[Any, Meta(description="One text or several.", extra_json_schema=_TEXT_OR_TEXTS)] = None
    text_2: Annotated[Any, Meta(description="One text or several.", extra_json_schema=_TEXT_OR_TEXTS)] = None
    queries: Annotated[Any, Meta(description="Another name of text_1.", extra_json_schema=_TEXT_OR_TEXTS)] = None
    documents: Annotated[Any, Meta(description="Another name of text_2.", extra_json_schema=_TEXT_OR_TEXTS)] = None


class PairScore(Struct, kw_only=True):
    object: Literal["score"] = "score"
    index: int
    score: float


class ScoreResponse(Struct, kw_only=True):
    id: Annotated[str, Meta(description="The request's X-Request-Id.")]
    object: Literal["list"] = "list"
    created: int
    model: str
    data: Annotated[list[PairScore], Meta(description="In the order of the pairs.")]
    usage: Usage
    method: str
    activation: Literal["sigmoid", "none"]
    label: str | int | UnsetType = UNSET
    prompts: dict[str, str] | UnsetType = UNSET

"""The JSON of /v1/contextualizedembeddings, as msgspec types; the OpenAPI document is made from them.

Unknown fields are ignored, as in schemas.py. Knows shapes; knows neither limits nor models.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from rose.gateway.schemas import Usage

_DOCUMENTS = {
    "type": "array",
    "minItems": 1,
    "items": {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
}


class ContextualRequest(Struct, kw_only=True):
    """What POST /v1/contextualizedembeddings takes."""

    input: Annotated[
        Any,
        Meta(
            description="Documents, each a list of its chunks in order. A query is a document of one chunk.",
            extra_json_schema=_DOCUMENTS,
        ),
    ]
    model: Annotated[str | None, Meta(description="The served name; may be left out.")] = None
    encoding_format: Annotated[
        str | None,
        Meta(
            description="base64_int8 (also for null), base64_binary, or float and base64 as in /v1/embeddings.",
            extra_json_schema={"enum": ["base64_int8", "base64_binary", "float", "base64", None]},
        ),
    ] = None
    dimensions: Annotated[
        int | None, Meta(description="Cut vectors to this many numbers.", extra_json_schema={"minimum": 1})
    ] = None
    priority: Annotated[Literal["online", "bulk"] | None, Meta(description="bulk yields to everything else.")] = None
    user: Annotated[Any, Meta(description="Accepted and ignored.", extra_json_schema={"type": ["string", "null"]})] = (
        None
    )


class ChunkEmbedding(Struct, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: Annotated[int, Meta(description="Position of the chunk in its document.")]
    embedding: list[float] | str


class DocumentEmbeddings(Struct, kw_only=True):
    object: Literal["list"] = "list"
    index: Annotated[int, Meta(description="Position of the document in `input`.")]
    data: list[ChunkEmbedding]


class ContextualResponse(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[DocumentEmbeddings]
    model: str
    usage: Annotated[Usage, Meta(description="Separators included.")]

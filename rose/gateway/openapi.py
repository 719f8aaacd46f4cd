"""The OpenAPI 3.1 document, made from the msgspec types and the error table.

Knows types and routes; knows no state.
"""

from __future__ import annotations

from typing import Any

import msgspec

import rose
from rose.config.serving import GatewayConfig
from rose.errors import WIRE_ERRORS, Cancelled
from rose.gateway.generate_request import MAX_ANSWERS
from rose.gateway.schemas import (
    EmbeddingRequest,
    EmbeddingResponse,
    ErrorResponse,
    Liveness,
    Model,
    ModelList,
    Readiness,
)
from rose.gateway.schemas_context import ContextualRequest, ContextualResponse
from rose.gateway.schemas_generate import ChatChunk, ChatRequest, ChatResponse, CompletionRequest, CompletionResponse
from rose.gateway.schemas_rank import RerankRequest, RerankResponse, ScoreRequest, ScoreResponse
from rose.gateway.schemas_tokenize import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse

_TYPES = (
    *(EmbeddingRequest, EmbeddingResponse, RerankRequest, RerankResponse, ScoreRequest, ScoreResponse),
    *(CompletionRequest, CompletionResponse, ChatRequest, ChatResponse, ChatChunk),
    *(TokenizeRequest, TokenizeResponse, DetokenizeRequest, DetokenizeResponse),
    *(ContextualRequest, ContextualResponse, ErrorResponse, Liveness, Model, ModelList, Readiness),
)
_TITLE = "ROSE"
_ABOUT = """\
Embeddings, scores and generated text over HTTP, in the dialects that OpenAI, Jina, Cohere and Perplexity clients speak.
Unknown request fields are ignored. Every error has the same shape:
`{"error": {"message", "type", "param", "code", "index"}}`.

Every answer carries `X-Request-Id` (yours, if you send one); answers of model routes carry `Server-Timing` with the
milliseconds of tokenize, queue, compute and encode.
"""
_EXAMPLE = {"input": ["where does the river meet the sea?", "south of the old lighthouse"], "encoding_format": "float"}
_RERANK_EXAMPLE = {"query": "where does the river meet the sea?", "documents": ["south of the lighthouse", "salt"]}
_SCORE_EXAMPLE = {"text_1": "where does the river meet the sea?", "text_2": ["south of the lighthouse", "salt"]}
_CONTEXTUAL_EXAMPLE = {"input": [["The river rises in the hills.", "It meets the sea."]], "encoding_format": "float"}
_COMPLETION_EXAMPLE = {"prompt": "The river meets the sea", "max_tokens": 32, "temperature": 0}
_CHAT_EXAMPLE = {"messages": [{"role": "user", "content": "Where does the river meet the sea?"}], "max_tokens": 64}
_TOKENIZE_EXAMPLE = {"prompt": "where does the river meet the sea?", "return_token_strs": True}
_REQUEST_HEADERS = [
    {
        "name": "X-Request-Id",
        "in": "header",
        "schema": {"type": "string", "maxLength": 128},
        "description": "Printable ASCII without blanks; comes back with the answer and stands in the log.",
    },
    {
        "name": "X-Request-Timeout-Ms",
        "in": "header",
        "schema": {"type": "integer", "minimum": 1},
        "description": "Milliseconds after which the answer is of no use; work on it stops then.",
    },
]


def openapi_document(config: GatewayConfig) -> dict[str, Any]:
    """The whole document, with this front's limits in it."""
    _, components = msgspec.json.schema_components(_TYPES, ref_template="#/components/schemas/{name}")
    return {
        "openapi": "3.1.0",
        "info": {"title": _TITLE, "version": rose.__version__, "description": _ABOUT},
        "paths": {
            **{path: {"post": _embeddings(config)} for path in ("/v1/embeddings", "/embeddings")},
            **{path: {"post": _rerank(config)} for path in ("/v1/rerank", "/rerank")},
            **{path: {"post": _score(config)} for path in ("/v1/score", "/score")},
            "/v1/contextualizedembeddings": {"post": _contextual(config)},
            **{path: {"post": _completions()} for path in ("/v1/completions", "/completions")},
            **{path: {"post": _chat()} for path in ("/v1/chat/completions", "/chat/completions")},
            **{path: {"post": _tokenize(config)} for path in ("/v1/tokenize", "/tokenize")},
            **{path: {"post": _detokenize()} for path in ("/v1/detokenize", "/detokenize")},
            **{path: {"get": _models()} for path in ("/v1/models", "/models")},
            "/v1/models/{model}": {"get": _model()},
            "/health": {"get": _page("The process is alive", Liveness, "state")},
            "/ready": {"get": _ready()},
            "/metrics": {"get": _text("Prometheus metrics", "text/plain", "state")},
            "/openapi.json": {"get": _text("This document", "application/json", "documents")},
            "/docs": {"get": _text("This document as a page to try things on", "text/html", "documents")},
        },
        "components": {"schemas": components},
    }


def error_responses(statuses: set[int] | None = None) -> dict[str, Any]:
    """Status -> response, from the one error table; a caller who left is never answered."""
    kinds: dict[int, list[str]] = {}
    for error in WIRE_ERRORS:
        if error is not Cancelled:
            kinds.setdefault(error.http_status, []).append(error.kind)
    return {
        str(status): {
            "description": "code: " + " or ".join(names),
            "content": {"application/json": {"schema": _ref(ErrorResponse)}},
            **({"headers": {"Retry-After": _retry_after()}} if status in (429, 503) else {}),
        }
        for status, names in sorted(kinds.items())
        if statuses is None or status in statuses
    }


def _embeddings(config: GatewayConfig) -> dict[str, Any]:
    return _work(
        "embeddings",
        "Vectors for texts or token ids",
        f"At most {config.max_items} inputs, {config.max_request_tokens} tokens and "
        f"{config.max_body_bytes / 2**20:g} MiB a request. data[i] belongs to input i. An input longer than the model "
        "takes is refused, unless `truncate` is set.",
        (EmbeddingRequest, _EXAMPLE),
        ("One vector an input, in order", EmbeddingResponse),
    )


def _rerank(config: GatewayConfig) -> dict[str, Any]:
    return _work(
        "scores",
        "Documents in the order of their relevance to a query",
        f"In the shape of Jina's and Cohere's routes; at most {config.max_items} documents. Cross-encoders score the "
        "pair; other models compare vectors, lexical weights or token vectors.",
        (RerankRequest, _RERANK_EXAMPLE),
        ("Best first", RerankResponse),
    )


def _score(config: GatewayConfig) -> dict[str, Any]:
    return _work(
        "scores",
        "A score for each pair of texts",
        f"One text with any number of others, or as many with as many; at most {config.max_items} pairs.",
        (ScoreRequest, _SCORE_EXAMPLE),
        ("One score a pair, in order", ScoreResponse),
    )


def _contextual(config: GatewayConfig) -> dict[str, Any]:
    return _work(
        "embeddings",
        "Vectors of chunks that have seen their whole document",
        f"In Perplexity's shape, for its contextual models. At most {config.max_documents} documents, "
        f"{config.max_chunks} chunks and {config.max_context_tokens} tokens a request.",
        (ContextualRequest, _CONTEXTUAL_EXAMPLE),
        ("One list a document, one vector a chunk", ContextualResponse),
    )


def _completions() -> dict[str, Any]:
    page = _work(
        "generation",
        "Texts or token ids, continued",
        f"In OpenAI's shape, for generating models. At most {MAX_ANSWERS} answers a request, over all its prompts. "
        "With `stream` server-sent events of the same shape, ended by `data: [DONE]`; one that fails ends with `data: "
        '{"error": ...}` instead.',
        (CompletionRequest, _COMPLETION_EXAMPLE),
        ("One answer a prompt and choice", CompletionResponse),
    )
    page["responses"]["200"]["content"]["text/event-stream"] = {"schema": _ref(CompletionResponse)}
    return page


def _chat() -> dict[str, Any]:
    page = _work(
        "generation",
        "The assistant's next message",
        "In OpenAI's shape, for generating models with a chat template. Streams as completions do.",
        (ChatRequest, _CHAT_EXAMPLE),
        ("One answer a choice", ChatResponse),
    )
    page["responses"]["200"]["content"]["text/event-stream"] = {"schema": _ref(ChatChunk)}
    return page


def _tokenize(config: GatewayConfig) -> dict[str, Any]:
    return _work(
        "tokens",
        "The token ids that the model would see",
        f"In vLLM's shape; a list of texts gives lists. At most {config.max_items} texts and "
        f"{config.max_request_tokens} tokens a request; texts may be longer than the model takes.",
        (TokenizeRequest, _TOKENIZE_EXAMPLE),
        ("Ids, and how many", TokenizeResponse),
    )


def _detokenize() -> dict[str, Any]:
    return _work(
        "tokens",
        "Token ids back into text",
        "In vLLM's shape; lists of ids give a list of texts.",
        (DetokenizeRequest, {"tokens": [11, 12, 13]}),
        ("The text, special tokens included unless they are to be left out", DetokenizeResponse),
    )


def _work(
    tag: str, summary: str, description: str, request: tuple[type, dict[str, Any]], answer: tuple[str, type]
) -> dict[str, Any]:
    """A route that costs model time: request type with an example, answer type with its description."""
    kind, example = request
    return {
        "tags": [tag],
        "summary": summary,
        "description": description,
        "parameters": _REQUEST_HEADERS,
        "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(kind), "example": example}}},
        "responses": {"200": _ok(*answer), **error_responses()},
    }


def _models() -> dict[str, Any]:
    return _page("What is served, with its limits and prompts", ModelList, "models")


def _model() -> dict[str, Any]:
    page = _page("One served model", Model, "models")
    page["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    page["responses"] |= error_responses({404, 503})
    return page


def _ready() -> dict[str, Any]:
    page = _page("The next request would be taken", Readiness, "state")
    page["responses"]["503"] = _ok("It would not: no replica is ready, or the server is draining", Readiness)
    return page


def _page(summary: str, kind: type, tag: str) -> dict[str, Any]:
    return {"tags": [tag], "summary": summary, "responses": {"200": _ok(summary, kind)}}


def _text(summary: str, media_type: str, tag: str) -> dict[str, Any]:
    content = {media_type: {"schema": {"type": "object" if media_type.endswith("json") else "string"}}}
    return {
        "tags": [tag],
        "summary": summary,
        "responses": {"200": {"description": summary, "content": content}},
    }


def _ok(description: str, kind: type) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": _ref(kind)}}}


def _ref(kind: type) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def _retry_after() -> dict[str, Any]:
    return {"description": "Seconds after which trying again makes sense.", "schema": {"type": "integer"}}

"""POST /v1/contextualizedembeddings: Perplexity's dialect on top of the contextual service.

Knows the JSON that goes in and out; knows neither text processing nor replicas.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import msgspec

from rose.errors import InvalidInput, PayloadTooLarge
from rose.gateway.asgi import Call, Reply
from rose.gateway.contextual import ContextualAnswer, ContextualJob, ContextualService
from rose.gateway.embedding_request import PRIORITIES, check_form_dimensions
from rose.gateway.forms import Form, vector_form
from rose.gateway.inputs import FIELD, kind_of_value
from rose.gateway.json_body import read_body
from rose.gateway.metrics import Metrics
from rose.gateway.schemas_context import ContextualRequest
from rose.gateway.timing import deadline_of, server_timing
from rose.gateway.vectors import joined, value_list
from rose.proto import rose_pb2 as pb

DEFAULT_ENCODING = "base64_int8"
_decoder = msgspec.json.Decoder(ContextualRequest)
_encode = msgspec.json.Encoder().encode


class ContextualRoute:
    """The endpoint; one instance serves all requests."""

    def __init__(self, service: ContextualService, metrics: Metrics) -> None:
        self._service = service
        self._metrics = metrics

    async def __call__(self, call: Call, body: bytes) -> Reply:
        """Raises RoseError for everything that is not an answer."""
        config = self._service.service.config
        deadline = deadline_of(call, config.default_timeout_s)
        request = await read_body(_decoder, body, config.max_request_tokens)
        card = self._service.service.embedding_card(request.model)
        self._service.check_served(card)
        form = vector_form(card, request.encoding_format or DEFAULT_ENCODING, None)
        dimensions = check_form_dimensions(request.dimensions, card, form, strict=config.strict_dimensions)
        job = ContextualJob(
            documents=parse_documents(request.input, config.max_documents, config.max_chunks),
            output=form.source,
            dimensions=dimensions if form.engine_cuts else 0,
            priority=PRIORITIES[request.priority],
            deadline=deadline,
        )
        done = await call.unless_gone(self._service.embed(card, job))
        started = time.perf_counter()
        answer = await _answer(card, form, dimensions, done)
        encode_s = time.perf_counter() - started
        self._metrics.encode.observe(encode_s)
        return Reply(200, answer, server_timing(call, done.tokenize_s, done.result.timing, encode_s))


def parse_documents(value: Any, max_documents: int, max_chunks: int) -> list[list[str]]:
    """
    Args:
        value: what a JSON `input` holds.

    Raises:
        InvalidInput: no list of lists of texts, or an empty list or text, with the index of its document.
        PayloadTooLarge: too many documents, or chunks in all.
    """
    if not isinstance(value, list):
        raise InvalidInput(f"expected a list of documents, got {kind_of_value(value)}", param=FIELD)
    if not value:
        raise InvalidInput("the list is empty: expected at least one document", param=FIELD)
    if len(value) > max_documents:
        raise PayloadTooLarge(f"{len(value)} documents in one request, the limit is {max_documents}", param=FIELD)
    chunks = sum(len(document) for document in value if isinstance(document, list))
    for index, document in enumerate(value if chunks <= max_chunks else ()):
        _check_document(document, index)
    if chunks > max_chunks:
        raise PayloadTooLarge(f"{chunks} chunks in one request, the limit is {max_chunks}", param=FIELD)
    documents: list[list[str]] = value
    return documents


def _check_document(document: Any, index: int) -> None:
    if not isinstance(document, list):
        raise InvalidInput(
            f"a document is a list of chunks, got {kind_of_value(document)}: send [[text]] for a query",
            param=FIELD,
            index=index,
        )
    if not document:
        raise InvalidInput("the document has no chunk", param=FIELD, index=index)
    for place, chunk in enumerate(document):
        if not isinstance(chunk, str):
            raise InvalidInput(f"chunk {place} is {kind_of_value(chunk)}, not a text", param=FIELD, index=index)
        if not chunk:
            raise InvalidInput(f"chunk {place} is empty", param=FIELD, index=index)


async def _answer(card: pb.ModelCard, form: Form, dimensions: int, done: ContextualAnswer) -> bytes:
    """schemas_context.ContextualResponse, written by hand: its largest part is already JSON."""
    rows = form.apply(done.result.outputs[form.source], dimensions)
    values = await value_list(rows, as_base64=form.base64)
    documents = [
        b'{"object":"list","index":%d,"data":[%b]}' % (index, _chunks(values[start:end]))
        for index, (start, end) in enumerate(pairwise(done.result.splits[form.source]))
    ]
    tail = b'],"model":%b,"usage":{"prompt_tokens":%d,"total_tokens":%d}}' % (
        _encode(card.model),
        done.tokens,
        done.tokens,
    )
    return await joined([b'{"object":"list","data":[', await joined(documents), tail], b"")


def _chunks(values: list[bytes]) -> bytes:
    return b",".join(
        b'{"object":"embedding","index":%d,"embedding":%b}' % (index, value) for index, value in enumerate(values)
    )

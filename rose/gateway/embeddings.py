"""POST /v1/embeddings: the OpenAI dialect on top of the embedding service.

Knows the answer's JSON and headers; knows neither text processing nor replicas.
"""

from __future__ import annotations

import asyncio
import time

import msgspec

from rose.errors import Unsupported
from rose.gateway.asgi import Call, Headers, Reply
from rose.gateway.embedding_request import TIMEOUT_HEADER, decode_request, make_job, timeout_s
from rose.gateway.metrics import Metrics
from rose.gateway.service import Embedded, EmbedService, output_cards
from rose.gateway.vectors import QUANTISED, check_format, cut_quantised, embedding_list
from rose.proto import rose_pb2 as pb
from rose.proto.convert import AnyArray

_encode = msgspec.json.Encoder().encode


class EmbeddingsRoute:
    """The endpoint; one instance serves all requests."""

    def __init__(self, service: EmbedService, metrics: Metrics) -> None:
        self._service = service
        self._metrics = metrics

    async def __call__(self, call: Call, body: bytes) -> Reply:
        """Raises RoseError for everything that is not an answer."""
        config = self._service.config
        deadline = asyncio.get_running_loop().time() + timeout_s(call.header(TIMEOUT_HEADER), config.default_timeout_s)
        request = decode_request(body)
        card = self._service.card_for(request.model)
        encoding = check_format(request.encoding_format, card)
        job = make_job(request, card, encoding, config.max_items, deadline)
        _check_one_row_an_item(card, job.outputs)
        done = await call.unless_gone(self._service.embed(card, job))
        started = time.perf_counter()
        answer = await _answer(card, done, _rows(done, encoding, request.dimensions), encoding)
        encode_s = time.perf_counter() - started
        self._metrics.encode.observe(encode_s)
        return Reply(200, answer, _timing(call, done, encode_s))


def _check_one_row_an_item(card: pb.ModelCard, outputs: tuple[str, ...]) -> None:
    for output in output_cards(card, outputs):
        if output.per_token:
            raise Unsupported(f"the output {output.name!r} has one vector a token; this route gives one an input")


def _rows(done: Embedded, encoding: str, dimensions: int | None) -> AnyArray:
    vectors = done.result.vectors
    return cut_quantised(vectors, dimensions or 0, encoding) if encoding in QUANTISED else vectors


async def _answer(card: pb.ModelCard, done: Embedded, rows: AnyArray, encoding: str) -> bytes:
    """schemas.EmbeddingResponse, written by hand: its largest part is already JSON."""
    return b'{"object":"list","data":[%b],"model":%b,"usage":{"prompt_tokens":%d,"total_tokens":%d}%b}' % (
        await embedding_list(rows, encoding),
        _encode(card.model),
        done.tokens,
        done.tokens,
        b"" if done.prompt_name is None else b',"prompt_name":' + _encode(done.prompt_name),
    )


def _timing(call: Call, done: Embedded, encode_s: float) -> Headers:
    """Server-Timing, in milliseconds: what browsers and proxies already show."""
    timing = done.result.timing
    stages = (done.tokenize_s, timing.queue_s, timing.compute_s, encode_s, call.elapsed())
    text = b"tokenize;dur=%.3f, queue;dur=%.3f, compute;dur=%.3f, encode;dur=%.3f, total;dur=%.3f"
    return [(b"server-timing", text % tuple(seconds * 1e3 for seconds in stages))]

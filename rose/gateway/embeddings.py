"""POST /v1/embeddings: the OpenAI dialect on top of the embedding service.

Knows the answer's JSON and headers; knows neither text processing nor replicas.
"""

from __future__ import annotations

import asyncio
import time

import msgspec

from rose.gateway.asgi import Call, Reply
from rose.gateway.embedding_request import Plan, Usual, decoder, make_plan
from rose.gateway.forms import cut_rows
from rose.gateway.json_body import off_loop, read_body
from rose.gateway.metrics import Metrics
from rose.gateway.named_outputs import named_list
from rose.gateway.service import Embedded, EmbedService
from rose.gateway.timing import deadline_of, server_timing
from rose.gateway.vectors import embedding_list, joined
from rose.proto import rose_pb2 as pb

_encode = msgspec.json.Encoder().encode


class EmbeddingsRoute:
    """The endpoint; one instance serves all requests."""

    def __init__(self, service: EmbedService, metrics: Metrics) -> None:
        self._service = service
        self._metrics = metrics
        self._usual = Usual()

    async def __call__(self, call: Call, body: bytes) -> Reply:
        """Raises RoseError for everything that is not an answer."""
        config = self._service.config
        deadline = deadline_of(call, config.default_timeout_s)
        request = await read_body(decoder, body, config.max_request_tokens)
        card = self._service.embedding_card(request.model)
        limits = (config.max_items, config.max_request_tokens)
        strict = config.strict_dimensions
        plan = await off_loop(body, make_plan, request, card, self._usual, *limits, deadline, strict=strict)
        done = await call.unless_gone(self._service.embed(card, plan.job))
        started = time.perf_counter()
        answer = await self._answer(card, plan, done)
        encode_s = time.perf_counter() - started
        asyncio.get_running_loop().call_soon(self._metrics.encode.observe, encode_s)  # after the answer
        return Reply(200, answer, server_timing(call, done.tokenize_s, done.result.timing, encode_s))

    async def _answer(self, card: pb.ModelCard, plan: Plan, done: Embedded) -> bytes:
        """schemas.EmbeddingResponse, written by hand: its largest part is already JSON."""
        prompt = b"" if done.prompt_name is None else b',"prompt_name":' + _encode(done.prompt_name)
        if plan.job.prompt:
            prompt += b',"prompt":' + _encode(plan.job.prompt)
        tail = b'],"model":%b,"usage":{"prompt_tokens":%d,"total_tokens":%d}%b}' % (
            _encode(card.model),
            done.tokens,
            done.tokens,
            prompt,
        )
        return await joined([b'{"object":"list","data":[', await self._data(card, plan, done), tail], b"")

    async def _data(self, card: pb.ModelCard, plan: Plan, done: Embedded) -> bytes:
        if plan.named is not None:
            return await named_list(card, plan.named, done, self._service.tokenizer, plan.cut)
        rows = cut_rows(card, plan.form, done.result.vectors, plan.cut)
        return await embedding_list(rows, as_base64=plan.form.base64, fields=plan.form.fields())

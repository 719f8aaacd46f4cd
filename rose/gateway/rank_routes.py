"""POST /v1/rerank in the Jina and Cohere shape, POST /v1/score for pairs: dialects on top of the rank service.

Knows the answers' JSON and headers; knows neither text processing nor replicas.
"""

from __future__ import annotations

import time

import msgspec

from rose.gateway.asgi import Call, Reply
from rose.gateway.json_body import read_body
from rose.gateway.metrics import Metrics
from rose.gateway.rank_job import Ranked, RankJob
from rose.gateway.rank_request import rerank_decoder, rerank_job, score_decoder, score_job
from rose.gateway.ranking import RankService
from rose.gateway.schemas import Usage
from rose.gateway.schemas_rank import (
    DocumentText,
    PairScore,
    RankedResult,
    RerankMeta,
    RerankRequest,
    RerankResponse,
    ScoreResponse,
    TokenCount,
)
from rose.gateway.timing import deadline_of, server_timing
from rose.proto import rose_pb2 as pb

_encode = msgspec.json.Encoder().encode


class RerankRoute:
    """The endpoint; one instance serves all requests."""

    def __init__(self, service: RankService, metrics: Metrics) -> None:
        self._service = service
        self._metrics = metrics

    async def __call__(self, call: Call, body: bytes) -> Reply:
        """Raises RoseError for everything that is not an answer."""
        config = self._service.service.config
        deadline = deadline_of(call, config.default_timeout_s)
        request = await read_body(rerank_decoder, body, config.max_request_tokens)
        card = self._service.service.embedding_card(request.model)
        job = rerank_job(request, config.max_items, deadline)
        ranked = await call.unless_gone(self._service.rank(card, job))
        started = time.perf_counter()
        answer = _encode(_reranked(call, card, request, job, ranked))
        return _reply(self._metrics, call, answer, ranked, started)


class ScoreRoute:
    """The endpoint; one instance serves all requests."""

    def __init__(self, service: RankService, metrics: Metrics) -> None:
        self._service = service
        self._metrics = metrics

    async def __call__(self, call: Call, body: bytes) -> Reply:
        """Raises RoseError for everything that is not an answer."""
        config = self._service.service.config
        deadline = deadline_of(call, config.default_timeout_s)
        request = await read_body(score_decoder, body, config.max_request_tokens)
        card = self._service.service.embedding_card(request.model)
        ranked = await call.unless_gone(self._service.rank(card, score_job(request, config.max_items, deadline)))
        started = time.perf_counter()
        scores, activation = ranked.shown(request.raw_scores)
        answer = ScoreResponse(
            id=call.id.decode(),
            created=int(time.time()),
            model=card.model,
            data=[PairScore(index=i, score=score) for i, score in enumerate(scores.tolist())],
            usage=Usage(ranked.tokens, ranked.tokens),
            method=ranked.method,
            activation=activation,
            label=msgspec.UNSET if request.label is None else request.label,
            prompts=ranked.prompts or msgspec.UNSET,
        )
        return _reply(self._metrics, call, _encode(answer), ranked, started)


def _reranked(call: Call, card: pb.ModelCard, request: RerankRequest, job: RankJob, ranked: Ranked) -> RerankResponse:
    scores, activation = ranked.shown(request.raw_scores)
    best = ranked.order()[: request.top_n]
    return RerankResponse(
        id=call.id.decode(),
        model=card.model,
        results=[
            RankedResult(
                index=i,
                relevance_score=float(scores[i]),
                document=DocumentText(job.documents[i]) if request.return_documents else msgspec.UNSET,
            )
            for i in best
        ],
        usage=Usage(ranked.tokens, ranked.tokens),
        meta=RerankMeta(TokenCount(ranked.tokens)),
        method=ranked.method,
        activation=activation,
        label=msgspec.UNSET if request.label is None else request.label,
        prompts=ranked.prompts or msgspec.UNSET,
    )


def _reply(metrics: Metrics, call: Call, answer: bytes, ranked: Ranked, started: float) -> Reply:
    encode_s = time.perf_counter() - started
    metrics.encode.observe(encode_s)
    return Reply(200, answer, server_timing(call, ranked.tokenize_s, ranked.timing, encode_s))

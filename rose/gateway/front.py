"""The parts of one front, put together: replicas, tokenizer, service, HTTP application.

Knows who needs whom; knows neither sockets nor signals.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from rose.config.serving import GatewayConfig, check_gateway_config
from rose.gateway.app import HttpFront
from rose.gateway.body_budget import BodyBudget
from rose.gateway.chat import ChatRoute
from rose.gateway.completions import CompletionsRoute
from rose.gateway.contextual import ContextualService
from rose.gateway.contextual_route import ContextualRoute
from rose.gateway.embeddings import EmbeddingsRoute
from rose.gateway.facts import Reading, read_facts
from rose.gateway.generating import GenerateService
from rose.gateway.lifecycle import Lifecycle
from rose.gateway.metrics import Metrics
from rose.gateway.pages import Pages
from rose.gateway.rank_routes import RerankRoute, ScoreRoute
from rose.gateway.ranking import RankService
from rose.gateway.replicas import ReplicaPool
from rose.gateway.service import EmbedService
from rose.gateway.tokenize_routes import DetokenizeRoute, TokenizeRoute
from rose.gateway.tokenizer import TextTokenizer
from rose.proto import rose_pb2 as pb

# Bodies of the largest size held at a time, where nothing else is asked for; decoded, each takes several times as much.
HELD_BODIES = 8
# With so many requests open the event loop is idle most of the time, and a text encoded on it is waited for less than a
# hop to a thread and back takes. One of 512 tokens is 0.4 ms: sixteen of them in turn fill the loop.
FEW_REQUESTS = 4


@dataclass(frozen=True, slots=True)
class Front:
    """Everything the carriers serve from."""

    http: HttpFront
    service: EmbedService
    rank: RankService
    generate: GenerateService
    lifecycle: Lifecycle
    metrics: Metrics
    pool: ReplicaPool
    pages: Pages
    bodies: BodyBudget


@asynccontextmanager
async def make_front(
    config: GatewayConfig, model_folder: Path, *, reading: Reading | None = None
) -> AsyncIterator[Front]:
    """A front that is connecting to its replicas; leaving closes the connections.

    Args:
        reading: keyword arguments of `read_model_folder`, as the engines were given them.

    Raises:
        StartupError: options with which nothing could be served.
        CheckpointError: the folder holds no usable tokenizer.json, or describes a model that cannot be served.
    """
    check_gateway_config(config)
    facts = read_facts(model_folder, reading)
    metrics, lifecycle = Metrics(config.metrics_folder), Lifecycle()
    tokenizer = TextTokenizer(
        facts.tokenizer_folder,
        threads=config.tokenizer_threads,
        inline_chars=config.inline_chars,
        crowded=lambda: lifecycle.in_flight > FEW_REQUESTS,
        queue=config.tokenizer_queue,
        lower_case=facts.lower_case,
    )

    def check_card(card: pb.ModelCard, address: str) -> None:
        tokenizer.check_same(card.tokenizer_sha256, address)

    sharing: asyncio.Task[None] | None = None
    try:
        async with ReplicaPool(
            config.replicas,
            check_card,
            metrics,
            names=config.replica_names,
            silence_s=config.replica_silence_seconds,
            spin_s=config.replica_spin_seconds,
        ) as pool:
            service = EmbedService(pool, tokenizer, config, metrics)
            rank = RankService(service, facts)
            generate = GenerateService(service, facts, metrics)
            pages = Pages(service, generate, lifecycle, metrics)
            metrics.watch(
                replicas=pool.replicas,
                in_flight=lambda: lifecycle.in_flight,
                tokenizer_pool=lambda: tokenizer.pool_depth,
                ready=lambda: float(pages.readiness().ready),
            )
            contextual = ContextualService(service, facts)
            bodies = BodyBudget(config.max_held_bytes or HELD_BODIES * config.max_body_bytes)
            http = http_front(service, rank, contextual, generate, pages, lifecycle, metrics, bodies)
            sharing = asyncio.get_running_loop().create_task(metrics.share()) if config.metrics_folder else None
            yield Front(http, service, rank, generate, lifecycle, metrics, pool, pages, bodies)
    finally:
        if sharing is not None:
            sharing.cancel()
        tokenizer.close()


def http_front(
    service: EmbedService,
    rank: RankService,
    contextual: ContextualService,
    generate: GenerateService,
    pages: Pages,
    lifecycle: Lifecycle,
    metrics: Metrics,
    bodies: BodyBudget,
) -> HttpFront:
    embeddings = EmbeddingsRoute(service, metrics)
    completions, chat = CompletionsRoute(generate), ChatRoute(generate)
    rerank, score = RerankRoute(rank, metrics), ScoreRoute(rank, metrics)
    tokenize, detokenize = TokenizeRoute(generate), DetokenizeRoute(generate)
    return HttpFront(
        {
            "/v1/embeddings": embeddings,
            "/embeddings": embeddings,
            "/v1/rerank": rerank,
            "/rerank": rerank,
            "/v1/score": score,
            "/score": score,
            "/v1/contextualizedembeddings": ContextualRoute(contextual, metrics),
            "/v1/completions": completions,
            "/completions": completions,
            "/v1/chat/completions": chat,
            "/chat/completions": chat,
            "/v1/tokenize": tokenize,
            "/tokenize": tokenize,
            "/v1/detokenize": detokenize,
            "/detokenize": detokenize,
        },
        {
            "/v1/models": pages.models,
            "/models": pages.models,
            "/v1/models/{model:path}": pages.model,
            "/health": pages.health,
            "/ready": pages.ready,
            "/metrics": pages.metrics,
            "/openapi.json": pages.openapi,
            "/docs": pages.docs,
        },
        service.pool.look,
        max_body_bytes=service.config.max_body_bytes,
        bodies=bodies,
        lifecycle=lifecycle,
        metrics=metrics,
    )

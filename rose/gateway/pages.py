"""The routes that cost no model time: liveness, readiness, models, metrics, the OpenAPI document and its page.

Knows the state of the front; knows neither requests in flight nor text.
"""

from __future__ import annotations

import time
from importlib import resources
from typing import Literal

import msgspec
from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import Response

import rose
from rose.errors import RoseError, Unavailable, UnknownModel
from rose.gateway import http_errors
from rose.gateway.generating import GenerateService
from rose.gateway.lifecycle import Lifecycle
from rose.gateway.metrics import Metrics
from rose.gateway.openapi import openapi_document
from rose.gateway.outputs import kind_of, output_cards
from rose.gateway.schemas import Liveness, Model, ModelList, OutputInfo, Readiness, ReplicaState
from rose.gateway.service import EmbedService, longest
from rose.proto import rose_pb2 as pb

_encode = msgspec.json.Encoder().encode
# A scrape waits no longer than this for the engines' counters; a busy engine's last ones are shown instead.
STATS_TIMEOUT_S = 0.5


class Pages:
    """Endpoints of the GET routes."""

    def __init__(
        self, service: EmbedService, generate: GenerateService, lifecycle: Lifecycle, metrics: Metrics
    ) -> None:
        self._service = service
        self._generate = generate
        self._lifecycle = lifecycle
        self._metrics = metrics
        self._started = int(time.time())
        self._openapi = _encode(openapi_document(service.config))
        self._docs = resources.files("rose.gateway").joinpath("docs_page.html").read_bytes()

    def readiness(self) -> Readiness:
        """Whether the next request would be taken. A busy replica is a ready one."""
        replicas = [
            ReplicaState(
                address=replica.name,
                ready=replica.ready,
                reason=replica.reason,
                outstanding_tokens=replica.outstanding_tokens,
            )
            for replica in self._service.pool.replicas
        ]
        ready = any(replica.ready for replica in replicas)
        reasons = ["draining"] if self._lifecycle.draining else []
        if not ready:
            reasons += [f"{replica.address}: {replica.reason}" for replica in replicas]
        return Readiness(ready=not reasons, reasons=reasons, replicas=replicas)

    async def health(self, request: Request) -> Response:
        return _json(Liveness(version=rose.__version__))

    async def ready(self, request: Request) -> Response:
        await self._service.pool.look()
        readiness = self.readiness()
        if readiness.ready:
            return _json(readiness)
        return _json(readiness, 503, {"retry-after": "1"})

    async def models(self, request: Request) -> Response:
        await self._service.pool.look()
        try:
            models = [self._model(self._service.pool.card)]
        except Unavailable:  # nothing has come up yet: an empty list is the truth
            models = []
        return _json(ModelList(data=models))

    async def model(self, request: Request) -> Response:
        await self._service.pool.look()
        try:
            return _json(self._model(self._service.card_for(request.path_params["model"])))
        except (UnknownModel, Unavailable) as error:
            return _error(error)

    async def metrics(self, request: Request) -> Response:
        await self._service.pool.refresh_stats(STATS_TIMEOUT_S)
        encoder, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encoder(self._metrics.collected()), headers={"content-type": content_type})

    async def openapi(self, request: Request) -> Response:
        return Response(self._openapi, media_type="application/json")

    async def docs(self, request: Request) -> Response:
        return Response(self._docs, media_type="text/html")

    def _model(self, card: pb.ModelCard) -> Model:
        config = self._service.config
        return Model(
            id=card.model,
            created=self._started,
            # A prompt is cut into chunks by the engine itself: the size of a batch bounds texts to embed only.
            max_model_len=card.max_tokens if card.generates else longest(card),
            max_items=config.max_items,
            max_body_bytes=config.max_body_bytes,
            dimension=_dimension(card),
            matryoshka_dimensions=list(card.matryoshka_dimensions),
            prompts=dict(card.prompts),
            default_prompt_name=card.default_prompt_name or None,
            include_prompt=not card.excludes_prompt,
            outputs=[_output(output) for output in card.outputs],
            architecture=card.architecture,
            pooling=card.pooling,
            dtype=card.dtype,
            device=card.device,
            backend=card.backend,
            task=_task(card),
            chat=card.generates and self._generate.chats,
            end_token_ids=list(card.end_ids),
            max_running=card.max_running,
        )


def _dimension(card: pb.ModelCard) -> int | None:
    if card.generates:
        return None
    return next((output.dimension for output in output_cards(card, ())), card.hidden_size)


def _task(card: pb.ModelCard) -> Literal["embed", "rerank", "generate"]:
    if card.generates:
        return "generate"
    return "rerank" if any(output.kind == "score" for output in card.outputs) else "embed"


def _output(output: pb.OutputCard) -> OutputInfo:
    return OutputInfo(
        name=output.name,
        dtype=pb.DType.Name(output.dtype).lower(),
        dimension=output.dimension,
        per_token=output.per_token,
        normalized=output.normalized,
        kind=kind_of(output),
        unavailable=output.unavailable or None,
    )


def _json(value: msgspec.Struct, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(_encode(value), status, headers, "application/json")


def _error(error: RoseError) -> Response:
    reply = http_errors.error_reply(error)
    headers = {name.decode(): value.decode() for name, value in reply.headers}
    return Response(reply.body, reply.status, headers, "application/json")

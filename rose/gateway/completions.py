"""POST /v1/completions: texts or token ids continued, in OpenAI's shape.

Knows the route's fields and JSON; knows neither tokenising nor replicas.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from msgspec import UNSET

from rose.errors import RoseError
from rose.gateway.answer import Delta
from rose.gateway.asgi import Call, Reply, StreamReply
from rose.gateway.embedding_request import PRIORITIES
from rose.gateway.generate_reply import Whole, finish_name, stream_reply, whole_reply
from rose.gateway.generate_request import check_served, choices_of, completion_decoder, sampling_of
from rose.gateway.generating import PROMPT, GenerateJob, GenerateService, Run
from rose.gateway.inputs import Input, Texts, parse_input, renamed
from rose.gateway.json_body import read_body
from rose.gateway.logprob_shapes import completion_logprobs
from rose.gateway.schemas_generate import (
    CompletionChoice,
    CompletionRequest,
    CompletionResponse,
    GenerateUsage,
)
from rose.gateway.timing import deadline_of
from rose.proto import rose_pb2 as pb
from rose.proto.convert import IntArray


class CompletionsRoute:
    """The endpoint; one instance serves all requests."""

    def __init__(self, service: GenerateService) -> None:
        self._service = service

    async def __call__(self, call: Call, body: bytes) -> Reply | StreamReply:
        """Raises RoseError for everything that is not an answer."""
        config = self._service.service.config
        deadline = deadline_of(call, config.default_timeout_s)
        request = await read_body(completion_decoder, body, config.max_request_tokens)
        card = self._service.card_for(request.model)
        check_served(request)
        given = _prompts(request, card, config.max_items, config.max_request_tokens)
        choices = choices_of(request, len(given.items))
        sampling = sampling_of(request, self._service.defaults)
        sampling.check(card.vocab_size)
        listed = isinstance(request.prompt, list) and not isinstance(request.prompt[0], int)
        prompts, tokenize_s = await self._ids(request, card, given, deadline, listed)
        job = GenerateJob(
            prompts=prompts,
            sampling=sampling,
            choices=choices,
            listed=listed,
            priority=PRIORITIES[request.priority],
            deadline=deadline,
        )
        run = self._service.run(card, job)
        dialect = _Completions(call, card, self._echoed(request, given))
        if request.stream:
            options = request.stream_options
            dialect.usage_in_stream = options is not None and bool(options.include_usage)
            return await call.unless_gone(stream_reply(run, dialect))
        return await call.unless_gone(whole_reply(call, run, dialect, tokenize_s))

    async def _ids(
        self, request: CompletionRequest, card: pb.ModelCard, given: Input, deadline: float, listed: bool
    ) -> tuple[Sequence[IntArray], float]:
        if not isinstance(given, Texts):
            return given.items, 0.0
        return await self._service.text_prompts(
            card,
            given.items,
            deadline,
            listed=listed,
            add_special_tokens=request.add_special_tokens is not False,
            split_special_tokens=bool(request.split_special_tokens),
        )

    def _echoed(self, request: CompletionRequest, given: Input) -> Sequence[str]:
        """What stands before the answers to each prompt."""
        if not request.echo:
            return [""] * len(given.items)
        if isinstance(given, Texts):
            return given.items
        return [self._service.texts.text(ids.tolist()) for ids in given.items]


def _prompts(request: CompletionRequest, card: pb.ModelCard, max_items: int, max_ids: int) -> Input:
    try:
        return parse_input(request.prompt, vocab_size=card.vocab_size, max_items=max_items, max_ids=max_ids)
    except RoseError as error:
        raise renamed(error, PROMPT, error.index) from None


class _Completions:
    """One request's answers."""

    def __init__(self, call: Call, card: pb.ModelCard, echoed: Sequence[str]) -> None:
        self.usage_in_stream = False
        self._id = f"cmpl-{call.id.decode()}"
        self._created = int(time.time())
        self._model = card.model
        self._echoed = echoed

    def whole(self, run: Run, answers: list[Whole], usage: GenerateUsage) -> CompletionResponse:
        choices = [
            CompletionChoice(
                index=number,
                text=self._before(run, number) + answer.text,
                logprobs=completion_logprobs(answer.infos, run.texts) if run.logprobs else None,
                finish_reason=answer.finish,
                stop_reason=run.answers[number].stop or UNSET,
            )
            for number, answer in enumerate(answers)
        ]
        return self._response(choices, usage=usage)

    def opening(self, run: Run, number: int) -> Iterable[CompletionResponse]:
        before = self._before(run, number)
        return [self._chunk(CompletionChoice(index=number, text=before))] if before else []

    def chunks(self, run: Run, number: int, delta: Delta) -> Iterable[CompletionResponse]:
        choice = CompletionChoice(
            index=number,
            text=delta.text,
            logprobs=completion_logprobs(delta.infos, run.texts) if run.logprobs else None,
            finish_reason=finish_name(delta) if delta.finish else None,
            stop_reason=(run.answers[number].stop or UNSET) if delta.finish else UNSET,
        )
        return [self._chunk(choice)]

    def closing(self, usage: GenerateUsage) -> Iterable[CompletionResponse]:
        return [self._response([], usage=usage)] if self.usage_in_stream else []

    def _before(self, run: Run, number: int) -> str:
        return self._echoed[number // run.job.choices]

    def _chunk(self, choice: CompletionChoice) -> CompletionResponse:
        response = self._response([choice])
        if self.usage_in_stream:
            response.usage = None
        return response

    def _response(self, choices: list[CompletionChoice], usage: GenerateUsage | None = None) -> CompletionResponse:
        return CompletionResponse(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=UNSET if usage is None else usage,
        )

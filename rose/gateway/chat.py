"""POST /v1/chat/completions: the assistant's next message, in OpenAI's shape.

Knows the route's fields and JSON; knows neither templates nor replicas.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from msgspec import UNSET

from rose.gateway.answer import Delta
from rose.gateway.asgi import Call, Reply, StreamReply
from rose.gateway.embedding_request import PRIORITIES
from rose.gateway.generate_reply import Whole, finish_name, stream_reply, whole_reply
from rose.gateway.generate_request import (
    chat_decoder,
    chat_messages,
    check_served,
    choices_of,
    sampling_of,
    template_variables,
)
from rose.gateway.generating import GenerateJob, GenerateService, Run
from rose.gateway.json_body import read_body
from rose.gateway.logprob_shapes import chat_logprobs
from rose.gateway.schemas_generate import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatResponse,
    GenerateUsage,
)
from rose.gateway.timing import deadline_of
from rose.proto import rose_pb2 as pb


class ChatRoute:
    """The endpoint; one instance serves all requests."""

    def __init__(self, service: GenerateService) -> None:
        self._service = service

    async def __call__(self, call: Call, body: bytes) -> Reply | StreamReply:
        """Raises RoseError for everything that is not an answer."""
        config = self._service.service.config
        deadline = deadline_of(call, config.default_timeout_s)
        request = await read_body(chat_decoder, body, config.max_request_tokens)
        card = self._service.card_for(request.model)
        check_served(request)
        choices = choices_of(request, 1)
        sampling = sampling_of(request, self._service.defaults)
        sampling.check(card.vocab_size)
        ids, tokenize_s = await self._service.chat_prompt(
            card,
            chat_messages(request.messages),
            deadline,
            add_generation_prompt=request.add_generation_prompt is not False,
            variables=template_variables(request.chat_template_kwargs),
        )
        job = GenerateJob(
            prompts=[ids],
            sampling=sampling,
            choices=choices,
            field="messages",
            goes_on=False,
            priority=PRIORITIES[request.priority],
            deadline=deadline,
        )
        run = self._service.run(card, job)
        dialect = _Chat(call, card)
        if request.stream:
            options = request.stream_options
            dialect.usage_in_stream = options is not None and bool(options.include_usage)
            return await call.unless_gone(stream_reply(run, dialect))
        return await call.unless_gone(whole_reply(call, run, dialect, tokenize_s))


class _Chat:
    """One request's answers."""

    def __init__(self, call: Call, card: pb.ModelCard) -> None:
        self.usage_in_stream = False
        self._id = f"chatcmpl-{call.id.decode()}"
        self._created = int(time.time())
        self._model = card.model

    def whole(self, run: Run, answers: list[Whole], usage: GenerateUsage) -> ChatResponse:
        choices = [
            ChatChoice(
                index=number,
                message=AnswerMessage(content=answer.text),
                logprobs=chat_logprobs(answer.infos, run.texts) if run.logprobs else None,
                finish_reason=answer.finish,
                stop_reason=run.answers[number].stop or UNSET,
            )
            for number, answer in enumerate(answers)
        ]
        return ChatResponse(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)

    def opening(self, run: Run, number: int) -> Iterable[ChatChunk]:
        return [self._chunk(ChatChunkChoice(index=number, delta=ChatDelta(role="assistant", content="")))]

    def chunks(self, run: Run, number: int, delta: Delta) -> Iterable[ChatChunk]:
        if delta.text or delta.infos:
            logprobs = chat_logprobs(delta.infos, run.texts) if run.logprobs else None
            yield self._chunk(ChatChunkChoice(index=number, delta=ChatDelta(content=delta.text), logprobs=logprobs))
        if delta.finish:
            stop = run.answers[number].stop or UNSET
            finish = finish_name(delta)
            yield self._chunk(ChatChunkChoice(index=number, delta=ChatDelta(), finish_reason=finish, stop_reason=stop))

    def closing(self, usage: GenerateUsage) -> Iterable[ChatChunk]:
        return [self._response([], usage)] if self.usage_in_stream else []

    def _chunk(self, choice: ChatChunkChoice) -> ChatChunk:
        chunk = self._response([choice])
        if self.usage_in_stream:
            chunk.usage = None
        return chunk

    def _response(self, choices: list[ChatChunkChoice], usage: GenerateUsage | None = None) -> ChatChunk:
        return ChatChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=UNSET if usage is None else usage,
        )

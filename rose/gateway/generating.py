"""Generating as every carrier offers it: checks, prompts, replicas, answers, in that order.

    texts or messages -> token ids -> GenerateJob -> Run -> deltas of its answers

Knows the model card and text; knows neither HTTP nor gRPC.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass

from rose.client import Timing
from rose.errors import InvalidInput, RoseError
from rose.gateway.answer import Answer, Delta
from rose.gateway.chat_prompt import ChatPrompt, Message
from rose.gateway.detokenize import PAST_TOKENS
from rose.gateway.facts import ModelFacts
from rose.gateway.inputs import renamed
from rose.gateway.metrics import Metrics
from rose.gateway.replica import Replica
from rose.gateway.sampling import SamplingOptions
from rose.gateway.service import EmbedService, check_tokens, timed
from rose.gateway.streams import continued, side_by_side
from rose.gateway.text_bounds import Bounds
from rose.proto import rose_pb2 as pb
from rose.proto.convert import IntArray, tokens_to_proto

PROMPT = "prompt"
# Several answers to a prompt of at least so many tokens: the first is begun alone, and the others find the prompt in
# its cache. Below, computing it again in the same batch is quicker than a step's wait.
SHARE_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateJob:
    """What a caller wants continued.

    Attributes:
        prompts: token ids, each within the vocabulary.
        choices: answers to each prompt.
        field: what the caller calls the prompts.
        listed: whether errors name the number of a prompt.
        goes_on: answers are read behind their prompts, as one text; else each is a text of its own.
        deadline: loop.time() after which nobody wants more.
    """

    prompts: Sequence[IntArray]
    sampling: SamplingOptions
    choices: int = 1
    field: str = PROMPT
    listed: bool = False
    goes_on: bool = True
    priority: pb.Priority.ValueType = pb.ONLINE
    deadline: float


class GenerateService:
    """One generating model, whatever the number of replicas and carriers.

    Attributes:
        texts: ids back into text.
    """

    def __init__(self, service: EmbedService, facts: ModelFacts, metrics: Metrics) -> None:
        self.service = service
        self.texts = service.tokenizer.token_texts()
        self.defaults: Mapping[str, float] = {} if facts.generation is None else facts.generation.defaults
        self._chat = None if facts.chat is None else ChatPrompt(facts.chat, service.tokenizer)
        self._metrics = metrics

    @property
    def chats(self) -> bool:
        """Whether messages can be taken."""
        return self._chat is not None

    def card_for(self, model: str | None) -> pb.ModelCard:
        """Raises as EmbedService.card_for; InvalidInput for a model that continues no text."""
        card = self.service.card_for(model)
        if not card.generates:
            raise InvalidInput(
                f"the model {card.model!r} continues no text: it serves /v1/embeddings, /v1/rerank or /v1/score, as "
                "GET /v1/models says",
                param="model",
            )
        return card

    async def text_prompts(
        self,
        card: pb.ModelCard,
        texts: Sequence[str],
        deadline: float,
        *,
        listed: bool = False,
        field: str = PROMPT,
        add_special_tokens: bool = True,
        split_special_tokens: bool = False,
    ) -> tuple[list[IntArray], float]:
        """Ids of texts, and the seconds that took.

        Args:
            listed, field: as GenerateJob has them.

        Raises:
            RoseError: as EmbedService.encode; InvalidInput for a text without tokens.
        """
        try:
            ids, seconds = await self.service.encode(
                texts,
                deadline,
                split_special_tokens=split_special_tokens,
                add_special_tokens=add_special_tokens,
                bounds=Bounds(card.max_tokens),
            )
            for index, sequence in enumerate(ids):
                if not len(sequence):
                    raise InvalidInput("the text gives no tokens", index=index)
        except RoseError as error:
            raise renamed(error, field, error.index if listed else None) from None
        return ids, seconds

    async def chat_prompt(
        self,
        card: pb.ModelCard,
        messages: Sequence[Message],
        deadline: float,
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> tuple[IntArray, float]:
        """Ids of messages, and the seconds that took. Raises as ChatPrompt.ids; DeadlineExceeded."""
        if self._chat is None:
            raise InvalidInput(
                f"the model {card.model!r} has no chat template: send its prompt as a text to /v1/completions",
                param="messages",
            )
        rendering = self._chat.ids(
            messages,
            max_tokens=card.max_tokens,
            add_generation_prompt=add_generation_prompt,
            variables=variables,
        )
        ids, seconds = await timed(rendering, deadline)
        if not len(ids):
            raise InvalidInput("the chat template makes no tokens of the messages", param="messages")
        return ids, seconds

    def run(self, card: pb.ModelCard, job: GenerateJob) -> Run:
        """What begins when its deltas are asked for. Raises InvalidInput, PayloadTooLarge, Unavailable."""
        job.sampling.check(card.vocab_size)
        check_tokens(sum(map(len, job.prompts)), self.service.config.max_request_tokens, job.field)
        left = [_room(card, job, index) for index in range(len(job.prompts))]
        self.service.pool.require_ready()
        return Run(self, job, left, self._metrics)


class Run:
    """The answers of one job.

    Attributes:
        answers: prompt after prompt, the choices of each together.
    """

    def __init__(self, service: GenerateService, job: GenerateJob, left: Sequence[int], metrics: Metrics) -> None:
        sampling = job.sampling
        count = len(job.prompts) * job.choices
        self.job = job
        self.texts = service.texts
        pasts = [prompt[-PAST_TOKENS:].tolist() if job.goes_on else [] for prompt in job.prompts]
        self.answers = [
            Answer(service.texts, sampling.stop, sampling.min_new_tokens, pasts[number // job.choices])
            for number in range(count)
        ]
        self._pool = service.service.pool
        self._left = left
        self._metrics = metrics

    @property
    def logprobs(self) -> bool:
        """Whether log probabilities were asked for."""
        return self.job.sampling.logprobs is not None

    @property
    def longest_answers(self) -> int:
        """Tokens of all answers, where nothing ends them early."""
        return sum(self._left) * self.job.choices

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts; each counts once, however many answers it has."""
        return sum(map(len, self.job.prompts))

    @property
    def completion_tokens(self) -> int:
        return sum(answer.completion_tokens for answer in self.answers)

    @property
    def cached_tokens(self) -> int:
        """Of the prompts, as the first answer to each found them."""
        return sum(answer.cached_tokens for answer in self.answers[:: self.job.choices])

    @property
    def timing(self) -> Timing:
        """Of the slowest answer."""
        return max((answer.timing for answer in self.answers), key=lambda timing: timing.queue_s + timing.compute_s)

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """(number of the answer, delta) as they come. Closing it cancels what is not finished.

        Raises:
            RoseError: of the first answer that fails.
        """
        homes: list[list[Replica] | None] = [[] if self._shares(prompt) else None for prompt in self.job.prompts]
        numbers = range(len(self.answers))
        streams = [self._stream(number, homes[number // self.job.choices]) for number in numbers]
        leaders = [self._leader(number) for number in numbers]
        started = time.perf_counter()
        first = True
        try:
            async with contextlib.aclosing(side_by_side(streams, leaders=leaders)) as stream:
                async for number, delta in stream:
                    if first:
                        self._metrics.first_token.observe(time.perf_counter() - started)
                        first = False
                    yield number, delta
            self._metrics.items.inc(len(self.answers))
            self._metrics.tokens.inc(self.prompt_tokens)
            self._metrics.request_tokens.observe(self.prompt_tokens)
            self._metrics.queue.observe(self.timing.queue_s)
            self._metrics.compute.observe(self.timing.compute_s)
        finally:
            self._metrics.generated.inc(self.completion_tokens)

    async def _stream(self, number: int, home: list[Replica] | None) -> AsyncGenerator[Delta, None]:
        job, answer = self.job, self.answers[number]
        index, choice = divmod(number, job.choices)
        request = pb.GenerateRequest(
            tokens=tokens_to_proto([job.prompts[index]]),
            sampling=job.sampling.message(self._left[index], choice),
            priority=job.priority,
        )
        chunks = continued(self._pool, self._metrics, request, deadline=job.deadline, home=home)
        try:
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    delta = answer.take(chunk)
                    yield delta
                    if delta.finish:
                        return  # of a stop string the engine knows nothing: closing the stream ends it there
        except RoseError as error:
            names = {PROMPT: job.field, "tokens": job.field, **job.sampling.names}
            raise renamed(error, names.get(error.param or ""), index if job.listed else None) from None

    def _shares(self, prompt: IntArray) -> bool:
        return self.job.choices > 1 and len(prompt) >= SHARE_TOKENS

    def _leader(self, number: int) -> int:
        index, choice = divmod(number, self.job.choices)
        return number - choice if self._shares(self.job.prompts[index]) else number


def _room(card: pb.ModelCard, job: GenerateJob, index: int) -> int:
    """New tokens that a prompt's answers may have.

    Raises:
        InvalidInput: none, or fewer than a caller asked for.
    """
    prompt, asked = len(job.prompts[index]), job.sampling.max_new_tokens
    number = index if job.listed else None
    left = card.max_tokens - prompt
    if left < 1:
        raise InvalidInput(
            f"the prompt has {prompt} tokens; the model takes {card.max_tokens}, the answer included",
            param=job.field,
            index=number,
        )
    if asked > left and not job.sampling.may_be_fewer:
        name = job.sampling.names.get("max_new_tokens", "max_new_tokens")
        raise InvalidInput(
            f"{name} of {asked} behind a prompt of {prompt} tokens; the model takes {card.max_tokens} together, which "
            f"leaves {left}",
            param=name,
            index=number,
        )
    return min(asked or left, left)

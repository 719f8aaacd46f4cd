"""Embedding as every carrier offers it: checks, prompt, tokens, replicas, in that order.

    EmbedJob -> texts with prompt -> token ids -> replicas -> Embedded

Knows the model card and text; knows neither HTTP nor gRPC.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rose.client import EmbedResult
from rose.config.serving import GatewayConfig
from rose.errors import DeadlineExceeded, InvalidInput, UnknownModel, Unsupported
from rose.gateway.inputs import FIELD, Input, Texts, check_count, show
from rose.gateway.metrics import Metrics
from rose.gateway.replicas import ReplicaPool
from rose.gateway.tokenizer import TextTokenizer
from rose.proto import rose_pb2 as pb
from rose.proto.convert import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedJob:
    """What a caller wants.

    Attributes:
        input: texts or token ids, already checked for themselves.
        prompt_name: a prompt of the model card; "" for none, None for the model's default.
        cut_to: cut longer inputs to this many tokens, -1 for the model's limit; None refuses them.
        deadline: loop.time() after which nobody wants the answer.
    """

    input: Input
    outputs: tuple[str, ...] = ()
    dimensions: int = 0
    prompt_name: str | None = None
    cut_to: int | None = None
    split_special_tokens: bool = False
    priority: pb.Priority.ValueType = pb.ONLINE
    deadline: float


@dataclass(frozen=True, slots=True)
class Embedded:
    """The answer, and where the time went.

    Attributes:
        prompt_name: the prompt that was put before the texts, or None.
        tokens: tokens of the request as the model saw it.
        tokenize_s: tokenising, the wait for the pool included.
    """

    result: EmbedResult
    prompt_name: str | None
    tokens: int
    tokenize_s: float


class EmbedService:
    """One model, whatever the number of replicas and carriers."""

    def __init__(self, pool: ReplicaPool, tokenizer: TextTokenizer, config: GatewayConfig, metrics: Metrics) -> None:
        self.pool = pool
        self.config = config
        self._tokenizer = tokenizer
        self._metrics = metrics

    def card_for(self, model: str | None) -> pb.ModelCard:
        """The card of the served model.

        Args:
            model: its name, the last part of it, or nothing.

        Raises:
            UnknownModel: any other name.
            Unavailable: no replica has come up yet.
        """
        card = self.pool.card
        if model and model != card.model and model != card.model.rpartition("/")[2]:
            raise UnknownModel(f"the model {model!r} is not served here, this is {card.model!r}", param="model")
        return card

    async def embed(self, card: pb.ModelCard, job: EmbedJob) -> Embedded:
        """Raises RoseError: InvalidInput and PayloadTooLarge before anything is sent, else what the replicas say."""
        check_count(len(job.input.items), self.config.max_items)
        check_outputs(card, job.outputs)
        check_dimensions(card, job.outputs, job.dimensions, strict=self.config.strict_dimensions)
        self.pool.require_ready()  # before any work is spent on a request that nobody could run
        sequences, prompt_name, tokenize_s = await self._sequences(card, job)
        result = await self.pool.embed(
            sequences, outputs=job.outputs, dimensions=job.dimensions, priority=job.priority, deadline=job.deadline
        )
        tokens = sum(map(len, sequences))
        self._count(len(sequences), tokens, tokenize_s, result)
        return Embedded(result, prompt_name, tokens, tokenize_s)

    async def _sequences(self, card: pb.ModelCard, job: EmbedJob) -> tuple[Sequence[IntArray], str | None, float]:
        limit = longest(card)
        cut_to = check_cut(job.cut_to, limit, self._tokenizer.special_tokens)
        if not isinstance(job.input, Texts):
            if job.prompt_name:
                raise InvalidInput("a prompt goes before texts, the input is token ids", param="prompt_name")
            return self._fit(job.input.items, limit, cut_to), None, 0.0
        name, texts = with_prompt(card, job.input.items, job.prompt_name)
        started = time.perf_counter()
        try:
            async with asyncio.timeout_at(job.deadline):
                ids = await self._tokenizer.encode_async(texts, split_special_tokens=job.split_special_tokens)
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed while the texts were being tokenised") from None
        tokenize_s = time.perf_counter() - started
        for index, sequence in enumerate(ids):
            if not len(sequence):
                raise InvalidInput("the text gives no tokens", param=FIELD, index=index)
        return self._fit(ids, limit, cut_to), name, tokenize_s

    def _fit(self, sequences: Sequence[IntArray], limit: int, cut_to: int | None) -> Sequence[IntArray]:
        if cut_to is not None:
            return [self._tokenizer.cut(sequence, cut_to) for sequence in sequences]
        for index, sequence in enumerate(sequences):
            if len(sequence) > limit:
                raise InvalidInput(
                    f"the input has {len(sequence)} tokens, the limit of the model is {limit}; "
                    "shorten it or send truncate=true",
                    param=FIELD,
                    index=index,
                )
        return sequences

    def _count(self, items: int, tokens: int, tokenize_s: float, result: EmbedResult) -> None:
        metrics = self._metrics
        metrics.items.inc(items)
        metrics.tokens.inc(tokens)
        metrics.request_tokens.observe(tokens)
        metrics.tokenize.observe(tokenize_s)
        metrics.queue.observe(result.timing.queue_s)
        metrics.compute.observe(result.timing.compute_s)


def longest(card: pb.ModelCard) -> int:
    """The longest sequence that can be served: a text longer than a batch could never run."""
    return min(card.max_tokens, card.max_batch_tokens)


def check_cut(cut_to: int | None, limit: int, special_tokens: int) -> int | None:
    """The length to cut to. Raises InvalidInput where nothing but special tokens would be left, or above the limit."""
    if cut_to is None or cut_to == -1:
        return limit if cut_to == -1 else None
    if not special_tokens < cut_to <= limit:
        raise InvalidInput(
            f"cannot cut to {show(cut_to)} tokens: expected -1 or {special_tokens + 1}..{limit} "
            f"({special_tokens} of them are special tokens)",
            param="truncate_prompt_tokens",
        )
    return cut_to


def with_prompt(card: pb.ModelCard, texts: Sequence[str], name: str | None) -> tuple[str | None, Sequence[str]]:
    """The prompt that applies, and the texts behind it. Raises InvalidInput for a name the card does not have."""
    chosen = card.default_prompt_name if name is None else name
    if not chosen:
        return None, texts
    if chosen not in card.prompts:
        known = ", ".join(sorted(card.prompts)) or "none"
        raise InvalidInput(f"the model has no prompt {chosen!r}; it has: {known}", param="prompt_name")
    prompt = card.prompts[chosen]
    return chosen, [prompt + text for text in texts]


def output_cards(card: pb.ModelCard, names: Sequence[str]) -> list[pb.OutputCard]:
    """The cards of the asked outputs, or of the default one."""
    wanted = names or [card.default_output or (card.outputs[0].name if card.outputs else "")]
    by_name = {output.name: output for output in card.outputs}
    return [by_name[name] for name in wanted if name in by_name]


def check_outputs(card: pb.ModelCard, names: Sequence[str]) -> None:
    """Raises InvalidInput for an output the model does not know, Unsupported for one it cannot give."""
    for name in names:
        found = next((output for output in card.outputs if output.name == name), None)
        if found is None:
            known = ", ".join(output.name for output in card.outputs)
            raise InvalidInput(f"the model has no output {name!r}; it has: {known}", param="outputs")
        if found.unavailable:
            raise Unsupported(f"the output {name!r} cannot be had: {found.unavailable}", param="outputs")


def check_dimensions(card: pb.ModelCard, names: Sequence[str], dimensions: int, *, strict: bool) -> None:
    """0 keeps all. Raises InvalidInput above the output's length, or, if strict, for a length not trained for."""
    if dimensions == 0:
        return
    for output in output_cards(card, names):
        if not 0 < dimensions <= output.dimension:
            raise InvalidInput(
                f"dimensions of {show(dimensions)}: 1..{output.dimension} for {output.name}",
                param="dimensions",
            )
        if strict and dimensions != output.dimension and dimensions not in card.matryoshka_dimensions:
            trained = sorted({*card.matryoshka_dimensions, output.dimension})
            raise InvalidInput(
                f"dimensions of {dimensions}: this server only gives what the model was trained for: {trained}",
                param="dimensions",
            )

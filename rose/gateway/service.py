"""Embedding as every carrier offers it: checks, prompt, tokens, replicas, in that order.

    EmbedJob -> texts with prompt -> token ids -> replicas -> Embedded

Knows the model card and text; knows neither HTTP nor gRPC.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from rose.client import EmbedResult, Timing
from rose.config.serving import GatewayConfig
from rose.errors import DeadlineExceeded, InvalidInput, PayloadTooLarge, RoseError, UnknownModel
from rose.gateway.inputs import FIELD, Input, Texts, check_count, show
from rose.gateway.metrics import Metrics
from rose.gateway.outputs import check_dimensions, check_outputs, check_size, is_cut, output_cards
from rose.gateway.pieces import Pieces, check_mergeable
from rose.gateway.prompts import check_excluding, choose_prompt, spans_behind
from rose.gateway.replicas import ReplicaPool
from rose.gateway.text_bounds import ANY, Bounds
from rose.gateway.tokenizer import TextTokenizer
from rose.gateway.vectors import cut_vectors
from rose.proto import rose_pb2 as pb
from rose.proto.convert import AnyArray, IntArray

T = TypeVar("T")


class EmbedJob(NamedTuple):
    """What a caller wants.

    Attributes:
        input: texts or token ids, already checked for themselves.
        deadline: loop.time() after which nobody wants the answer.
        dimensions: length of float vectors, one a text; other outputs beside them are left whole. 0 keeps all.
        prompt_name: a prompt of the model card; "" for none, None for the model's default.
        prompt: a prompt in words, put before every text; "" for none.
        token_types: beside token ids, or None for all zero.
        spans: beside token ids, [n, 2] each, or None: parts that are pooled each by itself.
        cut_to: cut longer inputs to this many tokens, -1 for the model's limit; None refuses them.
        cut_field: how the caller could ask for longer inputs to be cut, as errors say it; "" where there is no way.
        split_long_inputs: embed longer inputs in pieces and average them; see pieces.py.
        payload: the EmbedRequest of all this, where it came as one of token ids.
    """

    input: Input
    deadline: float
    outputs: tuple[str, ...] = ()
    dimensions: int = 0
    prompt_name: str | None = None
    prompt: str | None = None
    token_types: Sequence[IntArray] | None = None
    spans: Sequence[IntArray] | None = None
    cut_to: int | None = None
    cut_field: str = ""
    split_special_tokens: bool = False
    split_long_inputs: bool = False
    priority: pb.Priority.ValueType = pb.ONLINE
    payload: bytes = b""


class Embedded(NamedTuple):
    """The answer, and where the time went.

    Attributes:
        prompt_name: the prompt of the model card that was put before the texts, or None.
        sequences: token ids of every item as the model saw them.
        tokens: of all of them.
        tokenize_s: tokenising, the wait for the pool included.
    """

    result: EmbedResult
    prompt_name: str | None
    sequences: Sequence[IntArray]
    tokens: int
    tokenize_s: float


class _Encoded(NamedTuple):
    """`behind`: what of each sequence is pooled, where its prompt is left out."""

    sequences: Sequence[IntArray]
    prompt_name: str | None = None
    behind: list[IntArray] | None = None
    tokenize_s: float = 0.0


def numbers(done: Embedded) -> int:
    """In all outputs, which is what writing them takes time for."""
    return sum(rows.size for rows in done.result.outputs.values())


class EmbedService:
    """One model, whatever the number of replicas and carriers."""

    def __init__(self, pool: ReplicaPool, tokenizer: TextTokenizer, config: GatewayConfig, metrics: Metrics) -> None:
        self.pool = pool
        self.config = config
        self.tokenizer = tokenizer
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

    def embedding_card(self, model: str | None) -> pb.ModelCard:
        """The same for a model that gives vectors or scores. Raises InvalidInput for one that continues texts."""
        card = self.card_for(model)
        if card.generates:
            raise InvalidInput(
                f"the model {card.model!r} continues texts and gives neither vectors nor scores: it serves "
                "/v1/completions and /v1/chat/completions",
                param="model",
            )
        return card

    async def embed(self, card: pb.ModelCard, job: EmbedJob) -> Embedded:
        """Raises RoseError: InvalidInput and PayloadTooLarge before anything is sent, else what the replicas say."""
        check_count(len(job.input.items), self.config.max_items)
        check_outputs(card, job.outputs)
        check_dimensions(card, job.outputs, job.dimensions, strict=self.config.strict_dimensions)
        self.pool.require_ready()  # before any work is spent on a request that nobody could run
        sequences, prompt_name, behind, tokenize_s = await self._sequences(card, job)
        pieces = self._pieces(card, job, sequences) if job.split_long_inputs else None
        run = sequences if pieces is None else pieces.sequences
        tokens = sum(map(len, run))
        check_tokens(tokens, self.config.max_request_tokens, FIELD)
        check_size(card, job.outputs, tokens)
        asked = output_cards(card, job.outputs) if job.dimensions else []
        # The engine cuts all outputs or none; what is to be left whole beside a vector comes with it uncut.
        here = any(map(is_cut, asked)) and not all(map(is_cut, asked))
        try:
            result = await self.pool.embed(
                run,
                outputs=job.outputs,
                dimensions=0 if here else job.dimensions,
                priority=job.priority,
                token_types=job.token_types,
                spans=job.spans if behind is None else behind,
                payload=b"" if here or pieces is not None else job.payload,
                deadline=job.deadline,
            )
        except RoseError as error:
            raise error if pieces is None else pieces.of_items(error) from None
        if behind is not None:
            result = replace(result, splits={})  # one span a text: a row each
        if pieces is not None:
            normalized = {output.name: output.normalized for output in card.outputs}
            outputs = {name: pieces.merge(rows, normalized=normalized[name]) for name, rows in result.outputs.items()}
            result = replace(result, outputs=outputs, payload=b"")
        if here:
            result = replace(result, outputs={**result.outputs, **_cut(asked, result, job.dimensions)})
        self.count(len(sequences), tokens, tokenize_s, result.timing)
        return Embedded(result, prompt_name, sequences, tokens, tokenize_s)

    def _pieces(self, card: pb.ModelCard, job: EmbedJob, sequences: Sequence[IntArray]) -> Pieces:
        check_mergeable(card, job.outputs)
        suffix = self.tokenizer.suffix
        opening = self.tokenizer.special_tokens - len(suffix) if isinstance(job.input, Texts) else 0
        return Pieces(sequences, longest(card), opening, suffix)

    async def _sequences(self, card: pb.ModelCard, job: EmbedJob) -> _Encoded:
        limit = longest(card)
        cut_to = check_cut(job.cut_to, limit, self.tokenizer.special_tokens)
        if not isinstance(job.input, Texts):
            if job.prompt_name or job.prompt:
                raise InvalidInput(
                    "a prompt goes before texts, the input is token ids",
                    param="prompt_name" if job.prompt_name else "prompt",
                )
            return _Encoded(self._fit(job.input.items, job, limit, cut_to))
        name, prompt = choose_prompt(card, job.prompt_name, job.prompt)
        texts = [prompt + text for text in job.input.items] if prompt else job.input.items
        if prompt and card.excludes_prompt:
            check_excluding(card)
            if job.split_long_inputs:
                raise InvalidInput(
                    "the model leaves the prompt out of what it pools, and only the first piece of an input would have "
                    "one: send no prompt",
                    param="split_long_inputs",
                )
        bounds = Bounds(None if job.split_long_inputs else limit, cut_to)
        ids, tokenize_s = await self.encode(
            texts, job.deadline, split_special_tokens=job.split_special_tokens, bounds=bounds
        )
        for index, sequence in enumerate(ids):
            if not len(sequence):
                raise InvalidInput("the text gives no tokens", param=FIELD, index=index)
        sequences = self._fit(ids, job, limit, cut_to)
        behind = None
        if prompt and card.excludes_prompt:
            behind = await self.behind_prompt(
                prompt, sequences, job.deadline, split_special_tokens=job.split_special_tokens
            )
        return _Encoded(sequences, name, behind, tokenize_s)

    async def behind_prompt(
        self, prompt: str, sequences: Sequence[IntArray], deadline: float, *, split_special_tokens: bool
    ) -> list[IntArray]:
        """What of each sequence is pooled where the prompt is left out. Raises as `encode` and `spans_behind` do."""
        (ids,), _ = await self.encode([prompt], deadline, split_special_tokens=split_special_tokens, bounds=ANY)
        return spans_behind(ids, sequences, self.tokenizer.control_ids, len(self.tokenizer.suffix))

    async def encode(
        self,
        texts: Sequence[str],
        deadline: float,
        *,
        split_special_tokens: bool,
        add_special_tokens: bool = True,
        bounds: Bounds,
    ) -> tuple[list[IntArray], float]:
        """Ids of every text, and the seconds that took. Raises DeadlineExceeded, and as `encode_async` does."""
        return await timed(
            self.tokenizer.encode_async(
                texts, split_special_tokens=split_special_tokens, add_special_tokens=add_special_tokens, bounds=bounds
            ),
            deadline,
        )

    def _fit(self, sequences: Sequence[IntArray], job: EmbedJob, limit: int, cut_to: int | None) -> Sequence[IntArray]:
        if job.split_long_inputs:
            return sequences
        if cut_to is not None:
            return [self.tokenizer.cut(sequence, cut_to) for sequence in sequences]
        for index, sequence in enumerate(sequences):
            if len(sequence) > limit:
                raise InvalidInput(
                    f"the input has {len(sequence)} tokens, the limit of the model is {limit}; "
                    f"shorten it{or_send(job.cut_field)}",
                    param=FIELD,
                    index=index,
                )
        return sequences

    def count(self, items: int, tokens: int, tokenize_s: float, timing: Timing) -> None:
        """Into the metrics, once a request is answered: the answer goes first."""
        asyncio.get_running_loop().call_soon(self._count, items, tokens, tokenize_s, timing)

    def _count(self, items: int, tokens: int, tokenize_s: float, timing: Timing) -> None:
        metrics = self._metrics
        metrics.items.inc(items)
        metrics.tokens.inc(tokens)
        metrics.request_tokens.observe(tokens)
        metrics.tokenize.observe(tokenize_s)
        metrics.queue.observe(timing.queue_s)
        metrics.compute.observe(timing.compute_s)


def _cut(asked: Sequence[pb.OutputCard], result: EmbedResult, dimensions: int) -> dict[str, AnyArray]:
    """Those of the outputs that are cut."""
    return {
        one.name: cut_vectors(
            result.outputs[one.name],
            dimensions,
            one.name,
            normalized=one.normalized,
            splits=result.splits.get(one.name, ()),
        )
        for one in asked
        if is_cut(one)
    }


async def timed(tokenising: Awaitable[T], deadline: float) -> tuple[T, float]:
    """What it gives, and the seconds that took. Raises DeadlineExceeded."""
    started = time.perf_counter()
    try:
        async with asyncio.timeout_at(deadline):
            done = await tokenising
    except TimeoutError:
        raise DeadlineExceeded("the deadline passed while the texts were being tokenised") from None
    return done, time.perf_counter() - started


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


def or_send(field: str) -> str:
    """The end of an advice."""
    return f" or send {field}" if field else ""


def check_tokens(tokens: int, limit: int, param: str) -> None:
    """Raises PayloadTooLarge: however many items share them, the tokens of a request have an end."""
    if tokens > limit:
        raise PayloadTooLarge(f"{tokens} tokens in one request, the limit is {limit}", param=param)

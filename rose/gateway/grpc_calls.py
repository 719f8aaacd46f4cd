"""The calls of rose.v1.Rose: messages to jobs of the services, their answers to messages.

Knows messages; knows neither gRPC nor replicas. Prompts that were applied are given back beside the answer, since only
gRPC knows where to put them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from rose.client import Timing
from rose.errors import InvalidInput, PayloadTooLarge
from rose.gateway.front import Front
from rose.gateway.inputs import FIELD, Input, Texts, Tokens, check_texts
from rose.gateway.named_outputs import check_kinds
from rose.gateway.outputs import WEIGHTS, find_output, kind_of, output_cards
from rose.gateway.rank_job import Ranked, RankJob
from rose.gateway.scoring import Lexical, lexical_items
from rose.gateway.service import Embedded, EmbedJob, numbers
from rose.gateway.vectors import for_numbers
from rose.proto import rose_pb2 as pb
from rose.proto.annotations import check_spans, check_token_types, spans_from_proto, token_types_from_bytes
from rose.proto.convert import IntArray, check_token_ids, tensor_to_proto, tokens_from_proto

# Beside lexical weights, the tokens they belong to.
INDICES = "_indices"
# Trailing metadata that names prompts; for texts that are compared with -query and -document behind it.
PROMPT_KEY = "rose-prompt"


class Answered(NamedTuple):
    """An answer, and the prompts that were applied: what they are called in the metadata, and their names."""

    payload: bytes
    prompts: Mapping[str, str]


async def embed(front: Front, request: pb.EmbedRequest, deadline: float) -> Answered:
    service = front.service
    card = service.embedding_card(request.model)
    given, token_types, spans = _input(request, card, service.config.max_items)
    if isinstance(given, Texts):
        check_kinds(card, [output.name for output in output_cards(card, request.outputs)])
    job = EmbedJob(
        input=given,
        outputs=tuple(request.outputs),
        dimensions=request.dimensions,
        prompt_name=request.prompt_name or None,
        token_types=token_types,
        spans=spans,
        priority=request.priority,
        payload=_as_it_is(request, card),
        deadline=deadline,
    )
    done = await service.embed(card, job)
    if done.result.payload and not any(_weights(card, name) for name in done.result.outputs):
        return Answered(done.result.payload, {})
    outputs = await for_numbers(numbers(done), _outputs, card, done, service.tokenizer.control_ids)
    answer = pb.EmbedResponse(
        outputs=outputs,
        prompt_tokens=done.tokens,
        timing=_timing(done.result.timing),
    )
    return Answered(answer.SerializeToString(), {} if done.prompt_name is None else {PROMPT_KEY: done.prompt_name})


async def rerank(front: Front, request: pb.RerankRequest, deadline: float) -> Answered:
    _check_text(request.query, "query", None)
    documents = _texts(request.documents, "documents", front.service.config.max_items)
    job = RankJob(
        queries=[request.query] * len(documents),
        documents=documents,
        instruction=request.instruction or None,
        priority=request.priority,
        deadline=deadline,
    )
    ranked = await front.rank.rank(front.service.embedding_card(request.model), job)
    scores = _shown(ranked, request.raw_scores)
    best = ranked.order()[: request.top_n or None]
    answer = pb.RerankResponse(
        results=[
            pb.RankedDocument(
                index=i, relevance_score=scores[i], document=documents[i] if request.return_documents else ""
            )
            for i in best
        ],
        prompt_tokens=ranked.tokens,
        timing=_timing(ranked.timing),
    )
    return Answered(answer.SerializeToString(), _prompts(ranked))


async def score(front: Front, request: pb.ScoreRequest, deadline: float) -> Answered:
    limit = front.service.config.max_items
    job = RankJob(
        queries=_texts([pair.text_1 for pair in request.pairs], "text_1", limit),
        documents=_texts([pair.text_2 for pair in request.pairs], "text_2", limit),
        names=("text_1", "text_2"),
        query_index=True,
        instruction=request.instruction or None,
        priority=request.priority,
        deadline=deadline,
    )
    ranked = await front.rank.rank(front.service.embedding_card(request.model), job)
    answer = pb.ScoreResponse(
        scores=_shown(ranked, request.raw_scores), prompt_tokens=ranked.tokens, timing=_timing(ranked.timing)
    )
    return Answered(answer.SerializeToString(), _prompts(ranked))


def _prompts(ranked: Ranked) -> dict[str, str]:
    return {f"{PROMPT_KEY}-{side}": name for side, name in ranked.prompts.items()}


def _shown(ranked: Ranked, raw_scores: bool) -> list[float]:
    """A message knows no null: without raw_scores it is what the model's own files apply."""
    scores: list[float] = ranked.shown(True if raw_scores else None)[0].tolist()
    return scores


def _texts(texts: Sequence[str], param: str, limit: int) -> list[str]:
    if not texts:
        raise InvalidInput("the list is empty: expected at least one text", param=param)
    if len(texts) > limit:
        raise PayloadTooLarge(f"{len(texts)} texts in one request, the limit is {limit}", param=param)
    for index, text in enumerate(texts):
        _check_text(text, param, index)
    return list(texts)


def _check_text(text: str, param: str, index: int | None) -> None:
    if not text:
        raise InvalidInput("the text is empty", param=param, index=index)


def _input(
    request: pb.EmbedRequest, card: pb.ModelCard, max_items: int
) -> tuple[Input, list[IntArray] | None, list[IntArray] | None]:
    """(texts or tokens, token types, spans)."""
    match request.WhichOneof("input"):
        case "texts":
            for name in ("token_types", "spans"):
                if request.HasField("spans") if name == "spans" else request.token_types:
                    raise InvalidInput(f"{name} go with tokens, the input is texts", param=name)
            return check_texts(list(request.texts.items), max_items), None, None
        case "tokens":
            sequences = tokens_from_proto(request.tokens)
            check_token_ids(sequences, card.vocab_size)
            lengths = [len(sequence) for sequence in sequences]
            types = token_types_from_bytes(request.token_types, lengths)
            if types is not None:
                check_token_types(types, lengths, None)
            spans = spans_from_proto(request.spans, len(lengths)) if request.HasField("spans") else None
            if spans is not None:
                check_spans(spans, lengths)
            return Tokens(sequences), types, spans
        case _:
            raise InvalidInput("neither texts nor tokens were sent", param=FIELD)


def _as_it_is(request: pb.EmbedRequest, card: pb.ModelCard) -> bytes:
    """What a replica may be sent as it came: token ids that fit one batch; else nothing."""
    if not 0 < len(request.tokens.ids) <= 4 * card.max_batch_tokens:
        return b""
    request.ClearField("model")  # a replica knows one of the names that are taken here
    request.DiscardUnknownFields()  # what was not checked here goes no further
    return request.SerializeToString()


def _outputs(card: pb.ModelCard, done: Embedded, control_ids: IntArray) -> list[pb.Output]:
    outputs: list[pb.Output] = []
    for name, values in done.result.outputs.items():
        output = _weights(card, name)
        if output is None:
            splits = done.result.splits.get(name, ())
            outputs.append(pb.Output(name=name, values=tensor_to_proto(values), splits=splits))
            continue
        weights = [done.result.item(name, i) for i in range(len(done.sequences))]
        found = lexical_items(weights, done.sequences, output.skip_tokens, control_ids)
        outputs += _lexical(name, found)
    return outputs


def _weights(card: pb.ModelCard, name: str) -> pb.OutputCard | None:
    """The card of an output of lexical weights, which are sent with the ids they belong to; None for any other."""
    output = find_output(card, name)
    return output if output is not None and kind_of(output) == WEIGHTS else None


def _lexical(name: str, found: Sequence[Lexical]) -> list[pb.Output]:
    """Weights and, under another name, the ids they belong to, with the same splits."""
    splits = list(accumulate((len(one.ids) for one in found), initial=0))
    weights = np.concatenate([one.weights for one in found])[:, None]
    ids = np.concatenate([one.ids for one in found])[:, None]
    return [
        pb.Output(name=name, values=tensor_to_proto(weights), splits=splits),
        pb.Output(name=name + INDICES, values=tensor_to_proto(ids), splits=splits),
    ]


def _timing(timing: Timing) -> pb.Timing:
    return pb.Timing(
        queue_us=round(timing.queue_s * 1e6), compute_us=round(timing.compute_s * 1e6), batches=timing.batches
    )

"""Texts embedded each by itself and then compared in pairs: cosine, lexical weights, token vectors.

Queries come first and are kept; documents follow in groups and are dropped once scored, since the token vectors of a
thousand documents would fill gigabytes. Knows texts, outputs and scores; knows no carrier.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar

import numpy as np

from rose.client import EmbedResult, Timing
from rose.errors import InvalidInput, PayloadTooLarge, RoseError
from rose.gateway import scoring
from rose.gateway.inputs import FIELD
from rose.gateway.methods import COLBERT, DENSE, SPARSE, Method
from rose.gateway.outputs import find_output
from rose.gateway.pairs import distinct
from rose.gateway.parts import at_item, cut_parts
from rose.gateway.prompts import check_excluding, common_head
from rose.gateway.rank_job import RankJob
from rose.gateway.scoring import Floats
from rose.gateway.service import EmbedService, check_tokens, longest, or_send
from rose.gateway.text_bounds import Bounds
from rose.proto import rose_pb2 as pb
from rose.proto.convert import IntArray

# Names sentence-transformers' encode_query and encode_document look for, in its order.
QUERY_PROMPTS, DOCUMENT_PROMPTS = ("query",), ("document", "passage", "corpus")
# Token vectors held at a time, in numbers: 128 MiB of float32.
HELD_NUMBERS = 32 << 20
# Comparing texts of fewer tokens in all takes a millisecond or two.
INLINE_TOKENS = 4096
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Compared:
    """Method -> [pairs] scores, and where the time went."""

    scores: Mapping[str, Floats]
    tokens: int
    tokenize_s: float
    timing: Timing


# Method -> one entry a text: a vector, Lexical, or the vectors of its tokens.
_Given = dict[str, list[Any]]


def with_prompts(card: pb.ModelCard, job: RankJob) -> RankJob:
    """The job with the prompts that apply, by name; "" is none. Raises InvalidInput for one the card does not have."""
    return replace(
        job,
        query_prompt_name=_prompt(card, job.query_prompt_name, QUERY_PROMPTS, "query_prompt_name"),
        document_prompt_name=_prompt(card, job.document_prompt_name, DOCUMENT_PROMPTS, "document_prompt_name"),
    )


async def compare(service: EmbedService, card: pb.ModelCard, job: RankJob, method: Method) -> Compared:
    """
    Args:
        job: with its prompts settled.

    Raises:
        RoseError: the replicas', with indices counted from the first distinct query, then on through the documents.
    """
    queries, places = distinct(job.queries)
    prompt = card.prompts.get(job.document_prompt_name or "", "")
    texts = [card.prompts.get(job.query_prompt_name or "", "") + query for query in queries]
    texts += [prompt + document for document in job.documents]
    limit, split = longest(card), job.split_special_tokens is not False
    head, prompt_s = await _document_head(service, job, prompt)
    ids, text_s = await service.encode(
        texts,
        job.deadline,
        split_special_tokens=split,
        bounds=Bounds(limit, _longest_document(service, job, limit, len(head)), len(queries)),
    )
    tokenize_s = prompt_s + text_s
    sequences = _fit(service, ids, len(queries), job, limit, head, prompted=bool(prompt))
    tokens = sum(map(len, sequences))
    check_tokens(tokens, service.config.max_request_tokens, job.names[1])
    spans = await _behind_prompts(service, card, job, sequences, len(queries))
    held = _tokens_held(card, method)
    if held and sum(map(len, sequences[: len(queries)])) > held:
        raise PayloadTooLarge(f"the queries have more than {held} tokens to compare by", param=job.names[0])
    queries_given: _Given = {name: [] for name in method.outputs}
    scores: dict[str, list[Floats]] = {name: [] for name in method.outputs}
    timing, scored = Timing(0.0, 0.0, 0), 0
    for start, end in _groups(sequences, len(queries), held):
        group = sequences[start:end]
        own = None if spans is None else spans[start:end]
        result = await _embed(service, job, method, group, own, start)
        timing = _add(timing, result.timing)
        # A hop to a thread costs more than a few short texts do; many would hold everyone else up.
        run = _inline if not held and tokens <= INLINE_TOKENS else asyncio.to_thread
        given = await run(_read, method, result, group, _skipped(card, method), service.tokenizer.control_ids)
        new_queries = max(len(queries) - start, 0)
        for name, texts_given in given.items():
            queries_given[name] += texts_given[:new_queries]
        documents_given = {name: texts_given[new_queries:] for name, texts_given in given.items()}
        pairs = places[scored : scored + end - start - new_queries]
        scored += len(pairs)
        for name, found in (await run(_score, queries_given, documents_given, pairs)).items():
            scores[name].append(found)
    return Compared({name: np.concatenate(found) for name, found in scores.items()}, tokens, tokenize_s, timing)


async def _embed(
    service: EmbedService,
    job: RankJob,
    method: Method,
    group: Sequence[IntArray],
    spans: Sequence[IntArray] | None,
    start: int,
) -> EmbedResult:
    outputs = tuple(dict.fromkeys(method.outputs.values()))
    try:
        result = await service.pool.embed(
            group, outputs=outputs, priority=job.priority, spans=spans, deadline=job.deadline
        )
    except RoseError as error:
        raise at_item(error, start) from None
    return result if spans is None else replace(result, splits={})  # one span a text: a row each


async def _behind_prompts(
    service: EmbedService, card: pb.ModelCard, job: RankJob, sequences: Sequence[IntArray], queries: int
) -> list[IntArray] | None:
    """What of each sequence is pooled where prompts are left out; None: all of it."""
    names = (job.query_prompt_name, job.document_prompt_name)
    prompts = [card.prompts.get(name or "", "") for name in names]
    if not card.excludes_prompt or not any(prompts):
        return None
    check_excluding(card)
    spans: list[IntArray] = []
    for prompt, own in zip(prompts, (sequences[:queries], sequences[queries:]), strict=True):
        if not prompt:
            spans += [np.array([[0, len(ids)]], dtype=np.int32) for ids in own]
            continue
        try:
            spans += await service.behind_prompt(
                prompt, own, job.deadline, split_special_tokens=job.split_special_tokens is not False
            )
        except RoseError as error:
            raise at_item(error, len(spans)) from None
    return spans


async def _inline(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """As asyncio.to_thread, without the thread."""
    return work(*args, **kwargs)


def _groups(sequences: Sequence[IntArray], queries: int, held: int) -> list[tuple[int, int]]:
    """Bounds of the groups: all at once, or the queries and then documents of at most `held` tokens."""
    if not held:
        return [(0, len(sequences))]
    parts = cut_parts(sequences[queries:], held, len(sequences))
    return [(0, queries)] + [(queries + part.start, queries + part.start + len(part.sequences)) for part in parts]


def _read(
    method: Method, result: EmbedResult, sequences: Sequence[IntArray], skipped: int, control_ids: IntArray
) -> _Given:
    given: _Given = {}
    for name, output in method.outputs.items():
        items: list[Any] = [result.item(output, i) for i in range(len(sequences))]
        if name == SPARSE:
            items = scoring.lexical_items(items, sequences, skipped, control_ids)
        given[name] = items
    return given


def _score(queries: _Given, documents: _Given, pairs: Sequence[int]) -> dict[str, Floats]:
    """[pairs] of each method; pair i is of query pairs[i] and document i."""
    scores: dict[str, Floats] = {}
    for name, given in documents.items():
        asked = [queries[name][place] for place in pairs]
        if name == DENSE:
            scores[name] = scoring.cosine(np.stack(asked), np.stack(given)) if pairs else np.zeros(0)
            continue
        compare_two = scoring.max_sim if name == COLBERT else scoring.sparse_dot
        scores[name] = np.array([compare_two(*pair) for pair in zip(asked, given, strict=True)], dtype=np.float64)
    return scores


def _skipped(card: pb.ModelCard, method: Method) -> int:
    """Leading tokens without a lexical weight."""
    output = find_output(card, method.outputs.get(SPARSE, ""))
    return output.skip_tokens if output is not None else 0


def _tokens_held(card: pb.ModelCard, method: Method) -> int:
    """Tokens whose vectors may be held at a time; 0: any number, as they have none."""
    output = find_output(card, method.outputs.get(COLBERT, ""))
    return 0 if output is None else max(1, HELD_NUMBERS // output.dimension)


async def _document_head(service: EmbedService, job: RankJob, prompt: str) -> tuple[IntArray, float]:
    """What stands before every document: opening special tokens and its prompt; and the seconds that took."""
    if not prompt or (job.document_tokens is None and not job.truncate):
        return np.zeros(service.tokenizer.special_tokens - len(service.tokenizer.suffix), dtype=np.int32), 0.0
    split = job.split_special_tokens is not False
    (ids,), seconds = await service.encode([prompt], job.deadline, split_special_tokens=split, bounds=Bounds())
    return ids[: len(ids) - len(service.tokenizer.suffix)], seconds


def _fit(
    service: EmbedService,
    ids: list[IntArray],
    queries: int,
    job: RankJob,
    limit: int,
    head: IntArray,
    *,
    prompted: bool,
) -> list[IntArray]:
    """Documents cut where the caller wants that. Raises InvalidInput for texts that are too long or have no token."""
    for place, one in enumerate(ids[queries:], queries):
        # A document's first token may have taken the prompt's last one in, so each counts from where it differs.
        before = common_head(head, one) if prompted else len(head)
        most = _longest_document(service, job, limit, before)
        if most is None or len(one) <= most:
            continue
        used = before + len(service.tokenizer.suffix)
        if most <= used:
            raise InvalidInput(
                f"the prompt {job.document_prompt_name!r} and the special tokens take {used} of the {limit} tokens the "
                "model takes, which leaves none for a document",
                param="document_prompt_name",
            )
        ids[place] = service.tokenizer.cut(one, most)
    for place, one in enumerate(ids):
        if not len(one):
            raise InvalidInput("the text gives no tokens", param=FIELD, index=place)
        if len(one) > limit:
            hint = "; the query is never cut" if place < queries else f"; shorten it{or_send(job.cut_field)}"
            raise InvalidInput(
                f"the text has {len(one)} tokens, the limit of the model is {limit}{hint}", param=FIELD, index=place
            )
    return ids


def _longest_document(service: EmbedService, job: RankJob, limit: int, head: int) -> int | None:
    """What documents behind `head` tokens are cut to, special tokens and prompt included; None: they are not."""
    lengths = [limit] if job.truncate else []
    if job.document_tokens is not None:
        lengths.append(head + job.document_tokens + len(service.tokenizer.suffix))
    return min(lengths, default=None)


def _prompt(card: pb.ModelCard, name: str | None, usual: Sequence[str], param: str) -> str:
    if name is None:
        return next((one for one in usual if one in card.prompts), card.default_prompt_name)
    if name and name not in card.prompts:
        known = ", ".join(sorted(card.prompts)) or "none"
        raise InvalidInput(f"the model has no prompt {name!r}; it has: {known}", param=param)
    return name


def _add(left: Timing, right: Timing) -> Timing:
    """Of groups that ran one after the other."""
    return Timing(left.queue_s + right.queue_s, left.compute_s + right.compute_s, left.batches + right.batches)

"""The bodies of /v1/rerank and /v1/score, read and checked into pairs to score.

Knows JSON values; knows neither models nor text processing.
"""

from __future__ import annotations

from typing import Any

import msgspec

from rose.errors import InvalidInput, PayloadTooLarge
from rose.gateway.embedding_request import PRIORITIES
from rose.gateway.inputs import kind_of_value, show
from rose.gateway.rank_job import RankJob
from rose.gateway.schemas_rank import PairFields, RerankRequest, ScoreRequest

rerank_decoder = msgspec.json.Decoder(RerankRequest)
score_decoder = msgspec.json.Decoder(ScoreRequest)


def rerank_job(request: RerankRequest, max_items: int, deadline: float) -> RankJob:
    """Raises InvalidInput naming field and item, PayloadTooLarge for too many documents."""
    query = _text(request.query, "query", None)
    documents = _texts(request.documents, "documents", max_items)
    if request.top_n is not None and request.top_n < 1:
        raise InvalidInput(f"top_n of {show(request.top_n)}: expected 1 or more, or null for all", param="top_n")
    return _job(request, [query] * len(documents), documents, ("query", "documents"), False, deadline)


def score_job(request: ScoreRequest, max_items: int, deadline: float) -> RankJob:
    """Raises the same; one text pairs with all of the others, or as many with as many."""
    first, firsts = _either(request, ("text_1", "queries"), max_items)
    second, seconds = _either(request, ("text_2", "documents"), max_items)
    if len(firsts) not in (1, len(seconds)):
        raise InvalidInput(
            f"{len(firsts)} texts in {first} and {len(seconds)} in {second}: expected one with any number, or as many",
            param=first,
        )
    several = len(firsts) > 1
    queries = firsts if several else firsts * len(seconds)
    return _job(request, queries, seconds, (first, second), several, deadline)


def _job(
    request: PairFields,
    queries: list[str],
    documents: list[str],
    names: tuple[str, str],
    query_index: bool,
    deadline: float,
) -> RankJob:
    most = request.max_tokens_per_doc
    if most is not None and most < 1:
        raise InvalidInput(f"max_tokens_per_doc of {show(most)}: expected 1 or more", param="max_tokens_per_doc")
    return RankJob(
        queries=queries,
        documents=documents,
        names=names,
        query_index=query_index,
        method=request.method,
        weights=request.weights,
        label=request.label,
        instruction=request.instruction,
        truncate=bool(request.truncate),
        cut_field="truncate=true",
        document_tokens=None if most is None else min(most, 1 << 30),
        split_special_tokens=request.split_special_tokens,
        query_prompt_name=request.query_prompt_name,
        document_prompt_name=request.document_prompt_name,
        priority=PRIORITIES[request.priority],
        deadline=deadline,
    )


def _either(request: ScoreRequest, names: tuple[str, str], max_items: int) -> tuple[str, list[str]]:
    """The field that was sent under either name, and its texts."""
    sent = [name for name in names if getattr(request, name) is not None]
    if len(sent) != 1:
        problem = "both were sent" if sent else "neither was sent"
        raise InvalidInput(f"expected {names[0]} or {names[1]}: {problem}", param=names[0])
    value = getattr(request, sent[0])
    return sent[0], _texts([value] if isinstance(value, str) else value, sent[0], max_items)


def _texts(value: Any, param: str, max_items: int) -> list[str]:
    if not isinstance(value, list):
        raise InvalidInput(f"expected a list of texts, got {kind_of_value(value)}", param=param)
    if not value:
        raise InvalidInput("the list is empty: expected at least one text", param=param)
    if len(value) > max_items:
        raise PayloadTooLarge(f"{len(value)} texts in one request, the limit is {max_items}", param=param)
    return [_text(item, param, index) for index, item in enumerate(value)]


def _text(value: Any, param: str, index: int | None) -> str:
    """A text, or the `text` of an object."""
    if isinstance(value, dict):
        if "text" not in value:
            raise InvalidInput(
                "expected a text, or an object with a text, got an object without", param=param, index=index
            )
        value = value["text"]
    if not isinstance(value, str):
        raise InvalidInput(f"expected a text, got {kind_of_value(value)}", param=param, index=index)
    if not value:
        raise InvalidInput("the text is empty", param=param, index=index)
    return value

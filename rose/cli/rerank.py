"""`rose rerank`: the documents of a file in the order of their relevance to a query.

Texts are ordered by what the model says before its sigmoid: the sigmoid of 40 is that of 50, 1.0, and the order of such
would be that of the file. Knows options and what to print; the server scores.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from rose.cli.bulk.api import Api
from rose.cli.bulk.options import add_input, add_server, served_model, server, source_of
from rose.cli.bulk.run import batches, in_halves, in_order
from rose.cli.bulk.source import Item, Source
from rose.cli.shared import Commands, add_command
from rose.errors import InternalError, InvalidInput

_EXAMPLES = (
    "rose rerank 'who wrote Faust?' passages.txt --top 5",
    "rose rerank 'who wrote Faust?' docs.jsonl --field body --json --server http://127.0.0.1:8080",
)
# Fields of the route that are sent as they were given.
_PASSED_ON = (
    "method",
    "weights",
    "label",
    "instruction",
    "query_prompt_name",
    "document_prompt_name",
    "max_tokens_per_doc",
    "truncate",
)


_Scores: TypeAlias = tuple[list[float], str | None]  # of one request, and how they were made


@dataclass(frozen=True, slots=True)
class _Scored:
    """
    Attributes:
        raw: what the texts are ordered by.
        index: position among the texts, counted from 0.
        method: how it was scored, as the server says; None for a server that says nothing.
    """

    raw: float
    index: int
    item: Item
    method: str | None


def add_rerank(commands: Commands) -> None:
    parser = add_command(
        commands, "rerank", _rerank, "order the texts of a file by their relevance to a query", _EXAMPLES
    )
    parser.add_argument("query", metavar="QUERY", help="what the texts are to be relevant to")
    add_input(parser)
    parser.add_argument("--top", type=int, metavar="N", help="print only the best N")
    parser.add_argument("--json", action="store_true", help="print JSON lines: rank, index, score, document")
    scoring = parser.add_argument_group("scoring")
    scoring.add_argument("--raw-scores", action="store_true", default=None, help="logits instead of probabilities")
    scoring.add_argument("--instruction", help="the task in words, for models with a template")
    scoring.add_argument("--method", help="cross, dense, sparse, colbert or combined (default: what the model is for)")
    scoring.add_argument(
        "--weights", type=_weights, help="of --method combined: dense=1,sparse=0.3,colbert=1 (default: 1 each)"
    )
    scoring.add_argument(
        "--label", type=_label, help="the label to rank by, by name or number, for models with several"
    )
    scoring.add_argument("--query-prompt-name", metavar="NAME", help="prompt before a query that is compared")
    scoring.add_argument("--document-prompt-name", metavar="NAME", help="the same for the texts; '' for none")
    scoring.add_argument("--max-tokens-per-doc", type=int, metavar="N", help="cut every text to this many tokens first")
    add_server(parser)


def _weights(text: str) -> dict[str, float]:
    try:
        pairs = [part.split("=") for part in text.split(",")]
        return {name.strip(): float(weight) for name, weight in pairs}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected such as dense=1,sparse=0.3") from None


def _label(text: str) -> str | int:
    return int(text) if text.isascii() and text.isdigit() else text


def _rerank(options: argparse.Namespace) -> int:
    if options.top is not None and options.top < 1:
        raise InvalidInput(f"--top {options.top}: expected 1 or more")
    if options.max_tokens_per_doc is not None and options.max_tokens_per_doc < 1:
        raise InvalidInput(f"--max-tokens-per-doc {options.max_tokens_per_doc}: expected 1 or more")
    if options.weights is not None and options.method != "combined":
        raise InvalidInput("--weights is for --method combined")
    if not options.query:
        raise InvalidInput("the query is empty")
    source = source_of(options)
    source.check_first()
    with server(options) as api:
        model, rose = served_model(api, options)
        fields = _fields(options, model, rose)
        raw = {"raw_scores": True} if rose or options.raw_scores else {}  # other servers may not know the field
        found = _scored(api, source, fields | raw)
        sigmoid = not options.raw_scores and _applies_sigmoid(api, fields, found)
    best = sorted(found, key=lambda one: -one.raw)[: options.top]  # stable: equal ones stay in the file's order
    for rank, (one, score) in enumerate(zip(best, _shown(best, sigmoid), strict=True), 1):
        print(_json(rank, one, score) if options.json else f"{score:.4f}\t{one.item.number}\t{one.item.text}")
    return 0


def _fields(options: argparse.Namespace, model: str, rose: bool) -> dict[str, Any]:
    """The request's fields besides its texts; what is not asked for is left to the server."""
    fields: dict[str, Any] = {"model": model, "query": options.query}
    for name in _PASSED_ON:
        value = getattr(options, name)
        if value is not None and value is not False:
            fields[name] = value
    if rose:
        fields["priority"] = "bulk"  # single queries of others come first
    return fields


def _scored(api: Api, source: Source, fields: dict[str, Any]) -> list[_Scored]:
    """Every text of the source with its score; pairs are scored one by one, so parts can be asked for apart.

    Raises:
        RoseError: at the first text that cannot be scored, with its place.
    """

    def send(items: Sequence[Item]) -> _Scores:
        answer = api.post("/v1/rerank", {**fields, "documents": [item.text for item in items]})
        return _scores(answer, len(items)), answer.get("method")

    def join(parts: Sequence[_Scores]) -> _Scores:
        return [score for scores, _ in parts for score in scores], parts[0][1]

    found: list[_Scored] = []
    for items, (scores, method) in in_order(in_halves(send, join, source), batches(source.items())):
        start = len(found)
        pairs = enumerate(zip(items, scores, strict=True), start)
        found += [_Scored(score, index, item, method) for index, (item, score) in pairs]
    if not found:
        raise source.empty()
    return found


def _scores(answer: Any, items: int) -> list[float]:
    """In the order of the documents."""
    try:
        by_index = {int(result["index"]): float(result["relevance_score"]) for result in answer["results"]}
        return [by_index[index] for index in range(items)]
    except (KeyError, TypeError, ValueError) as error:
        raise InternalError(f"the server's answer is not of the rerank route: {error!r}") from None


def _applies_sigmoid(api: Api, fields: dict[str, Any], found: Sequence[_Scored]) -> bool:
    """Whether the model's own files put a sigmoid behind its logits.

    An answer with raw scores cannot say so; the shortest text is scored once more. Compared vectors have no logits.
    """
    if found[0].method != "cross":
        return False
    shortest = min(found, key=lambda one: len(one.item.text))
    answer = api.post("/v1/rerank", {**fields, "documents": [shortest.item.text]})
    return bool(answer.get("activation") == "sigmoid")


def _shown(best: Sequence[_Scored], through_sigmoid: bool) -> list[float]:
    raw = [one.raw for one in best]
    if not through_sigmoid:
        return raw
    import numpy as np

    from rose.gateway.scoring import sigmoid

    shown: list[float] = sigmoid(np.array(raw, np.float64)).tolist()
    return shown


def _json(rank: int, one: _Scored, score: float) -> str:
    row = {"rank": rank, "index": one.index, "score": score, "document": one.item.text}
    return json.dumps(row, ensure_ascii=False)

"""A query and a document as the one sequence that a cross-encoder scores: the tokenizer's own pair, or a template.

Texts cannot forge special tokens: those written in them are taken apart into ordinary pieces, in a template always. A
template's field names in plain text ("<Document>: ") are ordinary text wherever they stand, as with its authors. What
is too long is refused, or the document is cut; the query, the special tokens and the template never are. Knows text and
ids; knows neither replicas nor scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rose.config.reranker import RerankerConfig
from rose.errors import InvalidInput
from rose.gateway.facts import ModelFacts
from rose.gateway.prompts import common_head
from rose.gateway.service import or_send
from rose.gateway.text_bounds import Bounds
from rose.gateway.tokenizer import TextTokenizer
from rose.proto.convert import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What to do with pairs that are too long.

    Attributes:
        limit: most tokens of a pair, special tokens and template included.
        cut: cut the document instead of refusing the pair.
        cut_field: how the caller could ask for that, as errors say it; "" where there is no way.
        document_tokens: cut every document to this many tokens first; None: to none.
        names: what the caller calls the query and the document.
        query_index: whether each pair has a query of its own, which errors then number.
    """

    limit: int
    cut: bool = False
    cut_field: str = ""
    document_tokens: int | None = None
    names: tuple[str, str] = ("query", "documents")
    query_index: bool = False

    def room(self, used: int, least: int, index: int) -> int:
        """Tokens left for a document beside `used` others. Raises InvalidInput where the document needs some."""
        left = self.limit - used
        if left < least:
            raise InvalidInput(
                f"the query and what goes around it take {used} of the {self.limit} tokens the model takes, "
                "which leaves none for a document; the query is never cut",
                param=self.names[0],
                index=index if self.query_index else None,
            )
        return left

    def cut_document(self, document: IntArray, room: int, used: int, index: int) -> IntArray:
        """The document's first tokens. Raises InvalidInput for one that is longer than `room`, unless cutting."""
        if self.document_tokens is not None:
            document = document[: self.document_tokens]
        if len(document) <= room:
            return document
        if not self.cut:
            raise InvalidInput(
                f"the query and this document have {used + len(document)} tokens together, the limit of the model is "
                f"{self.limit}; shorten the document{or_send(self.cut_field)}",
                param=self.names[1],
                index=index,
            )
        return document[:room]

    def bounds(self, queries: int, *, head: int = 0) -> Bounds:
        """For `queries` texts that are never cut, and the documents after them behind at most `head` other tokens."""
        lengths = [self.limit] if self.cut else []
        if self.document_tokens is not None:
            lengths.append(head + self.document_tokens)
        return Bounds(self.limit, min(lengths, default=None), queries)

    def of_pair(self, error: InvalidInput, queries: Sequence[int]) -> InvalidInput:
        """An error that numbers distinct queries, then documents, in the caller's words.

        Args:
            queries: where each pair's query is among the distinct ones.
        """
        if error.index is None:
            return error
        documents = max(queries) + 1
        if error.index >= documents:
            return InvalidInput(error.message, param=self.names[1], index=error.index - documents)
        index = queries.index(error.index) if self.query_index else None
        return InvalidInput(error.message, param=self.names[0], index=index)


@dataclass(frozen=True, slots=True)
class EncodedPairs:
    """
    Attributes:
        token_types: beside the sequences, for models that tell texts apart by them; else None.
    """

    sequences: list[IntArray]
    token_types: list[IntArray] | None


class PairEncoder(Protocol):
    """One form of pairs."""

    @property
    def takes_instruction(self) -> bool: ...

    async def encode(
        self, queries: Sequence[str], documents: Sequence[str], fit: Fit, *, instruction: str | None, split: bool
    ) -> EncodedPairs:
        """
        Args:
            queries, documents: the same number of both.
            split: whether control tokens written in the texts are ordinary text.

        Raises:
            InvalidInput: a pair that does not fit, with its index.
        """
        ...


def pair_encoder(facts: ModelFacts, tokenizer: TextTokenizer) -> PairEncoder | None:
    """None for a model that scores no pairs. Raises CheckpointError where the tokenizer cannot write them."""
    if facts.reranker is None:
        return None
    if facts.reranker.form == "template":
        return TemplatePairs(facts.reranker, tokenizer)
    return TokenizerPairs(tokenizer, token_types=facts.token_types)


class TokenizerPairs:
    """[CLS] query [SEP] document [SEP], <s> query </s></s> document </s>: whatever tokenizer.json says of pairs."""

    takes_instruction = False

    def __init__(self, tokenizer: TextTokenizer, *, token_types: bool) -> None:
        self._tokenizer = tokenizer
        self._layout = tokenizer.pair_layout()
        self._token_types = token_types

    async def encode(
        self, queries: Sequence[str], documents: Sequence[str], fit: Fit, *, instruction: str | None, split: bool
    ) -> EncodedPairs:
        unique, places = distinct(queries)
        try:
            ids = await self._tokenizer.encode_async(
                [*unique, *documents],
                split_special_tokens=split,
                add_special_tokens=False,
                bounds=fit.bounds(len(unique)),
            )
        except InvalidInput as error:
            raise fit.of_pair(error, places) from None
        firsts = [ids[place] for place in places]
        whole = zip(firsts, ids[len(unique) :], strict=True)
        pairs = [(first, self._fitted(first, second, fit, i)) for i, (first, second) in enumerate(whole)]
        layout = self._layout
        types = [layout.token_types(*pair) for pair in pairs] if self._token_types else None
        return EncodedPairs([layout.ids(*pair) for pair in pairs], types)

    def _fitted(self, query: IntArray, document: IntArray, fit: Fit, index: int) -> IntArray:
        used = self._layout.special_tokens + len(query)
        return fit.cut_document(document, fit.room(used, min(1, len(document)), index), used, index)


class TemplatePairs:
    """prefix, body of instruction, query and document, suffix: three pieces, each tokenised by itself."""

    takes_instruction = True

    def __init__(self, reranker: RerankerConfig, tokenizer: TextTokenizer) -> None:
        self._reranker = reranker
        self._tokenizer = tokenizer
        self._prefix, self._suffix = tokenizer.encode([reranker.prefix, reranker.suffix], add_special_tokens=False)
        # Some marks of the template (</think>) are added tokens that their file does not call special.
        tokenizer.guard(np.concatenate((self._prefix, self._suffix)).tolist())

    async def encode(
        self, queries: Sequence[str], documents: Sequence[str], fit: Fit, *, instruction: str | None, split: bool
    ) -> EncodedPairs:
        """`split` has no say: what a document says must never become a turn of the conversation."""
        unique, places = distinct(queries)
        write = self._reranker.body
        # What a head and its bodies have in common is what a cut must leave: all before the document.
        heads = [write(query, "", instruction) for query in unique]
        bodies = [write(query, document, instruction) for query, document in zip(queries, documents, strict=True)]
        try:
            ids = await self._tokenizer.encode_async(
                [*heads, *bodies],
                split_special_tokens=True,
                add_special_tokens=False,
                bounds=fit.bounds(len(unique), head=fit.limit),
            )
        except InvalidInput as error:
            raise fit.of_pair(error, places) from None
        around = len(self._prefix) + len(self._suffix)
        sequences = []
        for index, (place, body) in enumerate(zip(places, ids[len(unique) :], strict=True)):
            head = common_head(ids[place], body)
            used = around + head
            document = fit.cut_document(body[head:], fit.room(used, 1, index), used, index)
            sequences.append(np.concatenate((self._prefix, body[:head], document, self._suffix)))
        return EncodedPairs(sequences, None)


def distinct(queries: Sequence[str]) -> tuple[list[str], list[int]]:
    """The queries, each once, and where each pair's query is among them."""
    places = {query: i for i, query in enumerate(dict.fromkeys(queries))}
    return list(places), [places[query] for query in queries]

"""Vectors of chunks that have seen their whole document (late chunking).

    chunks -> ids, joined by the separator -> one sequence a document -> a vector for each span between separators

A chunk is its span, so no text can make another chunk: a separator written in one is taken apart into ordinary pieces.
Knows chunks and ids; knows no carrier.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from rose.client import EmbedResult
from rose.errors import InvalidInput, RoseError
from rose.gateway.facts import ModelFacts
from rose.gateway.inputs import FIELD
from rose.gateway.service import EmbedService, check_tokens, longest
from rose.gateway.text_bounds import Bounds
from rose.proto import rose_pb2 as pb
from rose.proto.convert import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextualJob:
    """What a caller wants.

    Attributes:
        documents: chunks of each, none empty.
        output: of the model.
        dimensions: for the engine to cut vectors to; 0 for all.
        deadline: loop.time() after which nobody wants the answer.
    """

    documents: Sequence[Sequence[str]]
    output: str
    dimensions: int
    priority: pb.Priority.ValueType = pb.ONLINE
    deadline: float


@dataclass(frozen=True, slots=True)
class ContextualAnswer:
    """The rows of all chunks, and where the time went.

    Attributes:
        result: one output, with splits: document i has rows splits[i] .. splits[i + 1].
        tokens: of the request, separators included.
    """

    result: EmbedResult
    tokens: int
    tokenize_s: float


class ContextualService:
    """Late chunking over one model's service."""

    def __init__(self, service: EmbedService, facts: ModelFacts) -> None:
        self.service = service
        self._separator_id = facts.separator_id
        if facts.separator_id is not None:
            service.tokenizer.guard([facts.separator_id])

    def check_served(self, card: pb.ModelCard) -> None:
        """Raises InvalidInput for a model that pools whole texts alone."""
        if self._separator_id is None:
            raise InvalidInput(
                f"{card.model!r} is no contextual model: its folder names no separator of chunks", param="model"
            )

    async def embed(self, card: pb.ModelCard, job: ContextualJob) -> ContextualAnswer:
        """Raises RoseError: InvalidInput and PayloadTooLarge before anything is sent, else what the replicas say."""
        self.check_served(card)
        self.service.pool.require_ready()
        texts = [chunk for document in job.documents for chunk in document]
        try:
            ids, tokenize_s = await self.service.encode(
                texts,
                job.deadline,
                split_special_tokens=True,
                add_special_tokens=False,
                bounds=Bounds(longest(card)),
            )
        except InvalidInput as error:
            raise _of_document(error, job.documents) from None
        sequences, spans = self._joined(card, job.documents, ids)
        tokens = sum(map(len, sequences))
        check_tokens(tokens, self.service.config.max_context_tokens, FIELD)
        result = await self.service.pool.embed(
            sequences,
            outputs=(job.output,),
            dimensions=job.dimensions,
            priority=job.priority,
            spans=spans,
            deadline=job.deadline,
        )
        self.service.count(len(texts), tokens, tokenize_s, result.timing)
        return ContextualAnswer(result, tokens, tokenize_s)

    def _joined(
        self, card: pb.ModelCard, documents: Sequence[Sequence[str]], ids: Sequence[IntArray]
    ) -> tuple[list[IntArray], list[IntArray]]:
        """(one sequence a document, the bounds of its chunks [n, 2]). Raises InvalidInput for what cannot run."""
        limit = longest(card)
        separator = np.array([self._separator_id], dtype=np.int32)
        sequences: list[IntArray] = []
        spans: list[IntArray] = []
        ends = pairwise(accumulate(map(len, documents), initial=0))
        for index, (first, last) in enumerate(ends):
            chunks = ids[first:last]
            lengths = np.array([len(chunk) for chunk in chunks], dtype=np.int32)
            if not lengths.all():
                raise _bad(index, int(np.flatnonzero(lengths == 0)[0]), "gives no tokens")
            # Each chunk but the first stands behind all before it and one separator for each.
            starts = np.cumsum(lengths, dtype=np.int32) - lengths + np.arange(len(chunks), dtype=np.int32)
            pieces = [piece for chunk in chunks for piece in (separator, chunk)][1:]
            sequence = np.concatenate(pieces)
            if len(sequence) > limit:
                raise InvalidInput(
                    f"the document has {len(sequence)} tokens, separators included; the limit of the model is {limit}",
                    param=FIELD,
                    index=index,
                )
            sequences.append(sequence)
            spans.append(np.stack((starts, starts + lengths), axis=1).astype(np.int32))
        return sequences, spans


def _of_document(error: InvalidInput, documents: Sequence[Sequence[str]]) -> InvalidInput:
    """An error that numbers the chunks of all documents, with the number of the document."""
    if error.index is None:
        return error
    ends = list(accumulate(map(len, documents)))
    document = bisect_right(ends, error.index)
    chunk = error.index - (ends[document - 1] if document else 0)
    return InvalidInput(f"chunk {chunk}: {error.message}", param=FIELD, index=document)


def _bad(document: int, chunk: int, problem: str) -> RoseError:
    return InvalidInput(f"chunk {chunk} of document {document} {problem}", param=FIELD, index=document)

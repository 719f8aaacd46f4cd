"""Scores of pairs of texts, as every carrier offers them: by one pass over both, or by what each text gives alone.

    RankJob -> method -> token ids -> replicas -> raw scores -> Ranked

Knows methods, texts and the model card; knows neither HTTP nor gRPC.
"""

from __future__ import annotations

from rose.errors import InternalError, InvalidInput, RoseError, from_kind
from rose.gateway import scoring
from rose.gateway.comparing import compare, with_prompts
from rose.gateway.facts import ModelFacts
from rose.gateway.inputs import FIELD
from rose.gateway.methods import CROSS, Method, choose_method, label_index
from rose.gateway.outputs import find_output
from rose.gateway.pairs import Fit, pair_encoder
from rose.gateway.rank_job import Ranked, RankJob
from rose.gateway.service import EmbedService, check_tokens, longest, timed
from rose.proto import rose_pb2 as pb


class RankService:
    """Scores over one model's service."""

    def __init__(self, service: EmbedService, facts: ModelFacts) -> None:
        """Raises CheckpointError where the tokenizer cannot write the model's pairs."""
        self.service = service
        self._facts = facts
        self._pairs = pair_encoder(facts, service.tokenizer)

    async def rank(self, card: pb.ModelCard, job: RankJob) -> Ranked:
        """Raises RoseError: InvalidInput and PayloadTooLarge before anything is sent, else what the replicas say."""
        method = choose_method(card, job.method, job.weights)
        self.service.pool.require_ready()
        if method.name == CROSS:
            ranked = await self._cross(card, job, method.outputs[CROSS])
        else:
            ranked = await self._compared(card, job, method)
        self.service.count(len(job.documents), ranked.tokens, ranked.tokenize_s, ranked.timing)
        return ranked

    async def _cross(self, card: pb.ModelCard, job: RankJob, output: str) -> Ranked:
        if self._pairs is None or self._facts.reranker is None:
            raise InvalidInput(
                "this front's model folder does not say how pairs are written: it needs the model's config.json",
                param="model",
            )
        self._check_cross(job)
        found = find_output(card, output)
        assert found is not None  # the method was chosen by it
        label = label_index(job.label, self._facts.reranker.labels, found.dimension)
        fit = Fit(
            limit=longest(card),
            cut=job.truncate,
            cut_field=job.cut_field,
            document_tokens=job.document_tokens,
            names=job.names,
            query_index=job.query_index,
        )
        encoded, tokenize_s = await timed(
            self._pairs.encode(
                job.queries,
                job.documents,
                fit,
                instruction=job.instruction,
                split=job.split_special_tokens is not False,
            ),
            job.deadline,
        )
        tokens = sum(map(len, encoded.sequences))
        check_tokens(tokens, self.service.config.max_request_tokens, job.names[1])
        try:
            result = await self.service.pool.embed(
                encoded.sequences,
                outputs=(output,),
                priority=job.priority,
                token_types=encoded.token_types,
                deadline=job.deadline,
            )
        except RoseError as error:
            raise _named(error, job, 0) from None
        logits = result.outputs[output]
        if logits.shape != (len(job.documents), found.dimension):
            raise InternalError(f"a replica answered scores of shape {logits.shape} for {len(job.documents)} pairs")
        several = found.dimension > 1
        return Ranked(
            raw=scoring.log_odds(logits, label),
            method=CROSS,
            activation="sigmoid" if several else self._facts.reranker.activation,
            tokens=tokens,
            tokenize_s=tokenize_s,
            timing=result.timing,
            label=label if several else None,
        )

    def _check_cross(self, job: RankJob) -> None:
        """Raises InvalidInput for what this form of pairs has no place for."""
        assert self._pairs is not None
        if job.instruction is not None and not self._pairs.takes_instruction:
            raise InvalidInput("the model's pairs have no place for an instruction", param="instruction")
        if self._pairs.takes_instruction and job.split_special_tokens is False:
            raise InvalidInput(
                "control tokens in texts are always taken apart in a template: a document must not end its turn",
                param="split_special_tokens",
            )
        for name in ("query_prompt_name", "document_prompt_name"):
            if getattr(job, name):
                raise InvalidInput("prompts go before texts that are compared, not before pairs", param=name)

    async def _compared(self, card: pb.ModelCard, job: RankJob, method: Method) -> Ranked:
        if job.instruction is not None:
            raise InvalidInput(
                "the model has no template with a place for an instruction; use its prompts", param="instruction"
            )
        if job.label is not None:
            raise InvalidInput(f"method {method.name!r} has no labels", param="label")
        job = with_prompts(card, job)
        try:
            compared = await compare(self.service, card, job, method)
        except RoseError as error:
            raise _named(error, job, len(set(job.queries))) from None
        scores = compared.scores
        raw = scoring.combine(scores, method.weights) if method.weights else scores[method.name]
        prompts = {"query": job.query_prompt_name, "document": job.document_prompt_name}
        return Ranked(
            raw=raw,
            method=method.name,
            activation="none",
            tokens=compared.tokens,
            tokenize_s=compared.tokenize_s,
            timing=compared.timing,
            prompts={side: name for side, name in prompts.items() if name},
        )


def _named(error: RoseError, job: RankJob, queries: int) -> RoseError:
    """An error of the replicas in the caller's words: their items are `queries` queries, then documents."""
    if error.param != FIELD and error.index is None:
        return error
    param, index = job.names[1], error.index
    if index is not None and index < queries:
        asked = list(dict.fromkeys(job.queries))[index]
        param, index = job.names[0], job.queries.index(asked) if job.query_index else None
    elif index is not None:
        index -= queries
    return from_kind(error.kind, error.message, param=param, index=index, retry_after_s=error.retry_after_s)

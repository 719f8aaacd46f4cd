"""Generate of rose.v1.Rose: a message to a job of the service, its deltas to messages.

Knows messages; knows neither gRPC nor replicas. What a field leaves out is the schema's default, not the model's.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from rose.errors import InvalidInput
from rose.gateway.answer import Answer, Delta
from rose.gateway.front import Front
from rose.gateway.generate_request import chat_messages
from rose.gateway.generating import GenerateJob, Run
from rose.gateway.inputs import FIELD
from rose.gateway.sampling import SamplingOptions
from rose.gateway.schemas_generate import ChatMessage
from rose.proto import rose_pb2 as pb
from rose.proto.convert import IntArray, check_token_ids, tokens_from_proto


async def generate(
    front: Front, request: pb.GenerateRequest, deadline: float
) -> AsyncGenerator[pb.GenerateChunk, None]:
    """Chunks of the answer, each with the text that it makes certain; the last one with finish and counts.

    Raises:
        RoseError: at any point.
    """
    service = front.generate
    card = service.card_for(request.model)
    sampling = _sampling(request.sampling)
    sampling.check(card.vocab_size)
    prompt, field = await _prompt(front, card, request, deadline)
    job = GenerateJob(
        prompts=[prompt],
        sampling=sampling,
        field=field,
        goes_on=field != "messages",
        priority=request.priority,
        deadline=deadline,
    )
    run = service.run(card, job)
    async with aclosing(run.deltas()) as deltas:
        async for _, delta in deltas:
            yield _chunk(run, run.answers[0], delta)


async def _prompt(
    front: Front, card: pb.ModelCard, request: pb.GenerateRequest, deadline: float
) -> tuple[IntArray, str]:
    """Token ids, and the field they come from."""
    match request.WhichOneof("prompt"):
        case "tokens":
            return _tokens(request.tokens, card.vocab_size), "tokens"
        case "text":
            if not request.text:
                raise InvalidInput("the text is empty", param="text")
            ids, _ = await front.generate.text_prompts(card, [request.text], deadline, field="text")
            return ids[0], "text"
        case "messages":
            messages = [ChatMessage(role=each.role, content=each.content) for each in request.messages.items]
            ids_of_chat, _ = await front.generate.chat_prompt(card, chat_messages(messages), deadline)
            return ids_of_chat, "messages"
        case _:
            raise InvalidInput("neither text, messages nor tokens were sent", param="text")


def _tokens(tokens: pb.Tokens, vocab_size: int) -> IntArray:
    try:
        sequences = tokens_from_proto(tokens)
        if len(sequences) != 1:
            raise InvalidInput(f"{len(sequences)} sequences, and one prompt is continued: send one")
        check_token_ids(sequences, vocab_size)
    except InvalidInput as error:
        param = "tokens" if error.param in (None, FIELD) else error.param
        raise InvalidInput(error.message, param=param) from None
    return sequences[0]


def _sampling(asked: pb.Sampling) -> SamplingOptions:
    return SamplingOptions(
        max_new_tokens=asked.max_new_tokens,
        temperature=asked.temperature if asked.HasField("temperature") else 1.0,
        top_k=asked.top_k,
        top_p=asked.top_p if asked.HasField("top_p") else 1.0,
        min_p=asked.min_p,
        seed=asked.seed if asked.HasField("seed") else None,
        stop_ids=tuple(asked.stop_ids),
        stop=tuple(asked.stop),
        ignore_eos=asked.ignore_eos,
        min_new_tokens=asked.min_new_tokens,
        logprobs=asked.logprobs if asked.HasField("logprobs") else None,
    )


def _chunk(run: Run, answer: Answer, delta: Delta) -> pb.GenerateChunk:
    chunk = pb.GenerateChunk(
        tokens=delta.tokens, logprobs=delta.logprobs if run.logprobs else (), text=delta.text, finish=delta.finish
    )
    if delta.finish:
        chunk.prompt_tokens = run.prompt_tokens
        chunk.completion_tokens = answer.completion_tokens
        chunk.cached_tokens = answer.cached_tokens
        chunk.stop = answer.stop
        chunk.timing.queue_us = round(answer.timing.queue_s * 1e6)
        chunk.timing.compute_us = round(answer.timing.compute_s * 1e6)
        chunk.timing.batches = answer.timing.batches
    return chunk

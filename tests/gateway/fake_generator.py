"""A fake engine process that continues prompts with scripted tokens: at once, slowly, badly or not at all."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from rose.errors import RoseError
from rose.proto import rose_pb2 as pb
from rose.proto.convert import error_to_proto, tokens_from_proto
from rose.proto.frames import Frame, FrameType
from tests.gateway.conftest import card_for
from tests.gateway.fake_engine import FakeEngine

Send = Callable[[FrameType, int, bytes], None]
PAGE = 16


class FakeGenerator(FakeEngine):
    """`script` gives the tokens that continue a prompt; the answer ends where they do, or at max_new_tokens.

    Attributes:
        end_id: drawn behind the script, unless the length ends it first.
        per_chunk: tokens of a chunk. pause_s: between chunks.
        fail_after, failure: answer with this error after so many chunks; `hang_after`: nothing more.
        first_gate: chunks wait for it, where it is set.
    """

    def __init__(self, path: str, card: pb.ModelCard) -> None:
        super().__init__(path, card)
        self.script: Callable[[Sequence[int]], Sequence[int]] = lambda prompt: [*range(30, 40)]
        self.end_id = card.end_ids[0] if card.end_ids else 0
        self.per_chunk, self.pause_s = 1, 0.0
        self.fail_after, self.failure = 0, None
        self.hang_after: int | None = None
        self.drop_after: int | None = None
        self.generated: list[pb.GenerateRequest] = []
        self.arrivals: list[float] = []
        self._running: dict[int, asyncio.Task[None]] = {}
        self._served: set[tuple[int, ...]] = set()

    async def __aexit__(self, *rest: object) -> None:
        for task in self._running.values():
            task.cancel()
        await super().__aexit__(*rest)

    def _take(self, frame: Frame, send: Send) -> None:
        if frame.type is FrameType.GENERATE:
            self.deadlines.append(frame.deadline_ms)
            request = pb.GenerateRequest.FromString(frame.payload)
            self.generated.append(request)
            loop = asyncio.get_running_loop()
            self.arrivals.append(loop.time())
            self._running[frame.request_id] = loop.create_task(self._continue(frame.request_id, request, send))
            return
        super()._take(frame, send)
        if frame.type is FrameType.CANCEL and (task := self._running.pop(frame.request_id, None)) is not None:
            task.cancel()

    async def _continue(self, id_: int, request: pb.GenerateRequest, send: Send) -> None:
        prompt = tokens_from_proto(request.tokens)[0].tolist()
        cached = len(prompt) // PAGE * PAGE if tuple(prompt) in self._served else 0
        most = request.sampling.max_new_tokens
        tokens = list(self.script(prompt))
        finish = pb.LENGTH if len(tokens) >= most else pb.STOP
        tokens = tokens[:most] if finish == pb.LENGTH else [*tokens, self.end_id]
        with contextlib.suppress(asyncio.CancelledError):
            for count, start in enumerate(range(0, len(tokens), self.per_chunk)):
                if self.failure is not None and count == self.fail_after:
                    send(FrameType.ERROR, id_, error_to_proto(self.failure).SerializeToString())
                    return
                if count == self.hang_after:
                    return
                if count == self.drop_after:
                    for writer in self._writers:
                        writer.transport.abort()
                    return
                await asyncio.sleep(self.pause_s)
                some = tokens[start : start + self.per_chunk]
                chunk = pb.GenerateChunk(tokens=some)
                if request.sampling.HasField("logprobs"):
                    for i, token in enumerate(some, start):
                        each = chunk.logprobs.add(logprob=-0.25 * (i + 1))
                        for k in range(request.sampling.logprobs):
                            each.top.add(token=token + k, logprob=-0.25 * (i + 1) - k)
                self._served.add(tuple(prompt))
                if start + self.per_chunk >= len(tokens):
                    chunk.finish = finish
                    chunk.prompt_tokens, chunk.completion_tokens = len(prompt), len(tokens)
                    chunk.cached_tokens = cached
                    chunk.timing.queue_us, chunk.timing.compute_us, chunk.timing.batches = 100, 600, len(tokens)
                send(FrameType.GENERATE_CHUNK, id_, chunk.SerializeToString())
        self._running.pop(id_, None)

    def fails(self, failure: RoseError, after: int = 0) -> None:
        self.failure, self.fail_after = failure, after


def generator_card(folder: Path, **changes) -> pb.ModelCard:
    fields = {
        "model": "tiny/chat",
        "architecture": "Qwen3ForCausalLM",
        "outputs": [],
        "default_output": "",
        "prompts": {},
        "pooling": "",
        "vocab_size": 400,
        "max_tokens": 512,
        "generates": True,
        "end_ids": [1],
        "max_running": 64,
    }
    return card_for(folder, **fields | changes)

"""A fake engine process on the real light link, in sixty lines: it answers late, backwards, badly or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rose.errors import RoseError
from rose.proto import rose_pb2 as pb
from rose.proto.convert import error_to_proto
from rose.proto.frames import Frame, FrameDecoder, FrameType, encode_frame
from tests.gateway.expected import answer_for


class FakeEngine:
    """`fault` may raise; `backwards = n` answers every n requests together, the last one first."""

    def __init__(self, path: str, card: pb.ModelCard) -> None:
        self.path, self.card, self.stats = path, card, pb.ServerStats()
        self.fault: Callable[[pb.EmbedRequest], None] = lambda request: None
        self.answer = answer_for
        self.backwards, self.delay_s = 1, 0.0
        self.seen: list[pb.EmbedRequest] = []
        self.deadlines: list[int] = []
        self.cancelled: list[int] = []
        self._waiting: list[Callable[[], None]] = []

    async def __aenter__(self) -> FakeEngine:
        self._writers: list[asyncio.StreamWriter] = []
        self._server = await asyncio.start_unix_server(self._serve, self.path)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        decoder = FrameDecoder()
        while data := await reader.read(1 << 20):
            for frame in decoder.feed(data):
                self._take(frame, lambda kind, id_, message: writer.write(encode_frame(kind, id_, message)))

    def _take(self, frame: Frame, send: Callable[[FrameType, int, bytes], None]) -> None:
        if frame.type is FrameType.INFO:
            send(FrameType.INFO_RESULT, frame.request_id, self.card.SerializeToString())
        elif frame.type is FrameType.STATS:
            send(FrameType.STATS_RESULT, frame.request_id, self.stats.SerializeToString())
        elif frame.type is FrameType.CANCEL:
            self.cancelled.append(frame.request_id)
        else:
            request = pb.EmbedRequest.FromString(frame.payload)
            self.seen.append(request)
            self.deadlines.append(frame.deadline_ms)
            self._waiting.append(lambda: send(*self._reply(frame.request_id, request)))
            if len(self._waiting) >= self.backwards:
                asyncio.get_running_loop().call_later(self.delay_s, self.release)

    def release(self) -> None:
        waiting, self._waiting = self._waiting, []
        for send in reversed(waiting):
            send()

    def _reply(self, id_: int, request: pb.EmbedRequest) -> tuple[FrameType, int, bytes]:
        try:
            self.fault(request)
        except RoseError as error:
            return FrameType.ERROR, id_, error_to_proto(error).SerializeToString()
        return FrameType.EMBED_RESULT, id_, self.answer(self.card, request).SerializeToString()

"""A reactor in a thread, around any engine of the server's port, and raw sockets to talk to it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace

from rose.config import ServerConfig
from rose.errors import RoseError
from rose.proto import rose_pb2 as pb
from rose.proto.address import parse_address
from rose.proto.convert import error_from_proto
from rose.proto.frames import Frame, FrameDecoder, FrameType, encode_frame
from rose.server.card import output_cards
from rose.server.listener import Listener
from rose.server.reactor import Reactor
from rose.server.validate import Limits
from tests.server.fake_engine import VOCAB, FakeEngine

MAX_TOKENS = 256


class RunningServer:
    """Serves `engine` until `stop` or the end of the `with` block."""

    def __init__(
        self, engine: FakeEngine, address: str = "127.0.0.1:0", *, patience_s: float = 60.0, device_alive=None, **limits
    ) -> None:
        config = replace(ServerConfig(drain_seconds=10.0), **limits)
        self.engine = engine
        default = next(iter(engine.outputs))
        self.limits = Limits(
            served_name="fake",
            outputs=engine.outputs,
            default_output=default,
            vocab_size=VOCAB,
            max_tokens=MAX_TOKENS,
            max_request_items=config.max_request_items,
            max_request_tokens=config.max_queued_tokens,
            max_answer_bytes=config.max_payload - 65536,
        )
        card = pb.ModelCard(
            model="fake", outputs=output_cards(engine.outputs), default_output=default, vocab_size=VOCAB
        )
        listener = Listener(parse_address(address))
        self.address = str(listener.address)
        self.reactor = Reactor(
            engine,
            self.limits,
            card,
            listener,
            config,
            patience_s=patience_s,
            device_alive=device_alive or (lambda: True),
        )
        self.reactor.listen()
        self.status: int | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.status = self.reactor.run()

    def stop(self) -> None:
        self.reactor.stop()

    def join(self, timeout_s: float = 15.0) -> int | None:
        """Wait for the reactor to end; its exit status."""
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "the reactor does not end"
        return self.status

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(self, *exc) -> None:
        if self._thread.is_alive():
            self.reactor.stop()
            self.reactor.stop()
            self.join()
        self.engine.executor.close()


class RawPeer:
    """A client that can send anything."""

    def __init__(self, address: str, timeout_s: float = 10.0) -> None:
        where = parse_address(address)
        if where.path:
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.socket.connect(where.path)
        else:
            self.socket = socket.create_connection((where.host, where.port))
        self.socket.settimeout(timeout_s)
        self._decoder = FrameDecoder()
        self._frames: list[Frame] = []

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def request(self, request_id: int, sequences, *, deadline_ms: int = 0, **fields) -> None:
        self.send(encode_frame(FrameType.EMBED, request_id, embed_payload(sequences, **fields), deadline_ms))

    def frame(self) -> Frame:
        """The next frame; EOFError at the end of the stream."""
        while not self._frames:
            data = self.socket.recv(1 << 20)
            if not data:
                raise EOFError
            self._frames += self._decoder.feed(data)
        return self._frames.pop(0)

    def error(self) -> tuple[int, RoseError]:
        """The next frame, which must be an error: the request's id and the error."""
        frame = self.frame()
        assert frame.type is FrameType.ERROR, frame
        return frame.request_id, error_from_proto(pb.Error.FromString(frame.payload))

    def at_end(self) -> bool:
        """Whether the server has closed the connection."""
        try:
            self.frame()
        except (EOFError, ConnectionError):
            return True
        return False

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> RawPeer:
        return self

    def __exit__(self, *exc) -> None:
        self.close()


def embed_payload(sequences, **fields) -> bytes:
    import numpy as np

    from rose.proto.convert import tokens_to_proto

    tokens = tokens_to_proto([np.asarray(ids, dtype=np.int32) for ids in sequences])
    return pb.EmbedRequest(tokens=tokens, **fields).SerializeToString()


@contextlib.contextmanager
def serving(engine: FakeEngine | None = None, address: str = "127.0.0.1:0", **limits) -> Iterator[RunningServer]:
    with RunningServer(engine or FakeEngine(), address, **limits) as server:
        yield server

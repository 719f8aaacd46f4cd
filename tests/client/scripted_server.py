"""A server that does what a test tells it, frame by frame."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

import numpy as np

from rose.proto import rose_pb2 as pb
from rose.proto.convert import tensor_to_proto, tokens_from_proto
from rose.proto.frames import Frame, FrameDecoder, FrameType, encode_frame

Handler = Callable[[socket.socket, Frame], None]


class ScriptedServer:
    """Calls `handler(connection, frame)` for each frame, a thread a connection, and remembers the frames."""

    def __init__(self, handler: Handler, path: str = "") -> None:
        self.handler = handler
        self.frames: list[Frame] = []
        self.connections = 0
        if path:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(path)
            self._listener.listen()
            self.address = f"unix:{path}"
        else:
            self._listener = socket.create_server(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        decoder = FrameDecoder()
        try:
            while data := connection.recv(1 << 16):
                for frame in decoder.feed(data):
                    self.frames.append(frame)
                    self.handler(connection, frame)
        except OSError:
            pass

    def drop_connections(self) -> None:
        """Close every open connection, so that a client sees the end of the stream."""
        # Whoever connects anew because of it is left alone.
        dropped, self._open = self._open, []
        for connection in dropped:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def close(self) -> None:
        # Closing alone would leave the kernel's socket listening for as long as accept() waits on it.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._listener.close()
        self.drop_connections()

    def __enter__(self) -> ScriptedServer:
        return self

    def __exit__(self, *exc) -> None:
        self.close()


def echo(connection: socket.socket, frame: Frame) -> None:
    """Answer EMBED with one row a sequence: its length and its ids' sum."""
    if frame.type is FrameType.EMBED:
        connection.sendall(encode_frame(FrameType.EMBED_RESULT, frame.request_id, echo_payload(frame)))
    elif frame.type is FrameType.INFO:
        card = pb.ModelCard(model="echo").SerializeToString()
        connection.sendall(encode_frame(FrameType.INFO_RESULT, frame.request_id, card))


def echo_payload(frame: Frame) -> bytes:
    sequences = tokens_from_proto(pb.EmbedRequest.FromString(frame.payload).tokens)
    rows = np.array([[len(ids), ids.sum()] for ids in sequences], dtype=np.float32)
    return pb.EmbedResponse(outputs=[pb.Output(name="echo", values=tensor_to_proto(rows))]).SerializeToString()


def silent(connection: socket.socket, frame: Frame) -> None:
    """Answer nothing."""

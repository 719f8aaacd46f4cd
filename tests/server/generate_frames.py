"""GENERATE frames out, and the frames that answer them, each checked to be within its request."""

from __future__ import annotations

import numpy as np

from rose.proto import rose_pb2 as pb
from rose.proto.convert import error_from_proto, tokens_to_proto
from rose.proto.frames import FrameType, encode_frame
from tests.server.running_server import RawPeer


def payload(ids, priority=pb.ONLINE, **sampling) -> bytes:
    tokens = tokens_to_proto([np.asarray(ids, dtype=np.int32)])
    return pb.GenerateRequest(tokens=tokens, sampling=pb.Sampling(**sampling), priority=priority).SerializeToString()


def ask(peer: RawPeer, request_id: int, ids, *, deadline_ms: int = 0, **sampling) -> None:
    peer.send(encode_frame(FrameType.GENERATE, request_id, payload(ids, **sampling), deadline_ms))


def answer(peer: RawPeer, answers: dict, until: int) -> None:
    """Read until `until` requests are answered: id -> (tokens, last chunk or error)."""
    while sum(end is not None for _, end in answers.values()) < until:
        frame = peer.frame()
        tokens, end = answers.get(frame.request_id, ([], None))
        assert end is None, "a frame after the end of its request"
        if frame.type is FrameType.ERROR:
            end = error_from_proto(pb.Error.FromString(frame.payload))
        else:
            assert frame.type is FrameType.GENERATE_CHUNK
            chunk = pb.GenerateChunk.FromString(frame.payload)
            tokens += chunk.tokens
            end = chunk if chunk.finish else None
        answers[frame.request_id] = (tokens, end)

"""What the fake engine answers, so that a test can tell which vector belongs to which ids."""

from __future__ import annotations

import hashlib

import numpy as np

from rose.proto import rose_pb2 as pb
from rose.proto.convert import tensor_to_proto, tokens_from_proto


def vector_of(ids, dimensions: int) -> np.ndarray:
    """A unit vector made from the ids alone: no two sequences share one."""
    seed = hashlib.sha256(np.asarray(ids, dtype="<i4").tobytes()).digest()
    row = np.random.default_rng(int.from_bytes(seed[:8], "little")).standard_normal(dimensions).astype(np.float32)
    return row / np.linalg.norm(row)


def answer_for(card: pb.ModelCard, request: pb.EmbedRequest) -> pb.EmbedResponse:
    """One row a sequence, cut to the asked dimensions without normalising."""
    sequences = tokens_from_proto(request.tokens)
    output = card.outputs[0]
    rows = np.stack([vector_of(ids, output.dimension)[: request.dimensions or None] for ids in sequences])
    return pb.EmbedResponse(
        outputs=[pb.Output(name=output.name, values=tensor_to_proto(rows))],
        prompt_tokens=sum(map(len, sequences)),
        timing=pb.Timing(queue_us=100, compute_us=600, batches=1),
    )

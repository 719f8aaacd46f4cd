"""What the fake engine answers, so that a test can tell which row belongs to which ids."""

from __future__ import annotations

import hashlib

import numpy as np

from rose.proto import rose_pb2 as pb
from rose.proto.annotations import spans_from_proto, token_types_from_bytes
from rose.proto.convert import tensor_to_proto, tokens_from_proto


def vector_of(ids, dimensions: int) -> np.ndarray:
    """A unit vector made from the ids alone: no two sequences share one."""
    seed = hashlib.sha256(np.asarray(ids, dtype="<i4").tobytes()).digest()
    row = np.random.default_rng(int.from_bytes(seed[:8], "little")).standard_normal(dimensions).astype(np.float32)
    return row / np.linalg.norm(row)


def weight_of(number: int) -> float:
    """A lexical weight: of a third of the vocabulary zero."""
    return max(0.0, float(number * 7919 % 101 - 33) / 64)


def logits_of(ids, types, labels: int) -> np.ndarray:
    """Raw scores of one pair: they depend on every id and every token type."""
    return 6 * vector_of([*ids, -1, *types], max(labels, 8))[:labels]


def token_vectors(ids, dimensions: int, skipped: int) -> np.ndarray:
    """One unit vector a token, of the token and its place."""
    return np.stack([vector_of([number, place], dimensions) for place, number in enumerate(ids)][skipped:])


def answer_for(card: pb.ModelCard, request: pb.EmbedRequest) -> pb.EmbedResponse:
    """Rows of every output asked for; vectors are cut to the asked dimensions without normalising."""
    sequences = tokens_from_proto(request.tokens)
    by_name = {output.name: output for output in card.outputs}
    asked = [by_name[name] for name in request.outputs or [card.default_output or card.outputs[0].name]]
    lengths = [len(ids) for ids in sequences]
    types = token_types_from_bytes(request.token_types, lengths) or [np.zeros(n, np.int32) for n in lengths]
    spans = spans_from_proto(request.spans, len(lengths)) if request.HasField("spans") else None
    return pb.EmbedResponse(
        outputs=[_output(output, sequences, types, spans, request.dimensions) for output in asked],
        prompt_tokens=sum(lengths),
        timing=pb.Timing(queue_us=100, compute_us=600, batches=1),
    )


def _output(output, sequences, types, spans, dimensions) -> pb.Output:
    if output.kind == "score":
        rows = [logits_of(ids, kinds, output.dimension) for ids, kinds in zip(sequences, types, strict=True)]
        return pb.Output(name=output.name, values=tensor_to_proto(np.stack(rows).astype(np.float32)))
    if output.per_token:
        skipped = output.skip_tokens
        if output.kind == "weights":
            rows = [np.array([[weight_of(int(one))] for one in ids[skipped:]]) for ids in sequences]
        else:
            rows = [token_vectors(ids, output.dimension, skipped) for ids in sequences]
        splits = np.cumsum([0, *map(len, rows)]).tolist()
        return pb.Output(
            name=output.name, values=tensor_to_proto(np.concatenate(rows).astype(np.float32)), splits=splits
        )
    parts, splits = sequences, []
    if spans is not None:
        parts = [ids[start:end] for ids, bounds in zip(sequences, spans, strict=True) for start, end in bounds]
        splits = np.cumsum([0, *map(len, spans)]).tolist()
    rows = [_finished(output, ids)[: dimensions or None] for ids in parts]
    return pb.Output(name=output.name, values=tensor_to_proto(np.stack(rows)), splits=splits)


def _finished(output, ids) -> np.ndarray:
    if output.dtype == pb.INT8:
        return np.rint(np.tanh(vector_of(ids, output.dimension)) * 127).astype(np.int8)
    if output.dtype == pb.UINT8:
        return np.packbits(vector_of(ids, output.dimension * 8) >= 0, bitorder="little")
    return vector_of(ids, output.dimension)

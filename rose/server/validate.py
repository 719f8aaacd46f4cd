"""The one validator of embed requests, whichever carrier brought them.

Turns a message into work the engine can never trip over, or into an error that names the field, the item and the
limit. Knows messages and the model's limits; knows neither sockets nor the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rose.engine.request import Priority
from rose.errors import InvalidInput, PayloadTooLarge, UnknownModel, Unsupported
from rose.models.base import OutputSpec
from rose.proto import rose_pb2 as pb
from rose.proto.annotations import check_spans, check_token_types, spans_from_proto, token_types_from_bytes
from rose.proto.convert import IntArray, check_token_ids, tokens_from_proto

_ITEM_BYTES = {"float32": 4, "int8": 1, "uint8": 1}
# Most bytes of one entry of `splits`: a varint of 32 bits.
_SPLIT_BYTES = 5
_PRIORITIES = {int(priority): priority for priority in Priority}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one request may ask of the served model.

    Attributes:
        served_name: the name clients may use; an empty name in a request means the same.
        outputs, default_output: as the model states them.
        max_tokens: longest sequence, in tokens.
        type_vocab_size: token types the model has; None where nobody knows, and then any is taken.
        spans_unavailable: why the model pools whole sequences only, or None.
        max_request_items: most sequences of one request.
        max_request_tokens: most tokens of one request; more would not fit an empty queue.
        max_answer_bytes: largest answer that fits a frame.
    """

    served_name: str
    outputs: Mapping[str, OutputSpec]
    default_output: str
    vocab_size: int
    max_tokens: int
    max_request_items: int
    max_request_tokens: int
    max_answer_bytes: int
    type_vocab_size: int | None = None
    spans_unavailable: str | None = None


@dataclass(slots=True)
class Work:
    """A valid request.

    Attributes:
        specs: the outputs asked for, in the order they were asked.
        dimensions: where float vectors are cut, or 0.
        tokens: of all sequences.
        answer_bytes: upper bound of the answer's values.
        token_types: beside the sequences, or None for all zero.
        spans: [n, 2] beside each sequence, or None: pooled outputs have a row a span then.
    """

    sequences: list[IntArray]
    specs: dict[str, OutputSpec]
    dimensions: int
    priority: Priority
    tokens: int
    answer_bytes: int
    token_types: list[IntArray] | None = None
    spans: list[IntArray] | None = None


def validate(request: pb.EmbedRequest, limits: Limits) -> Work:
    """Check a request whole before any of it is queued.

    Raises:
        UnknownModel, Unsupported, PayloadTooLarge, InvalidInput.
    """
    if request.model and request.model != limits.served_name:
        raise UnknownModel(f"model {request.model!r} is not served here, {limits.served_name!r} is", param="model")
    specs = _outputs(request, limits)
    dimensions = request.dimensions
    if dimensions:
        _check_dimensions(dimensions, specs)
    priority = _PRIORITIES.get(request.priority)
    if priority is None:
        raise InvalidInput(f"priority {request.priority} is neither ONLINE (0) nor BULK (1)", param="priority")
    sequences, lengths = _sequences(request, limits)
    tokens = lengths[0] if len(lengths) == 1 else sum(lengths)
    if tokens > limits.max_request_tokens:
        raise PayloadTooLarge(
            f"the request has {tokens} tokens, over the queue's limit of {limits.max_request_tokens}", param="input"
        )
    work = Work(sequences, specs, dimensions, priority, tokens, 0)
    if request.token_types:
        work.token_types = token_types_from_bytes(request.token_types, lengths)
        check_token_types(work.token_types or (), lengths, limits.type_vocab_size)
    if request.HasField("spans"):
        work.spans = _spans(request, specs, lengths, limits)
    work.answer_bytes = _answer_bytes(work, lengths)
    if work.answer_bytes > limits.max_answer_bytes:
        raise PayloadTooLarge(
            f"the answer would have {work.answer_bytes} bytes, over the limit of {limits.max_answer_bytes}"
            " (--max-payload): send fewer items in one request, or ask for fewer outputs",
            param="input",
        )
    return work


def _spans(
    request: pb.EmbedRequest, specs: Mapping[str, OutputSpec], lengths: list[int], limits: Limits
) -> list[IntArray]:
    """Raises InvalidInput also where no output, or one that is no vector, would have a row a span."""
    if limits.spans_unavailable is not None:
        raise InvalidInput(f"this model takes no spans: {limits.spans_unavailable}", param="spans")
    if all(spec.per_token for spec in specs.values()):
        raise InvalidInput(f"spans are pooled, and output {next(iter(specs))!r} is per token", param="spans")
    for name, spec in specs.items():
        if spec.kind == "score":
            raise InvalidInput(f"spans are pooled, and output {name!r} scores whole sequences", param="spans")
    spans = spans_from_proto(request.spans, len(lengths))
    check_spans(spans, lengths)
    return spans


def _sequences(request: pb.EmbedRequest, limits: Limits) -> tuple[list[IntArray], list[int]]:
    """The sequences and their lengths."""
    kind = request.WhichOneof("input")
    if kind == "texts":
        raise Unsupported(
            "this is an engine process and holds no tokenizer: send token ids, or send texts to a gateway",
            param="input",
        )
    if kind is None:
        raise InvalidInput("the request has no input", param="input")
    if request.prompt_name:
        raise InvalidInput("prompt_name goes with texts: token ids hold their prompt already", param="prompt_name")
    packed = request.tokens
    lengths = list(packed.lengths)
    if len(lengths) > limits.max_request_items:
        raise PayloadTooLarge(
            f"the request has {len(lengths)} items, over the limit of {limits.max_request_items}", param="input"
        )
    if lengths and max(lengths) > limits.max_tokens:
        index = next(i for i, length in enumerate(lengths) if length > limits.max_tokens)
        raise InvalidInput(
            f"item {index} has {lengths[index]} tokens, over the model's limit of {limits.max_tokens}",
            param="input",
            index=index,
        )
    sequences = tokens_from_proto(packed, lengths)
    check_token_ids(sequences, limits.vocab_size)
    return sequences, lengths


def _outputs(request: pb.EmbedRequest, limits: Limits) -> dict[str, OutputSpec]:
    specs: dict[str, OutputSpec] = {}
    for name in request.outputs or (limits.default_output,):
        spec = limits.outputs.get(name)
        if spec is None:
            known = ", ".join(sorted(limits.outputs))
            raise InvalidInput(f"the model has no output {name!r}, it has: {known}", param="outputs")
        if spec.unavailable is not None:
            raise InvalidInput(
                f"output {name!r} cannot be had from this checkpoint: {spec.unavailable}", param="outputs"
            )
        specs[name] = spec
    return specs


def _check_dimensions(dimensions: int, specs: Mapping[str, OutputSpec]) -> None:
    """1 .. dimension, for float vectors only: a cut of a quantised or per-token row, of weights or of
    scores has no agreed meaning. The full dimension of vectors is always accepted: generic clients send it unasked.
    """
    for name, spec in specs.items():
        if spec.kind != "vector":
            kind = "lexical weights" if spec.kind == "weights" else "a score"
            raise InvalidInput(
                f"dimensions of {dimensions}: output {name!r} is {kind}, and only float32 vectors are cut",
                param="dimensions",
            )
        if dimensions > spec.dimension:
            raise InvalidInput(
                f"dimensions of {dimensions}: output {name!r} has {spec.dimension}, expected 1 to {spec.dimension}",
                param="dimensions",
            )
        if dimensions < spec.dimension and (spec.per_token or spec.dtype != "float32"):
            kind = "per-token" if spec.per_token else spec.dtype
            raise InvalidInput(
                f"dimensions of {dimensions}: output {name!r} is {kind}, and only float32 vectors are cut",
                param="dimensions",
            )


def _answer_bytes(work: Work, lengths: list[int]) -> int:
    total, items = 0, len(lengths)
    for spec in work.specs.values():
        rows = items
        if spec.per_token:
            skip = spec.skip_tokens
            rows = sum(max(length - skip, 0) for length in lengths) if skip else work.tokens
        elif work.spans is not None:
            rows = sum(map(len, work.spans))
        total += rows * (work.dimensions or spec.dimension) * _ITEM_BYTES[spec.dtype]
        if spec.per_token or work.spans is not None:
            total += _SPLIT_BYTES * (items + 1)
    return total

"""The body and headers of an embeddings request, read and checked.

Knows JSON and the model card; knows neither text processing nor answers.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from rose.errors import InvalidInput, RoseError
from rose.gateway.inputs import FIELD, parse_input, show
from rose.gateway.schemas import EmbeddingRequest
from rose.gateway.service import EmbedJob
from rose.gateway.vectors import QUANTISED, check_quantised_dimensions
from rose.proto import rose_pb2 as pb
from rose.proto.frames import MAX_DEADLINE_MS

TIMEOUT_HEADER = b"x-request-timeout-ms"
_decode = msgspec.json.Decoder(EmbeddingRequest).decode
_PRIORITIES: dict[str | None, pb.Priority.ValueType] = {None: pb.ONLINE, "online": pb.ONLINE, "bulk": pb.BULK}
_AT = re.compile(r" - at `\$\.?([A-Za-z_]+)?.*`$")
_MISSING = re.compile(r"required field `(\w+)`")


def make_job(request: EmbeddingRequest, card: pb.ModelCard, encoding: str, max_items: int, deadline: float) -> EmbedJob:
    """Raises InvalidInput and PayloadTooLarge as parse_input does, and for dimensions that cannot be had."""
    dimensions = request.dimensions
    if dimensions is not None and dimensions < 1:
        raise InvalidInput(f"dimensions of {show(dimensions)}: expected 1 or more, or null for all", param="dimensions")
    quantised = QUANTISED.get(encoding)
    if quantised is not None:
        check_quantised_dimensions(dimensions or 0, encoding, card)
    cut_to = request.truncate_prompt_tokens
    if cut_to is None and request.truncate:
        cut_to = -1
    return EmbedJob(
        input=parse_input(request.input, vocab_size=card.vocab_size, max_items=max_items),
        outputs=() if quantised is None else (quantised,),
        dimensions=0 if quantised is not None else dimensions or 0,  # quantised rows are cut here, afterwards
        prompt_name=request.prompt_name,
        cut_to=cut_to,
        split_special_tokens=bool(request.split_special_tokens),
        priority=_PRIORITIES[request.priority],
        deadline=deadline,
    )


def timeout_s(header: bytes | None, default: float) -> float:
    """Seconds a request may take. Raises InvalidInput unless the header is a whole number of milliseconds."""
    if header is None:
        return default
    text = header.strip()
    if not text.isdigit() or not 0 < int(text) <= MAX_DEADLINE_MS:
        raise InvalidInput(
            f"X-Request-Timeout-Ms is {header!r}: expected whole milliseconds, 1..{MAX_DEADLINE_MS}",
            param="X-Request-Timeout-Ms",
        )
    return int(text) / 1000


def decode_request(body: bytes) -> EmbeddingRequest:
    """Raises InvalidInput that names the field where there is one."""
    try:
        return _decode(body)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except msgspec.DecodeError as error:
        raise _malformed(body, str(error)) from None
    except RecursionError:
        raise InvalidInput("the JSON is nested too deeply") from None


def _invalid(text: str) -> InvalidInput:
    at = _AT.search(text) or _MISSING.search(text)
    return InvalidInput(text[:1].lower() + text[1:], param=at.group(1) if at else None)


def _malformed(body: bytes, text: str) -> RoseError:
    """Why the body is no JSON; a lone surrogate, which JSON's grammar allows, is named with its item."""
    if b"\\ud" in body.lower():
        index = _lone_surrogate(body)
        if index is not None:
            return InvalidInput(
                "the text holds a lone surrogate, which is no Unicode text: send the pair, or leave it out",
                param=FIELD,
                index=index,
            )
    return InvalidInput(f"the body is no valid JSON: {text}")


def _lone_surrogate(body: bytes) -> int | None:
    try:
        value: Any = json.loads(body)["input"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    texts = value if isinstance(value, list) else [value]
    return next((i for i, text in enumerate(texts) if isinstance(text, str) and not _is_unicode(text)), None)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True

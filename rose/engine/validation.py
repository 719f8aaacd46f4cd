"""What a request must be before it is queued: the last check before a device sees it.

An id outside the vocabulary ends a CUDA process, and an empty sequence some kernels, so neither gets past here, whoever
the caller is; only ids that the caller says it has checked are not looked at again. Knows limits; knows neither queues
nor models.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

import numpy as np

from rose.config import EngineConfig
from rose.engine.open_request import OpenRequest
from rose.engine.request import Request
from rose.errors import InvalidInput, StartupError, Unsupported
from rose.models.base import OutputSpec
from rose.proto.annotations import check_spans, check_token_types

_INT32 = np.dtype(np.int32)


def check_engine_config(config: EngineConfig) -> None:
    """Raises StartupError naming the first number that cannot work."""
    for name in ("online_tokens", "single_tokens", "bulk_tokens", "max_sequences", "max_tokens", "max_in_flight"):
        if getattr(config, name) < 1:
            raise StartupError(f"{name} must be at least 1, not {getattr(config, name)}")
    if config.bulk_tokens < config.online_tokens:
        raise StartupError(f"bulk_tokens ({config.bulk_tokens}) is smaller than online_tokens ({config.online_tokens})")
    if config.max_in_flight > 2:
        raise StartupError(f"max_in_flight is at most 2, not {config.max_in_flight}: there are two staging buffers")


def check_request(
    request: Request, max_tokens: int, open_ids: Container[int], type_vocab_size: int | None = None
) -> list[int]:
    """Tokens of each sequence.

    Args:
        type_vocab_size: token types the model has, or None where nobody knows.

    Raises:
        InvalidInput: naming the item and the limit.
    """
    if request.id in open_ids:
        raise InvalidInput(f"request id {request.id} is open already", param="id")
    if not request.sequences:
        raise InvalidInput("the request holds no sequence", param="input")
    lengths = []
    for index, ids in enumerate(request.sequences):
        if (ids.dtype is not _INT32 and ids.dtype != _INT32) or ids.ndim != 1:
            raise InvalidInput(
                f"token ids must be a flat int32 array, not {ids.dtype} of shape {ids.shape}",
                param="input",
                index=index,
            )
        length = len(ids)
        if not 0 < length <= max_tokens:
            limit = f"{length} tokens; this model takes at most {max_tokens}" if length else "no tokens"
            raise InvalidInput(f"a sequence has {limit}", param="input", index=index)
        lengths.append(length)
    if request.token_types is not None:
        check_token_types(request.token_types, lengths, type_vocab_size)
    if request.spans is not None:
        check_spans(request.spans, lengths)
    return lengths


def check_ids(request: OpenRequest, vocab_size: int) -> None:
    """Raises InvalidInput naming the first id outside 0 .. vocab_size - 1 and its item."""
    # Seen as unsigned, a negative id is larger than any vocabulary: one pass instead of two.
    if int(request.ids.view(np.uint32).max()) < vocab_size:
        return
    position = int(np.flatnonzero(request.ids.view(np.uint32) >= vocab_size)[0])
    index = int(np.searchsorted(request.ends, position, side="right")) - 1
    raise InvalidInput(
        f"token id {int(request.ids[position])} at position {position - request.ends[index]} is outside the"
        f" vocabulary 0..{vocab_size - 1}",
        param="input",
        index=index,
    )


def resolve_outputs(asked: tuple[str, ...], specs: Mapping[str, OutputSpec], default_output: str) -> tuple[str, ...]:
    """The outputs to compute, each once and in one fixed order, so that equal requests share batches and graphs.

    Raises:
        InvalidInput: a name the model does not have.
        Unsupported: an output this checkpoint cannot give, with the reason.
    """
    names = sorted(set(asked)) or [default_output]
    for name in names:
        if name not in specs:
            raise InvalidInput(f"unknown output {name!r}; this model has {', '.join(specs)}", param="outputs")
        if (reason := specs[name].unavailable) is not None:
            raise Unsupported(f"output {name!r} is not available: {reason}", param="outputs")
    return tuple(names)

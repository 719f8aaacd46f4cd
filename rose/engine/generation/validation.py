"""What a request to generate must be before it is queued: the last check before a device sees it.

An id outside the vocabulary ends a CUDA process, and an endless wait for pages that do not exist helps nobody, so
neither gets past here, whoever the caller is. Fields are named as the schema spells them. Knows limits; knows neither
queues nor models.
"""

from __future__ import annotations

from collections.abc import Container
from math import isfinite

import numpy as np
import numpy.typing as npt

from rose.engine.generation.limits import GenerationLimits
from rose.engine.generation.request import GenerateRequest, Sampling
from rose.errors import InvalidInput

MAX_LOGPROBS = 20
MAX_STOP_IDS = 128
MAX_SEED = (1 << 64) - 1


def check_generate(request: GenerateRequest, limits: GenerationLimits, open_ids: Container[int] = ()) -> None:
    """
    Raises:
        InvalidInput: naming the field and the limit. A prompt that leaves no room for a token is refused, and so is one
            that leaves room for fewer than max_new_tokens: nothing is clipped. Whoever means "as many as fit" asks for
            `new_tokens_left`.
    """
    if request.id in open_ids:
        raise InvalidInput(f"request id {request.id} is open already", param="id")
    check_prompt(request.ids, limits.vocab_size)
    check_sampling(request.sampling, limits.vocab_size)
    _check_length(len(request.ids), request.sampling.max_new_tokens, limits)


def new_tokens_left(prompt_tokens: int, limits: GenerationLimits) -> int:
    """Most new tokens after a prompt of so many.

    Raises:
        InvalidInput: not even one.
    """
    left = limits.longest - prompt_tokens
    if left < 1:
        _check_length(prompt_tokens, 1, limits)
    return left


def check_prompt(ids: npt.NDArray[np.int32], vocab_size: int) -> None:
    """Raises InvalidInput naming what is wrong with the prompt's ids."""
    if ids.dtype != np.int32 or ids.ndim != 1:
        raise InvalidInput(
            f"token ids must be a flat int32 array, not {ids.dtype} of shape {ids.shape}", param="prompt"
        )
    if not len(ids):
        raise InvalidInput("the prompt has no tokens", param="prompt")
    # Seen as unsigned, a negative id is larger than any vocabulary: one pass instead of two.
    unsigned = ids.view(np.uint32) if ids.flags.c_contiguous else ids.astype(np.uint32)
    if int(unsigned.max()) >= vocab_size:
        position = int(np.flatnonzero(unsigned >= vocab_size)[0])
        raise InvalidInput(
            f"token id {int(ids[position])} at position {position} is outside the vocabulary of {vocab_size}",
            param="prompt",
        )


def check_sampling(sampling: Sampling, vocab_size: int) -> None:
    """Raises InvalidInput naming the first field that cannot work, its value and its limit."""
    s = sampling
    most = s.max_new_tokens
    _check(most >= 1, "max_new_tokens", most, "at least 1")
    _check(isfinite(s.temperature) and s.temperature >= 0, "temperature", s.temperature, "a number, 0 or more")
    _check(s.top_k >= 0, "top_k", s.top_k, "0 (all) or more")
    _check(0 < s.top_p <= 1, "top_p", s.top_p, "more than 0 and at most 1")
    _check(0 <= s.min_p <= 1, "min_p", s.min_p, "between 0 and 1")
    _check(s.seed is None or 0 <= s.seed <= MAX_SEED, "seed", s.seed, f"between 0 and {MAX_SEED}")
    bounds = f"between 0 and max_new_tokens ({most})"
    _check(0 <= s.min_new_tokens <= most, "min_new_tokens", s.min_new_tokens, bounds)
    bounds = f"between 0 and {MAX_LOGPROBS}"
    _check(s.logprobs is None or 0 <= s.logprobs <= MAX_LOGPROBS, "logprobs", s.logprobs, bounds)
    _check(len(s.stop_ids) <= MAX_STOP_IDS, "stop_ids", f"{len(s.stop_ids)} ids", f"at most {MAX_STOP_IDS} ids")
    for index, token in enumerate(s.stop_ids):
        if not 0 <= token < vocab_size:
            raise InvalidInput(
                f"stop id {token} is outside the vocabulary of {vocab_size}", param="stop_ids", index=index
            )


def _check(good: bool, name: str, value: object, expected: str) -> None:
    if not good:
        raise InvalidInput(f"{name} must be {expected}, not {value}", param=name)


def _check_length(prompt: int, new: int, limits: GenerationLimits) -> None:
    if prompt + 1 > limits.max_tokens:
        raise InvalidInput(
            f"the prompt has {prompt} tokens; this model takes at most {limits.max_tokens}, of which one must be new",
            param="prompt",
        )
    if prompt + new > limits.max_tokens:
        raise InvalidInput(
            f"{prompt} prompt tokens and max_new_tokens {new} make {prompt + new}; this model takes at most"
            f" {limits.max_tokens}",
            param="max_new_tokens",
        )
    if prompt + new > limits.longest:
        raise InvalidInput(
            f"{prompt} prompt tokens and max_new_tokens {new} need {limits.pages_for(prompt + new - 1)} pages of"
            f" {limits.page_size} tokens; the whole cache has {limits.num_pages - 1}",
            param="prompt" if prompt + 1 > limits.longest else "max_new_tokens",
        )

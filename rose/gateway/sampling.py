"""How the next token is drawn, as a caller asks for it: one set of fields and one check for every carrier.

Knows numbers and the message that carries them to the engine; knows neither JSON nor text.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite

from rose.errors import InvalidInput
from rose.gateway.inputs import show
from rose.proto import rose_pb2 as pb

MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_IDS = 128
MAX_LOGPROBS = 20
MAX_SEED = (1 << 64) - 1
# uint32 fields of the message.
_MAX_COUNT = (1 << 32) - 1
# Field -> what a caller of the HTTP API knows it by.
HTTP_NAMES = {
    "max_new_tokens": "max_tokens",
    "stop_ids": "stop_token_ids",
    "min_new_tokens": "min_tokens",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Fields mean what they do in rose.proto's Sampling.

    Attributes:
        max_new_tokens: 0 for as many as the model's limit leaves.
        stop: texts that end the answer; for the front, the engine never sees them.
        logprobs: alternatives a token; None for no log probabilities.
        may_be_fewer: max_new_tokens is a default: where the model's limit leaves less, as many as are left.
        names: field -> what the caller calls it, where that is something else.
    """

    max_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop_ids: Sequence[int] = ()
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    min_new_tokens: int = 0
    logprobs: int | None = None
    may_be_fewer: bool = False
    names: Mapping[str, str] = field(default_factory=dict)

    def check(self, vocab_size: int) -> None:
        """Raises InvalidInput naming the first field that cannot work, its value and its limit."""
        most = self.max_new_tokens or _MAX_COUNT
        self._number("max_new_tokens", 0 <= self.max_new_tokens <= _MAX_COUNT, f"1 to {_MAX_COUNT}")
        heat = _float32(self.temperature)
        self._number("temperature", isfinite(heat) and heat >= 0, "0 or more, up to 3.4e+38")
        self._number("top_k", 0 <= self.top_k <= _MAX_COUNT, f"0 (all) to {_MAX_COUNT}")
        kept = _float32(self.top_p) > 0 and self.top_p <= 1
        self._number("top_p", kept, "more than 0 (as a 32-bit number) and at most 1")
        self._number("min_p", 0 <= self.min_p <= 1, "between 0 and 1")
        self._number("seed", self.seed is None or 0 <= self.seed <= MAX_SEED, f"0 to {MAX_SEED}")
        fits = f"0 to {self._name('max_new_tokens')} ({most})"
        self._number("min_new_tokens", 0 <= self.min_new_tokens <= most, fits)
        self._number("logprobs", self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}")
        self._check_stops(vocab_size)

    def message(self, max_new_tokens: int, choice: int = 0) -> pb.Sampling:
        """What the engine is told.

        Args:
            max_new_tokens: what is left of the model's limit, where none were asked for.
            choice: of several answers to one prompt: each has a seed of its own.
        """
        message = pb.Sampling(
            max_new_tokens=max_new_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            stop_ids=self.stop_ids,
            ignore_eos=self.ignore_eos,
            min_new_tokens=self.min_new_tokens,
        )
        if self.seed is not None:
            message.seed = (self.seed + choice) & MAX_SEED
        if self.logprobs is not None:
            message.logprobs = self.logprobs
        return message

    def _check_stops(self, vocab_size: int) -> None:
        if len(self.stop) > MAX_STOPS:
            raise InvalidInput(f"{len(self.stop)} stop strings, the limit is {MAX_STOPS}", param="stop")
        for index, text in enumerate(self.stop):
            if not text:
                raise InvalidInput("a stop string is empty", param="stop", index=index)
            if len(text) > MAX_STOP_CHARS:
                raise InvalidInput(
                    f"a stop string has {len(text)} characters, the limit is {MAX_STOP_CHARS}",
                    param="stop",
                    index=index,
                )
        name = self._name("stop_ids")
        if len(self.stop_ids) > MAX_STOP_IDS:
            raise InvalidInput(f"{len(self.stop_ids)} stop ids, the limit is {MAX_STOP_IDS}", param=name)
        for index, number in enumerate(self.stop_ids):
            if not 0 <= number < vocab_size:
                raise InvalidInput(
                    f"token id {show(number)} is outside the vocabulary 0..{vocab_size - 1}", param=name, index=index
                )

    def _name(self, field_name: str) -> str:
        return self.names.get(field_name, field_name)

    def _number(self, field_name: str, good: bool, expected: str) -> None:
        if not good:
            value = getattr(self, field_name)
            name = self._name(field_name)
            shown = show(value) if isinstance(value, int) else repr(value)
            raise InvalidInput(f"{name} of {shown}: expected {expected}", param=name)


def _float32(number: float) -> float:
    """As the message carries it; infinite where it cannot."""
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", number))[0]
    except OverflowError:
        return inf
    return rounded

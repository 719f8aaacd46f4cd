"""One answer while it is being written: chunks of tokens in, text that is certain out.

    chunk -> its tokens as text -> stop strings -> Delta

Knows chunks of the schema and text; knows neither replicas nor carriers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rose.client import Timing
from rose.gateway.detokenize import TokenTexts
from rose.gateway.stop_strings import StopStrings
from rose.proto import rose_pb2 as pb

STOP, LENGTH = pb.FinishReason.STOP, pb.FinishReason.LENGTH


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """A token and its log probabilities.

    Attributes:
        offset: of its first character in the text of the answer.
        top: (id, log probability) of the most likely tokens, best first.
    """

    token: int
    logprob: float
    top: Sequence[tuple[int, float]]
    offset: int


@dataclass(slots=True)
class Delta:
    """What has become certain since the last one.

    Attributes:
        tokens: drawn since then; their text may still be held back.
        logprobs: as the engine sent them, beside `tokens`; none where none were asked for.
        infos: of the tokens whose text begins in what was given out so far, where log probabilities were asked for.
        finish: STOP or LENGTH in the last one.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: Sequence[pb.TokenLogprobs] = ()
    infos: list[TokenInfo] = field(default_factory=list)
    finish: pb.FinishReason.ValueType = pb.FinishReason.UNFINISHED


class Answer:
    """
    Args:
        stops: strings that end it.
        min_tokens: text of so many tokens is not searched for them.
        after: tokens whose text this one goes on from; none for a text of its own.

    Attributes:
        completion_tokens: so far; an end token is among them, and so is the one that completed a stop string.
        cached_tokens: of the prompt, as far as the engine has said.
        stop: the stop string that ended it, or "".
        timing: of the engine; all zero where it did not get to say.
    """

    def __init__(self, texts: TokenTexts, stops: Sequence[str], min_tokens: int = 0, after: Sequence[int] = ()) -> None:
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.stop = ""
        self.timing = Timing(0.0, 0.0, 0)
        self._stream = texts.stream(after)
        self._stops = StopStrings(stops)
        self._min_tokens = min_tokens
        self._decoded = 0  # characters of all tokens so far
        self._given = 0  # of them, given out
        self._infos: deque[TokenInfo] = deque()

    def take(self, chunk: pb.GenerateChunk) -> Delta:
        """What a chunk adds. Nothing more is taken after a delta with a finish."""
        delta = Delta()
        self.cached_tokens = max(self.cached_tokens, chunk.cached_tokens)
        # An end token has no text, whatever it is spelled like.
        ending = len(chunk.tokens) - 1 if chunk.finish == STOP else -1
        pieces: list[str] = []
        for i, token in enumerate(chunk.tokens):
            delta.tokens.append(token)
            self.completion_tokens += 1
            if i == ending:
                break
            if i < len(chunk.logprobs):
                each = chunk.logprobs[i]
                top = [(one.token, one.logprob) for one in each.top]
                self._infos.append(TokenInfo(token, each.logprob, top, self._decoded))
            pieces.append(self._search(self._stream.add(token)))
            if self._stops.found is not None:
                break
        if self._stops.found is None and chunk.finish:
            pieces.append(self._search(self._stream.finish()))
            pieces.append(self._stops.finish())
            delta.finish = chunk.finish
            spent = chunk.timing
            self.timing = Timing(spent.queue_us / 1e6, spent.compute_us / 1e6, spent.batches)
        if self._stops.found is not None:
            self.stop, delta.finish = self._stops.found, STOP
        delta.logprobs = chunk.logprobs[: len(delta.tokens)]
        delta.text = "".join(pieces)
        self._given += len(delta.text)
        delta.infos = self._settled(ended=bool(delta.finish))
        return delta

    def _search(self, text: str) -> str:
        self._decoded += len(text)
        return text if self.completion_tokens <= self._min_tokens else self._stops.add(text)

    def _settled(self, *, ended: bool) -> list[TokenInfo]:
        """Those whose text has begun to be given out; at the end also those without text, but none behind a stop."""
        cut = ended and self._stops.found is not None
        settled: list[TokenInfo] = []
        while self._infos and (self._infos[0].offset < self._given or (ended and not cut)):
            settled.append(self._infos.popleft())
        return settled

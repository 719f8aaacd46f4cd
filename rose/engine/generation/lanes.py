"""What the host keeps of every running sequence from one batch to the next: its pages and how its tokens are drawn.

One row of every array a lane, brought up to date as sequences take lanes and pages, so that a decoding batch is staged
by a few array operations instead of anew for each sequence. Knows sequences; knows neither layouts nor devices.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

import numpy as np
import numpy.typing as npt

from rose.engine.generation.buckets import Draw, round_up
from rose.engine.generation.sequence import Sequence
from rose.kernels.sample import MIN_TEMPERATURE

# (row, ids it may not draw)
Bans = Items[tuple[int, tuple[int, ...]]]
# The message holds larger numbers than the array; either is all of any vocabulary.
MOST_K = (1 << 31) - 1
_FREE: tuple[int, tuple[int, ...]] = (0, ())


# Few steps, since each is another set of graphs: a caller who asks for other numbers every time would else keep the
# engine capturing.
LOGPROB_STEPS = (0, 4, 32)
BAN_STEPS = (16, 256)


def _step(count: int, steps: tuple[int, ...]) -> int:
    """The first step that holds `count`; past the last a power of two."""
    return next((step for step in steps if count <= step), round_up(count))


class Lanes:
    """Arrays over lanes; lane 0 belongs to dummies: greedy, and nothing but page 0.

    Attributes:
        pages: [lanes, most pages] int32, 0 behind a sequence's own.
        prompt_length: [lanes] int32.
        temperature, top_p, min_p: [lanes] fp32. top_k: [lanes] int32. seeds: [lanes] int64.
        sampled: lanes whose sequence draws. logprobs, banning: likewise those that want log probabilities, and those
            that may not end yet for some tokens. Lanes given up may be among them.
    """

    def __init__(self, lanes: int, most_pages: int, end_ids: Iterable[int] = ()) -> None:
        """
        Args:
            lanes: lane 0 included.
            end_ids: end tokens of the model.
        """
        self.pages = np.zeros((lanes, most_pages), np.int32)
        self.prompt_length = np.zeros(lanes, np.int32)
        self.temperature, self.min_p = np.zeros(lanes, np.float32), np.zeros(lanes, np.float32)
        self.top_p = np.ones(lanes, np.float32)
        self.top_k = np.zeros(lanes, np.int32)
        self.seeds = np.zeros(lanes, np.int64)
        self.sampled: set[int] = set()
        self.logprobs: dict[int, int] = {}
        self.banning: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._end_ids = tuple(end_ids)
        self._owners: list[Sequence | None] = [None] * lanes
        self._lives = [0] * lanes
        self._counts = [0] * lanes

    def update(self, sequence: Sequence) -> None:
        """Bring the sequence's lane up to date. Its pages are only ever added to, until it is preempted."""
        lane = sequence.lane
        if self._owners[lane] is not sequence or self._lives[lane] != sequence.preemptions:
            self._take(sequence)
        pages, count = sequence.pages, self._counts[lane]
        if len(pages) != count:
            self.pages[lane, count : len(pages)] = pages[count:]
            self._counts[lane] = len(pages)

    def draw(self, lanes: list[int], bans: Bans) -> Draw:
        """How the next tokens of `lanes` are drawn."""
        wanted = [self.logprobs[lane] for lane in lanes if lane in self.logprobs] if self.logprobs else ()
        return Draw(
            sampled=not self.sampled.isdisjoint(lanes),
            logprobs=_step(max(wanted), LOGPROB_STEPS) if wanted else -1,
            banned=_step(max(len(ids) for _, ids in bans), BAN_STEPS) if bans else 0,
        )

    def bans(self, lanes: list[int], steps: npt.NDArray[np.int32]) -> Bans:
        """
        Args:
            steps: tokens that each of `lanes` has generated before this one.
        """
        found = []
        for row, lane in enumerate(lanes):
            tokens, ids = self.banning.get(lane, _FREE)
            if steps[row] < tokens:
                found.append((row, ids))
        return found

    def _take(self, sequence: Sequence) -> None:
        lane, sampling = sequence.lane, sequence.request.sampling
        self._owners[lane], self._lives[lane] = sequence, sequence.preemptions
        self.pages[lane, : self._counts[lane]] = 0
        self._counts[lane] = 0
        self.prompt_length[lane] = sequence.prompt_length
        self.temperature[lane] = sampling.temperature
        self.top_k[lane] = min(sampling.top_k, MOST_K)
        self.top_p[lane] = sampling.top_p
        self.min_p[lane] = sampling.min_p
        self.seeds[lane] = np.uint64(sampling.seed or 0).astype(np.int64)  # the same 64 bits, seen with a sign
        self.sampled.discard(lane)
        self.logprobs.pop(lane, None)
        self.banning.pop(lane, None)
        if sampling.temperature >= MIN_TEMPERATURE:
            self.sampled.add(lane)
        if sampling.logprobs is not None:
            self.logprobs[lane] = sampling.logprobs
        banned = sampling.stop_ids if sampling.ignore_eos else (*sampling.stop_ids, *self._end_ids)
        if sampling.min_new_tokens > 0 and banned:
            self.banning[lane] = (sampling.min_new_tokens, tuple(dict.fromkeys(banned)))

"""The numbers a generating engine schedules by.

Knows numbers; knows neither requests nor devices.
"""

from __future__ import annotations

from dataclasses import dataclass

from rose.errors import StartupError


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationLimits:
    """What fits, and how much of it at a time.

    Attributes:
        vocab_size: token ids lie below it.
        max_tokens: longest sequence the model takes, prompt and new tokens together.
        page_size: tokens a page.
        num_pages: pages of the cache; page 0 is nobody's, so one less can be used.
        max_running: most sequences that have a lane; lanes are 1 .. max_running.
        batch_tokens: most tokens of a batch. What decoding sequences leave of it goes to prompts.
        prefix_cache: pages are found again by what they hold. Must be off for a model with recurrent state and no
            `saved_states`: its pages alone do not say how to go on after them.
        saved_states: rows that hold such states behind beginnings that may come again: max_running + 1 and on. Then
            pages are found as far as a state behind them is. 0 for a model that has none.
        state_tokens: a state is saved no sooner than so many tokens after the last one of its sequence: shorter
            beginnings are computed again more quickly than they are found.
    """

    vocab_size: int
    max_tokens: int
    page_size: int
    num_pages: int
    max_running: int = 64
    batch_tokens: int = 2048
    prefix_cache: bool = True
    saved_states: int = 0
    state_tokens: int = 256

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence served: what the model takes and the cache can hold."""
        # The last token that is drawn is never computed, so its keys and values need no room.
        return min(self.max_tokens, (self.num_pages - 1) * self.page_size + 1)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_size)


def check_limits(limits: GenerationLimits) -> None:
    """Raises StartupError naming the first number that cannot work."""
    least = {
        "vocab_size": 1,
        "max_tokens": 2,
        "page_size": 1,
        "num_pages": 2,
        "max_running": 1,
        "batch_tokens": 2,
        "saved_states": 0,
        "state_tokens": 1,
    }
    for name, smallest in least.items():
        if getattr(limits, name) < smallest:
            raise StartupError(f"{name} must be at least {smallest}, not {getattr(limits, name)}")
    if limits.batch_tokens <= limits.max_running:
        raise StartupError(
            f"batch_tokens ({limits.batch_tokens}) must be more than max_running ({limits.max_running}): every running"
            " sequence takes one token of a batch, and prompts need some too"
        )

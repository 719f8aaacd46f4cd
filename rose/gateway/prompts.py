"""A prompt before texts, and the tokens behind it, where pooling leaves the prompt's own out.

Which tokens those are is told as sentence-transformers tells it (`include_prompt` of its Pooling module): as many are
left out as the prompt has alone, opening special tokens included. Knows the card, texts and ids; knows no carrier.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rose.errors import InvalidInput
from rose.gateway.inputs import FIELD
from rose.proto import rose_pb2 as pb
from rose.proto.convert import IntArray

_MEAN = "mean"


def choose_prompt(card: pb.ModelCard, name: str | None, words: str | None = None) -> tuple[str | None, str]:
    """The name of the prompt that applies, or None, and its text, or "".

    Args:
        name: of the card; "" for none, None for the model's default.
        words: a prompt in words instead.

    Raises:
        InvalidInput: a name the card does not have, or a name beside a prompt in words.
    """
    if words is not None:
        if name:
            raise InvalidInput("send prompt_name or prompt, not both", param="prompt")
        return None, words
    chosen = card.default_prompt_name if name is None else name
    if not chosen:
        return None, ""
    if chosen not in card.prompts:
        known = ", ".join(sorted(card.prompts)) or "none"
        raise InvalidInput(f"the model has no prompt {chosen!r}; it has: {known}", param="prompt_name")
    return chosen, card.prompts[chosen]


def check_excluding(card: pb.ModelCard) -> None:
    """Raises InvalidInput where the prompt's tokens cannot be left out."""
    if card.pooling != _MEAN:
        raise InvalidInput(
            f"the model leaves prompts out of what it pools, which is served for the mean alone, and it pools by "
            f"{card.pooling}: send no prompt",
            param="prompt",
        )


def spans_behind(
    prompt: IntArray, sequences: Sequence[IntArray], control_ids: IntArray, closing: int
) -> list[IntArray]:
    """[1, 2] for each sequence: its first token behind the prompt, and its end.

    Args:
        prompt: ids of the prompt alone, with the special tokens of a text; one that closes it belongs to the text.
        sequences: of prompt and text.
        closing: how many special tokens stand behind every text.

    Raises:
        InvalidInput: a sequence that has no token of the text behind the prompt, with its index.
    """
    count = len(prompt) - int(len(prompt) > 0 and prompt[-1] in control_ids)
    spans: list[IntArray] = []
    for index, ids in enumerate(sequences):
        end = len(ids) - closing
        # A blank at the prompt's end is often part of the text's first token: of a text of one nothing would stay.
        start = count if count < end else common_head(prompt, ids)
        if start >= end:
            raise InvalidInput(
                f"the prompt takes all {len(ids)} tokens, which leaves none of the text to pool",
                param=FIELD,
                index=index,
            )
        spans.append(np.array([[start, len(ids)]], dtype=np.int32))
    return spans


def common_head(left: IntArray, right: IntArray) -> int:
    """Length of the common beginning."""
    length = min(len(left), len(right))
    different = np.flatnonzero(left[:length] != right[:length])
    return int(different[0]) if different.size else length

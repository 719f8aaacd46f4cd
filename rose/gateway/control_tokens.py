"""Control tokens written in a text, encoded as the ordinary characters they are: for text from strangers.

The library can be told not to look for them, but a Unigram model still finds "</s>" as a piece of its vocabulary; such
pieces are replaced by what the model makes of their two halves. Knows ids; knows neither requests nor models.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from tokenizers import Tokenizer

from rose.proto.convert import IntArray

# A code point that no text holds and no vocabulary knows.
UNKNOWN = "\U0010fffe"


class ControlTokenSplitter:
    """Turns a tokenizer into one that gives no control token for anything a text says.

    Args:
        tokenizer: neither padding nor cutting; it is changed, so it must be nobody else's.
        also: added tokens that are taken apart although the file does not call them special.
    """

    def __init__(self, tokenizer: Tokenizer, also: Collection[int] = ()) -> None:
        tokenizer.encode_special_tokens = True
        # The unknown token is marked special too, but stands for ordinary characters the vocabulary lacks.
        unknown = {token.id for token in tokenizer.model.tokenize(UNKNOWN)}
        self._halves = {
            number: _halves(tokenizer, token.content)
            for number, token in tokenizer.get_added_tokens_decoder().items()
            if (token.special and number not in unknown) or number in also
        }
        self._control = np.array(sorted(self._halves), dtype=np.int32)

    def split(self, ids: IntArray, opening: int, closing: int) -> IntArray:
        """The ids of a text with its own `opening` and `closing` special tokens kept and all others taken apart."""
        end = len(ids) - closing
        if not np.isin(ids[opening:end], self._control).any():
            return ids
        kept: list[int] = ids[:opening].tolist()
        for number in ids[opening:end].tolist():
            kept += self._halves.get(number, (number,))
        return np.array([*kept, *ids[end:].tolist()], dtype=np.int32)


def plain_ids(tokenizer: Tokenizer, text: str, control: Collection[int]) -> list[int]:
    """Ids of a text by the tokenizer's own steps without its search for added tokens, and none of `control` among them.

    A model of pieces may still have a control token's spelling as a piece: then its two halves.
    """
    normal = text if tokenizer.normalizer is None else tokenizer.normalizer.normalize_str(text)
    words = [normal]
    if tokenizer.pre_tokenizer is not None:
        words = [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normal)]
    ids = [token.id for word in words for token in tokenizer.model.tokenize(word)]
    return list(_halves(tokenizer, text)) if any(number in control for number in ids) else ids


def _halves(tokenizer: Tokenizer, content: str) -> Sequence[int]:
    middle = max(1, len(content) // 2)
    halves = [half for half in (content[:middle], content[middle:]) if half]
    return [token.id for half in halves for token in tokenizer.model.tokenize(half)]

"""Token ids back into text as they come: a piece is given out once no later token can change it.

A character may be spread over several tokens, and is never given out in halves; bytes that are no text become U+FFFD
only when that is certain. All pieces together are what the library makes of all ids at once. Knows ids and the
tokenizer; knows neither requests nor stop strings.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer, decoders

REPLACEMENT = "\ufffd"
# No character takes more tokens than it has bytes, which is four; what is still unreadable after these never will be.
MAX_PENDING = 8
# Tokens of a text's own past that a window of it looks back on: any that says something keeps the next one's blank.
PAST_TOKENS = 8
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TextStream(Protocol):
    """The text of one sequence."""

    def add(self, number: int) -> str:
        """What the next token makes certain; often nothing."""
        ...

    def finish(self) -> str:
        """What is left when no further token comes."""
        ...


class TokenTexts:
    """What tokens are in bytes, and streams of text; shared by all sequences."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        self._letters = _byte_letters() if self._byte_level else {}
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(number for number, token in added.items() if token.special)
        self._added = {number: token.content.encode() for number, token in added.items()}
        self._known: dict[int, bytes] = {}

    def stream(self, after: Sequence[int] = ()) -> TextStream:
        """Of a sequence whose special tokens are left out of its text.

        Args:
            after: what the text goes on from. A vocabulary of word beginnings drops the blank before a text's first
                word, and what continues a text is not its beginning.
        """
        if self._byte_level:
            return _Bytes(self, self._special)
        return _Window(self._tokenizer, self._special, after)

    def bytes_of(self, number: int) -> bytes:
        """The bytes of one token by itself; none for an id that is no token."""
        found = self._known.get(number)
        if found is None:
            found = self._known[number] = self._added.get(number) or self._bytes_of(number)
        return found

    def text(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """Of a whole sequence, special tokens included unless they are to be left out."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def _bytes_of(self, number: int) -> bytes:
        piece: str | None = self._tokenizer.id_to_token(number)
        if piece is None:
            return b""
        if self._byte_level:
            letters = [self._letters.get(letter) for letter in piece]
            known = [letter for letter in letters if letter is not None]
            # As the library has it: a token with any other letter is text as it stands.
            return bytes(known) if len(known) == len(letters) else piece.encode()
        raw = _BYTE_PIECE.fullmatch(piece)
        return bytes([int(raw[1], 16)]) if raw else piece.replace("\u2581", " ").encode()


class _Bytes:
    """Byte-level tokens are bytes, and nothing else: UTF-8 is read as they come."""

    def __init__(self, texts: TokenTexts, left_out: frozenset[int]) -> None:
        self._texts = texts
        self._left_out = left_out
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, number: int) -> str:
        return "" if number in self._left_out else self._utf8.decode(self._texts.bytes_of(number))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _Window:
    """Other tokens depend on their neighbours, a blank at the beginning above all: the last few are decoded again.

    What is new is what the window says beyond what it said without its newest tokens.
    """

    def __init__(self, tokenizer: Tokenizer, left_out: frozenset[int], after: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._left_out = left_out
        self._pending: list[int] = []
        # Given out already, and what that says alone.
        self._before = [number for number in after[-PAST_TOKENS:] if number not in left_out]
        self._said = self._text(self._before)
        while REPLACEMENT in self._said:
            # Half a character, cut off here or by the prompt's own end: new bytes would be read with its.
            del self._before[0]
            self._said = self._text(self._before)

    def add(self, number: int) -> str:
        if number in self._left_out:
            return ""
        self._pending.append(number)
        text = self._text(self._before + self._pending)
        unfinished = text.endswith(REPLACEMENT) and len(self._pending) < MAX_PENDING
        return "" if unfinished else self._give(text)

    def finish(self) -> str:
        return self._give(self._text(self._before + self._pending)) if self._pending else ""

    def _give(self, text: str) -> str:
        new = text[len(self._said) :]
        if new or len(self._pending) >= MAX_PENDING:
            self._before, self._pending = self._pending, []
            self._said = self._text(self._before)
        return new

    def _text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


def _byte_letters() -> dict[str, int]:
    """The letter that stands for each byte in byte-level vocabularies (GPT-2): itself where it can be seen, else one
    from U+0100 on.
    """
    seen = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + i): byte for i, byte in enumerate(others)}

"""Text to token ids with the model folder's tokenizer.json: never padded, cut only on request, special tokens kept.

The library's own padding and truncation are switched off once and never touched again: they are state of the shared
tokenizer, so setting them per call makes threads see each other's limits or fail. Short texts are encoded on the event
loop, since a hop to a thread costs more than they do. Knows text and ids; knows neither models nor requests.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from rose.errors import CheckpointError, TokenizerMismatch
from rose.gateway.control_tokens import ControlTokenSplitter
from rose.gateway.pair_layout import PairLayout, read_pair_layout
from rose.proto.convert import IntArray

# Texts encoded between two looks at the clock of the interpreter lock: the library lets go of it, our id copies do not.
CHUNK = 32


class TextTokenizer:
    """The tokenizer of one model folder, safe to use from many threads and tasks.

    Args:
        lower_case: lower-case every text first, as sentence-transformers does for models that say so.

    Attributes:
        sha256: digest of tokenizer.json, 32 bytes, as the model card carries it.
        special_tokens: how many special tokens are added to every text.
        suffix: the ids among them that come after the text.
        control_ids: ids of all tokens the file marks as special, sorted.
        pool_depth: lists of texts that wait for the pool or run in it.
    """

    def __init__(self, folder: Path, *, threads: int = 2, inline_chars: int = 4096, lower_case: bool = False) -> None:
        path = folder / "tokenizer.json"
        try:
            source = path.read_bytes()
            self._tokenizer = _bare(source)
        except FileNotFoundError:
            raise CheckpointError(f"{folder} holds no tokenizer.json: a front needs it to serve text") from None
        except Exception as error:  # noqa: BLE001 (the library raises bare Exception)
            raise CheckpointError(f"{path} cannot be read as a tokenizer: {error}") from None
        self.sha256 = hashlib.sha256(source).digest()
        self.special_tokens, self.suffix = _special_tokens(self._tokenizer)
        added = self._tokenizer.get_added_tokens_decoder()
        self.control_ids = np.array(sorted(i for i, token in added.items() if token.special), dtype=np.int32)
        self.pool_depth = 0
        self._source = source
        self._split: tuple[Tokenizer, ControlTokenSplitter] | None = None
        self._guarded: frozenset[int] = frozenset()
        self._inline_chars = inline_chars
        self._lower_case = lower_case
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")

    def check_same(self, sha256: bytes, owner: str) -> None:
        """Raises TokenizerMismatch unless `owner` was built for this very tokenizer.json."""
        if sha256 != self.sha256:
            theirs = sha256.hex()[:16] if sha256 else "none"
            raise TokenizerMismatch(
                f"the tokenizer of {owner} (sha256 {theirs}) is not this front's (sha256 {self.sha256.hex()[:16]})"
            )

    def encode(
        self, texts: Sequence[str], *, split_special_tokens: bool = False, add_special_tokens: bool = True
    ) -> list[IntArray]:
        """Ids of every text, at whatever length they have. Blocks; thread-safe.

        Args:
            split_special_tokens: encode control tokens written in a text as ordinary text.
            add_special_tokens: put the model's special tokens around every text.
        """
        if self._lower_case:
            texts = [text.lower() for text in texts]
        if not split_special_tokens:
            return _encode(self._tokenizer, texts, add_special_tokens)
        tokenizer, splitter = self._splitting()
        closing = len(self.suffix) if add_special_tokens else 0
        opening = self.special_tokens - closing if add_special_tokens else 0
        return [splitter.split(ids, opening, closing) for ids in _encode(tokenizer, texts, add_special_tokens)]

    async def encode_async(
        self, texts: Sequence[str], *, split_special_tokens: bool = False, add_special_tokens: bool = True
    ) -> list[IntArray]:
        """The same from the event loop: inline up to `inline_chars` characters in all, else in the pool."""
        encode = partial(
            self.encode, texts, split_special_tokens=split_special_tokens, add_special_tokens=add_special_tokens
        )
        ready = not split_special_tokens or self._split is not None
        if ready and sum(map(len, texts)) <= self._inline_chars:
            return encode()
        self.pool_depth += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, encode)
        finally:
            self.pool_depth -= 1

    def guard(self, ids: Sequence[int]) -> None:
        """Count further added tokens as control tokens: a template's own marks that its file does not call special.

        Called before the first text is split, or not at all.
        """
        added = self._tokenizer.get_added_tokens_decoder()
        self._guarded = frozenset(number for number in ids if number in added)

    def piece(self, number: int) -> str:
        """The vocabulary's own spelling of an id ("\u2581the", "##ing")."""
        return self._tokenizer.id_to_token(number) or ""

    def pair_layout(self) -> PairLayout:
        """Where the special tokens of a pair of texts go. Raises CheckpointError for a file that does not say."""
        return read_pair_layout(self._tokenizer)

    def cut(self, ids: IntArray, limit: int) -> IntArray:
        """The first `limit` ids (more than `special_tokens`); closing special tokens survive, where there are any."""
        if len(ids) <= limit:
            return ids
        closing = len(self.suffix)
        if not closing or not np.array_equal(ids[-closing:], self.suffix):
            return ids[:limit]
        return np.concatenate((ids[: limit - closing], self.suffix))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _splitting(self) -> tuple[Tokenizer, ControlTokenSplitter]:
        if self._split is None:  # made twice at worst, when two threads meet here
            tokenizer = _bare(self._source)
            self._split = (tokenizer, ControlTokenSplitter(tokenizer, self._guarded))
        return self._split


def _encode(tokenizer: Tokenizer, texts: Sequence[str], add_special_tokens: bool) -> list[IntArray]:
    found: list[IntArray] = []
    for start in range(0, len(texts), CHUNK):
        some = list(texts[start : start + CHUNK])
        encodings = tokenizer.encode_batch_fast(some, add_special_tokens=add_special_tokens)
        found += [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]
    return found


def _bare(source: bytes) -> Tokenizer:
    tokenizer = Tokenizer.from_buffer(source)
    # Files often carry a fixed padding or truncation (all-MiniLM-L6-v2 pads everything to 128).
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _special_tokens(tokenizer: Tokenizer) -> tuple[int, IntArray]:
    """How many special tokens a text gets, and those after it, read off an encoded letter."""
    encoding = tokenizer.encode("a")
    mask = encoding.special_tokens_mask
    if 0 not in mask:
        raise CheckpointError("the tokenizer gives no token for the letter a")
    closing = mask[::-1].index(0)
    return sum(mask), np.array(encoding.ids[len(mask) - closing :], dtype=np.int32)

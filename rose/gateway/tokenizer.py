"""Text to token ids with the model folder's tokenizer.json: never padded, cut only on request, special tokens kept.

The library's own padding and truncation are switched off once and never touched again: they are state of the shared
tokenizer, so setting them per call makes threads see each other's limits or fail. Short texts are encoded on the event
loop, since a hop to a thread costs more than they do; long ones in a pool, a piece at a time, and so are all but the
shortest while many requests are open and the loop is what they wait for. Knows text and ids; knows neither models nor
requests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
from tokenizers import Tokenizer, normalizers

from rose.errors import CheckpointError, TokenizerMismatch
from rose.gateway.control_tokens import ControlTokenSplitter, plain_ids
from rose.gateway.detokenize import TokenTexts
from rose.gateway.pair_layout import PairLayout, read_pair_layout
from rose.gateway.text_bounds import ANY, Bounds, encode_prefix, groups, has_prefix
from rose.gateway.tokenizer_pool import Piece, TokenizerPool
from rose.proto.convert import IntArray

# Characters encoded in one go: 20 to 40 ms of a thread, after which it is somebody else's turn.
CHUNK_CHARS = 1 << 16
# Longer texts, which cannot be encoded in parts, wait for each other and hold up nobody else.
LONG_CHARS = 1 << 18
# Shorter than a hop to the pool in any crowd: some 50 µs, where 512 tokens (2 to 3 thousand characters) take 400.
BRIEF_CHARS = 512
T = TypeVar("T")


class TextTokenizer:
    """The tokenizer of one model folder, safe to use from many threads and tasks.

    Args:
        threads: of the pool for longer texts.
        inline_chars: texts up to this many characters in all are encoded on the event loop.
        crowded: whether the event loop has others to serve meanwhile; then `inline_chars` are at most BRIEF_CHARS.
        queue: lists of longer texts that may wait for the pool or run in it.
        lower_case: lower-case every text first, as sentence-transformers does for models that say so.

    Attributes:
        sha256: digest of tokenizer.json, 32 bytes, as the model card carries it.
        special_tokens: how many special tokens are added to every text.
        suffix: the ids among them that come after the text.
        control_ids: ids of all tokens the file marks as special, sorted.
    """

    def __init__(
        self,
        folder: Path,
        *,
        threads: int = 2,
        inline_chars: int = 4096,
        crowded: Callable[[], bool] = lambda: False,
        queue: int = 256,
        lower_case: bool = False,
    ) -> None:
        path = folder / "tokenizer.json"
        try:
            source = path.read_bytes()
            self._tokenizer = _bare(source, lower_case)
        except FileNotFoundError:
            raise CheckpointError(f"{folder} holds no tokenizer.json: a front needs it to serve text") from None
        except Exception as error:  # noqa: BLE001 (the library raises bare Exception)
            raise CheckpointError(f"{path} cannot be read as a tokenizer: {error}") from None
        self.sha256 = hashlib.sha256(source).digest()
        self.special_tokens, self.suffix = _special_tokens(self._tokenizer)
        added = self._tokenizer.get_added_tokens_decoder()
        self.control_ids = np.array(sorted(i for i, token in added.items() if token.special), dtype=np.int32)
        self._source = source
        self._split: tuple[Tokenizer, ControlTokenSplitter] | None = None
        self._guarded: frozenset[int] = frozenset()
        self._inline_chars = inline_chars
        self._crowded = crowded
        self._queue = queue
        self._lower_case = lower_case
        self._pool = TokenizerPool(threads, queue)

    @property
    def pool_depth(self) -> int:
        """Lists of texts that wait for the pool or run in it."""
        return self._pool.depth

    def check_same(self, sha256: bytes, owner: str) -> None:
        """Raises TokenizerMismatch unless `owner` was built for this very tokenizer.json."""
        if sha256 != self.sha256:
            theirs = sha256.hex()[:16] if sha256 else "none"
            raise TokenizerMismatch(
                f"the tokenizer of {owner} (sha256 {theirs}) is not this front's (sha256 {self.sha256.hex()[:16]})"
            )

    def encode(
        self,
        texts: Sequence[str],
        *,
        split_special_tokens: bool = False,
        add_special_tokens: bool = True,
        bounds: Bounds = ANY,
        first: int = 0,
    ) -> list[IntArray]:
        """Ids of every text, at whatever length they have. Blocks; thread-safe.

        Args:
            split_special_tokens: encode control tokens written in a text as ordinary text.
            add_special_tokens: put the model's special tokens around every text.
            bounds: what may be left out of the ids: those behind `bounds.kept` may be missing, or others.
            first: what number the first text has, for `bounds` and for errors.

        Raises:
            InvalidInput: a text of which too few tokens come of what is read of it; see text_bounds.py.
        """
        tokenizer, splitter = self._splitting() if split_special_tokens else (self._tokenizer, None)

        def encode(some: Sequence[str]) -> list[IntArray]:
            encodings = tokenizer.encode_batch_fast(list(some), add_special_tokens=add_special_tokens)
            return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

        kept = {i: one for i in range(len(texts)) if (one := bounds.kept(first + i)) and has_prefix(texts[i], one)}
        found = encode([text for i, text in enumerate(texts) if i not in kept])
        for i, one in kept.items():
            found.insert(i, encode_prefix(lambda prefix: encode([prefix])[0], texts[i], one, first + i))
        if splitter is None:
            return found
        closing = len(self.suffix) if add_special_tokens else 0
        opening = self.special_tokens - closing if add_special_tokens else 0
        return [splitter.split(ids, opening, closing) for ids in found]

    async def encode_async(
        self,
        texts: Sequence[str],
        *,
        split_special_tokens: bool = False,
        add_special_tokens: bool = True,
        bounds: Bounds = ANY,
    ) -> list[IntArray]:
        """The same from the event loop: inline up to `inline_chars` characters in all, else in the pool.

        Raises:
            InvalidInput: a text of more characters than are read for the tokens that the model takes.
            Overloaded: the pool has enough to do.
        """
        bounds.check(texts)
        encode = partial(
            self.encode,
            split_special_tokens=split_special_tokens,
            add_special_tokens=add_special_tokens,
            bounds=bounds,
        )
        ready = not split_special_tokens or self._split is not None
        if ready and self._inline(sum(map(len, texts))):
            return encode(texts)
        pieces = (
            Piece(
                partial(encode, texts[run.start : run.stop], first=run.start),
                long=len(run) == 1 and len(texts[run.start]) > LONG_CHARS,
            )
            for run in groups(texts, bounds, CHUNK_CHARS)
        )
        return [ids for found in await self._pool.run(pieces) for ids in found]

    def encode_rendered(self, text: str, forged: Callable[[int, int], bool] | None) -> IntArray:
        """Ids of a text that a template has made: its control tokens count, nothing is added. Blocks; thread-safe.

        Args:
            forged: whether a control token at these characters is to be ordinary text; None: none is.
        """
        if forged is None:
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
            return np.array(encoding.ids, dtype=np.int32)
        added = self._tokenizer.get_added_tokens_decoder()
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        ids: list[int] = []
        for number, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            is_forged = number in added and forged(start, end)
            ids += plain_ids(self._tokenizer, text[start:end], added) if is_forged else (number,)
        return np.array(ids, dtype=np.int32)

    async def in_pool(self, work: Callable[[], T], chars: int) -> T:
        """What `work` on so many characters gives: inline where they are few, else from the pool.

        Raises:
            Overloaded: the pool has enough to do.
        """
        if self._inline(chars):
            return work()
        (done,) = await self._pool.run([Piece(work, long=chars > LONG_CHARS)])
        return done

    def _inline(self, chars: int) -> bool:
        """Texts that may be encoded inline never take the pool's last places: they are not what it refuses."""
        if chars > self._inline_chars:
            return False
        return chars <= BRIEF_CHARS or not self._crowded() or self._pool.depth >= self._queue // 2

    def added_tokens(self) -> dict[int, tuple[str, bool]]:
        """Id -> spelling, and whether the file calls it special."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {number: (token.content, token.special) for number, token in added.items()}

    def token_texts(self) -> TokenTexts:
        """Ids back into text."""
        return TokenTexts(self._tokenizer)

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
        self._pool.close()

    def _splitting(self) -> tuple[Tokenizer, ControlTokenSplitter]:
        if self._split is None:  # made twice at worst, when two threads meet here
            tokenizer = _bare(self._source, self._lower_case)
            self._split = (tokenizer, ControlTokenSplitter(tokenizer, self._guarded))
        return self._split


def _bare(source: bytes, lower_case: bool) -> Tokenizer:
    tokenizer = Tokenizer.from_buffer(source)
    # Files often carry a fixed padding or truncation (all-MiniLM-L6-v2 pads everything to 128).
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if lower_case and not _lowers(tokenizer.normalizer):
        # Where sentence-transformers puts it: before the file's own steps, and behind the search for special tokens,
        # so that "[SEP]" stays one. Python's own lower() would differ: "Σ" at the end of a word becomes "ς".
        own = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])
    return tokenizer


def _lowers(normalizer: normalizers.Normalizer | None) -> bool:
    # A Sequence has numbered steps, which list() takes; its type stub does not say so.
    steps = list(normalizer) if isinstance(normalizer, normalizers.Sequence) else [normalizer]  # type: ignore[call-overload]
    return any(isinstance(step, normalizers.Lowercase) for step in steps)


def _special_tokens(tokenizer: Tokenizer) -> tuple[int, IntArray]:
    """How many special tokens a text gets, and those after it, read off an encoded letter."""
    encoding = tokenizer.encode("a")
    mask = encoding.special_tokens_mask
    if 0 not in mask:
        raise CheckpointError("the tokenizer gives no token for the letter a")
    closing = mask[::-1].index(0)
    return sum(mask), np.array(encoding.ids[len(mask) - closing :], dtype=np.int32)

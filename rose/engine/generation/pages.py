"""Who holds which page of the cache, and which pages hold what somebody may ask for again.

A page is held by any number of sequences, or by none; then it is free, or it is kept for what it holds until room is
needed, least recently used first. Only full pages are shared, and nobody writes to a full page, so nothing is ever
copied. Content is found by a digest of all tokens up to the page's end. Page 0 is nobody's. Plain Python; knows neither
devices nor requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

# 128 bits: with 2^40 different pages, the chance that any two of them collide is 2^-49.
DIGEST_BYTES = 16
_ROOT = bytes(DIGEST_BYTES)


@dataclass(slots=True)
class PageMetrics:
    """Counters since start.

    Attributes:
        lookups: sequences that started or started again.
        hits: of them, those that found pages.
        tokens_reused: tokens of found pages.
        evictions: pages whose content was given up for room.
    """

    lookups: int = 0
    hits: int = 0
    tokens_reused: int = 0
    evictions: int = 0


def page_digest(before: bytes | None, ids: npt.NDArray[np.int32]) -> bytes:
    """Digest of a page.

    Args:
        before: digest of the page before it, None for a sequence's first.
        ids: [page_size] int32, the tokens of the page.
    """
    return blake2b((before or _ROOT) + ids.tobytes(), digest_size=DIGEST_BYTES).digest()


class PagePool:
    """The pages 1 .. num_pages - 1.

    Attributes:
        releases: how often pages were given back; while it stands, nothing that did not fit will fit.
    """

    def __init__(self, num_pages: int, page_size: int, *, reuse: bool = True) -> None:
        """
        Args:
            reuse: pages can be found by what they hold.
        """
        self._page_size = page_size
        self._reuse = reuse
        self._free = list(range(num_pages - 1, 0, -1))
        self._holders = [0] * num_pages
        self._digest: list[bytes | None] = [None] * num_pages
        self._by_digest: dict[bytes, int] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()
        self.releases = 0
        self.metrics = PageMetrics()

    @property
    def reuse(self) -> bool:
        return self._reuse

    @property
    def total(self) -> int:
        return len(self._holders) - 1

    @property
    def available(self) -> int:
        """Pages that nobody holds."""
        return len(self._free) + len(self._kept)

    @property
    def cached(self) -> int:
        """Pages that can be found by what they hold, whether held or not."""
        return len(self._by_digest)

    def available_beside(self, pages: Sequence[int]) -> int:
        """Pages that nobody holds, once somebody holds these."""
        return self.available - sum(self._holders[page] == 0 for page in pages)

    def held_once(self, pages: Sequence[int]) -> int:
        """How many of these would be available if one holder gave them back."""
        return sum(self._holders[page] == 1 for page in pages)

    def match(self, ids: npt.NDArray[np.int32], digests: list[bytes], most: int) -> list[int]:
        """Pages that hold the leading tokens of `ids`; nothing changes hands.

        Args:
            digests: of the leading pages of `ids`, made longer here as far as they are needed.
            most: pages to look for at most, all of them full of ids that are known.
        """
        found: list[int] = []
        if not self._reuse:
            return found
        for index in range(most):
            page = self._by_digest.get(self.digest_of(ids, digests, index))
            if page is None:
                break
            found.append(page)
        return found

    def digest_of(self, ids: npt.NDArray[np.int32], digests: list[bytes], index: int) -> bytes:
        """Digest of page `index`, from the list or appended to it; that of the page before it must be there."""
        if index == len(digests):
            start = index * self._page_size
            before = digests[-1] if digests else None
            digests.append(page_digest(before, ids[start : start + self._page_size]))
        return digests[index]

    def share(self, pages: Sequence[int]) -> None:
        """Hold pages that `match` found, none of them for a lookup that found nothing."""
        self.metrics.lookups += 1
        self.metrics.hits += bool(pages)
        self.metrics.tokens_reused += len(pages) * self._page_size
        for page in pages:
            if self._holders[page] == 0:
                del self._kept[page]
            self._holders[page] += 1

    def take(self, count: int) -> list[int]:
        """Pages for new content.

        Raises:
            ValueError: fewer are available.
        """
        if count > self.available:
            raise ValueError(f"{count} pages wanted, {self.available} available")
        pages = []
        for _ in range(count):
            page = self._free.pop() if self._free else self._evict()
            self._holders[page] = 1
            pages.append(page)
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Hold pages no longer; the last of them are the first to be given up, for without the others they say nothing.

        Raises:
            ValueError: a page that nobody holds.
        """
        self.releases += 1
        for page in reversed(pages):
            holders = self._holders[page] - 1
            if holders < 0:
                raise ValueError(f"page {page} is given back and nobody holds it")
            self._holders[page] = holders
            if holders == 0:
                if self._digest[page] is None:
                    self._free.append(page)
                else:
                    self._kept[page] = None

    def keep(self, page: int, digest: bytes) -> None:
        """Let a full page that somebody holds be found by its digest.

        Where another page holds the same already that one stays, unless nobody holds it: then it would be given up for
        room while this one is still there.
        """
        if not self._reuse or self._digest[page] is not None:
            return
        other = self._by_digest.get(digest)
        if other is not None:
            if self._holders[other]:
                return
            self.forget([other])
        self._digest[page] = digest
        self._by_digest[digest] = page

    def forget(self, pages: Sequence[int]) -> None:
        """Let nobody find these pages any more; whoever holds them goes on."""
        for page in pages:
            digest = self._digest[page]
            if digest is not None:
                self._digest[page] = None
                del self._by_digest[digest]
                if self._holders[page] == 0:
                    del self._kept[page]
                    self._free.append(page)

    def _evict(self) -> int:
        page, _ = self._kept.popitem(last=False)
        digest = self._digest[page]
        self._digest[page] = None
        if digest is not None:
            del self._by_digest[digest]
        self.metrics.evictions += 1
        return page

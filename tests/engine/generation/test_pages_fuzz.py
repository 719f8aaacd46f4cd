"""Pages under random hands, against a plain model of who holds what and what was put where."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rose.engine.generation.pages import PagePool

SIZE = 2
# Few different tokens and short sequences, so that beginnings coincide often.
SEQUENCES = st.lists(st.integers(0, 2), min_size=1, max_size=12)


class Pages(RuleBasedStateMachine):
    @initialize(pages=st.integers(2, 14), reuse=st.booleans())
    def make(self, pages, reuse):
        self.pool = PagePool(pages, SIZE, reuse=reuse)
        self.reuse = reuse
        self.held: list[tuple[list[int], tuple[int, ...], int]] = []  # pages, tokens, full pages offered
        # What a reader of the page would see; None once it was taken for something else.
        self.content: dict[int, tuple[int, ...] | None] = {}

    @rule(tokens=SEQUENCES)
    def start(self, tokens):
        ids = np.array(tokens, dtype=np.int32)
        total = -(-len(tokens) // SIZE)
        before = self.pool.available
        found = self.pool.match(ids, [], (len(tokens) - 1) // SIZE)
        for index, page in enumerate(found):
            assert self.content[page] == tuple(tokens[: (index + 1) * SIZE]), "a page that holds something else"
        assert self.pool.available == before, "looking changes nothing"
        if self.pool.available_beside(found) < total - len(found):
            return
        self.pool.share(found)
        fresh = self.pool.take(total - len(found))
        for page in fresh:
            self.content[page] = None
        assert not set(fresh) & {page for pages, _, _ in self.held for page in pages}, "taken from under a holder"
        assert self.pool.available == before - len(fresh) - sum(
            not any(page in pages for pages, _, _ in self.held) for page in found
        )
        self.held.append((found + fresh, tuple(tokens), len(found)))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def offer(self, data):
        """The pages of a sequence are full and become known."""
        which = data.draw(st.integers(0, len(self.held) - 1))
        pages, tokens, offered = self.held[which]
        full = len(tokens) // SIZE
        digests: list[bytes] = []
        for index in range(full):
            digest = self.pool.digest_of(np.array(tokens, dtype=np.int32), digests, index)
            if index >= offered:
                self.content[pages[index]] = tokens[: (index + 1) * SIZE]
                self.pool.keep(pages[index], digest)
        found = len(self.pool.match(np.array(tokens, dtype=np.int32), [], full))
        # Of what was offered earlier, another copy may have been the one to find, and be gone.
        assert found == full or found < offered or not self.reuse
        self.held[which] = (pages, tokens, full)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), spoilt=st.booleans())
    def end(self, data, spoilt):
        pages, _, _ = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        if spoilt:
            self.pool.forget(pages)
            for page in pages:
                self.content[page] = None  # found no more, whatever a reader would see
        self.pool.release(pages)

    @invariant()
    def every_page_is_held_or_available(self):
        held = {page for pages, _, _ in self.held for page in pages}
        assert 0 not in held
        assert len(held) + self.pool.available == self.pool.total
        assert self.pool.held_once(sorted(held)) == sum(
            sum(page in pages for pages, _, _ in self.held) == 1 for page in held
        )

    def teardown(self):
        for pages, _, _ in getattr(self, "held", []):
            self.pool.release(pages)
        if hasattr(self, "pool"):
            assert self.pool.available == self.pool.total
            assert sorted(self.pool.take(self.pool.total)) == list(range(1, self.pool.total + 1))
            assert self.pool.cached == 0


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)

"""Pages by hand: who holds them, how content is found again, and what is given up first."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from rose.engine.generation.pages import PagePool, page_digest

SIZE = 4


def ids_of(*pages: int) -> np.ndarray:
    """A sequence whose page i holds the token pages[i] four times."""
    return np.repeat(np.array(pages, dtype=np.int32), SIZE)


def put(pool: PagePool, *contents: int) -> list[int]:
    """Pages taken for a sequence and offered to others."""
    pages, digests, ids = pool.take(len(contents)), [], ids_of(*contents)
    for index, page in enumerate(pages):
        pool.keep(page, pool.digest_of(ids, digests, index))
    return pages


def find(pool: PagePool, *contents: int) -> list[int]:
    return pool.match(ids_of(*contents), [], len(contents))


def test_page_0_is_nobodys_and_all_others_are_taken_once():
    pool = PagePool(8, SIZE)
    assert pool.total == pool.available == 7
    assert sorted(pool.take(7)) == [1, 2, 3, 4, 5, 6, 7]
    assert pool.available == 0
    with pytest.raises(ValueError, match="1 pages wanted, 0 available"):
        pool.take(1)


def test_a_refused_take_takes_nothing():
    pool = PagePool(4, SIZE)
    with pytest.raises(ValueError, match="4 pages wanted, 3 available"):
        pool.take(4)
    assert pool.available == 3


def test_a_page_given_back_twice_is_a_fault():
    pool = PagePool(4, SIZE)
    pages = pool.take(2)
    pool.release(pages)
    with pytest.raises(ValueError, match=f"page {pages[1]} is given back"):
        pool.release(pages)


def test_content_is_found_by_all_tokens_up_to_it_and_shared_without_copying():
    pool = PagePool(16, SIZE)
    pages = put(pool, 1, 2, 3)
    assert find(pool, 1, 2, 3) == pages
    assert find(pool, 1, 2, 9) == pages[:2]
    assert find(pool, 9, 2, 3) == [], "the same page behind another beginning is another content"
    assert find(pool, 2) == []
    found = find(pool, 1, 2)
    pool.share(found)
    pool.release(pages)
    assert pool.available == 15 - 2
    pool.release(found)
    assert pool.available == 15
    assert find(pool, 1, 2, 3) == pages, "what nobody holds stays until room is needed"


def test_only_as_many_pages_are_looked_for_as_asked():
    pool = PagePool(16, SIZE)
    pages = put(pool, 1, 2, 3)
    digests: list[bytes] = []
    assert pool.match(ids_of(1, 2, 3), digests, 2) == pages[:2]
    assert len(digests) == 2, "digests are made as far as they are needed"
    assert pool.match(ids_of(7, 2, 3), digests := [], 3) == []
    assert len(digests) == 1


def test_the_least_recently_used_content_goes_first_and_of_one_sequence_its_end():
    pool = PagePool(7, SIZE)
    old, new = put(pool, 1, 2, 3), put(pool, 4, 5)
    pool.release(old)
    pool.release(new)
    assert pool.metrics.evictions == 0
    taken = pool.take(1)
    assert taken[0] not in old + new, "a page that holds nothing goes before any content"
    assert pool.take(1) == [old[2]]
    assert pool.take(1) == [old[1]]
    assert pool.metrics.evictions == 2
    assert find(pool, 1, 2, 3) == old[:1]
    pool.share(find(pool, 1))
    pool.release(old[:1])
    assert pool.take(2) == [new[1], new[0]], "found content has been used again"
    assert find(pool, 1) == old[:1]


def test_content_that_is_there_twice_is_kept_once():
    pool = PagePool(16, SIZE)
    first, second = put(pool, 1, 2), put(pool, 1, 2)
    assert find(pool, 1, 2) == first
    assert pool.cached == 2
    pool.release(second)
    pool.release(first)
    assert pool.available == 15
    assert find(pool, 1, 2) == first


def test_forgotten_content_is_found_by_nobody_and_its_holders_go_on():
    pool = PagePool(16, SIZE)
    pages = put(pool, 1, 2)
    pool.share(find(pool, 1))
    pool.forget(pages)
    assert find(pool, 1, 2) == []
    assert pool.cached == 0
    pool.release(pages)
    assert pool.available == 14
    pool.release(pages[:1])
    assert pool.available == 15
    again = put(pool, 1, 2)
    pool.release(again)
    pool.forget(again)
    assert pool.available == 15
    assert len(set(pool.take(15))) == 15


def test_without_reuse_nothing_is_found():
    pool = PagePool(16, SIZE, reuse=False)
    pool.release(put(pool, 1, 2))
    assert find(pool, 1, 2) == []
    assert pool.cached == 0
    assert pool.available == 15


def test_counters():
    pool = PagePool(16, SIZE)
    pages = put(pool, 1, 2)
    pool.share(find(pool, 1, 2))
    pool.share(find(pool, 3))
    assert (pool.metrics.lookups, pool.metrics.hits, pool.metrics.tokens_reused) == (2, 1, 2 * SIZE)
    assert pool.available_beside([]) == 13
    assert pool.held_once(pages) == 0
    pool.release(pages)
    assert pool.held_once(pages) == 2
    pool.release(pages)
    assert pool.available == 15
    assert pool.available_beside(pages) == 13


def test_the_digest_is_blake2b_of_the_digest_before_and_the_ids():
    ids = np.array([1, -2, 3, 70000], dtype=np.int32)
    first = hashlib.blake2b(bytes(16) + ids.astype("<i4").tobytes(), digest_size=16).digest()
    assert page_digest(None, ids) == first
    second = hashlib.blake2b(first + ids.astype("<i4").tobytes(), digest_size=16).digest()
    assert page_digest(first, ids) == second != first


def test_a_strided_view_of_ids_has_the_digest_of_its_values():
    wide = np.arange(16, dtype=np.int32)
    assert page_digest(None, wide[::2][:SIZE]) == page_digest(None, wide[::2][:SIZE].copy())


def test_of_two_pages_with_one_content_the_one_that_is_held_is_found():
    """The other would be given up for room, and the content be lost though somebody still holds it."""
    pool = PagePool(5, SIZE)
    old = put(pool, 1, 2)
    new = put(pool, 1, 2)
    assert find(pool, 1, 2) == old, "both are held"
    pool.release(new)
    pool.release(old)
    held = put(pool, 1, 2)
    assert find(pool, 1, 2) == held
    pool.take(2)
    assert find(pool, 1, 2) == held
    assert pool.cached == 2

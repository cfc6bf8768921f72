"""Pages: reuse by content, eviction order, and a state machine."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loraplex.server.engine.memory.pages import PagePool, page_hash, root_hash
from tests.server.invariants import check_pool


def chain(*pages: list[int], salt: str = "", adapter: str | None = None) -> list[bytes]:
    hashes, parent = [], root_hash(salt, adapter)
    for tokens in pages:
        parent = page_hash(parent, tokens)
        hashes.append(parent)
    return hashes


def test_hashes_tell_every_part_of_the_identity_apart() -> None:
    page = [1, 2]
    roots = [
        root_hash("", None),
        root_hash("", None, True),
        root_hash("", "base"),
        root_hash("base", None),
        root_hash("ab", "c"),
        root_hash("a", "bc"),
    ]
    hashes = [page_hash(root, page) for root in roots]
    hashes += [*chain([1, 3]), *chain([2, 1]), chain([1], [2])[1], chain([1, 2], [1, 2])[1]]
    assert len(set(hashes)) == len(hashes)
    assert chain([1, 2]) == [hashes[0]], "and the same content is the same everywhere"


def test_a_released_prefix_is_found_again() -> None:
    pool = PagePool(4, 2)
    hashes = chain([1, 2], [3, 4])
    pages = pool.allocate(3)
    assert pages is not None
    for page, digest in zip(pages, hashes, strict=False):
        pool.publish(page, digest)
    assert pool.match(hashes) == pages[:2], "while it is still held, too"
    pool.release(pages[:2])
    pool.release(pages)
    assert pool.available == 4
    assert pool.match([*hashes, b"other"]) == pages[:2]
    assert pool.available == 2
    assert pool.match(chain([9, 9], [3, 4])) == []
    check_pool(pool)


def test_cached_pages_are_overwritten_oldest_first_and_tails_before_heads() -> None:
    pool = PagePool(4, 2)
    first, second = chain([1, 2], [3, 4]), chain([5, 6], [7, 8])
    for hashes in (first, second):
        pages = pool.allocate(2)
        assert pages is not None
        for page, digest in zip(pages, hashes, strict=True):
            pool.publish(page, digest)
        pool.release(pages)
    assert pool.allocate(1) is not None
    held = pool.match(first)
    assert len(held) == 1, "the tail of the older prefix went first"
    pool.release(held)
    assert len(pool.match(second)) == 2
    assert pool.allocate(2) is None
    assert pool.available == 1


def test_a_page_that_is_copied_is_not_copied_again_with_other_content() -> None:
    pool = PagePool(1, 2)
    (part,), (full,) = chain([1]), chain([1, 2])
    pages = pool.allocate(1)
    assert pages is not None
    pool.publish(pages[0], part)
    pool.release(pages)
    pool.save(page for page, _ in pool.at_risk(1))
    assert pool.match([part]) == pages, "a sequence goes on within the page"
    pool.forget(pages)
    pool.publish(pages[0], full)
    pool.release(pages)
    assert [*pool.at_risk(1)] == []
    pool.saved(pages)
    assert [*pool.at_risk(1)] == [(pages[0], full)]
    check_pool(pool)


def test_content_that_is_known_stays_where_it_is() -> None:
    pool = PagePool(2, 2)
    (digest,) = chain([1, 2])
    pages = pool.allocate(2)
    assert pages is not None
    pool.publish(pages[0], digest)
    pool.publish(pages[1], digest)
    pool.release(pages)
    assert pool.match([digest]) == pages[:1]


def test_forgotten_pages_are_not_read_by_anyone_new() -> None:
    pool = PagePool(2, 2)
    (digest,) = chain([1, 2])
    pages = pool.allocate(1)
    assert pages is not None
    pool.publish(pages[0], digest)
    pool.forget(pages)
    assert pool.match([digest]) == []
    pool.release(pages)
    assert pool.available == 2
    check_pool(pool)
    with pytest.raises(ValueError, match="not held"):
        pool.release(pages)


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (2, 1), (3, 2)])
def test_pages_for(tokens: int, pages: int) -> None:
    assert PagePool(1, 2).pages_for(tokens) == pages


class PagesMachine(RuleBasedStateMachine):
    """Holders write what they hold; whatever is matched must still carry what was published."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(6, 1)
        self.held: list[list[int]] = []
        self.content: dict[int, bytes] = {}

    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=4))
    def take(self, tokens: list[int]) -> None:
        hashes = chain(*([t] for t in tokens))
        cached = self.pool.match(hashes)
        for page, digest in zip(cached, hashes, strict=False):
            assert self.content[page] == digest, "another prefix's page"
        fresh = self.pool.allocate(len(tokens) - len(cached))
        if fresh is None:
            self.pool.release(cached)
            return
        for page, digest in zip(fresh, hashes[len(cached) :], strict=True):
            self.content[page] = digest
            self.pool.publish(page, digest)
        self.held.append(cached + fresh)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), forget=st.booleans())
    def release(self, data: st.DataObject, forget: bool) -> None:
        pages = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        if forget:
            self.pool.forget(pages)
        self.pool.release(pages)

    @invariant()
    def holds(self) -> None:
        check_pool(self.pool)
        held = {page for pages in self.held for page in pages}
        assert self.pool.available == 6 - len(held)


PagesMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestPages = PagesMachine.TestCase

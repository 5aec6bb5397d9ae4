"""The page allocator against a plain model, and its sharing rules one by one."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from subten.cache.allocator import PageAllocator, page_key
from subten.core import PAGE_SIZE

Chain = tuple[int, ...]
"""A sequence of full pages; each number stands for a page full of that token."""


def tokens_of(chain: Chain, tail: int = 0) -> list[int]:
    """Token ids of whole pages, then `tail` more."""
    return [token for token in chain for _ in range(PAGE_SIZE)] + [7] * tail


def weak_key(_parent: bytes, _salt: str, tokens: tuple[int, ...]) -> bytes:
    """Collides all the time, and forgets what came before."""
    return bytes([sum(tokens) % 4])


def test_allocate_hands_out_each_page_once() -> None:
    allocator = PageAllocator(5)
    assert sorted(allocator.allocate(3) + allocator.allocate(2)) == list(range(5))
    assert allocator.allocate(1) is None
    assert allocator.allocate(0) == []
    allocator.check_integrity()


def test_failed_allocation_changes_nothing() -> None:
    allocator = PageAllocator(4)
    held = allocator.allocate(3)
    assert allocator.allocate(2) is None
    assert (allocator.num_free, allocator.num_used, allocator.num_cached) == (1, 3, 0)
    allocator.release(held)
    assert allocator.num_free == 4
    allocator.check_integrity()


def test_second_release_is_caught() -> None:
    allocator = PageAllocator(2)
    held = allocator.allocate(1)
    allocator.release(held)
    with pytest.raises(AssertionError):
        allocator.release(held)


def test_only_full_pages_are_shared() -> None:
    allocator = PageAllocator(4)
    tokens = tokens_of((1, 2), tail=PAGE_SIZE - 1)
    held = allocator.allocate(3)
    allocator.commit(held, tokens)
    assert allocator.match_prefix(tokens + [9] * PAGE_SIZE) == held[:2]
    assert allocator.match_prefix(tokens[: PAGE_SIZE - 1]) == []
    assert allocator.match_prefix(tokens[:PAGE_SIZE]) == held[:1]
    assert [allocator.num_holders(page) for page in held] == [3, 2, 1]
    allocator.check_integrity()


def test_equal_page_after_another_beginning_is_not_shared() -> None:
    allocator = PageAllocator(4)
    held = allocator.allocate(2)
    allocator.commit(held, tokens_of((1, 2)))
    assert allocator.match_prefix(tokens_of((3, 2))) == []
    assert allocator.match_prefix(tokens_of((2,))) == []


def test_salt_keeps_equal_tokens_apart() -> None:
    allocator = PageAllocator(4)
    held = allocator.allocate(1)
    allocator.commit(held, tokens_of((1,)), salt="adapter a")
    assert allocator.match_prefix(tokens_of((1,)), salt="adapter b") == []
    assert allocator.match_prefix(tokens_of((1,))) == []
    assert allocator.match_prefix(tokens_of((1,)), salt="adapter a") == held


def test_key_separates_salt_from_tokens_and_parents() -> None:
    tokens = tuple(range(PAGE_SIZE))
    keys = {
        page_key(parent, salt, tokens)
        for parent in (b"", page_key(b"", "", tokens))
        for salt in ("", "a", "ab")
    }
    assert len(keys) == 6


@pytest.mark.parametrize("salt", ["", "other"])
def test_collision_never_shares_a_wrong_page(salt: str) -> None:
    allocator = PageAllocator(8, page_hash=weak_key)
    first = allocator.allocate(2)
    allocator.commit(first, tokens_of((1, 2)))
    # Page sums are multiples of 4 here: every page collides with every other.
    second = allocator.allocate(2)
    allocator.commit(second, tokens_of((3, 2)), salt=salt)
    assert allocator.match_prefix(tokens_of((3, 2)), salt=salt) == []
    assert allocator.match_prefix(tokens_of((5,))) == []
    assert allocator.match_prefix(tokens_of((1,)), salt="other") == []
    assert allocator.match_prefix(tokens_of((1, 2))) == first[:1]
    allocator.check_integrity()


def test_released_pages_are_evicted_oldest_first_and_last_page_first() -> None:
    allocator = PageAllocator(4)
    old = allocator.allocate(2)
    allocator.commit(old, tokens_of((1, 2)))
    young = allocator.allocate(2)
    allocator.commit(young, tokens_of((3, 4)))
    allocator.release(old)
    allocator.release(young)
    assert (allocator.num_free, allocator.num_cached) == (0, 4)
    assert allocator.allocate(3) == [old[1], old[0], young[1]]
    assert allocator.match_prefix(tokens_of((3, 4))) == young[:1]
    allocator.check_integrity()


def test_match_revives_a_cached_page() -> None:
    allocator = PageAllocator(2)
    held = allocator.allocate(1)
    allocator.commit(held, tokens_of((1,)))
    allocator.release(held)
    assert allocator.match_prefix(tokens_of((1,))) == held
    assert allocator.allocate(2) is None
    allocator.check_integrity()


def test_duplicate_content_is_kept_once() -> None:
    allocator = PageAllocator(4)
    first, second = allocator.allocate(1), allocator.allocate(2)
    allocator.commit(first, tokens_of((1,)))
    allocator.commit(second, tokens_of((1, 2)))
    allocator.release(second)
    allocator.release(first)
    # The second copy of page 1 is free; page 2 hangs on it and is found through the first copy.
    assert (allocator.num_free, allocator.num_cached) == (2, 2)
    assert allocator.match_prefix(tokens_of((1, 2))) == [first[0], second[1]]
    allocator.check_integrity()


def test_page_is_found_again_after_its_parent_was_computed_anew() -> None:
    allocator = PageAllocator(3)
    first, second = allocator.allocate(1), allocator.allocate(2)
    allocator.commit(first, tokens_of((1,)))
    allocator.commit(second, tokens_of((1, 2)))
    allocator.release(first)
    anew = allocator.allocate(1)
    assert anew == first
    assert allocator.match_prefix(tokens_of((1, 2))) == []
    allocator.commit(anew, tokens_of((1,)))
    assert allocator.match_prefix(tokens_of((1, 2))) == [anew[0], second[1]]
    allocator.check_integrity()


def test_forgotten_pages_are_not_found_while_others_hold_them() -> None:
    allocator = PageAllocator(4)
    held = allocator.allocate(2)
    allocator.commit(held, tokens_of((1, 2)))
    shared = allocator.match_prefix(tokens_of((1, 2)))
    allocator.release(held, forget=True)
    assert allocator.match_prefix(tokens_of((1, 2))) == []
    assert allocator.num_used == 2
    allocator.check_integrity()
    allocator.release(shared)
    assert allocator.num_free == 4
    allocator.check_integrity()


def test_without_prefix_caching_nothing_is_kept() -> None:
    allocator = PageAllocator(2, enable_prefix_caching=False)
    held = allocator.allocate(1)
    allocator.commit(held, tokens_of((1,)))
    assert allocator.match_prefix(tokens_of((1,))) == []
    allocator.release(held)
    assert allocator.num_free == 2
    allocator.check_integrity()


class PlainModel:
    """What the allocator promises, as slowly and plainly as it can be written."""

    def __init__(self, num_pages: int) -> None:
        self.holders = [0] * num_pages
        self.known: dict[Chain, int] = {}
        self.committed: set[int] = set()
        self.released: list[int] = []

    def chain_of(self, page: int) -> Chain | None:
        return next((chain for chain, known in self.known.items() if known == page), None)

    def match(self, chain: Chain) -> list[int]:
        pages = []
        for length in range(1, len(chain) + 1):
            if chain[:length] not in self.known:
                break
            pages.append(self.known[chain[:length]])
        for page in pages:
            self.holders[page] += 1
            self.released = [p for p in self.released if p != page]
        return pages

    def take(self, pages: list[int], num_free: int) -> None:
        evicted = self.released[: max(0, len(pages) - num_free)]
        assert set(evicted) <= set(pages), (evicted, pages)
        for page in pages:
            assert self.holders[page] == 0, page
            self.holders[page] = 1
            self.committed.discard(page)
            chain = self.chain_of(page)
            if chain is not None:
                del self.known[chain]
        self.released = self.released[len(evicted) :]

    def commit(self, pages: list[int], chain: Chain) -> None:
        for length in range(1, len(chain) + 1):
            # A page is made known once: one that lost to an equal page stays unknown.
            if pages[length - 1] not in self.committed:
                self.committed.add(pages[length - 1])
                self.known.setdefault(chain[:length], pages[length - 1])

    def release(self, pages: list[int]) -> None:
        for page in reversed(pages):
            chain = self.chain_of(page)
            self.holders[page] -= 1
            if self.holders[page] == 0 and chain is not None:
                self.released.append(page)


class Simulation:
    """Random calls to the allocator and the model side by side."""

    def __init__(self, seed: int, page_hash: Callable[..., bytes]) -> None:
        self.random = random.Random(seed)
        self.num_pages = self.random.choice([1, 7, 16, 17])
        self.allocator = PageAllocator(self.num_pages, page_hash=page_hash)
        self.model = PlainModel(self.num_pages)
        self.held: list[tuple[list[int], Chain]] = []

    def start(self) -> None:
        """A sequence of a few pages: match, allocate, maybe commit."""
        chain = tuple(self.random.choices([0, 1], k=self.random.randint(1, 4)))
        pages = self.allocator.match_prefix(tokens_of(chain))
        assert pages == self.model.match(chain)
        num_free = self.allocator.num_free
        fresh = self.allocator.allocate(len(chain) - len(pages))
        if fresh is None:
            assert len(chain) - len(pages) > self.num_pages - sum(h > 0 for h in self.model.holders)
            self.allocator.release(pages)
            self.model.release(pages)
            return
        self.model.take(fresh, num_free)
        self.held.append((pages + fresh, chain))

    def commit(self) -> None:
        pages, chain = self.random.choice(self.held)
        chain = chain[: self.random.randint(0, len(chain))]
        self.allocator.commit(pages, tokens_of(chain))
        self.model.commit(pages, chain)

    def release(self) -> None:
        pages, _ = self.held.pop(self.random.randrange(len(self.held)))
        self.allocator.release(pages)
        self.model.release(pages)

    def step(self) -> None:
        roll = self.random.random()
        if not self.held or roll < 0.4:
            self.start()
        elif roll < 0.65:
            self.commit()
        else:
            self.release()
        allocator, model = self.allocator, self.model
        assert allocator.num_used == sum(holders > 0 for holders in model.holders)
        assert allocator.num_cached == len(model.released)
        assert allocator.num_free + allocator.num_used + allocator.num_cached == self.num_pages


def test_random_calls_agree_with_the_plain_model() -> None:
    seed = random.SystemRandom().randrange(2**31)
    for part in range(10):
        simulation = Simulation(seed + part, page_key)
        print(f"seed {seed + part}, {simulation.num_pages} pages")
        for step in range(10_000):
            simulation.step()
            if step % 100 == 0:
                simulation.allocator.check_integrity()
        for pages, _ in simulation.held:
            simulation.allocator.release(pages)
        simulation.allocator.check_integrity()
        simulation.allocator.flush()
        simulation.allocator.check_integrity()
        assert simulation.allocator.num_free == simulation.num_pages


def test_random_calls_under_collisions_never_share_a_wrong_page() -> None:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    rng = random.Random(seed)
    allocator = PageAllocator(16, page_hash=weak_key)
    truth: dict[int, Chain] = {}
    held: list[list[int]] = []
    for _ in range(3000):
        chain = tuple(rng.choices(range(5), k=rng.randint(1, 3)))
        pages = allocator.match_prefix(tokens_of(chain))
        for length, page in enumerate(pages, start=1):
            assert truth[page] == chain[:length], (page, truth[page], chain)
        fresh = allocator.allocate(len(chain) - len(pages))
        if fresh is None:
            allocator.release(pages)
            allocator.release(held.pop(rng.randrange(len(held))) if held else [])
            continue
        pages = pages + fresh
        truth.update({page: chain[: i + 1] for i, page in enumerate(pages)})
        allocator.commit(pages, tokens_of(chain))
        held.append(pages)
        allocator.check_integrity()


def test_keys_that_are_known_are_not_hashed_again() -> None:
    """Those that a match computed, and those that were asked for before the commit."""
    hashed: list[tuple[int, ...]] = []

    def counted(parent: bytes, salt: str, tokens: tuple[int, ...]) -> bytes:
        hashed.append(tokens)
        return page_key(parent, salt, tokens)

    allocator = PageAllocator(8, page_hash=counted)
    held = allocator.allocate(3)
    tokens, keys = tokens_of((1, 2, 3), tail=5), []
    assert allocator.match_prefix(tokens, salt="a", keys=keys) == []
    allocator.add_keys(keys, tokens, num_tokens=len(tokens), salt="a")
    assert len(hashed) == len(keys) == 3
    allocator.commit(held, tokens, salt="a", keys=keys)
    assert len(hashed) == 3
    assert allocator.match_prefix(tokens, salt="a", keys=keys) == held
    assert len(hashed) == 3
    # Without keys the same are found, each hashed.
    assert allocator.match_prefix(tokens, salt="a") == held
    assert len(hashed) == 6
    assert allocator.match_prefix(tokens, salt="b") == []
    allocator.check_integrity()

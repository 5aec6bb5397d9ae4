"""Which page belongs to whom: free list, reference counts and prefix sharing; no torch.

A page is in exactly one of three states:

    free    nobody's, content worthless
    used    one or more sequences hold it
    cached  nobody holds it, its content is known and can be taken up again

        free --allocate--> used --release--> free    (content not committed, or a duplicate)
          ^                | ^
          |          release match_prefix
          |                v |
          +---evicted--- cached                      (least recently released first)

Only full pages are shared. A full page is known by a chain key, SHA-256 over (key of the page
before it, salt, its tokens), so that equal tokens after different beginnings stay apart. A key
only finds a candidate: tokens, salt and everything before the page are compared as well, so that
two chains with one key can never share a page.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from subten.core import PAGE_SIZE, Fault, no_fault

PageHash = Callable[[bytes, str, tuple[int, ...]], bytes]


def page_key(parent_key: bytes, salt: str, tokens: tuple[int, ...]) -> bytes:
    """SHA-256 over the key of the page before, the salt and the tokens of a page."""
    salt_bytes = salt.encode()
    digest = hashlib.sha256(parent_key)
    digest.update(len(salt_bytes).to_bytes(8, "little"))
    digest.update(salt_bytes)
    digest.update(array("q", tokens).tobytes())
    return digest.digest()


def page_salt(*parts: str) -> str:
    """One salt of several names; different lists of names never give the same."""
    return "".join(f"{len(part)}:{part}" for part in parts)


@dataclass(frozen=True, slots=True, eq=False)
class _Content:
    """What a full page holds and what comes before it."""

    key: bytes
    salt: str
    tokens: tuple[int, ...]
    parent: _Content | None


def _is_same_chain(a: _Content | None, b: _Content | None) -> bool:
    """Whether two chains hold the same tokens under the same salt, back to their beginnings."""
    while a is not b:
        if a is None or b is None or a.tokens != b.tokens or a.salt != b.salt:
            return False
        a, b = a.parent, b.parent
    return True


class PageListener(Protocol):
    """Who wants to know when a page changes its state; called after the change."""

    def page_held(self, page_id: int) -> None:
        """A page that nobody held is used."""
        ...

    def page_idle(self, page_id: int) -> None:
        """A used page is cached."""
        ...

    def page_freed(self, page_id: int) -> None:
        """A used or cached page is free."""
        ...


class PageAllocator:
    """Hands out page ids 0..num_pages-1; see the states above.

    `salt` keeps apart sequences with equal tokens and different keys and values, such as those of
    two adapters. `page_hash` is for tests: any function of the same parameters, however weak.
    `listener` is told of every change of state.
    """

    def __init__(
        self,
        num_pages: int,
        enable_prefix_caching: bool = True,
        *,
        page_hash: PageHash = page_key,
        fault: Fault = no_fault,
        listener: PageListener | None = None,
    ) -> None:
        assert num_pages >= 1, num_pages
        self.num_pages = num_pages
        self.enable_prefix_caching = enable_prefix_caching
        self._page_hash = page_hash
        self._fault = fault
        self._listener = listener
        # Taken from the end: the page released last is the likeliest to be in a cache of the chip.
        self._free = list(range(num_pages - 1, -1, -1))
        self._num_holders = [0] * num_pages
        # Content of every committed page. Of pages with equal content only the first is found
        # through its key; the others go straight to the free list when released.
        self._content: dict[int, _Content] = {}
        self._page_of_key: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Pages with worthless content."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Pages that nobody holds and whose content can be taken up again."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Pages that sequences hold."""
        return self.num_pages - self.num_free - self.num_cached

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can hand out now, cached ones included."""
        return self.num_free + self.num_cached

    def free_page_ids(self) -> tuple[int, ...]:
        """The pages with worthless content."""
        return tuple(self._free)

    def num_holders(self, page_id: int) -> int:
        """How many sequences hold a page."""
        return self._num_holders[page_id]

    def match_prefix(
        self, token_ids: Sequence[int], *, salt: str = "", keys: list[bytes] | None = None
    ) -> list[int]:
        """The longest run of known pages that `token_ids` begins with, each held once more.

        Release them if they are not wanted after all. `keys` of the first pages are taken from
        there as far as it goes, and added to it.
        """
        keys = [] if keys is None else keys
        page_ids: list[int] = []
        parent: _Content | None = None
        if not self.enable_prefix_caching:
            return page_ids
        for start in range(0, len(token_ids) - PAGE_SIZE + 1, PAGE_SIZE):
            tokens = tuple(token_ids[start : start + PAGE_SIZE])
            self.add_keys(keys, token_ids, num_tokens=start + PAGE_SIZE, salt=salt)
            page_id = self._page_of_key.get(keys[start // PAGE_SIZE])
            if page_id is None:
                break
            content = self._content[page_id]
            if content.tokens != tokens or content.salt != salt:
                break
            if not _is_same_chain(content.parent, parent):
                break
            page_ids.append(page_id)
            parent = content
        for page_id in page_ids:
            self._hold(page_id)
        return page_ids

    def allocate(self, num_pages: int) -> list[int] | None:
        """`num_pages` pages with one holder each, or None, and nothing changed, if too few.

        Free pages go first, then the cached ones that were released longest ago.
        """
        assert num_pages >= 0, num_pages
        self._fault("kv.alloc")
        if num_pages > self.num_available:
            return None
        page_ids = []
        for _ in range(num_pages):
            if not self._free:
                self._evict()
            page_id = self._free.pop()
            assert self._num_holders[page_id] == 0, (page_id, self._num_holders[page_id])
            self._num_holders[page_id] = 1
            if self._listener is not None:
                self._listener.page_held(page_id)
            page_ids.append(page_id)
        return page_ids

    def add_keys(
        self, keys: list[bytes], token_ids: Sequence[int], *, num_tokens: int, salt: str = ""
    ) -> None:
        """Add what the full pages among the first `num_tokens` are known by, from `keys` on.

        `keys` has those of the pages before; all are of one salt.
        """
        if not self.enable_prefix_caching:
            return
        for start in range(len(keys) * PAGE_SIZE, num_tokens - PAGE_SIZE + 1, PAGE_SIZE):
            tokens = tuple(token_ids[start : start + PAGE_SIZE])
            keys.append(self._page_hash(keys[-1] if keys else b"", salt, tokens))

    def commit(
        self,
        page_ids: Sequence[int],
        token_ids: Sequence[int],
        *,
        num_tokens: int | None = None,
        salt: str = "",
        keys: Sequence[bytes] = (),
    ) -> None:
        """Make the full pages of a sequence known.

        The first `num_tokens` of `token_ids`, or all, lie in `page_ids` from the start. Costs one
        hash for each page that became full since the last call, however long the sequence is, and
        none where `keys` has what `add_keys` gave for the same tokens.
        """
        if not self.enable_prefix_caching:
            return
        num_full = (len(token_ids) if num_tokens is None else num_tokens) // PAGE_SIZE
        assert num_full <= len(page_ids), (num_full, len(page_ids))
        first = num_full
        while first > 0 and page_ids[first - 1] not in self._content:
            first -= 1
        parent = self._content[page_ids[first - 1]] if first > 0 else None
        for index in range(first, num_full):
            tokens = tuple(token_ids[index * PAGE_SIZE : (index + 1) * PAGE_SIZE])
            known = index < len(keys)
            key = keys[index] if known else self._page_hash(_key_of(parent), salt, tokens)
            page_id = page_ids[index]
            assert self._num_holders[page_id] > 0, page_id
            parent = self._content[page_id] = _Content(key, salt, tokens, parent)
            self._page_of_key.setdefault(key, page_id)

    def release(self, page_ids: Sequence[int], *, forget: bool = False) -> None:
        """Drop one hold on each page of a sequence.

        With `forget` the pages are no longer found by anyone, whoever else holds them: their
        content is not what the tokens say (a NaN got in).
        """
        # Last page first: a page is of use only with those before it, so it is evicted earlier.
        for page_id in reversed(page_ids):
            assert self._num_holders[page_id] > 0, page_id
            if forget:
                self._forget(page_id)
            self._num_holders[page_id] -= 1
            if self._num_holders[page_id] > 0:
                continue
            if self._is_findable(page_id):
                self._cached[page_id] = None
                if self._listener is not None:
                    self._listener.page_idle(page_id)
            else:
                self._content.pop(page_id, None)
                self._add_free(page_id)

    def flush(self) -> None:
        """Forget every cached page."""
        while self._cached:
            self._evict()

    def check_integrity(self) -> None:
        """Assert that the states are disjoint and complete and that every index agrees."""
        free, cached = set(self._free), set(self._cached)
        used = {page_id for page_id, holders in enumerate(self._num_holders) if holders > 0}
        assert len(free) == len(self._free), "a page is twice in the free list"
        assert not free & cached, free & cached
        assert not free & used, free & used
        assert not cached & used, cached & used
        assert len(free) + len(cached) + len(used) == self.num_pages, (
            len(free),
            len(cached),
            len(used),
            self.num_pages,
        )
        assert min(self._num_holders) >= 0, min(self._num_holders)
        assert not free & self._content.keys(), free & self._content.keys()
        for key, page_id in self._page_of_key.items():
            assert self._content[page_id].key == key, page_id
        for page_id in cached:
            assert self._is_findable(page_id), page_id

    def _is_findable(self, page_id: int) -> bool:
        content = self._content.get(page_id)
        return content is not None and self._page_of_key.get(content.key) == page_id

    def _hold(self, page_id: int) -> None:
        self._cached.pop(page_id, None)
        self._num_holders[page_id] += 1
        if self._num_holders[page_id] == 1 and self._listener is not None:
            self._listener.page_held(page_id)

    def _evict(self) -> None:
        page_id, _ = self._cached.popitem(last=False)
        self._forget(page_id)
        self._add_free(page_id)

    def _add_free(self, page_id: int) -> None:
        self._free.append(page_id)
        if self._listener is not None:
            self._listener.page_freed(page_id)

    def _forget(self, page_id: int) -> None:
        if self._is_findable(page_id):
            del self._page_of_key[self._content[page_id].key]
        self._content.pop(page_id, None)


def _key_of(content: _Content | None) -> bytes:
    return b"" if content is None else content.key

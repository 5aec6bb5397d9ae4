"""Planes of an adaptive cache: the rungs that a page can stand on, and who has which plane.

A page id of an adaptive cache owns planes instead of bytes at a fixed place. A plane spans all
layers and KV heads and belongs to one of five pools, whose sizes are fixed at the start:

    hot    rows in BF16, K and V          fine   a refinement of K, or of V
    base   2-bit codes, K and V           cold   vector-quantised codes, K and V
    sink   the first rows of a sequence in BF16, beside its first page's codes

    rung   HOT    K4V4          MIDDLE       K2V2   COLD
    planes hot    base + 2 fine base + fine  base   cold

A page only ever goes to the right. MIDDLE has the refinement of K, or of V, for a whole ledger: 4
bits there and 2 in the other. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum


class Rung(IntEnum):
    """Fidelity of a page, from best to coarsest; EMPTY has no planes."""

    EMPTY = -1
    HOT = 0
    K4V4 = 1
    MIDDLE = 2
    K2V2 = 3
    COLD = 4


KIND_EMPTY, KIND_HOT, KIND_BASE, KIND_COLD = -1, 0, 1, 2
"""First number of a place record, as the kernels read it."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a page lies: `first` is its hot, base or cold plane by `kind`; -1 is none."""

    kind: int = KIND_EMPTY
    first: int = -1
    fine_k: int = -1
    fine_v: int = -1

    @property
    def rung(self) -> Rung:
        """The fidelity that these planes give."""
        if self.kind == KIND_BASE:
            return Rung(Rung.K2V2 - (self.fine_k >= 0) - (self.fine_v >= 0))
        return _RUNG_OF_KIND[self.kind]

    @property
    def name(self) -> str:
        """The fidelity in words: empty, hot, k4v4, k4v2, k2v4, k2v2 or cold."""
        if self.kind == KIND_BASE:
            return f"k{2 if self.fine_k < 0 else 4}v{2 if self.fine_v < 0 else 4}"
        return _RUNG_OF_KIND[self.kind].name.lower()

    @property
    def record(self) -> tuple[int, int, int, int]:
        """The row of `place_P4`."""
        return self.kind, self.first, self.fine_k, self.fine_v


NOWHERE = Place()
_RUNG_OF_KIND = {KIND_EMPTY: Rung.EMPTY, KIND_HOT: Rung.HOT, KIND_COLD: Rung.COLD}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaneNumbers:
    """One number for each kind of plane: bytes of one, or how many there are."""

    hot: int
    base: int
    fine: int
    cold: int
    sink: int = 0

    @property
    def by_rung(self) -> tuple[int, ...]:
        """Bytes of a page by rung, where these numbers are bytes; EMPTY, -1, is the last."""
        base, fine = self.base, self.fine
        return self.hot, base + 2 * fine, base + fine, base, self.cold, 0

    def dot(self, other: PlaneNumbers) -> int:
        """Sum of products: bytes of so many planes."""
        return (
            self.hot * other.hot
            + self.base * other.base
            + self.fine * other.fine
            + self.cold * other.cold
            + self.sink * other.sink
        )


class PlanePool:
    """Ids 0..num_planes-1 of one kind of plane, each free or taken."""

    def __init__(self, num_planes: int) -> None:
        assert num_planes >= 0, num_planes
        self.num_planes = num_planes
        # Taken from the end: the plane freed last is the likeliest to be in a cache of the chip.
        self._free = list(range(num_planes - 1, -1, -1))
        self._is_taken = [False] * num_planes

    @property
    def num_free(self) -> int:
        """Planes that nobody has."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Planes that a page has."""
        return self.num_planes - len(self._free)

    def take(self) -> int:
        """A free plane; there must be one."""
        plane = self._free.pop()
        assert not self._is_taken[plane], plane
        self._is_taken[plane] = True
        return plane

    def give_back(self, plane: int) -> None:
        """Free a taken plane."""
        assert self._is_taken[plane], plane
        self._is_taken[plane] = False
        self._free.append(plane)

    def check_integrity(self, taken: Iterable[int]) -> None:
        """Assert that exactly the planes `taken` are taken, each once."""
        owned = list(taken)
        assert len(set(owned)) == len(owned), "a plane has two owners"
        assert len(set(self._free)) == len(self._free), "a plane is twice in the free list"
        assert set(owned) == {p for p, is_taken in enumerate(self._is_taken) if is_taken}
        assert len(owned) + len(self._free) == self.num_planes, (len(owned), len(self._free))


class PlaneLedger:
    """The pools and the place of every page id; moves planes, never bytes.

    `frees_v_first` says which fine plane a page on MIDDLE no longer has.
    """

    def __init__(
        self,
        counts: PlaneNumbers,
        plane_bytes: PlaneNumbers,
        num_pages: int,
        *,
        frees_v_first: bool = True,
    ) -> None:
        self.frees_v_first = frees_v_first
        self.counts = counts
        self.plane_bytes = plane_bytes
        self._bytes_by_rung = plane_bytes.by_rung
        self.hot = PlanePool(counts.hot)
        self.base = PlanePool(counts.base)
        self.fine = PlanePool(counts.fine)
        self.cold = PlanePool(counts.cold)
        self.sink = PlanePool(counts.sink)
        self.sink_of: dict[int, int] = {}
        self.places = [NOWHERE] * num_pages

    @property
    def used(self) -> PlaneNumbers:
        """Planes taken, by kind."""
        return PlaneNumbers(
            hot=self.hot.num_used,
            base=self.base.num_used,
            fine=self.fine.num_used,
            cold=self.cold.num_used,
            sink=self.sink.num_used,
        )

    @property
    def bytes_used(self) -> int:
        """Bytes of all planes taken."""
        return self.used.dot(self.plane_bytes)

    def page_bytes(self, page_id: int) -> int:
        """Bytes of one page's planes."""
        sink_bytes = self.plane_bytes.sink if page_id in self.sink_of else 0
        return self._bytes_by_rung[self.places[page_id].rung] + sink_bytes

    def open(self, page_id: int) -> None:
        """Give an empty page its hot plane."""
        assert self.places[page_id].kind == KIND_EMPTY, (page_id, self.places[page_id])
        self.places[page_id] = Place(KIND_HOT, self.hot.take())

    def lower(self, page_id: int, rung: Rung) -> None:
        """Bring a page down to `rung`: what it no longer needs is free at once."""
        place = self.places[page_id]
        assert Rung.HOT <= place.rung < rung, (page_id, place, rung)
        if rung is Rung.COLD:
            self._clear_place(page_id)
            self.places[page_id] = Place(KIND_COLD, self.cold.take())
            return
        kept, freed = place.fine_k, place.fine_v
        if not self.frees_v_first:
            kept, freed = freed, kept
        if place.kind == KIND_HOT:
            self.hot.give_back(place.first)
            base = self.base.take()
            kept = self.fine.take() if rung <= Rung.MIDDLE else -1
            freed = self.fine.take() if rung is Rung.K4V4 else -1
        else:
            base = place.first
            if freed >= 0:
                self.fine.give_back(freed)
                freed = -1
            if rung is Rung.K2V2:
                self.fine.give_back(kept)
                kept = -1
        fine_k, fine_v = (kept, freed) if self.frees_v_first else (freed, kept)
        self.places[page_id] = Place(KIND_BASE, base, fine_k, fine_v)

    def keep_sink(self, page_id: int) -> None:
        """Give a page the sink plane that keeps its first rows."""
        assert page_id not in self.sink_of, page_id
        self.sink_of[page_id] = self.sink.take()

    def drop_sink(self, page_id: int) -> None:
        """Take the sink plane of a page, if it has one."""
        sink = self.sink_of.pop(page_id, None)
        if sink is not None:
            self.sink.give_back(sink)

    def clear(self, page_id: int) -> None:
        """Take all planes of a page, if it has any."""
        self.drop_sink(page_id)
        self._clear_place(page_id)

    def _clear_place(self, page_id: int) -> None:
        place = self.places[page_id]
        if place.kind != KIND_EMPTY:
            (self.hot, self.base, self.cold)[place.kind].give_back(place.first)
        for fine in (place.fine_k, place.fine_v):
            if fine >= 0:
                self.fine.give_back(fine)
        self.places[page_id] = NOWHERE

    def check_integrity(self) -> None:
        """Assert that every plane has at most one page, and that the bytes add up."""
        kinds = ((self.hot, KIND_HOT), (self.base, KIND_BASE), (self.cold, KIND_COLD))
        for pool, kind in kinds:
            pool.check_integrity(place.first for place in self.places if place.kind == kind)
        fines = [f for place in self.places for f in (place.fine_k, place.fine_v) if f >= 0]
        self.fine.check_integrity(fines)
        self.sink.check_integrity(self.sink_of.values())
        for place in self.places:
            assert place.kind == KIND_BASE or (place.fine_k, place.fine_v) == (-1, -1), place
            kept, freed = (place.fine_k, place.fine_v)[:: 1 if self.frees_v_first else -1]
            assert freed < 0 or kept >= 0, place
        total = sum(self.page_bytes(page_id) for page_id in range(len(self.places)))
        assert total == self.bytes_used, (total, self.bytes_used)

"""Planes of an adaptive cache: where the values of each page lie, and who has which plane.

A page id owns its plane of keys, as it owns a page of any other cache. Its values lie in planes of
pools, whose sizes are fixed at the start; a plane spans all layers and KV heads:

    base   2-bit codes            fine   2 bits more
    cold   1.5 bits, in place of both
    sink   the first rows of a sequence in BF16, beside its first page's codes

    rung   V4            V2     COLD
    planes base + fine   base   cold

A page only ever goes to the right. A sequence also has a ring of its recent rows. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum


class Rung(IntEnum):
    """Fidelity of a page's values, from best to coarsest; EMPTY has no planes."""

    EMPTY = -1
    V4 = 0
    V2 = 1
    COLD = 2


@dataclass(frozen=True, slots=True)
class Place:
    """Where values of a page lie: ids of planes, -1 for none."""

    base: int = -1
    fine: int = -1
    cold: int = -1

    @property
    def rung(self) -> Rung:
        """The fidelity that these planes give."""
        if self.cold >= 0:
            return Rung.COLD
        if self.base < 0:
            return Rung.EMPTY
        return Rung.V2 if self.fine < 0 else Rung.V4

    @property
    def record(self) -> tuple[int, int, int]:
        """The row of `place_P3`."""
        return self.base, self.fine, self.cold


NOWHERE = Place()


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaneNumbers:
    """One number for each kind of plane: bytes of one, or how many there are.

    `key` planes are as many as page ids, `ring`s as many as sequences at a time.
    """

    key: int
    base: int
    fine: int
    cold: int
    sink: int = 0
    ring: int = 0

    @property
    def by_rung(self) -> tuple[int, ...]:
        """Bytes of a page by rung, where these numbers are bytes; EMPTY, -1, is the last."""
        key, base = self.key, self.base
        return key + base + self.fine, key + base, key + self.cold, 0

    def dot(self, other: PlaneNumbers) -> int:
        """Sum of products: bytes of so many planes."""
        return (
            self.key * other.key
            + self.base * other.base
            + self.fine * other.fine
            + self.cold * other.cold
            + self.sink * other.sink
            + self.ring * other.ring
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
        """Planes that somebody has."""
        return self.num_planes - len(self._free)

    @property
    def free_ids(self) -> tuple[int, ...]:
        """The planes that nobody has."""
        return tuple(self._free)

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
    """The pools, the place of every page id and the ring of every sequence; never moves bytes."""

    def __init__(self, counts: PlaneNumbers, plane_bytes: PlaneNumbers) -> None:
        self.counts = counts
        self.plane_bytes = plane_bytes
        self._bytes_by_rung = plane_bytes.by_rung
        self.base = PlanePool(counts.base)
        self.fine = PlanePool(counts.fine)
        self.cold = PlanePool(counts.cold)
        self.sink = PlanePool(counts.sink)
        self.ring = PlanePool(counts.ring)
        self.places = [NOWHERE] * counts.key
        self.sink_of: dict[int, int] = {}
        self.ring_of: dict[str, int] = {}
        self.num_open = 0

    @property
    def used(self) -> PlaneNumbers:
        """Planes taken, by kind."""
        return PlaneNumbers(
            key=self.num_open,
            base=self.base.num_used,
            fine=self.fine.num_used,
            cold=self.cold.num_used,
            sink=self.sink.num_used,
            ring=self.ring.num_used,
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
        """Give an empty page a base plane, and a fine one if there is one."""
        assert self.places[page_id] == NOWHERE, (page_id, self.places[page_id])
        fine = self.fine.take() if self.fine.num_free else -1
        self.places[page_id] = Place(self.base.take(), fine)
        self.num_open += 1

    def lower(self, page_id: int) -> None:
        """Bring a page down a rung: what it no longer needs is free at once."""
        place = self.places[page_id]
        if place.rung is Rung.V4:
            self.fine.give_back(place.fine)
            self.places[page_id] = Place(place.base)
            return
        assert place.rung is Rung.V2, (page_id, place)
        self.base.give_back(place.base)
        self.places[page_id] = Place(cold=self.cold.take())

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
        place = self.places[page_id]
        if place == NOWHERE:
            return
        for pool, plane in ((self.base, place.base), (self.fine, place.fine)):
            if plane >= 0:
                pool.give_back(plane)
        if place.cold >= 0:
            self.cold.give_back(place.cold)
        self.places[page_id] = NOWHERE
        self.num_open -= 1

    def enter(self, request_id: str) -> int:
        """The ring of a sequence, its own from the first call to `leave`."""
        if request_id not in self.ring_of:
            self.ring_of[request_id] = self.ring.take()
        return self.ring_of[request_id]

    def leave(self, request_id: str) -> None:
        """Take the ring of a sequence, if it has one."""
        ring = self.ring_of.pop(request_id, None)
        if ring is not None:
            self.ring.give_back(ring)

    def check_integrity(self) -> None:
        """Assert that every plane has at most one owner, and that the bytes add up."""
        places = [place for place in self.places if place != NOWHERE]
        self.base.check_integrity(place.base for place in places if place.base >= 0)
        self.fine.check_integrity(place.fine for place in places if place.fine >= 0)
        self.cold.check_integrity(place.cold for place in places if place.cold >= 0)
        self.sink.check_integrity(self.sink_of.values())
        self.ring.check_integrity(self.ring_of.values())
        assert self.num_open == len(places), (self.num_open, len(places))
        for place in places:
            assert (place.base < 0) == (place.cold >= 0), place
            assert place.fine < 0 or place.base >= 0, place
        total = sum(self.page_bytes(page_id) for page_id in range(len(self.places)))
        total += len(self.ring_of) * self.plane_bytes.ring
        assert total == self.bytes_used, (total, self.bytes_used)

"""Checks of a store: damage, age, the byte budget."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from kvpact.errors import StoreFull
from kvpact.stores.base import StoreWarning
from kvpact.testing.store_base import Clock, StoreKit, random_bytes

SMALL = b"a small blob"


class DamageChecks(StoreKit):
    """A wrong byte is never given."""

    def _damaged(self, place: Path, edit: Callable[[bytes], bytes]) -> None:
        with self.make_store(place) as store:
            store.put("a", SMALL)
            store.put("b", SMALL)
            store.flush()
            self.tamper(store, "a", edit)
            with pytest.warns(StoreWarning):
                assert store.get("a") is None
            stats = store.stats()
            assert (stats.hits, stats.misses, stats.damaged) == (0, 1, 1)
            assert "a" not in store and list(store) == ["b"]
            assert store.get("b") == SMALL
            store.put("a", b"new")
            assert store.get("a") == b"new"

    @pytest.mark.parametrize(
        "edit",
        [
            lambda record: b"",
            lambda record: record[:-1],
            lambda record: record + b"\0",
            lambda record: record[1:],
            lambda record: random_bytes(len(record)),
            lambda record: record[:8] + record[40:] + record[8:40],
        ],
        ids=["empty", "cut", "longer", "shifted", "noise", "swapped"],
    )
    def test_a_damaged_entry_is_a_miss_and_removed(
        self, tmp_path: Path, edit: Callable[[bytes], bytes]
    ) -> None:
        """Said, counted and gone; the other entries stay."""
        self.need("tampers")
        self._damaged(tmp_path, edit)

    def test_flipped_bits_are_found(self, tmp_path: Path) -> None:
        """Every eleventh bit of an entry, one by one; all kinds of bytes are among them."""
        self.need("tampers")
        taken: list[bytes] = []
        with self.make_store(tmp_path) as store, warnings.catch_warnings():
            warnings.simplefilter("ignore", StoreWarning)
            store.put("a", SMALL)
            store.flush()
            self.tamper(store, "a", lambda record: taken.append(record) or record)  # type: ignore[func-returns-value]
            assert store.get("a") == SMALL
            for bit in range(0, len(taken[0]) * 8, 11):

                def flip(record: bytes, bit: int = bit) -> bytes:
                    changed = bytearray(record)
                    changed[bit // 8] ^= 1 << bit % 8
                    return bytes(changed)

                store.put("a", SMALL)
                store.flush()
                self.tamper(store, "a", flip)
                assert store.get("a") is None, f"bit {bit}"
                assert "a" not in store

    def test_an_entry_in_anothers_place_is_a_miss(self, tmp_path: Path) -> None:
        """The key is part of what is verified."""
        self.need("tampers")
        records: dict[str, bytes] = {}
        with self.make_store(tmp_path) as store:
            for key in ("a", "b"):
                store.put(key, key.encode() * 10)
            store.flush()
            self.tamper(store, "b", lambda record: records.setdefault("b", record))
            self.tamper(store, "a", lambda record: records["b"])
            with pytest.warns(StoreWarning):
                assert store.get("a") is None
            assert store.get("b") == b"b" * 10

    def test_gc_can_verify(self, tmp_path: Path) -> None:
        """It removes the damaged entry and counts it, and no other."""
        self.need("tampers")
        with self.make_store(tmp_path) as store:
            for key in ("a", "b", "c"):
                store.put(key, SMALL)
            store.flush()
            self.tamper(store, "b", lambda record: record[:-1] + bytes([record[-1] ^ 1]))
            assert store.gc().damaged == 0
            report = store.gc(verify=True)
            assert report.damaged == 1 and report.freed > 0
            assert sorted(store) == ["a", "c"]


class LimitChecks(StoreKit):
    """Age and bytes."""

    def test_an_old_entry_is_a_miss(self, tmp_path: Path) -> None:
        """After `ttl` seconds from its last put, reads notwithstanding."""
        self.need("expires")
        clock = Clock()
        with self.make_store(tmp_path, ttl=60.0, clock=clock) as store:
            store.put("a", b"1")
            store.flush()
            clock.now += 30
            store.put("b", b"2")
            store.flush()
            clock.now += 29.5
            assert store.get("a") == b"1"
            clock.now += 1
            assert store.get("a") is None
            assert "a" not in store and not store.delete("a")
            assert list(store) == ["b"] and store.get("b") == b"2"
            clock.now += 60
            assert store.gc().expired == 1
            stats = store.stats()
            assert (stats.entries, stats.bytes, stats.evictions) == (0, 0, 2)

    def test_the_budget_holds(self, tmp_path: Path) -> None:
        """Never more bytes than `max_bytes`, and the last entry is there."""
        self.need("budget")
        with self.make_store(tmp_path, max_bytes=10_000) as store:
            for index in range(50):
                blob = random_bytes(index * 137 % 3000, index)
                store.put(f"k{index}", blob)
                store.flush()
                held = store.stats().bytes
                assert held is not None and held <= 10_000
                assert store.get(f"k{index}") == blob
            stats = store.stats()
            assert stats.entries == len(list(store)) and stats.entries + stats.evictions == 50

    def test_the_least_recently_used_entry_makes_room(self, tmp_path: Path) -> None:
        """Reading and replacing are uses; asking whether it is there is none."""
        self.need("budget")
        with self.make_store(tmp_path, max_bytes=4500) as store:
            for key in ("a", "b", "c", "d"):
                store.put(key, random_bytes(1000))
            store.flush()
            assert store.get("a") is not None
            store.put("b", random_bytes(1000, 1))
            store.flush()
            assert "c" in store
            store.put("e", random_bytes(1000))
            store.flush()
            assert sorted(store) == ["a", "b", "d", "e"]
            store.put("f", random_bytes(1000))
            store.flush()
            assert sorted(store) == ["a", "b", "e", "f"]

    def test_what_never_fits_is_refused(self, tmp_path: Path) -> None:
        """With `StoreFull`, and nothing is dropped for it."""
        self.need("budget")
        with self.make_store(tmp_path, max_bytes=1000) as store:
            store.put("a", b"1")
            store.flush()
            with pytest.raises(StoreFull):
                store.put("a", bytes(1001))
                store.flush()
            assert store.get("a") == b"1" and store.stats().errors == 1

    def test_gc_keeps_a_smaller_budget(self, tmp_path: Path) -> None:
        """What was put before the budget was cut goes, the least recently used first."""
        self.need("budget")
        self.need("persistent")
        with self.make_store(tmp_path) as store:
            for index in range(10):
                store.put(f"k{index}", bytes(1000))
        with self.make_store(tmp_path, max_bytes=3500) as store:
            assert store.gc().evicted == 7
            assert sorted(store) == ["k7", "k8", "k9"]

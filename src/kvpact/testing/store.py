"""`StoreContract`: the checks of entries, keys, blobs and counts; of damage, age and the budget."""

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvpact.errors import DtypeError, IntegrityError, StoreError, StoreFull, StoreKeyError
from kvpact.stores.base import Store, StoreWarning
from kvpact.testing.store_base import BAD_KEYS, KEYS, Clock, StoreKit, random_bytes


class EntryChecks(StoreKit):
    """Putting, getting, deleting, listing."""

    def test_an_empty_store_has_nothing(self, store: Store) -> None:
        """No entry, no key, no byte; nothing to delete."""
        assert store.get("a") is None
        assert not store.contains("a") and "a" not in store
        assert not store.delete("a")
        assert list(store) == [] and len(store) == 0
        stats = store.stats()
        assert (stats.entries, stats.bytes) == (0, 0)

    @pytest.mark.parametrize("size", [0, 1, 60, 4096, 3_000_001])
    def test_what_was_put_comes_back(self, store: Store, size: int) -> None:
        """Equal bytes, for any size and kind of key, among other entries."""
        for index, key in enumerate(KEYS):
            store.put(key, random_bytes(size, index))
        for index, key in enumerate(KEYS):
            assert store.get(key) == random_bytes(size, index)
            assert key in store
        assert sorted(store.keys()) == sorted(KEYS)
        store.flush()
        stats = store.stats()
        assert stats.entries == len(KEYS)
        assert stats.bytes is not None and stats.bytes >= size * len(KEYS)

    def test_put_replaces(self, store: Store) -> None:
        """The last put counts, longer or shorter, and there is one entry."""
        for size in (100, 5000, 10, 10):
            store.put("a", random_bytes(size, 1))
            assert store.get("a") == random_bytes(size, 1)
        store.put("a", b"last")
        store.flush()
        assert store.get("a") == b"last"
        assert list(store) == ["a"]
        assert store.stats().entries == 1

    def test_bytes_are_keys_by_their_hex(self, store: Store) -> None:
        """A digest is a key as it comes."""
        store.put(b"\x00\xff", b"blob")
        assert store.get("00ff") == b"blob" == store.get(b"\x00\xff")
        assert b"\x00\xff" in store and list(store) == ["00ff"]
        assert store.delete(b"\x00\xff")

    def test_other_keys_are_refused(self, store: Store) -> None:
        """Every method names the error, and nothing is stored."""
        calls: list[Callable[[Any], object]] = [store.get, store.contains, store.delete]
        calls.append(lambda key: store.put(key, b"x"))
        for key in BAD_KEYS:
            for call in calls:
                try:
                    call(key)
                except StoreKeyError:
                    continue
                pytest.fail(f"{key!a} was not refused")
        assert len(store) == 0

    @pytest.mark.parametrize(
        "blob",
        ["text", None, 5, [1], memoryview(b"abcd")[::2]],
        ids=["text", "none", "number", "list", "gaps"],
    )
    def test_what_is_no_blob_is_refused(self, store: Store, blob: object) -> None:
        """A named error, and the entry is as before."""
        store.put("a", b"before")
        with pytest.raises(DtypeError):
            store.put("a", blob)  # type: ignore[arg-type]
        assert store.get("a") == b"before"

    def test_buffers_are_copied(self, store: Store) -> None:
        """A buffer may be used again after the put."""
        buffer = bytearray(b"first")
        store.put("a", buffer)
        store.put("b", memoryview(buffer)[1:3])
        buffer[:] = b"XXXXX"
        assert store.get("a") == b"first" and store.get("b") == b"ir"
        assert isinstance(store.get("a"), bytes)

    def test_hits_and_misses_are_counted(self, store: Store) -> None:
        """By `get` alone."""
        store.put("a", b"1")
        store.flush()
        for key in ("a", "a", "b", "a"):
            store.get(key)
        "a" in store  # noqa: B015
        stats = store.stats()
        assert (stats.hits, stats.misses, stats.errors, stats.damaged) == (3, 1, 0, 0)

    def test_gc_leaves_what_is_of_use(self, store: Store) -> None:
        """Nothing is too old or too much here."""
        for key in KEYS:
            store.put(key, random_bytes(100))
        report = store.gc(verify=True)
        assert (report.expired, report.evicted, report.damaged) == (0, 0, 0)
        assert all(store.get(key) == random_bytes(100) for key in KEYS)

    def test_many_threads(self, store: Store) -> None:
        """Every entry is one that some thread put, whole."""

        def work(number: int) -> None:
            for turn in range(20):
                key = f"k{(number + turn) % 5}"
                store.put(key, key.encode() * 1000 + bytes([number]))
                found = store.get(key)
                assert found is None or found[:-1] == key.encode() * 1000
                if turn % 7 == 6:
                    store.delete(key)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        store.flush()
        for key in store:
            found = store.get(key)
            assert found is not None and found[:-1] == key.encode() * 1000

    def test_a_closed_store_refuses(self, tmp_path: Path) -> None:
        """Closing twice is allowed; anything else is a named error."""
        with self.make_store(tmp_path) as store:
            store.put("a", b"1")
        store.close()
        calls = (
            lambda: store.get("a"),
            lambda: store.put("a", b"2"),
            lambda: store.contains("a"),
            lambda: store.delete("a"),
            lambda: list(store),
            store.stats,
            store.gc,
            store.flush,
        )
        for call in calls:
            with pytest.raises(StoreError):
                call()

    def test_entries_outlive_the_store(self, tmp_path: Path) -> None:
        """Another object at the same place sees the same."""
        self.need("persistent")
        with self.make_store(tmp_path) as first:
            for index, key in enumerate(KEYS):
                first.put(key, random_bytes(1000, index))
            first.delete(KEYS[0])
        with self.make_store(tmp_path) as second:
            assert sorted(second) == sorted(KEYS[1:])
            assert [second.get(key) for key in KEYS[1:]] == [
                random_bytes(1000, index) for index in range(1, len(KEYS))
            ]
            assert second.get(KEYS[0]) is None


SMALL = b"a small blob"


class DamageChecks(StoreKit):
    """A wrong byte is never given."""

    def _damaged(self, place: Path, edit: Callable[[bytes], bytes]) -> None:
        with self.make_store(place) as store:
            self.put(store, a=SMALL, b=SMALL)
            self.tamper(store, "a", edit)
            with pytest.warns(StoreWarning):
                assert store.get("a") is None
            stats = store.stats()
            assert (stats.hits, stats.misses, stats.damaged) == (0, 1, 1)
            assert "a" not in store and list(store) == ["b"]
            assert store.get("b") == SMALL
            if type(store).fetch is not Store.fetch:
                self.tamper(store, "b", edit)
                with pytest.raises(IntegrityError, match="b"):
                    store.fetch("b")
                assert store.stats().damaged == 2 and "b" not in store
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
            self.put(store, a=SMALL)
            self.tamper(store, "a", lambda record: taken.append(record) or record)  # type: ignore[func-returns-value]
            assert store.get("a") == SMALL
            for bit in range(0, len(taken[0]) * 8, 11):

                def flip(record: bytes, bit: int = bit) -> bytes:
                    changed = bytearray(record)
                    changed[bit // 8] ^= 1 << bit % 8
                    return bytes(changed)

                self.put(store, a=SMALL)
                self.tamper(store, "a", flip)
                assert store.get("a") is None, f"bit {bit}"
                assert "a" not in store

    def test_an_entry_in_anothers_place_is_a_miss(self, tmp_path: Path) -> None:
        """The key is part of what is verified."""
        self.need("tampers")
        records: dict[str, bytes] = {}
        with self.make_store(tmp_path) as store:
            self.put(store, a=b"a" * 10, b=b"b" * 10)
            self.tamper(store, "b", lambda record: records.setdefault("b", record))
            self.tamper(store, "a", lambda record: records["b"])
            with pytest.warns(StoreWarning):
                assert store.get("a") is None
            assert store.get("b") == b"b" * 10

    def test_gc_can_verify(self, tmp_path: Path) -> None:
        """It removes the damaged entry and counts it, and no other."""
        self.need("tampers")
        with self.make_store(tmp_path) as store:
            self.put(store, a=SMALL, b=SMALL, c=SMALL)
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
            self.put(store, a=b"1")
            clock.now += 30
            self.put(store, b=b"2")
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
                self.put(store, **{f"k{index}": blob})
                held = store.stats().bytes
                assert held is not None and held <= 10_000
                assert store.get(f"k{index}") == blob
            stats = store.stats()
            assert stats.entries == len(list(store)) and stats.entries + stats.evictions == 50

    def test_the_least_recently_used_entry_makes_room(self, tmp_path: Path) -> None:
        """Reading and replacing are uses; asking whether it is there is none."""
        self.need("budget")
        with self.make_store(tmp_path, max_bytes=4500) as store:
            self.put(store, **dict.fromkeys("abcd", random_bytes(1000)))
            assert store.get("a") is not None
            self.put(store, b=random_bytes(1000, 1))
            assert "c" in store
            self.put(store, e=random_bytes(1000))
            assert sorted(store) == ["a", "b", "d", "e"]
            self.put(store, f=random_bytes(1000))
            assert sorted(store) == ["a", "b", "e", "f"]

    def test_what_never_fits_is_refused(self, tmp_path: Path) -> None:
        """With `StoreFull`, and nothing is dropped for it."""
        self.need("budget")
        with self.make_store(tmp_path, max_bytes=1000) as store:
            self.put(store, a=b"1")
            with pytest.raises(StoreFull):
                store.put("a", bytes(1001))
                store.flush()
            assert store.get("a") == b"1" and store.stats().errors == 1

    def test_gc_keeps_a_smaller_budget(self, tmp_path: Path) -> None:
        """Entries put before the budget was cut are removed, the least recently used first."""
        self.need("budget")
        self.need("persistent")
        with self.make_store(tmp_path) as store:
            for index in range(10):
                store.put(f"k{index}", bytes(1000))
        with self.make_store(tmp_path, max_bytes=3500) as store:
            assert store.gc().evicted == 7
            assert sorted(store) == ["k7", "k8", "k9"]


class StoreContract(EntryChecks, DamageChecks, LimitChecks):
    """Inherit this in a test module, override `make_store` and `tamper`; pytest does the rest.

    Attributes
    ----------
    persistent : bool
        Entries outlive the object: a second one made at the same place sees them.
    budget, expires : bool
        `make_store` takes ``max_bytes``, and the least recently used entries make room; it takes
        ``ttl`` and ``clock``. Checks of what a store can't do are skipped.
    tampers : bool
        `tamper` is there.
    examples, steps : int
        How many random histories are run against a dict too, and how long they are.

    Notes
    -----
    A conforming store gives back what was put or nothing, never a wrong byte; lists what it holds;
    refuses keys that are no digests; counts; and after a named error holds what it held.
    """

    examples: ClassVar[int] = 25
    steps: ClassVar[int] = 20

    def test_random_histories_agree_with_a_dict(self, tmp_path: Path) -> None:
        """Every history of puts, gets, deletes, collections and restarts."""
        pytest.importorskip("hypothesis")
        from kvpact.testing.store_machine import run_against_a_dict

        # Not at `tmp_path`: every history begins at a place of its own.
        run_against_a_dict(self.make_store, self.persistent, self.examples, self.steps)

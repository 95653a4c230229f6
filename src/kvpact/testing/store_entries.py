"""Checks of a store: entries, keys, blobs, counts, the end."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvpact.errors import DtypeError, StoreError, StoreKeyError
from kvpact.stores.base import Store
from kvpact.testing.store_base import BAD_KEYS, KEYS, StoreKit, random_bytes


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
        """Equal bytes, for any size and kind of key, beside other entries."""
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

    def test_delete_removes_one_entry(self, store: Store) -> None:
        """It is gone, the others stay; a second delete says that there was none."""
        store.put("a", b"1")
        store.put("b", b"2")
        assert store.delete("a")
        assert not store.delete("a")
        assert store.get("a") is None and "a" not in store
        assert store.get("b") == b"2" and list(store) == ["b"]
        store.put("a", b"3")
        assert store.get("a") == b"3"

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

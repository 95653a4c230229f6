"""The base of the checks of a store: making one, and reaching its bytes."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvpact.stores.base import Store
from kvpact.stores.memory import MemoryStore

KEYS = ("a", "b" * 200, "0123456789abcdef", "UPPER_lower-9")
BAD_KEYS = (
    *("", "a/b", "..", ".", "../../etc/passwd", "/etc/passwd", "a\\b", "a b", "a\n", "a\0"),
    *("ä", "a.b", "c" * 201, "%2e%2e", "*", b"", b"d" * 101, None, 7, ("a",)),
)


class Clock:
    """A clock that stands still until it is set."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


def random_bytes(size: int, seed: int = 0) -> bytes:
    """Return the same bytes for the same size and seed."""
    return random.Random(size * 1_000_003 + seed).randbytes(size)


class StoreKit:
    """The store under test; `StoreContract` says what its attributes are."""

    persistent: ClassVar[bool] = True
    budget: ClassVar[bool] = False
    expires: ClassVar[bool] = False
    tampers: ClassVar[bool] = True

    def make_store(self, place: Path, **options: Any) -> Store:
        """Make a store at a place that is this test's alone; the same place, the same entries.

        `place`: an empty folder, or one that this was called with before. `**options`:
        ``max_bytes``, ``ttl`` and ``clock``, where the attributes allow them.
        """
        return MemoryStore(**options)

    def tamper(self, store: Store, key: str, edit: Callable[[bytes], bytes]) -> None:
        """Change what is held for `key` without the store's own methods."""
        raise NotImplementedError

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        """Yield an empty store."""
        with self.make_store(tmp_path) as store:
            yield store

    def put(self, store: Store, **blobs: bytes) -> None:
        """Put entries, and wait until they are there."""
        for key, blob in blobs.items():
            store.put(key, blob)
        store.flush()

    def need(self, name: str) -> None:
        """Skip a check of a feature that the store does not have."""
        if not getattr(self, name):
            pytest.skip(f"{name} = False")

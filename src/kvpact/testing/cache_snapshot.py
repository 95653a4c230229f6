"""Checks of snapshots: a cache that is restored continues as the one that was saved."""

from __future__ import annotations

import pytest

from kvpact.contract import AttendConfig
from kvpact.errors import KVPactError
from kvpact.snapshot import Snapshot
from kvpact.testing.cache_base import SMALL, CacheKit
from kvpact.testing.data import integers
from kvpact.testing.depends import depends_on


class SnapshotChecks(CacheKit):
    """`snapshot` and `restore`."""

    @depends_on("bytes")
    def test_a_snapshot_is_the_cache(self) -> None:
        """Saved, read and restored: the same bytes now, and after more tokens."""
        self.needs("snapshot")
        config = AttendConfig(padding=integers(0, 5))
        cache = self.filled(SMALL, config=config, layers=2)
        before = self.state(cache)
        saved = cache.snapshot().to_bytes()
        self.assert_same(before, cache)
        other = self.make_cache(SMALL.geometry(2))
        other.restore(Snapshot.from_bytes(saved))
        for seed, count in enumerate((1, 70)):
            self.assert_same(cache, other)
            for one in (cache, other):
                for layer in range(2):
                    self.append(one, self.tokens(SMALL, count, seed=seed + 1), layer=layer)
        self.assert_same(cache, other)

    def test_a_snapshot_of_another_geometry_is_refused(self) -> None:
        """A named error, and the cache holds what it held."""
        self.needs("snapshot")
        saved = self.filled(SMALL).snapshot()
        cache = self.filled(SMALL, layers=2)
        before = self.state(cache)
        with pytest.raises(KVPactError):
            cache.restore(saved)
        self.assert_same(before, cache)

"""Checks of fork: each side goes on as if it were alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvpact.testing.cache_base import SMALL, CacheKit
from kvpact.testing.cache_rollback import rollbacks


class ForkChecks(CacheKit):
    """A cache that was forked."""

    def _replace(self, cache: Any, kept: int, count: int) -> None:
        cache.truncate(kept)
        self.append(cache, self.tokens(SMALL, count, seed=7))

    @pytest.mark.parametrize("writer", ["original", "fork"])
    def test_forks_are_independent(self, writer: str) -> None:
        """Whatever one side does, the other's bytes stay."""
        self.needs("fork", "truncate")
        operations: list[Callable[[Any], None]] = [
            *rollbacks(self),
            lambda c: self.append(c, self.tokens(SMALL, 1, seed=5)),
            lambda c: self.append(c, self.tokens(SMALL, 200, seed=6)),
            lambda c: self._replace(c, 65, 5),
            lambda c: self._replace(c, 0, 70),
        ]
        for operation in operations:
            original = self.filled(SMALL)
            fork = original.fork()
            self.assert_same(original, fork)
            active, other = (original, fork) if writer == "original" else (fork, original)
            before, alone = self.state(other), self.filled(SMALL)
            operation(active)
            self.assert_same(before, other)
            operation(alone)
            # Slots that the two share may hold tokens that are gone, until one writes.
            rows = replace(SMALL, batch=self.rows(active, SMALL))
            for one in (alone, active):
                self.append(one, self.tokens(rows, 130, seed=8))
            self.assert_same(alone, active)
            self.append(other, self.tokens(SMALL, 3, seed=9))
            self.assert_same(alone, active)

    def test_forks_of_a_short_cache(self) -> None:
        """Two tokens, fewer than there are sinks: each side goes on with its own."""
        self.needs("fork")
        original = self.filled(SMALL, (2,), count=2)
        forks = [original.fork() for _ in range(3)]
        before = self.state(original)
        for seed, fork in enumerate(forks):
            self.append(fork, self.tokens(SMALL, 3, seed))
        self.assert_same(before, original)
        for seed, fork in enumerate(forks):
            alone = self.filled(SMALL, (2,), count=2)
            self.append(alone, self.tokens(SMALL, 3, seed))
            self.assert_same(alone, fork)

    def test_forks_of_forks(self) -> None:
        """A fork outlives what it was made from."""
        self.needs("fork", "truncate")
        first = self.filled(SMALL)
        second = first.fork()
        third = second.fork()
        state = self.state(third)
        self.append(second, self.tokens(SMALL, 9, seed=1))
        first.reset()
        second.truncate(3)
        self.assert_same(state, third)

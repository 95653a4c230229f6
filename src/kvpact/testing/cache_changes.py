"""Checks of changes to a cache: truncate, rows, fork, snapshots."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpact.contract import AttendConfig
from kvpact.errors import KVPactError, StaleResult
from kvpact.snapshot import Snapshot
from kvpact.testing.cache_base import SMALL, CacheKit
from kvpact.testing.data import Shape, floats, integers
from kvpact.testing.depends import depends_on
from kvpact.testing.held import same_bytes


class RollbackChecks(CacheKit):
    """A cache that was rolled back."""

    @depends_on("bytes")
    def test_truncate_is_never_having_appended(self, shape: Shape) -> None:
        """A cut that leaves no group in part: all bytes become those of a new cache.

        At once where as many tokens had left the window, else when it has refilled. Nothing
        of the tokens that went is left: not in the slots, not in the sinks.
        """
        self.needs("truncate")
        total, group = shape.tokens, max(self.groups())
        window = max(window for _, window in self.exact_tokens())
        k, v, q = self.tokens(shape, total)
        cuts = {total, total - 5, total // 2, total // group * group, group, 2, 0}
        for kept in sorted(cut for cut in cuts if 0 <= cut <= total):
            whole, at_once = self._cut(total, kept)
            if not whole:
                continue
            cache, fresh = self.filled(shape), self.make_cache(shape.geometry())
            cache.truncate(kept)
            assert cache.seq_len(0) == kept
            if kept:
                self.append(fresh, (k[:, :, :kept], v[:, :, :kept], q[:, :, :kept]))
                if at_once:
                    self.assert_same(cache, fresh)
            more = self.tokens(shape, window + 2 * max(self.units()) + 3, seed=1)
            for one in (cache, fresh):
                self.append(one, more)
            self.assert_same(cache, fresh)

    def _cut(self, total: int, kept: int) -> tuple[bool, bool]:
        """Return whether no group is left in part, and whether the windows are the same."""
        whole = same = True
        sides = zip(self.groups(), self.units(), self.exact_tokens(), strict=True)
        for group, unit, (_, window) in sides:
            packed, then = (max(length - window, 0) // unit * unit for length in (total, kept))
            whole = whole and (kept >= packed or kept % group == 0)
            same = same and min(packed, kept) == then
        return whole, same

    @depends_on("bytes")
    def test_truncate_keeps_what_was_stored(self, shape: Shape) -> None:
        """A cut anywhere: the tokens that stay are shown as stored before; later ones are close.

        What was packed stays packed, with the side information of its group; what was left of the
        window is exact.
        """
        self.needs("truncate", "fork")
        before = self.filled(shape)
        shown, total = self.read(before, shape), shape.tokens
        exact = self.exact_tokens()
        stored_end = [total - w - u + 1 for (_, w), u in zip(exact, self.units(), strict=True)]
        given = self.tokens(shape, total)[:2]
        for kept in sorted({total - 1, total // 2 + 1, 1, min(33, total)} - {0}):
            cache = before.fork()
            cache.truncate(kept)
            assert cache.seq_len(0) == kept
            now = self.read(cache, shape)
            for x, was, is_, end in zip(given, shown, now, stored_end, strict=True):
                packed = max(min(end, kept), 0)
                assert same_bytes(is_[:, :, :packed], was[:, :, :packed])
                assert is_.shape[2] == kept
                assert _close(is_, x[:, :, :kept])
            for x, is_, (_, window) in zip(given, now, exact, strict=True):
                recent = slice(total - min(window, total), kept)
                assert same_bytes(is_[:, :, recent], x[:, :, recent])
            more = self.tokens(shape, 66, seed=1)
            self.append(cache, more)
            again = self.read(cache, shape)
            for x, was, is_, (_, window) in zip(more, now, again, exact, strict=False):
                settled = max(kept - window - max(self.units()) + 1, 0)
                assert same_bytes(is_[:, :, :settled], was[:, :, :settled])
                assert _close(is_[:, :, kept:], x)

    def test_truncate_never_extends(self) -> None:
        """To more tokens than there are, or below zero: nothing changes."""
        self.needs("truncate")
        cache = self.filled(SMALL, layers=2)
        before = self.state(cache)
        cache.truncate(SMALL.tokens)
        cache.truncate(SMALL.tokens + 7)
        self.assert_same(before, cache)
        for wrong in (-1, 1.5, None, True):
            self.refused(cache, KVPactError, cache.truncate, wrong)
        empty = self.make_cache(SMALL.geometry())
        empty.truncate(5)
        assert empty.seq_len(0) == 0

    def test_truncate_covers_all_layers(self) -> None:
        """All layers are cut, shorter ones stay."""
        self.needs("truncate")
        cache = self.make_cache(SMALL.geometry(3))
        for layer, count in enumerate((70, 10, 0)):
            if count:
                self.append(cache, self.tokens(SMALL, count), layer=layer)
        cache.truncate(20)
        assert [cache.seq_len(layer) for layer in range(3)] == [20, 10, 0]

    def test_a_result_from_before_is_stale(self) -> None:
        """A result read before a rollback stays; an unread one is as it was, or can't be read."""
        self.needs("truncate")
        for change in rollbacks(self):
            cache, twin = self.filled(SMALL), self.filled(SMALL)
            for one in (cache, twin):
                self.append(one, self.tokens(SMALL, 300, seed=1))
            tokens = self.tokens(SMALL, 2, seed=2)
            read, unread, started = (cache.prefill(0, *tokens, None) for _ in range(3))
            expected = [twin.prefill(0, *tokens, None) for _ in range(3)]
            wanted = [(result.k.clone(), result.v.clone()) for result in expected]
            assert same_bytes(read.k, wanted[0][0])
            tiles = started.tiles()
            first = next(tiles)
            change(cache)
            rows = replace(SMALL, batch=self.rows(cache, SMALL))
            self.append(cache, self.tokens(rows, 40, seed=3))
            assert same_bytes(read.k, wanted[0][0])
            assert same_bytes(read.v, wanted[0][1])
            with suppress(StaleResult):
                assert same_bytes(unread.v, wanted[1][1])
            with suppress(StaleResult):
                joined = torch.cat([first.k, *(tile.k for tile in tiles)], 2)
                assert same_bytes(joined, wanted[2][0])


def _close(shown: torch.Tensor, given: torch.Tensor) -> bool:
    """Return whether decompressed tokens are nearer to the given ones than zeros are."""
    error = (shown.double() - given.double()).norm()
    return bool(torch.isfinite(shown).all()) and bool(error < given.double().norm())


def rollbacks(kit: CacheKit) -> list[Callable[[Any], None]]:
    """Return changes of a cache after which slots are no longer what they were."""
    changes: list[Callable[[Any], None]] = [lambda c: c.truncate(40), lambda c: c.reset()]
    if "select" in kit.operations:
        changes.append(lambda c: c.select(integers(1)))
    return changes


ROWS = Shape(3, 2, (66, 1, 64), 32, 48, torch.float32)


class RowChecks(CacheKit):
    """Rows of the batch rearranged."""

    def _check(self, operation: str, argument: Any, rows: list[int]) -> None:
        self.needs("fork", operation)
        config = AttendConfig(padding=integers(0, 3, 40))
        cache = self.filled(ROWS, config=config, layers=2)
        before = [self.read(cache, ROWS, layer) for layer in range(2)]
        getattr(cache, operation)(argument)
        for layer in range(2):
            for was, now in zip(before[layer], self.read(cache, ROWS, layer), strict=True):
                assert same_bytes(now, was[rows])
        self._continues(cache, config, rows)

    def _continues(self, cache: Any, config: AttendConfig, rows: list[int]) -> None:
        """Tokens that come later give what a cache gives that held these rows from the start."""
        given = _rows(self.tokens(ROWS, ROWS.tokens), rows)
        assert config.padding is not None
        fresh = self.make_cache(ROWS.geometry(2))
        for layer in range(2):
            self.append(fresh, given, AttendConfig(padding=config.padding[rows]), layer)
        more = _rows(self.tokens(ROWS, 70, seed=1), rows)
        for one in (cache, fresh):
            for layer in range(2):
                self.append(one, more, layer=layer)
        self.assert_same(fresh, cache)

    def test_reorder(self) -> None:
        """Beam search: rows change places and may repeat."""
        self._check("reorder", integers(2, 0, 0), [2, 0, 0])

    @depends_on("bytes")
    def test_select(self) -> None:
        """Some rows stay, in the order asked for."""
        self._check("select", integers(2, 1), [2, 1])

    def test_select_more(self) -> None:
        """Rows may be selected more than once."""
        self._check("select", integers(1, 1, 0, 2, 1).int(), [1, 1, 0, 2, 1])

    def test_repeat(self) -> None:
        """Every row, several times, next to each other."""
        self._check("repeat", 2, [0, 0, 1, 1, 2, 2])

    def test_wrong_rows_are_refused(self) -> None:
        """A named error, and nothing changes."""
        self.needs("select", "reorder", "repeat")
        cache = self.filled(ROWS, layers=2)
        wrong: list[tuple[str, Any]] = [
            ("select", integers(3)),
            ("select", integers(-1)),
            ("select", integers()),
            ("select", floats(0.0)),
            ("select", integers(0)[None]),
            ("select", [0]),
            ("reorder", integers(0)),
            ("reorder", integers(0, 1, 3)),
            ("reorder", None),
            ("repeat", 0),
            ("repeat", 1.0),
        ]
        for operation, argument in wrong:
            self.refused(cache, KVPactError, getattr(cache, operation), argument)

    def test_rows_of_an_empty_cache(self) -> None:
        """Nothing held, nothing to rearrange."""
        self.needs("select", "repeat")
        cache = self.make_cache(ROWS.geometry())
        cache.select(integers(0))
        cache.repeat(3)
        assert cache.seq_len(0) == 0


def _rows(tokens: tuple[Tensor, Tensor, Tensor], rows: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    k, v, q = tokens
    return k[rows], v[rows], q[rows]


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
        cache, saved = self.filled(SMALL, layers=2), self.filled(SMALL).snapshot()
        self.refused(cache, KVPactError, cache.restore, saved)
